"""Engines that hold their connections and say nothing: clients are answered by others, and the right one is blamed."""

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from prfaas.core.deployment import ControlConfig
from prfaas.serving.gateway.http_pool import HttpPool

from ..stand_in import answer_text
from ..world import GATEWAY, HASTY, OPTIONS, World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))
# What waits for a frozen engine must not be saved by a limit of its own.
PATIENT = replace(OPTIONS, transfer_grace_s=100.0, announce_grace_s=100.0, prefill_timeout_s=100.0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen within ten seconds")


async def introduced(world: World) -> None:
    """The gateway has asked what it asks at its start, so that the next request is a client's."""
    await world.complete("x" * 20)


async def streamed(world: World, prompt: list[int], tokens: int = 9) -> str:
    asked = {"prompt": prompt, "max_tokens": tokens, "stream": True}
    async with world.client.post("/v1/completions", json=asked) as response:
        assert response.status == 200
        raw = await response.read()
    assert raw.endswith(b"data: [DONE]\n\n"), raw
    events = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n")[:-2]]
    return "".join(orjson.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["offload", "local"])
@pytest.mark.parametrize("point", ["before-headers", "in-body"])
def test_an_answer_that_does_not_come_comes_from_another_engine(
    in_world: InWorld, point: str, prompt: list[int]
) -> None:
    async def body(world: World) -> None:
        await introduced(world)
        world.decode.dies, world.decode.freezes = point, True
        request = asyncio.create_task(world.complete(prompt))
        await until(lambda: world.decode.frozen)
        world.plane.freeze("decode")
        route, answer = await request
        assert route["decode"] == "spare"
        assert answer["choices"][0]["text"] == answer_text(prompt)
        assert await world.metric('prfaas_gateway_decode_failures_total{reason="frozen"}') == 1
        # The control plane has judged already; nobody else is accused, and the cache is not said to be lost.
        assert world.plane.suspected == []
        # As long as it is frozen, nothing waits for it; then it is asked again.
        route, _ = await world.complete([9, *prompt])
        assert route["decode"] == "spare"
        world.decode.frozen, world.decode.dies = False, None
        world.plane.freeze("decode", None)
        route, _ = await world.complete([8, *prompt])
        assert route["decode"] == "decode"

    in_world(body, spare=True)


@pytest.mark.parametrize("point", ["mid-stream", "mid-event"])
def test_a_stream_that_stops_is_continued_elsewhere(in_world: InWorld, point: str) -> None:
    async def body(world: World) -> None:
        world.decode.dies, world.decode.dies_after, world.decode.freezes = point, 4, True
        request = asyncio.create_task(streamed(world, LONG))
        await until(lambda: world.decode.frozen)
        world.plane.freeze("decode")
        assert await request == answer_text(LONG, 9)
        assert await world.metric('prfaas_gateway_continuations_total{outcome="continued"}') == 1
        assert world.plane.suspected == []

    in_world(body, spare=True)


@pytest.mark.parametrize("moment", ["prefill", "transfer"])
def test_a_frozen_producer_becomes_a_local_prefill(in_world: InWorld, moment: str) -> None:
    async def body(world: World) -> None:
        world.remote.hangs, world.remote.stalls = moment == "prefill", moment == "transfer"
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: bool(world.remote.generated()))
        await asyncio.sleep(0.1)
        assert not request.done()
        world.plane.freeze("remote")
        route, answer = await request
        assert (route["prefill"], route["fallback"]) == ("local", "frozen")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.plane.suspected == []

    in_world(body, options=PATIENT)


@pytest.mark.parametrize("moment", ["prefill", "transfer"])
def test_a_frozen_consumer_is_left_for_another_one(in_world: InWorld, moment: str) -> None:
    async def body(world: World) -> None:
        world.remote.hangs, world.remote.stalls = moment == "prefill", moment == "transfer"
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: bool(world.remote.generated()))
        await asyncio.sleep(0.1)
        world.remote.hangs = world.remote.stalls = False
        world.plane.freeze("decode")
        route, answer = await request
        assert route["decode"] == "spare"
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.plane.suspected == []
        assert await world.metric('prfaas_gateway_fallbacks_total{reason="consumer-frozen"}') == 1

    in_world(body, spare=True, options=PATIENT)


