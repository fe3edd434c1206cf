"""An experiment: which policy decides in which slice, what it sees, and that it ends where it hurts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.serving.gateway.records import ledger_row

from prfaas.core.deployment import AppliedDeployment, Deployment, DeploymentError, ExperimentConfig
from prfaas.core.scheduling.baselines import LocalOnly, StaticThreshold
from prfaas.core.scheduling.policy import make_policy
from prfaas.serving.control.experiment import Experiment
from prfaas.serving.control.planning_inputs import prefill_curves, view_of
from prfaas.serving.running_deployment import RunningDeployment

from .world import FILE, KEY, FakeClock, deployment_of

PAPER = make_policy("paper")
ASKED = "gateway: {{ledger: {{file: ledger.sqlite}}, experiment: {{{}}}}}\n"


def asked(folder: Path, experiment: str, text: str = FILE) -> Deployment:
    return deployment_of(folder, text=text + ASKED.format(experiment))


class Slept:
    """An experiment, and a clock that goes to slices of an arm."""

    def __init__(self, deployment: Deployment) -> None:
        self.clock = FakeClock(1_700_000_000.0)
        self.experiment = Experiment(RunningDeployment(deployment), KEY, self.clock)
        self.view = view_of(deployment, None, prefill_curves(deployment), 0.0)

    def go_to(self, arm: str, *, counts: bool = True) -> Any:
        """What decides there. Slices are of 600 s, and the first 60 s of each do not count."""
        begin_s = self.clock.now_s // 600 * 600
        for number in range(1, 60):
            self.clock.now_s = begin_s + 600 * number + (300.0 if counts else 30.0)
            at = self.experiment.at(self.clock.now_s)
            assert at is not None and at.counts is counts
            if at.arm == arm:
                return self.experiment.way(PAPER, self.view)
        raise AssertionError(f"no slice is {arm}")

    def hear(self, ttft_s: float, outcome: str = "ok") -> None:
        at = self.experiment.at(self.clock.now_s)
        row = ledger_row(
            slice=None if at is None else at.number,
            arm=self.experiment.arm(at),
            washout=at is not None and not at.counts,
            ttft_s=ttft_s,
            outcome=outcome,
        )
        self.experiment.hear(row)


def test_without_one_the_file_decides(tmp_path: Path) -> None:
    slept = Slept(deployment_of(tmp_path))
    assert slept.experiment.way(PAPER, slept.view) == (PAPER, slept.view)
    assert slept.experiment.at(slept.clock()) is None
    assert slept.experiment.state(0.0) == {"experiment": None}
    slept.hear(1.0)


@pytest.mark.parametrize("counts", [True, False])
def test_policies_take_turns(tmp_path: Path, counts: bool) -> None:
    slept = Slept(asked(tmp_path, "against: local_only"))
    policy, view = slept.go_to("as-is", counts=counts)
    assert (policy, view) == (PAPER, slept.view)
    policy, view = slept.go_to("other", counts=counts)
    assert isinstance(policy, LocalOnly) and view is slept.view
    assert slept.experiment.state(0.0)["experiment"] == {
        "against": "local_only",
        "arm": "other",
        "ended": None,
    }


def test_a_link_or_a_threshold_is_other(tmp_path: Path) -> None:
    slept = Slept(asked(tmp_path, 'without_link: "far->home"'))
    assert slept.go_to("as-is") == (PAPER, slept.view)
    policy, view = slept.go_to("other")
    assert policy is PAPER and not view.links and slept.view.links
    slept = Slept(asked(tmp_path, "threshold_tokens: 9000"))
    policy, view = slept.go_to("other")
    assert policy is PAPER and set(view.threshold_tokens.values()) == {9000.0}
    static = asked(
        tmp_path, "threshold_tokens: 9000", FILE.replace("policy: paper", "policy: static_threshold")
    )
    policy, _ = Slept(static).go_to("other")
    assert isinstance(policy, StaticThreshold) and policy.threshold_tokens == 9000


def test_it_ends_where_it_hurts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slept = Slept(asked(tmp_path, "against: local_only, most_harm: 0.5"))
    slept.go_to("as-is")
    for number in range(100):
        slept.hear(1.0 + number % 5 / 10)
    slept.go_to("other", counts=False)
    for number in range(100):
        slept.hear(4.0 + number % 5 / 10)
    assert "the experiment against local_only has ended: first tokens took 4" in caplog.text
    assert slept.experiment.way(PAPER, slept.view) == (PAPER, slept.view)
    assert slept.experiment.at(slept.clock()) is None
    # What was decided before is still of its slice.
    assert slept.experiment.at(slept.clock() - 1.0) is not None
    told = slept.experiment.state(0.0)["experiment"]
    assert told["arm"] is None and told["ended"].startswith("first tokens took 4")


def test_another_file_begins_another_one(tmp_path: Path) -> None:
    before = asked(tmp_path, "against: local_only")
    slept = Slept(before)
    for arm, ttft_s in (("as-is", 1.0), ("other", 9.0)):
        slept.go_to(arm)
        for _ in range(100):
            slept.hear(ttft_s)
    assert slept.experiment.state(0.0)["experiment"]["ended"]

    def taken_on(now: Deployment) -> None:
        slept.experiment.follow(AppliedDeployment(before, ""), AppliedDeployment(now, ""))

    taken_on(replace(before, slo=before.slo))
    assert slept.experiment.state(0.0)["experiment"]["ended"]
    other = ExperimentConfig(against="offload_all")
    taken_on(replace(before, gateway=replace(before.gateway, experiment=other)))
    assert slept.experiment.state(0.0)["experiment"]["ended"] is None
    taken_on(replace(before, gateway=replace(before.gateway, experiment=None)))
    assert slept.experiment.state(0.0) == {"experiment": None}


@pytest.mark.parametrize(
    ("experiment", "why"),
    [
        ("against: nope", 'gateway.experiment.against: there is no policy "nope"'),
        ("against: paper, threshold_tokens: 5", "has against and threshold_tokens; give one of them"),
        ('without_link: "a->b"', 'there is no link "a->b"; there are far->home'),
        ("slice_s: 60", "gateway.experiment.washout_s: must be less than slice_s (60)"),
    ],
)
def test_what_can_not_be_is_said(tmp_path: Path, experiment: str, why: str) -> None:
    with pytest.raises(DeploymentError) as refusal:
        asked(tmp_path, experiment)
    assert why in str(refusal.value)


def test_it_needs_a_ledger_and_a_policy_that_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="needs gateway"):
        deployment_of(tmp_path, text=FILE + "gateway: {experiment: {}}\n")
    with pytest.raises(DeploymentError, match="threshold_tokens"):
        Slept(asked(tmp_path, "against: static_threshold"))
