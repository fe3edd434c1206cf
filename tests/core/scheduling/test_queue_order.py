"""In which order prefills wait is asked of the policy itself."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from prfaas.core.scheduling import Decision, RoutingRequest, View, policy_named
from prfaas.core.scheduling.policy import Policy, is_shortest_first

from .views import small


@pytest.mark.parametrize(
    ("policy", "is_so"),
    [
        (policy_named("tilted"), True),
        (policy_named("tilted", fairness=1.0), False),
        (policy_named("paper"), False),
        (policy_named("round_robin"), False),
        (policy_named("static_threshold", threshold_tokens=8000), False),
    ],
    ids=lambda value: value.name if not isinstance(value, bool) else "",
)
def test_each_policy(policy: Policy, is_so: bool) -> None:
    assert is_shortest_first(policy, small()) is is_so


@dataclass
class Counting:
    """Changes with each decision, which a policy should not."""

    name: ClassVar[str] = "counting"
    asked: int = 0

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        self.asked += 1
        return policy_named("tilted").decide(request, view)


def test_asking_changes_nothing() -> None:
    policy = Counting()
    assert is_shortest_first(policy, small()) and policy.asked == 0


def test_without_instances_nothing_waits() -> None:
    nobody = small()
    for cluster in nobody.clusters.values():
        cluster.instances.clear()
    assert not is_shortest_first(policy_named("tilted"), nobody)