@pytest.mark.slow("waits for time limits of connections")
def test_a_consumer_whose_kv_port_is_silent_is_blamed_and_no_producer(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        _, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.plane.suspected == [("decode", False)]
        assert await world.metric('prfaas_gateway_fallbacks_total{reason="consumer-silent"}') == 1

    in_world(body, mute=True, options=replace(HASTY, abandon_timeout_s=0.5))


def test_a_producer_that_opens_no_transfer_is_still_blamed(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.sends = False
        route, _ = await world.complete(LONG)
        assert route["fallback"] == "not-announced"
        assert world.plane.suspected == [("remote", False)]

    in_world(body, options=HASTY)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("point", "reason"), [("before-headers", "first-byte"), ("mid-stream", "idle")])
def test_an_answer_has_limits_of_its_own(in_world: InWorld, point: str, reason: str, streams: bool) -> None:
    async def body(world: World) -> None:
        await introduced(world)
        world.decode.dies, world.decode.freezes = (
            "in-body" if reason == "idle" and not streams else point,
            True,
        )
        if streams:
            assert await streamed(world, LONG) == answer_text(LONG, 9)
        else:
            _, answer = await world.complete(LONG)
            assert answer["choices"][0]["text"] == answer_text(LONG)
        assert await world.metric(f'prfaas_gateway_decode_failures_total{{reason="{reason}"}}') == 1
        # It lives, so it keeps its cache.
        assert world.plane.suspected == [("decode", False)]

    in_world(body, spare=True, gateway_config=replace(GATEWAY, first_byte_s=0.3, idle_s=0.3))


@pytest.mark.slow("waits for time limits of connections")
def test_no_descriptor_is_the_gateways_own_trouble(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def body(world: World) -> None:
        await world.complete(LONG)
        await asyncio.sleep(2.1)
        with monkeypatch.context() as patched:
            patched.setattr(HttpPool, "_connect", no_room)
            for prompt in (LONG, SHORT):
                response, answer = await world.post("/v1/completions", {"prompt": prompt})
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert "descriptor" in answer["error"]["message"]
        assert world.plane.suspected == []
        await world.complete(LONG)

    in_world(body, spare=True)


@pytest.mark.slow("waits for time limits of connections")
def test_a_connection_that_is_not_made_in_time_accuses_nobody(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(*_: Any) -> None:
        raise TimeoutError

    async def body(world: World) -> None:
        # No connection may be left of what the gateway asks when it starts.
        await world.complete(LONG)
        await asyncio.sleep(2.1)
        with monkeypatch.context() as patched:
            patched.setattr(HttpPool, "_connect", late)
            response, _ = await world.post("/v1/completions", {"prompt": LONG})
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert world.plane.suspected == []

    in_world(body)


SILENCE = ControlConfig(silence_s=1.0)


@pytest.mark.parametrize("streams", [False, True])
def test_the_live_plane_finds_a_frozen_engine(in_world: InWorld, streams: bool) -> None:
    async def body(world: World) -> None:
        assert world.live is not None
        await introduced(world)
        for engine in world.engines:
            engine.dies_after = 3
        world.decode.dies, world.decode.freezes = "mid-stream" if streams else "before-headers", True
        while not world.decode.frozen:
            request = asyncio.create_task(streamed(world, LONG))
            await until(lambda: world.decode.frozen or request.done())  # noqa: B023
        began_s = time.monotonic()
        assert await request == answer_text(LONG, 9)
        assert time.monotonic() - began_s < 20
        health = world.live.health
        assert str(health.reason("decode")).startswith("frozen: its HTTP server")
        # Nobody else is out, and the frozen one has not lost its cache.
        assert [name for name in ("remote", "local", "spare") if health.is_suspect(name)] == []
        drops = 'prfaas_control_index_drops_total{instance="decode",reason="died"}'
        assert await world.metric(drops) == 0
        world.decode.frozen, world.decode.dies = False, None
        await until(lambda: not health.is_suspect("decode"))
        await world.complete(LONG)

    in_world(body, spare=True, live=True, control=SILENCE)


@pytest.mark.slow("waits for time limits of connections")
def test_a_loop_that_stands_still_freezes_nobody(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.live is not None
        for _ in range(4):
            await world.complete(LONG)
            time.sleep(1.5)
            await asyncio.sleep(0.05)
        assert world.live.loop_clock.lag_s > 1
        assert [name for name in ("remote", "local", "decode") if world.live.health.is_suspect(name)] == []
        assert await world.metric("prfaas_control_suspicions_total") == 0

    in_world(body, live=True, control=SILENCE)
