"""What the gateway counts of requests: their times, tokens, refusals, and what they wait for."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prfaas.core.deployment import GatewayLimits
from prfaas.serving.gateway.metrics import Metrics, StagingGauges
from prfaas.serving.gateway.request_log import RequestLog, WaitsFor

from .world import World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))


def test_times_and_tokens_of_answers(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.complete(LONG)
        assert await world.metric('prfaas_gateway_request_seconds_count{route="offload"}') == 1
        assert await world.metric('prfaas_gateway_answer_tokens_total{route="offload"}') == 16
        # In one piece: when its tokens came is not known.
        assert await world.metric("prfaas_gateway_tpot_seconds_count") == 0

    in_world(body)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": SHORT}),
        ("/v1/completions", {"prompt": SHORT, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_times_and_tokens_of_streams(in_world: InWorld, path: str, asked: dict[str, object]) -> None:
    async def body(world: World) -> None:
        world.decode.chunk_s = 0.02
        async with world.client.post(path, json=asked | {"stream": True, "max_tokens": 6}) as response:
            await response.read()
        assert await world.metric("prfaas_gateway_answer_tokens_total") == 6
        assert await world.metric("prfaas_gateway_tpot_seconds_count") == 1
        # Five pauses between six tokens, at least.
        assert await world.metric("prfaas_gateway_tpot_seconds_sum") >= 0.02
        ttft_s = await world.metric("prfaas_gateway_ttft_seconds_sum")
        assert await world.metric("prfaas_gateway_request_seconds_sum") >= ttft_s + 5 * 0.02

    in_world(body)


def test_refusals_by_reason(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.post("/v1/completions", [])
        await world.post("/v1/completions", {"prompt": "x", "model": "other"})
        world.plane.suspect("decode", "made to fail")
        await world.post("/v1/completions", {"prompt": "x"})
        reasons = [
            await world.metric(f'prfaas_gateway_refused_total{{reason="{reason}"}}')
            for reason in ("invalid", "unknown-model", "unavailable")
        ]
        assert reasons == [1, 1, 1]

    in_world(body)


def test_what_open_requests_wait_for(in_world: InWorld) -> None:
    async def waits(world: World, step: WaitsFor, count: int = 1) -> None:
        series = f'prfaas_gateway_waiting_requests{{step="{step}"}}'
        while await world.metric(series) != count:
            await asyncio.sleep(0.01)

    async def body(world: World) -> None:
        world.remote.hangs = True
        hanging = asyncio.create_task(world.post("/v1/completions", {"prompt": LONG}))
        await waits(world, WaitsFor.PREFILL)
        hanging.cancel()
        await waits(world, WaitsFor.PREFILL, 0)
        world.decode.chunks, world.decode.chunk_s = 1000, 0.01
        async with world.client.post("/v1/completions", json={"prompt": SHORT, "stream": True}) as response:
            await response.content.readany()
            for step in WaitsFor:
                await waits(world, step, 0)
            assert await world.metric("prfaas_gateway_in_flight_requests") == 1

    in_world(body)


def test_staging_in_use(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        lease = world.decode.arena.allocate(100_000)
        assert lease is not None
        blocks = world.decode.arena.blocks_for(100_000)
        used = 'prfaas_gateway_staging_used_bytes{instance="decode"}'
        while await world.metric(used) != blocks * world.decode.arena.block_bytes:
            await asyncio.sleep(0.01)
        lease.free()
        assert (
            await world.metric('prfaas_gateway_staging_bytes{instance="decode"}')
            == world.decode.arena.total_bytes
        )
        while await world.metric(used):
            await asyncio.sleep(0.01)

    in_world(body, live=True)


SANE = {"staging_used_blocks": 1, "staging_total_blocks": 2, "staging_block_bytes": 3}


def staging_of(registry: CollectorRegistry, metrics: Metrics, name: str) -> tuple[float | None, float | None]:
    metrics.exposition()
    labels = {"instance": name}
    used, total = (f"prfaas_gateway_staging_{series}" for series in ("used_bytes", "bytes"))
    return registry.get_sample_value(used, labels), registry.get_sample_value(total, labels)


def test_of_a_silent_rank_no_staging_is_shown() -> None:
    now_s = 0.0
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    gauges = StagingGauges(metrics, lambda: now_s)
    for rank in range(2):
        gauges.told("home", rank, SANE)
    assert staging_of(registry, metrics, "home") == (6, 12)
    for _ in range(3):
        now_s += 20.0
        gauges.told("home", 0, SANE)
    assert staging_of(registry, metrics, "home") == (3, 6)
    now_s += 60.0
    assert staging_of(registry, metrics, "home") == (None, None) and not gauges._told


@pytest.mark.parametrize("value", [float("nan"), 10**400, 1 << 41, -1, "text", True, None, [1]])
def test_absurd_staging_is_not_shown(value: Any) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    gauges = StagingGauges(metrics, lambda: 0.0)
    gauges.told("home", 0, SANE | {"staging_block_bytes": value})
    assert staging_of(registry, metrics, "home") == (None, None)
    gauges.told("home", 0, SANE)
    assert staging_of(registry, metrics, "home") == (3, 6)


def test_the_loop_is_watched(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        while await world.metric("prfaas_gateway_loop_lag_seconds_count") < 2:
            await asyncio.sleep(0.05)

    in_world(body)


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    log = RequestLog(3, Metrics(CollectorRegistry()))
    for _ in range(5):
        with log.recording("completions"):
            assert len(log._open) == 1
    assert not log._open and len(log.latest(9)) == 3


def test_what_a_new_request_would_wait(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert await world.metric("prfaas_gateway_queue_limit_seconds") == GatewayLimits().queue_s
        world.plane.waits_s = 7.5
        assert await world.metric("prfaas_gateway_queue_wait_seconds") == 7.5

    in_world(body)
