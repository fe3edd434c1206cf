"""A policy that is not ours, live: it decides, and where it fails no request is lost."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.policy import make_policy
from prfaas.core.scheduling.view import NoDecodeInstanceError, View
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.role_allocation import RoleAllocation

from .test_plane import Planes
from .world import FakeClock, deployment_of


class Working:
    def decide(self, request: RoutingRequest, view: View) -> Decision:
        return structs.replace(make_policy("offload_all").decide(request, view), reason="always-far")


class Raising:
    def decide(self, request: RoutingRequest, view: View) -> Decision:
        raise ZeroDivisionError("no links")


class NobodyThere:
    def decide(self, request: RoutingRequest, view: View) -> Decision:
        raise NoDecodeInstanceError("so it says")


class Unsound:
    def decide(self, request: RoutingRequest, view: View) -> Decision:
        return structs.replace(make_policy("tilted").decide(request, view), decode="far-p0")


class Uncopied(Working):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def planes_of(tmp_path: Path, clock: FakeClock, policy: type) -> Planes:
    change = f"policy: paper -> policy: '{__name__}:{policy.__name__}'"
    return Planes(deployment_of(tmp_path, policy=change), clock)


def failures(planes: Planes) -> float | None:
    return planes.registry.get_sample_value("prfaas_control_policy_failures_total")


def test_a_policy_of_ones_own_decides(tmp_path: Path, clock: FakeClock) -> None:
    planes = planes_of(tmp_path, clock, Working)
    decision = planes.run(lambda plane: plane.router.route(300, plane.prefixes.chains(range(300), "", "")))
    assert decision.reason == "always-far" and failures(planes) == 0


@pytest.mark.parametrize("policy", [Raising, NobodyThere, Unsound])
def test_one_that_fails_loses_no_request(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, policy: type
) -> None:
    planes = planes_of(tmp_path, clock, policy)

    def use(plane: LivePlane) -> None:
        for number in range(1, 12):
            decision = plane.router.route(10_000, plane.prefixes.chains(range(10_000), "", ""))
            assert decision == structs.replace(decision, reason="long")
            assert failures(planes) == number
        with pytest.raises(NoDecodeInstanceError, match="no instance of any PD cluster"):
            plane.router.route(
                10_000, plane.prefixes.chains(range(10_000), "", ""), avoid=tuple(plane.cluster_state.names)
            )

    with caplog.at_level(logging.ERROR):
        planes.run(use)
    said = [each.getMessage() for each in caplog.records if "decided in its place" in each.getMessage()]
    assert [sentence.partition(" failed (")[2].split(" ")[0] for sentence in said] == ["1", "10"]
    assert f"{__name__}:{policy.__name__}" in said[0] and "tilted decided" in said[0]


@pytest.mark.parametrize("policy", [Working, Raising, NobodyThere, Unsound, Uncopied])
def test_roles_are_evaluated_under_any_policy(tmp_path: Path, clock: FakeClock, policy: type) -> None:
    """A loop that ends with an error ends the gateway."""
    planes = planes_of(tmp_path, clock, policy)

    async def evaluated() -> dict[str, Any]:
        plane = planes.made()
        for number in range(500):
            plane.thresholds.window.add(1000.0 + number, clock())
        clock.now_s += 250
        try:
            await plane.part(RoleAllocation).evaluate()
            return plane.part(RoleAllocation).last
        finally:
            await plane.close()

    assert asyncio.run(evaluated())["result"] in ("kept", "conversion")
    assert failures(planes) == 0
