"""KV that the decode engine reads by NIXL: the same answers, whatever becomes of the read."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from prfaas.core.deployment import GatewayConfig

from ..stand_in import answer_text
from ..world import HASTY, World, route_of

InWorld = Callable[..., None]
SHORT = list(range(50, 140))
LONG = list(range(50, 250)) * 5
NIXL: dict[str, Any] = {"local_transfer": "nixl"}


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen within twenty seconds")


def test_inside_of_the_cluster_the_decode_engine_reads_it(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        response, answer = await world.post("/v1/completions", {"model": "stand-in", "prompt": SHORT})
        route = response.headers["x-prfaas-route"]
        assert (
            f"local; prefill=local; decode=decode; uncached={len(SHORT)}; cached=0; bytes={4 * len(SHORT)}"
            in route
        )
        assert "hidden=0.0000" in route and "transfer=nixl" in route and "fallback" not in route
        assert answer["choices"][0]["text"] == answer_text(SHORT)
        assert (world.decode.read, world.decode.loaded) == ([len(SHORT)], [])
        # What the producer told reaches no client, and neither engine was told an address by the gateway.
        assert answer["kv_transfer_params"] is None
        for engine in (world.local, world.decode):
            (seen,) = engine.generated()
            assert set(seen.body["kv_transfer_params"]) <= {"prfaas", "prompt_token_ids"}
            assert seen.body["kv_transfer_params"]["prfaas"].startswith("nixl.")
            assert "127.0.0.1" not in json.dumps(seen.body)
        assert await world.metric('prfaas_gateway_transfers_total{by="nixl",route="local"}') == 1
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            told = await page.json()
        assert told["transfer"]["by"] == "nixl" and told["transfer"]["bytes"] == 4 * len(SHORT)
        await world.settled()

    in_world(body, **NIXL)


@pytest.mark.parametrize("decode_lead_s", [0.0, 1.0])
def test_streams_are_read_too(in_world: InWorld, decode_lead_s: float) -> None:
    """Also where decode requests are to wait for the last byte: a read begins with the decode request."""

    async def body(world: World) -> None:
        asked = {"model": "stand-in", "prompt": SHORT, "stream": True, "max_tokens": 4}
        async with world.client.post("/v1/completions", json=asked) as response:
            assert "transfer=nixl" in response.headers["x-prfaas-route"]
            lines = [line async for line in response.content if line.startswith(b"data: {")]
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
        assert text == answer_text(SHORT, 4) and world.decode.read == [len(SHORT)]

    in_world(body, decode_lead_s=decode_lead_s, **NIXL)


def test_between_clusters_our_own_transport_moves_it(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        route, answer = await world.complete(LONG)
        assert route["route"] == "offload" and "transfer" not in route
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (world.decode.read, world.decode.loaded) == ([], [len(LONG) - 1])
        assert await world.metric('prfaas_gateway_transfers_total{by="prfaas",route="offload"}') == 1

    in_world(body, **NIXL)


def test_several_answers_of_one_prompt_go_our_own_way(in_world: InWorld) -> None:
    """NIXL's producer frees its blocks after one reader."""

    async def body(world: World) -> None:
        route, _ = await world.complete(SHORT, n=2, temperature=1.0)
        assert "transfer" not in route
        assert (world.decode.read, world.decode.loaded) == ([], [len(SHORT) - 1])

    in_world(body, **NIXL)


def test_a_prefill_that_is_read_from_samples_no_first_token(in_world: InWorld) -> None:
    """A NIXL producer drops the last token of hybrid models, so it has none to sample from."""

    async def body(world: World) -> None:
        asked = {"model": "stand-in", "prompt": SHORT, "max_tokens": 9, "temperature": 0, "stream": True}
        async with world.client.post("/v1/completions", json=asked) as response:
            assert "first_token" not in route_of(response) and await response.read()
        assert world.decode.read

    gateway = GatewayConfig("127.0.0.1", 0, route_header="full", first_token="prefill")
    in_world(body, gateway_config=gateway, **NIXL)


