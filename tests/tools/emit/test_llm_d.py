"""Values for llm-d: what is in them, and which plans have none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import Plan, make_plan, problem_of
from prfaas.tools.emit.llm_d import llm_d_values

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def paper() -> tuple[PlannedDeployment, Plan]:
    deployment = load_planned(EXAMPLES / "paper.yaml")
    return deployment, make_plan(problem_of(deployment))


def documents(deployment: PlannedDeployment, plan: Plan) -> list[Any]:
    """Those with content; the first is only a comment."""
    return [each for each in yaml.safe_load_all(llm_d_values(deployment, plan)) if each is not None]


def test_roles_and_threshold_are_the_plan_s(paper: tuple[PlannedDeployment, Plan]) -> None:
    deployment, plan = paper
    far, home, router = documents(deployment, plan)
    assert far == {"prefill": {"replicas": 4}, "decode": {"replicas": 0}}
    assert home == {"prefill": {"replicas": 3}, "decode": {"replicas": 5}}
    decider, handler = router["plugins"]
    assert decider["type"] == "prefix-based-pd-decider"
    threshold_tokens = plan.optimum.threshold_tokens
    assert (
        threshold_tokens is not None and 0 <= threshold_tokens - decider["parameters"]["nonCachedTokens"] < 1
    )
    assert handler["parameters"] == {"deciders": {"prefill": decider["type"]}}
    assert "make all 8 decode pods" in llm_d_values(deployment, plan)


def test_without_offloading_every_prompt_goes_to_prefill_pods(paper: tuple[PlannedDeployment, Plan]) -> None:
    deployment, plan = paper
    optimum = replace(plan.optimum, offloaded_fraction=0.0, threshold_tokens=None)
    far, home, router = documents(deployment, replace(plan, optimum=optimum))
    assert far["prefill"] == {"replicas": 0} and home["prefill"] == {"replicas": 3}
    assert router["plugins"][0]["parameters"] == {"nonCachedTokens": 0}


def test_several_clusters_have_no_single_threshold(paper: tuple[PlannedDeployment, Plan]) -> None:
    with pytest.raises(ValueError, match="multi has 2 PD and 2 PrfaaS clusters"):
        llm_d_values(load_planned(EXAMPLES / "multi.yaml"), paper[1])
