"""Plans against the simulator and brute force on a few random deployments; bench/verdicts.py has hundreds."""

from dataclasses import replace
from io import StringIO
from itertools import islice

import pytest
from rich.console import Console

import verdicts
from prfaas.core.deployment import load_planned
from prfaas.core.deployment.planned import EmpiricalLengths, FixedLengths, LengthsSpec


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(
            5, marks=pytest.mark.extended("the same, with log-normal lengths and a larger deployment")
        ),
    ],
)
@pytest.mark.slow("searches plans and simulates them")
def test_no_plan_is_contradicted(seed: int) -> None:
    """One length, whose prompts are divided: stable rate, search, and what is left without the line."""
    found = list(islice(verdicts.verdicts_of(seed), 3))
    assert [each.kind for each in found] == ["stable rate", "search", "survival of link east->home"]
    assert not [each for each in found if each.contradicts]


@pytest.mark.parametrize(
    "lengths",
    [FixedLengths(27_000), EmpiricalLengths((8192, 65_536), (3, 1))],
    ids=["one length", "two templates"],
)
@pytest.mark.slow("searches plans and simulates them")
def test_no_plan_of_several_clusters_is_contradicted(lengths: LengthsSpec) -> None:
    """What the plan divides among four clusters, the default policy with a threshold for each PD cluster carries."""
    multi = load_planned(verdicts.EXAMPLES / "multi.yaml")
    planned = replace(multi, workload=replace(multi.workload, lengths=lengths))
    assert not verdicts.verdict_of_several(planned).contradicts


@pytest.mark.slow("searches plans and simulates them")
def test_a_pd_cluster_whose_instances_all_decode_keeps_their_time_for_answers() -> None:
    """Narrow links wait: prefills that went to decode instances instead cost 4 % of what was planned."""
    assert not verdicts.verdict_of_several(verdicts.random_deployment(22, has_several=True)).contradicts


def test_a_wrong_plan_is_contradicted_and_reported() -> None:
    wrong = verdicts.Verdict(
        1, "stable rate", "a deployment", planned_rps=1.0, found_rps=0.96, tolerance=0.03
    )
    better = verdicts.Verdict(2, "search", "another", planned_rps=1.0, found_rps=1.02, tolerance=0.01)
    worse = verdicts.Verdict(3, "search", "a third", planned_rps=1.0, found_rps=0.9, tolerance=0.01)
    assert wrong.contradicts and better.contradicts and not worse.contradicts
    text = StringIO()
    verdicts.report(Console(file=text, width=120), [wrong, better, worse])
    assert "-4.00%" in text.getvalue() and "+2.00%" in text.getvalue()
