"""When a cached prefix leaves the instance that holds it."""

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy

from prfaas.core.scheduling.decision import CacheTransfer, Decision, Route, RoutingRequest
from prfaas.core.scheduling.view import View
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.world import World

LONG, PREFIX, PROMPT = 60_000, 20_000, 22_000


class _FirstFarThenHome:
    """The first prompt is prefilled in the other cluster; the next ones start from a prefix that is there."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._count = 0

    def decide(self, request: RoutingRequest, _view: View) -> Decision:
        self._count += 1
        tokens = request.num_tokens
        if self._count == 1:
            return Decision(
                route=Route.OFFLOAD,
                prefill="east-0",
                decode="home-7",
                uncached_tokens=tokens,
                prefill_tokens=tokens,
                skip_tokens=0,
                kv_bytes=0,
                reason="long",
                threshold_tokens=1.0,
                predicted_ttft_s=1.0,
            )
        moved = CacheTransfer(self._source, PREFIX + 1, 0, 0)
        left = tokens - PREFIX
        return Decision(
            route=Route.LOCAL,
            prefill="home-0",
            decode="home-7",
            uncached_tokens=left,
            prefill_tokens=left,
            skip_tokens=0,
            kv_bytes=0,
            reason="short",
            threshold_tokens=1.0,
            predicted_ttft_s=1.0,
            cache_transfer=moved,
        )


@pytest.mark.parametrize("source", ["east-0", "east-1"])
def test_it_waits_for_the_prefills_of_its_instance(case_study: CaseStudy, source: str) -> None:
    """An engine computes the last token of what it sends, in its turn; another engine of the cluster is idle."""
    shown = scenario_of(
        case_study.planned, adapts=False, allocation=False, caches=CacheOptions(10_000_000, 8192, 100)
    )
    world = World(shown, np.random.default_rng(0), 512)
    world.policy = _FirstFarThenHome(source)
    world.columns.grow(2)
    world.arrive(0, LONG, 10, [])
    world.arrive(1, PROMPT, 10, list(range(PROMPT // 512 + 1)))
    world.events.run(1000.0)
    far, home = (cluster.curve.seconds for cluster in shown.clusters)
    (link,) = (each for each in shown.links if each.source == "east")
    moving_s = (
        BITS_PER_BYTE * world.kv.facts.bytes_to_move(PREFIX, 0) / link.bandwidth_bits_per_s + link.rtt_s
    )
    queue_s = far(LONG) if source == "east-0" else 0.0
    assert world.columns.ttft_s[1] == pytest.approx(queue_s + moving_s + home(PROMPT - PREFIX), rel=0.01)
