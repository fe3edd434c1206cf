"""Engines that draft tokens: how their options are read, and what plan, simulation and gateway count of the drafter."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.core.deployment.test_cluster_dtypes import WHOLE, written

from prfaas.core.deployment import DeploymentError, load_deployment, load_planned
from prfaas.core.deployment.speculation import speculation_of
from prfaas.core.kv.drafters import DrafterError, Speculation
from prfaas.core.planner import problem_of
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.world import World
from prfaas.serving.control.planning_inputs import kv_model_of, prefill_curves, view_of
from prfaas.serving.engines.synthetic.node import _sent_model

MTP = Speculation("mtp")


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (["--stream-interval", "4"], None),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'], MTP),
        (['--speculative-config={"method": "qwen3_next_mtp"}', "--seed", "1"], MTP),
        (["-sc", '{"model": "d", "kv-cache-dtype": "fp8"}'], Speculation("", "d", "fp8")),
        (
            ["--speculative_config.method", "eagle3", "--speculative-config.model=d"],
            Speculation("eagle3", "d"),
        ),
        (
            ["--spec-model", "d", "--spec_tokens", "3", "--spec-method=draft_model"],
            Speculation("draft_model", "d"),
        ),
        # The last one counts, as vLLM's parser has it.
        (
            ["--speculative-config", '{"method": "mtp"}', "--speculative-config", '{"method": "ngram"}'],
            Speculation("ngram"),
        ),
    ],
)
def test_options(arguments: list[str], read: Speculation | None) -> None:
    assert speculation_of(arguments) == read


@pytest.mark.parametrize("value", ["mtp", "[1]", ""])
def test_what_is_no_object_is_refused(value: str) -> None:
    with pytest.raises(DrafterError, match="--speculative-config must be a JSON object, not"):
        speculation_of(["--speculative-config", value])


DRAFT = {
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
DRAFTED = WHOLE // 8


def drafting(folder: Path, clusters: str, place: str | None = None, dtype: str = "") -> Path:
    """The file with a drafter in these clusters, of an eighth of the model's layers."""
    path = written(folder, dtype)
    draft = folder / "draft"
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps(DRAFT))
    option = json.dumps({"model": place or str(draft), "num_speculative_tokens": 3})
    text = path.read_text()
    for name in clusters.split():
        at = f"  - name: {name}\n"
        text = text.replace(at, f"{at}    extra_args: [--speculative-config, '{option}']\n")
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("clusters", "held", "sent"),
    [
        ("east home west", (1, 1, 1), (1, 1)),
        ("home", (0, 1, 0), (0, 0)),
        ("east home", (1, 1, 0), (1, 0)),
        ("east west", (1, 0, 1), (0, 0)),
    ],
)
def test_each_cluster_holds_its_drafters_part_and_a_link_carries_what_both_ends_have(
    tmp_path: Path, clusters: str, held: tuple[int, ...], sent: tuple[int, ...]
) -> None:
    """In planning, in simulations and in the gateway alike; bytes of a token."""
    path = drafting(tmp_path, clusters)
    deployment, live = load_planned(path), load_deployment(path, state_dir=tmp_path / "state")
    kept = [(each.kv_model or deployment.kv_model).token_bytes for each in deployment.clusters]
    assert kept == [WHOLE + DRAFTED * drafts for drafts in held]
    expected = [WHOLE + DRAFTED * drafts for drafts in sent]
    problem = problem_of(deployment)
    assert [problem.kv_bytes_over(link.name)(np.array([1000.0]))[0] for link in deployment.links] == [
        1000 * each for each in expected
    ]
    world = World(scenario_of(deployment), np.random.default_rng(1), 64)
    shown = view_of(live, kv_model_of(live), prefill_curves(live), 0.0)
    for view in (world.view, shown):
        over = [view.kv_between(link.source, link.target) for link in deployment.links]
        inside = [view.kv_between(each.name, each.name) for each in deployment.clusters]
        assert [each.prefix_bytes_to_move(2048, 1024) // 1024 for each in (*over, *inside)] == [
            *expected,
            *kept,
        ]
        pools = [view.clusters[each.name].pool_kv or view.kv for each in deployment.clusters]
        assert [each.prefix_bytes_to_move(2048, 1024) // 1024 for each in pools] == kept
    assert deployment.model_title == "m"


def test_in_an_unlike_dtype_too(tmp_path: Path) -> None:
    """The side with 8 bits drafts, the other does not: what crosses is the model's in 8 bits."""
    deployment = load_planned(drafting(tmp_path, "east", dtype="fp8"))
    assert deployment.sent_over(deployment.links[0].name).token_bytes == WHOLE // 2


def test_a_drafter_that_is_not_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plan can't be made; a gateway that has no such files goes on without it, and says so."""
    path = drafting(tmp_path, "home west", "org/draft")
    said = r"clusters\[1\]\.extra_args: what drafts tokens: org/draft is no directory on this machine"
    with pytest.raises(DeploymentError, match=said):
        load_planned(path)
    model = kv_model_of(load_deployment(path, state_dir=tmp_path / "state"))
    assert model is not None and model.token_bytes == WHOLE
    for cluster in ("home", "west"):
        assert (
            f"the KVCache of {cluster} is counted without a drafter's; what drafts tokens: org/draft"
            in caplog.text
        )


@pytest.mark.parametrize(("clusters", "drafts"), [("east home west", 1), ("east home", 0)])
def test_stand_ins_send_what_all_of_them_have(tmp_path: Path, clusters: str, drafts: int) -> None:
    path = drafting(tmp_path, clusters)
    text = re.sub("hardware: h200?", "hardware: synthetic", path.read_text())
    path.write_text(re.sub("prices: .*", "prices: {synthetic: 1}", text))
    deployment = load_deployment(path, state_dir=tmp_path / "state")
    assert _sent_model(deployment).token_bytes == WHOLE + DRAFTED * drafts
