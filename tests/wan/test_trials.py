"""What the trials conclude from what they have recorded, and that their deployment works."""

import asyncio
import math
import random
from pathlib import Path
from typing import cast

import pytest

from prfaas.core.deployment import Deployment
from prfaas.core.route_header import RouteHeader
from wan import mid_run, outages
from wan.load import LinkLoad, LinkReading, LinkRequest, random_ids
from wan.stack import GATEWAY_HOST, LINK


def reading(at_s: float, threshold_tokens: float, capacity_bits_per_s: float = 188e6) -> LinkReading:
    return LinkReading(
        at_s=at_s,
        up=True,
        capacity_bits_per_s=capacity_bits_per_s,
        egress_bits_per_s=0.0,
        rtt_s=0.03,
        threshold_tokens=threshold_tokens,
        queued_bytes=0,
    )


def test_a_threshold_changes_when_it_moves_by_more_than_its_grid() -> None:
    thresholds = (1000, 1040, 3000, 3000, math.inf, math.inf, 2990, 1000)
    readings = [reading(number, threshold) for number, threshold in enumerate(thresholds)]
    assert mid_run.threshold_changes(1000, readings) == [2, 4, 6, 7]
    assert mid_run.threshold_changes(math.inf, readings[4:6]) == []


def test_only_what_comes_after_the_prefill_is_a_wait_for_the_link() -> None:
    request = LinkRequest(sent_s=0.0, tokens=8000)
    assert request.link_wait_s == 0.0
    request.route = RouteHeader("offload", transfer_s=3.0, prefill_s=1.0)
    assert request.link_wait_s == 2.0
    request.route = RouteHeader("offload", transfer_s=0.9, prefill_s=1.0)
    assert request.link_wait_s == 0.0
    request.route = RouteHeader("local", transfer_s=3.0, prefill_s=1.0)
    assert request.link_wait_s == 0.0


def test_a_fallback_is_counted_from_what_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "local_prefill_s", lambda _deployment, _request: 0.5)

    def request(sent_s: float, first_s: float, ended_s: float, route: RouteHeader) -> LinkRequest:
        return LinkRequest(sent_s, outages.PROMPT_TOKENS, first_s, ended_s, "right", "", route)

    offload = RouteHeader("offload", transfer_s=0.5, prefill_s=0.4)
    fallback = RouteHeader("local", fallback="frozen")
    requests = [
        request(1.0, 2.0, 2.0, offload),
        request(9.5, 13.0, 14.0, fallback),
        request(11.0, 14.25, 15.0, fallback),
        request(12.0, 19.0, 20.0, RouteHeader("local")),
        request(16.0, 17.0, 17.0, RouteHeader("local")),
        request(17.0, 18.0, 18.0, RouteHeader("offload", transfer_s=0.7)),
    ]
    deployment = cast(Deployment, None)
    found = outages.conclude(outages.Outage("freeze-5"), deployment, requests, 10.0, 15.0, 0)
    assert found.fallbacks == 2
    assert found.latest_fallback_s == 2.75
    assert found.ttft_longest_s == 7.0
    assert (found.transfer_before_s, found.transfer_after_s, found.offload_back_s) == (0.5, 0.7, 2.0)
    assert found.outcomes["right"] == 6


@pytest.mark.wan
@pytest.mark.slow("starts a gateway and engines on both ends of an emulated line")
@pytest.mark.timeout(240)
def test_a_deployment_of_stand_ins_offloads_over_the_line(tmp_path: Path) -> None:
    async def drive() -> tuple[LinkRequest, LinkReading]:
        async with LinkLoad(stack).running() as load:
            request = await load.send(random_ids(random.Random(1), 5000))
            while not load.readings:
                await asyncio.sleep(0.05)
            return request, load.readings[-1]

    with outages.fixed_threshold(tmp_path, encryption=True) as stack:
        with stack.laboratory.inside(GATEWAY_HOST):
            request, read = asyncio.run(drive())
        carried_bytes = stack.laboratory.counters("far", "home").carried_bytes
        assert LINK in stack.state()["links"]
    assert (request.outcome, request.is_offloaded) == ("right", True), request
    assert request.route is not None and carried_bytes > request.route.kv_bytes > 5000 * 1024
    assert read.up
