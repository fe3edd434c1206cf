"""Of a model that no reader knows, routing and planning count in what its engines tell."""

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from prfaas.core.kv.model import KvModel
from prfaas.core.kv.published import published_model
from prfaas.core.workload.lengths import Uniform
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.planning_inputs import kv_facts

from .world import LINK, deployment_of, plane_of

TOKENS = 1024
TOLD = {"kv_layers": [["full_attention", 128, 0, 12_800, 1, 4], ["sliding_window", 64, 512, 64, 1, 2]]}
STATES = {"kv_layers": [*TOLD["kv_layers"], ["linear_state", 128, 0, 1_000_000, 1, 2]]}


def plane(folder: Path, kv_model: KvModel | None = None) -> LivePlane:
    """Nobody is asked anything."""
    return plane_of(deployment_of(folder), CollectorRegistry(), kv_model, http=object())


def test_before_anyone_tells_no_transfer_is_free(tmp_path: Path) -> None:
    facts = plane(tmp_path).cluster_state.view.kv
    largest = published_model("minimax-m2.5").kv_model
    assert facts.bytes_to_move(TOKENS + 1, 0) == largest.bytes_to_move(TOKENS)
    assert facts.is_hybrid and not facts.can_skip
    assert kv_facts(None).checkpoint_bytes == 0


def test_from_then_on_bytes_and_blocks_are_the_engines(tmp_path: Path) -> None:
    of = plane(tmp_path)
    of.listeners.told.tell("far-0", 0, TOLD)
    facts = of.cluster_state.view.kv
    windows = 2 * 64 * 512 // 64
    assert facts.bytes_to_move(TOKENS + 1, 0) == 4 * 12_800 * TOKENS // 128 + windows
    assert facts.bytes_to_move(TOKENS, 0) == facts.bytes_to_move(TOKENS + 1, 0)
    assert facts.is_hybrid and not facts.can_skip
    # The most that any of them keeps.
    of.listeners.told.tell("home-d0", 0, STATES)
    more = of.cluster_state.view.kv.bytes_to_move(TOKENS + 1, 0)
    assert more == facts.bytes_to_move(TOKENS + 1, 0) + 2 * 1_000_000
    of.listeners.told.tell("far-0", 0, TOLD)
    assert of.cluster_state.view.kv.bytes_to_move(TOKENS + 1, 0) == more


@pytest.mark.parametrize("stats", [{}, {"kv_layers": "none"}, {"kv_layers": [["full_attention"]]}])
def test_what_cannot_be_read_changes_nothing(tmp_path: Path, stats: dict[str, object]) -> None:
    of = plane(tmp_path)
    before = of.cluster_state.view.kv
    of.listeners.told.tell("far-0", 0, stats)
    of.listeners.told.tell("nobody", 0, TOLD)
    assert of.cluster_state.view.kv is before


def test_the_model_s_own_file_has_the_last_word(tmp_path: Path) -> None:
    of = plane(tmp_path, published_model("qwen3-235b").kv_model)
    before = of.cluster_state.view.kv
    of.listeners.told.tell("far-0", 0, STATES)
    assert of.cluster_state.view.kv is before


def test_no_link_counts_as_unlimited(tmp_path: Path) -> None:
    of = plane(tmp_path)
    assert LINK in of.cluster_state.view.links
    facts, lengths = of.thresholds._facts, np.array([float(TOKENS)])
    unknown = facts.problem(Uniform(1, TOKENS)).kv_bytes(lengths)
    of.listeners.told.tell("far-0", 0, TOLD)
    told = facts.problem(Uniform(1, TOKENS)).kv_bytes(lengths)
    assert 0 < told[0] < unknown[0]
