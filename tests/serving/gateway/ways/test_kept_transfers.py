"""A prefill elsewhere fails in the middle: the decode engine goes on from what has come, where it can."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from prfaas.serving.gateway.ways.kv_transfer import KvTransfers
from prfaas.serving.transport.protocol.ticket import Ticket

from ..stand_in import answer_text
from ..world import GATEWAY, World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
# Three quarters of what moves, which is the prompt without its last token.
CAME = 3 * (4 * (len(LONG) - 1)) // 4 // 4


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def _came(world: World) -> bool:
    """Whether the three quarters that leave at once have come."""
    table = world.decode.receiver.transfers.table
    return any(transfer.received_bytes >= 4 * CAME for transfer in table._transfers.values())


@pytest.mark.parametrize(
    ("how", "fallback"), [("fails", "http-500"), ("aborts", "transfer-failed"), ("preempted", "preempted")]
)
@pytest.mark.parametrize("lead_s", [0.0, 1.0])
def test_what_has_come_is_not_computed_again(
    in_world: InWorld, how: str, fallback: str, lead_s: float
) -> None:
    async def body(world: World) -> None:
        world.remote.lingers, world.plane.left_s = "ends" if how == "preempted" else how, 60.0
        request = asyncio.create_task(world.complete(LONG))
        await _until(lambda: _came(world))
        if how == "preempted":
            world.plane.give_notice("remote", 1.0)
        else:
            world.remote.goes_on.set()
        route, answer = await request
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (route["prefill"], route["fallback"]) == ("decode", fallback)
        assert world.decode.loaded == [CAME] and world.decode.lost == 0
        assert not world.local.generated()
        assert await world.metric("prfaas_gateway_kept_tokens_total") == CAME
        if not lead_s:
            assert world.plane.own_prefills == [len(LONG) - CAME]
        world.remote.goes_on.set()
        await world.settled()

    in_world(body, decode_lead_s=lead_s, keeps=True)


@pytest.mark.parametrize("every_tokens", [0, 512])
def test_the_ticket_tells_how_far_checkpoints_are_apart(in_world: InWorld, every_tokens: int) -> None:
    """Where something is kept of a transfer that breaks, the prefill samples no first token."""

    async def body(world: World) -> None:
        world.plane.waits.every_tokens = every_tokens
        asked = {"model": "stand-in", "prompt": LONG, "max_tokens": 9, "temperature": 0, "stream": True}
        async with world.client.post("/v1/completions", json=asked) as response:
            await response.read()
        (body,) = world.remote.generated()
        assert ("logprobs" in body.body) is (every_tokens == 0)
        sealed = body.body["kv_transfer_params"]["prfaas"]
        told = Ticket.unseal(sealed, world.decode.key, time.time()).attributes.checkpoint_tokens
        assert told == every_tokens

    in_world(body, gateway_config=replace(GATEWAY, first_token="prefill"))


def test_what_an_engine_took_before_the_gateway_asked_is_counted(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        keep = KvTransfers.keep

        async def keep_late(transfers: KvTransfers, ticket: Ticket, reason: str) -> int:
            await _until(lambda: bool(world.decode.loaded))
            return await keep(transfers, ticket, reason)

        monkeypatch.setattr(KvTransfers, "keep", keep_late)
        world.remote.lingers = "aborts"
        request = asyncio.create_task(world.complete(LONG))
        await _until(lambda: _came(world))
        # The decode engine waits for the rest before it breaks.
        await _until(lambda: world.decode.early > 0)
        world.remote.goes_on.set()
        route, answer = await request
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (route["prefill"], route["fallback"]) == ("decode", "transfer-failed")
        assert world.decode.loaded == [CAME] and world.decode.lost == 0
        assert await world.metric("prfaas_gateway_kept_tokens_total") == CAME
        await world.settled()

    in_world(body, decode_lead_s=1.0, keeps=True)


def test_a_decode_engine_that_cannot_go_on_has_it_prefilled(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers = "aborts"
        request = asyncio.create_task(world.complete(LONG))
        await _until(lambda: _came(world))
        world.remote.goes_on.set()
        route, answer = await request
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (route["prefill"], route["fallback"]) == ("local", "transfer-failed")
        assert await world.metric("prfaas_gateway_kept_tokens_total") == 0
        await world.settled()

    in_world(body, decode_lead_s=0.0)


def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers = "aborts"
        request = asyncio.create_task(world.complete(LONG))
        await _until(lambda: _came(world))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        world.remote.goes_on.set()
        await world.settled()
        assert world.decode.loaded == []

    in_world(body, decode_lead_s=0.0, keeps=True)
