"""What the gateway counts of requests: their times, tokens, refusals, and what they wait for."""

import asyncio
from collections.abc import Callable

import pytest

from prfaas.core.deployment import GatewayLimits
from prfaas.serving.gateway import server
from prfaas.serving.gateway.request_log import RequestLog, WaitsFor
from prfaas.serving.gateway.ways.kv_transfer import KvTransfers, StagingUse

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


def test_staging_in_use(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        await world.complete(LONG)
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

    monkeypatch.setattr(server, "_STAGING_WATCH_S", 0.05)
    in_world(body)


def test_the_loop_is_watched(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        while await world.metric("prfaas_gateway_loop_lag_seconds_count") < 2:
            await asyncio.sleep(0.05)

    in_world(body)


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    from prometheus_client import CollectorRegistry

    from prfaas.serving.gateway.metrics import Metrics

    log = RequestLog(3, Metrics(CollectorRegistry()))
    for _ in range(5):
        with log.recording("completions"):
            assert len(log._open) == 1
    assert not log._open and len(log) == 3


def test_what_a_new_request_would_wait(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        while await world.metric("prfaas_gateway_queue_limit_seconds") != GatewayLimits().queue_s:
            await asyncio.sleep(0.01)
        world.plane.waits_s = 7.5
        while await world.metric("prfaas_gateway_queue_wait_seconds") != 7.5:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(server, "_QUEUE_WATCH_S", 0.05)
    in_world(body)


def test_of_an_instance_that_is_silent_no_staging_is_shown(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        await world.complete(LONG)
        series = 'prfaas_gateway_staging_bytes{instance="decode"}'
        while not await world.metric(series):
            await asyncio.sleep(0.01)

        async def nobody_answers(_transfers: KvTransfers, _timeout_s: float) -> dict[str, StagingUse]:
            return {}

        monkeypatch.setattr(KvTransfers, "staging", nobody_answers)
        while await world.metric(series):
            await asyncio.sleep(0.01)

    monkeypatch.setattr(server, "_STAGING_WATCH_S", 0.05)
    in_world(body)
