"""Emitted files name the commit of a model of the hub, so that no machine asks where a branch is."""

from pathlib import Path

import pytest
import yaml

from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.core.shipped import example_path
from prfaas.tools.emit.blueprint import read_blueprint
from prfaas.tools.emit.compose import compose_files
from prfaas.tools.emit.unit import systemd_files

COMMIT = "c" * 40


def written(folder: Path, model: str) -> Path:
    text = example_path("two-datacenters").read_text()
    document = yaml.safe_load(text)
    (name,) = (key for key in ("path", "tiny") if key in document["model"])
    line = f"{name}: {document['model'][name]}"
    assert line in text
    path = folder / "two.yaml"
    path.write_text(text.replace(line, model))
    return path


def pin(path: Path, home: Path) -> None:
    model = load_deployment(path, state_dir=home).model
    model.path.parent.mkdir(parents=True)
    model.path.symlink_to(home / "snapshots" / COMMIT)


@pytest.mark.parametrize(
    "model",
    [
        "hub: org/tiny",
        "hub: org/tiny  # by us\n  revision: main  # for now",
        "hub: org/tiny\n  revision: 'v1'",
    ],
)
def test_the_pinned_commit_is_in_every_machine_s_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    path = written(tmp_path, model)
    pin(path, tmp_path / "home")
    emitted = yaml.safe_load(read_blueprint(path).documents["deployment.yaml"])
    expected = yaml.safe_load(path.read_text())
    expected["model"]["revision"] = COMMIT
    assert emitted == expected
    comments = [line.partition("#")[2] for line in path.read_text().splitlines()]
    lines = read_blueprint(path).documents["deployment.yaml"].splitlines()
    assert [line.partition("#")[2] for line in lines if "#" in line] == [each for each in comments if each]


def test_a_model_in_braces_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    path = written(tmp_path, "hub: org/tiny")
    document = yaml.safe_load(path.read_text())
    fields = ", ".join(f"{key}: {value}" for key, value in document.pop("model").items())
    path.write_text(f"model: {{{fields}}}\n" + yaml.safe_dump(document))
    pin(path, tmp_path / "home")
    assert yaml.safe_load(read_blueprint(path).documents["deployment.yaml"])["model"]["revision"] == COMMIT


def test_a_commit_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    path = written(tmp_path, f"hub: org/tiny\n  revision: {COMMIT}")
    assert read_blueprint(path).documents["deployment.yaml"] == path.read_text()


def test_a_branch_that_is_not_pinned_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    with pytest.raises(
        DeploymentError, match=r"model\.revision: is no commit.*prfaas model fetch .* --no-weights"
    ):
        read_blueprint(written(tmp_path, "hub: org/tiny"))


def test_nothing_emitted_has_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = written(tmp_path, f"hub: org/tiny\n  revision: {COMMIT}")
    files = [*systemd_files(read_blueprint(path), "/opt/prfaas"), *compose_files(read_blueprint(path))]
    assert files and not any("hf_secret" in file.text for file in files)
