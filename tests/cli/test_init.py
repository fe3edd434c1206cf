"""`prfaas init` for sites of one's own."""

import json
import sys
from pathlib import Path

import pytest

from prfaas.cli import main as cli
from prfaas.core.deployment import load_deployment, load_planned
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.secret_files import load_key, load_token

SITES = (
    "--site",
    "east:prfaas:h200x8:192.0.2.10",
    "--site",
    "home:pd:h20x8:198.51.100.10,198.51.100.11",
    "--link",
    "east:home:40 Gbit/s",
)
MODEL = ("--model", "/models/qwen3-next")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_file_with_key_certificates_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "init", "llm", "-o", tmp_path, *MODEL, *SITES, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    deployment = load_deployment(said["file"])
    assert deployment.name == "llm" and deployment.model.served_name == "qwen3-next"
    assert [instance.name for instance in deployment.instances] == ["east-0", "home-0", "home-1"]
    assert load_key(deployment.security.key_file)
    assert deployment.gateway.admin.token_file is not None
    assert len(load_token(deployment.gateway.admin.token_file)) == 64
    assert deployment.gateway.admin.token_file.stat().st_mode & 0o777 == 0o600
    states = CertificateFolder(deployment).states()
    assert {state.member.name for state in states} == {"east-0", "home-0", "home-1", "gateway", "tools"}
    assert all(state.is_fit for state in states)
    assert said["secrets"] == [
        str(deployment.security.key_file),
        str(deployment.gateway.admin.token_file),
        str(deployment.security.certificates),
    ]


def test_secrets_that_are_there_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert run(monkeypatch, "init", "llm", "-o", tmp_path, *MODEL, *SITES) == 0
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert run(monkeypatch, "init", "llm", "-o", tmp_path, *MODEL, *SITES) == 2
    assert "is there already; --force overwrites it" in capsys.readouterr().err
    assert run(monkeypatch, "init", "llm", "-o", tmp_path, *MODEL, *SITES, "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["secrets"] == []
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


def test_no_secrets_where_none_are_wanted_or_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert run(monkeypatch, "init", "llm", "-o", tmp_path, *MODEL, *SITES, "--no-secrets") == 0
    here = ("--site", "home:pd:cpu:127.0.0.1", "--model", "tiny:qwen3-next")
    assert run(monkeypatch, "init", "here", "-o", tmp_path, *here) == 0
    assert f"next: prfaas up {tmp_path / 'here.yaml'}" in capsys.readouterr().out
    assert not home.exists()
    assert load_deployment(tmp_path / "here.yaml").gateway.host == "127.0.0.1"


def test_engines_of_a_trial_fit_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take their staging at the start: 4 GiB each with a model whose KVCache needs it."""
    for model, staging_bytes in (("tiny:qwen3-next", 256 << 20), (MODEL[1], 4 << 30)):
        assert run(monkeypatch, "init", "llm", "-o", tmp_path, *SITES, "--model", model, "--force") == 0
        assert load_deployment(tmp_path / "llm.yaml").engine.staging_bytes == staging_bytes


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (SITES, "--model is missing"),
        ((*MODEL, "--site", "east:prfaas:h200x8"), "is no site; write NAME:KIND:HARDWARE:HOST,HOST"),
        (
            (*MODEL, *SITES, "--link", "east:west:1 Gbit/s"),
            "these options make no deployment: links[1].target",
        ),
        ((*MODEL, *SITES[:4]), "these options make no deployment: clusters[0]: no link leads from"),
        ((*MODEL, *SITES, "--gateway", "not a host"), '--gateway "not a host" is no host'),
        (("--model", "tiny:nothing", *SITES), '--model "tiny:nothing" is no model that prfaas has; choose'),
        (("--model", "/", *SITES), '--model "/" is the root of the file system'),
        ((*MODEL, "--site", "home:pd:h20:198.51.100.999"), '"198.51.100.999" is no IPv4 address; write four'),
        (MODEL, "--model is for a file of your own; give its sites, too: --site"),
        (("--served-name", "m"), "--served-name is for a file of your own"),
        (("--max-model-len", "4096"), "--max-model-len is for a file of your own"),
    ],
)
def test_what_makes_no_file_is_one_sentence(
    args: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "init", "llm", "-o", tmp_path / "out", *args) == 2
    error = capsys.readouterr().err
    assert error.startswith("prfaas: ") and said in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("*.yaml*"))


def test_examples_are_copied_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "init", "two-datacenters", "-o", tmp_path) == 0
    assert load_deployment(tmp_path / "two-datacenters.yaml").name == "two-datacenters"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["two-datacenters.yaml"]
    assert run(monkeypatch, "init", "--list") == 0
    assert "two-datacenters" in capsys.readouterr().out


def test_an_example_comes_with_the_folder_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "init", "when-it-pays", "-o", tmp_path) == 0
    copied = load_deployment(tmp_path / "when-it-pays.yaml")
    assert (copied.model.path / "tokenizer.json").is_file() and copied.model.path.parent == tmp_path
    assert (
        load_planned(tmp_path / "when-it-pays.yaml").kv_model.token_bytes
        == copied.model.kv_model().token_bytes
    )
    # The second one has the same folder, which may have been changed.
    changed = tmp_path / "stand-in" / "h20.yaml"
    changed.write_text("mine")
    assert run(monkeypatch, "init", "without-prfaas", "-o", tmp_path) == 0
    assert changed.read_text() == "mine"
    assert run(monkeypatch, "init", "without-prfaas", "-o", tmp_path, "--force") == 0
    assert load_planned(tmp_path / "without-prfaas.yaml").name == "without-prfaas"
