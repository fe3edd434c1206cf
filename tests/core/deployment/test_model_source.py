"""Where a deployment's model comes from: what a file may say, where the files are, and how it is planned."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.deployment import (
    Deployment,
    DeploymentError,
    ModelSource,
    difference,
    load_deployment,
    load_planned,
)
from prfaas.core.deployment.model import (
    HUB_NAME,
    REVISION,
    TINY_MODELS,
    TRAINED_MODELS,
    made_model,
    made_model_names,
    trained_folder,
)
from prfaas.core.kv.hf_config import model_from_file
from prfaas.core.shipped import example_path
from prfaas.serving.engines.tiny import tiny_config


def loaded(folder: Path, model: str, length: int = 4096) -> Deployment:
    text = example_path("local").read_text().replace("trained: words", model)
    path = folder / "local.yaml"
    path.write_text(text.replace("max_model_len: 32768", f"max_model_len: {length}"))
    return load_deployment(path, state_dir=folder / "state")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_trained_model_s_cache_is_known_before_it_is_fetched(name: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, f"trained: {name}").model
    assert (model.source, model.path) == (ModelSource("trained", name), tmp_path / "state" / "models" / name)
    assert model.kv_model() == model_from_file(trained_folder(name) / "config.json", name=model.served_name)


def test_of_the_hub_each_deployment_has_a_link(tmp_path: Path) -> None:
    model = loaded(tmp_path, "hub: org/name.7\n  revision: refs/pr/1").model
    assert model.source == ModelSource("hub", "org/name.7", "refs/pr/1")
    assert model.path == tmp_path / "state" / "local" / "hub" / "org--name.7@refs%2Fpr%2F1"
    snapshot = tmp_path / "cache" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    model.path.parent.mkdir(parents=True)
    model.path.symlink_to(snapshot)
    assert model.folder == snapshot and model.kv_model().token_bytes == 6144


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "trained: gpt",
            'model.trained: must be one of "words", "smollm2", "gemma3", not "gpt"',
        ),
        ("hub: name", 'model.hub: "name" is no name of the hub; write it like'),
        ("hub: org/../name", "model.hub: "),
        ("hub: org/name\n  revision: ../main", 'model.revision: "../main" is no revision'),
        ("tiny: qwen3\n  revision: main", "model.revision: is of a model of the hub"),
        ("trained: smollm2\n  hub: org/name", "model: needs either path"),
    ],
)
def test_what_can_t_be_is_said(model: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError) as failed:
        loaded(tmp_path, model)
    assert said in str(failed.value) and "\n" not in str(failed.value)


def test_a_trained_model_s_context_is_the_longest(tmp_path: Path) -> None:
    assert loaded(tmp_path, "trained: smollm2", 8192).model.max_model_len == 8192
    with pytest.raises(
        DeploymentError, match=r"model\.max_model_len: 8193 is more than the 8192 tokens that smollm2"
    ):
        loaded(tmp_path, "trained: smollm2", 8193)


def planned(folder: Path, model: str) -> Any:
    text = example_path("dense").read_text()
    line = next(each for each in text.splitlines() if each.strip().startswith("published:"))
    path = folder / "plan.yaml"
    text = re.sub("(    instance_count: .*)", r"\1\n    tensor_parallel: 1", text)
    path.write_text(text.replace(line, f"  {model}"))
    return load_planned(path)


def test_a_trained_model_can_be_planned_with(tmp_path: Path) -> None:
    assert planned(tmp_path, "trained: smollm2").kv_model.token_bytes == 23_040


def test_a_hub_s_model_can_be_planned_with_once_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    with pytest.raises(
        DeploymentError, match=r"model\.hub: org/name is not on this machine yet; prfaas model fetch"
    ):
        planned(tmp_path, "hub: org/name")
    name = load_planned(example_path("dense")).name
    link = ModelSource("hub", "org/name").directory(Path(os.environ["PRFAAS_HOME"]), name)
    link.mkdir(parents=True)
    (link / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    assert planned(tmp_path, "hub: org/name").kv_model.token_bytes == 6144


def test_another_source_is_seen_as_the_file_says_it(tmp_path: Path) -> None:
    changes = difference(
        loaded(tmp_path, "trained: smollm2"), loaded(tmp_path, "hub: org/name\n  revision: v1")
    ).changes
    assert {
        'model.trained is now not given; it was "smollm2"',
        'model.hub is now "org/name"; it was not given',
        'model.revision is now "v1"; it was not given',
    } < {each.sentence for each in changes}


def test_names_of_made_models_are_of_one_kind_each() -> None:
    assert made_model_names() == (*TRAINED_MODELS, *TINY_MODELS) and len(set(made_model_names())) == len(
        made_model_names()
    )
    assert {made_model(name) for name in made_model_names()} == {
        *(ModelSource("trained", name) for name in TRAINED_MODELS),
        *(ModelSource("tiny", name) for name in TINY_MODELS),
    }
    assert made_model("gpt-5") is None


@given(st.text(max_size=30), st.text(max_size=30) | st.none())
def test_no_name_leads_out_of_the_deployment_s_folder(name: str, revision: str | None) -> None:
    if not re.fullmatch(HUB_NAME, name) or (revision is not None and not re.fullmatch(REVISION, revision)):
        return
    link = ModelSource("hub", name, revision).directory(Path("/state"), "east")
    assert link.parent == Path("/state/east/hub") and Path(os.path.normpath(link)) == link


@pytest.mark.parametrize("name", ["org/name", "HuggingFaceTB/SmolLM2-135M", "a/b", "o_1/x.y"])
def test_names_of_the_hub(name: str) -> None:
    assert re.fullmatch(HUB_NAME, name)


@pytest.mark.parametrize(
    "name", ["", "org", "org/", "/x", "a/b/c", "../x", "a/..", "a/b--c", "a b/c", "-a/b", "a/b."]
)
def test_what_is_no_name_of_the_hub(name: str) -> None:
    assert not re.fullmatch(HUB_NAME, name)