def test_a_read_that_fails_is_a_prefill_there(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        route, answer = await world.complete(SHORT)
        assert (route["route"], route["prefill"], route["fallback"]) == ("local", "decode", "transfer-failed")
        assert answer["choices"][0]["text"] == answer_text(SHORT)
        # It said so itself, and went on with the same request.
        assert (world.decode.lost, len(world.decode.generated())) == (1, 1)
        assert await world.metric('prfaas_gateway_fallbacks_total{reason="transfer-failed"}') == 1
        await world.settled()

    in_world(body, reads="fails", **NIXL)


@pytest.mark.parametrize("stream", [False, True])
def test_a_read_that_hangs_is_given_up_and_asked_again(in_world: InWorld, stream: bool) -> None:
    async def body(world: World) -> None:
        asked = {"model": "stand-in", "prompt": SHORT, "stream": stream, "max_tokens": 4}
        async with world.client.post("/v1/completions", json=asked) as response:
            route = response.headers["x-prfaas-route"]
            text = await response.text()
        assert response.status == 200 and "fallback=transfer-deadline" in route and "transfer=" not in route
        if not stream:
            assert json.loads(text)["choices"][0]["text"] == answer_text(SHORT, 4)
        first, again = world.decode.generated()
        assert "prfaas" in first.body["kv_transfer_params"]
        assert "prfaas" not in (again.body.get("kv_transfer_params") or {})
        await until(lambda: world.decode.cancelled == 1)
        await world.settled()

    in_world(body, reads="hangs", **NIXL)


def test_a_frozen_producer_ends_the_read_at_once(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        request = asyncio.create_task(world.complete(SHORT))
        await until(lambda: len(world.decode.generated()) == 1)
        world.plane.freeze("local")
        route, answer = await request
        assert route["fallback"] == "frozen"
        assert answer["choices"][0]["text"] == answer_text(SHORT)
        assert len(world.decode.generated()) == 2
        await world.settled()

    in_world(body, reads="hangs", **NIXL)


@pytest.mark.slow("waits for time limits of connections")
def test_a_full_decode_engine_may_begin_late(in_world: InWorld) -> None:
    """The deadline is that of the read: no request is given up since it waits for its turn."""

    async def body(world: World) -> None:
        request = asyncio.create_task(world.complete(SHORT))
        await until(lambda: len(world.decode.generated()) == 1)
        await asyncio.sleep(2.0)  # the deadline is one second here
        world.decode.goes_on.set()
        route, answer = await request
        assert route["transfer"] == "nixl" and "fallback" not in route
        assert answer["choices"][0]["text"] == answer_text(SHORT)

    in_world(body, queues=True, **NIXL)


def test_a_producer_that_hands_nothing_over_is_not_waited_for(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.local.hands_over = False
        route, answer = await world.complete(SHORT)
        assert (route["prefill"], route["fallback"]) == ("decode", "not-announced")
        assert answer["choices"][0]["text"] == answer_text(SHORT)
        await world.settled()

    in_world(body, options=HASTY, **NIXL)


def test_a_prefill_that_fails_is_a_prefill_at_the_decode_engine(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.local.fails = 500
        route, answer = await world.complete(SHORT)
        assert (route["prefill"], route["fallback"]) == ("decode", "http-500")
        assert answer["choices"][0]["text"] == answer_text(SHORT)
        await world.settled()

    in_world(body, **NIXL)


def test_a_client_that_leaves_ends_the_read(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        request = asyncio.create_task(world.complete(SHORT))
        await until(lambda: len(world.decode.generated()) == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: world.decode.cancelled == 1)
        assert len(world.decode.generated()) == 1
        await world.settled()

    in_world(body, reads="hangs", **NIXL)


def test_what_clients_say_of_nixl_reaches_no_engine(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        steering = {"do_remote_prefill": True, "remote_host": "169.254.0.1", "remote_port": 80}
        _, answer = await world.complete(SHORT, kv_transfer_params=steering)
        assert answer["choices"][0]["text"] == answer_text(SHORT)
        for engine in world.engines:
            for seen in engine.generated():
                assert "169.254.0.1" not in json.dumps(seen.body)

    in_world(body, **NIXL)
