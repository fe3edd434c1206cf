"""Which tiers of a pool pay: checked against the equations by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.core.deployment import load_planned
from prfaas.core.planner import PlanProblem, problem_of, range_tokens
from prfaas.core.planner.pool_worth import tier_worths
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import Workload

EXAMPLES = Path(__file__).parents[3] / "examples"
RANGE = range_tokens(load_planned(EXAMPLES / "paper.yaml"))


def problem(name: str = "paper.yaml", tokens: int = 32_768) -> PlanProblem:
    """All prompts of one length."""
    given = problem_of(load_planned(EXAMPLES / name))
    return replace(given, workload=Workload(fixed(tokens), given.workload.output_tokens))


def test_a_tier_pays_above_the_kv_throughput() -> None:
    given = problem()
    seconds = float(given.prfaas[0].prefill_s(_array(32_768))[0])
    threshold = 8 * float(given.kv_bytes(_array(32_768))[0]) / seconds
    rates = {"east": {"below": 0.99 * threshold, "above": 1.01 * threshold}}
    below, above = tier_worths(given, rates, RANGE)

    assert (below.tier, below.pays, above.tier, above.pays) == ("below", False, "above", True)
    assert below.tokens == 32_768
    assert above.kv_bits_per_s == pytest.approx(threshold)


def test_short_prefixes_of_hybrids_are_computed() -> None:
    """A state has the same size however short its prefix is."""
    given = problem()
    (tier,) = tier_worths(given, {"home": {"slow": 2.5e9}}, RANGE)

    assert tier.pays and tier.pays_from_tokens is not None
    assert RANGE[0] < tier.pays_from_tokens < 32_768
    for factor, pays in ((1.05, True), (0.9, False)):
        tokens = _array(factor * tier.pays_from_tokens)
        loads_s = 8 * float(given.kv_bytes(tokens)[0]) / 2.5e9
        assert (loads_s < float(given.pd[0].prefill_s(tokens)[0])) == pays


def test_a_dense_model_needs_more_than_a_network() -> None:
    network, memory = tier_worths(problem("dense.yaml"), {"east": {"network": 10e9, "memory": 200e9}}, RANGE)

    assert (network.pays, network.pays_from_tokens) == (False, None)
    assert memory.pays


def _array(tokens: float):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array([tokens])
