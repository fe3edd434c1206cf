"""Decode requests that are sent before their KV is complete: the answer is right whatever becomes of the KV."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from prfaas.core.deployment import FirstTokenSource
from prfaas.serving.gateway.ways.kv_transfer import KvTransfers, TransferFailedError
from prfaas.serving.gateway.ways.remote_prefill import RemotePrefill
from prfaas.serving.transport.io.observer import OnSoon
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, part_id
from prfaas.serving.transport.protocol.wire import TransferPhase, TransferStatus

from ..stand_in import CACHED_TOKENS, answer_text
from ..world import GATEWAY, World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen within twenty seconds")


def test_the_decode_request_comes_while_the_last_bytes_are_on_their_way(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers = "ends"
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: world.decode.early == 1)
        assert not request.done() and world.busy == 2
        params = world.decode.generated()[-1].body["kv_transfer_params"]
        assert params["remote_prefill_cached_tokens"] == CACHED_TOKENS
        world.remote.goes_on.set()
        route, answer = await request
        assert (route["route"], route["prefill"], route["reason"]) == ("offload", "remote", "long")
        assert "fallback" not in route
        # What is known at the end only is told all the same: the client's headers wait for it.
        assert int(route["bytes"]) == 4 * (len(LONG) - 1)
        assert {"transfer_s", "prefill_s"} <= route.keys()
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (world.decode.loaded, world.decode.lost) == ([len(LONG) - 1], 0)

    in_world(body)


@pytest.mark.parametrize(("how", "reason"), [("aborts", "transfer-failed"), ("fails", "http-500")])
def test_what_fails_after_the_decode_request_is_prefilled_there(
    in_world: InWorld, how: str, reason: str
) -> None:
    async def body(world: World) -> None:
        world.remote.lingers = how
        response = asyncio.create_task(world.post("/v1/completions", {"model": "stand-in", "prompt": LONG}))
        await until(lambda: world.decode.early == 1)
        world.remote.goes_on.set()
        answered, answer = await response
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (world.decode.loaded, world.decode.lost) == ([], 1)
        route = answered.headers["x-prfaas-route"]
        assert f"local; prefill=decode; decode=decode; uncached={len(LONG)}; cached=0; bytes=0" in route
        assert f"fallback={reason}; reason=fallback" in route
        assert await world.metric(f'prfaas_gateway_fallbacks_total{{reason="{reason}"}}') == 1
        async with world.admin.get(f"/prfaas/requests/{answered.headers['X-Request-Id']}") as page:
            attempts = (await page.json())["attempts"]
        assert [attempt["outcome"] for attempt in attempts] == [reason, "done"]

    in_world(body)


def test_a_decode_request_may_come_after_its_transfer_has_failed(in_world: InWorld) -> None:
    """The gateway can't know that when it sends the request."""

    async def body(world: World) -> None:
        world.remote.lingers, world.decode.frozen = "aborts", True
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: world.plane.open["decode"] == 1)
        world.remote.goes_on.set()
        while await world.metric("prfaas_gateway_background_tasks") != 0 or world.plane.open["remote"]:
            await asyncio.sleep(0.01)
        world.decode.frozen = False
        route, answer = await request
        assert (route["route"], route["decode"], route["fallback"]) == ("local", "decode", "transfer-failed")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (world.decode.early, world.decode.lost, world.decode.loaded) == (0, 1, [])

    in_world(body)


def test_a_frozen_producer_costs_no_more_than_the_prefill(in_world: InWorld) -> None:
    """The decode engine need not wait for a deadline: it is told that its KV will not come."""

    async def body(world: World) -> None:
        world.remote.lingers = "ends"
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: world.decode.early == 1)
        world.plane.freeze("remote")
        route, answer = await request
        assert (route["route"], route["fallback"]) == ("local", "frozen")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.decode.lost == 1
        await until(lambda: world.remote.cancelled == 1)

    in_world(body)


def test_a_client_that_leaves_ends_the_prefill_too(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers = "ends"
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: world.decode.early == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: world.remote.cancelled == world.decode.cancelled == 1)
        await world.settled()
        assert world.plane.suspected == []  # what the gateway gives up itself is nobody's fault

    in_world(body)


@pytest.mark.parametrize("first_token", ["decode", "prefill"])
def test_a_client_that_leaves_in_the_moment_in_which_the_kv_is_there_leaves_none(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch, first_token: FirstTokenSource
) -> None:
    """The prefill elsewhere has ended well, and nobody has been told yet."""
    begin, prefill = RemotePrefill.begin, RemotePrefill._prefill
    handlers: list[asyncio.Task[Any] | None] = []

    async def begun(self: RemotePrefill) -> Any:
        handlers.append(asyncio.current_task())
        return await begin(self)

    async def prefilled(self: RemotePrefill, *args: Any) -> Any:
        prepared = await prefill(self, *args)
        # As aiohttp does it.
        (handler,) = handlers
        assert handler is not None
        handler.cancel()
        return prepared

    async def body(world: World) -> None:
        with pytest.raises(aiohttp.ClientError):
            await world.complete(LONG, temperature=0)
        await world.settled()
        assert world.decode.generated() == [] and world.plane.suspected == []

    monkeypatch.setattr(RemotePrefill, "begin", begun)
    monkeypatch.setattr(RemotePrefill, "_prefill", prefilled)
    in_world(body, gateway_config=replace(GATEWAY, first_token=first_token))


def test_another_decode_engine_gets_kv_of_its_own(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers = "ends"
        world.decode.dies = "before-headers"
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: world.decode.deaths > 0)
        await until(lambda: world.spare is not None and world.spare.early == 1)
        world.remote.goes_on.set()
        route, answer = await request
        assert route["decode"] == "spare"
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.spare is not None and world.spare.loaded == [len(LONG) - 1]

    in_world(body, spare=True)


@pytest.mark.parametrize("tells_cached", [True, False])
def test_without_a_lead_or_the_cached_tokens_it_waits_for_all_of_it(
    in_world: InWorld, tells_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tells_cached:
        monkeypatch.setattr("gateway.stand_in.CACHED_TOKENS", None)

    async def body(world: World) -> None:
        world.remote.lingers = "ends"
        request = asyncio.create_task(world.complete(LONG))
        await until(lambda: bool(world.remote.generated()))
        await asyncio.sleep(0.3)
        world.remote.goes_on.set()
        route, _ = await request
        assert route["route"] == "offload"
        assert (world.decode.early, world.decode.loaded) == (0, [len(LONG) - 1])

    in_world(body, decode_lead_s=0.0 if tells_cached else 1.0)


class Rank:
    """One rank's watcher, which tells what it is made to."""

    def __init__(self) -> None:
        self.over: asyncio.Future[TransferStatus] = asyncio.get_running_loop().create_future()
        self.lead_s = 0.0
        self.on_soon: OnSoon | None = None

    async def wait(
        self, transfer_id: bytes, timeout_s: float, lead_s: float = 0.0, on_soon: OnSoon | None = None
    ) -> TransferStatus:
        self.lead_s, self.on_soon = lead_s, on_soon
        return await self.over

    def soon(self, cached_tokens: int | None) -> None:
        assert self.on_soon is not None
        self.on_soon(replace(COMPLETE, soon=True, cached_tokens=cached_tokens))


def a_ticket() -> Ticket:
    return Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=10,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=60,
    )


COMPLETE = TransferStatus(TransferPhase.COMPLETE, "", 100, 100, 40, 10, 0)


@pytest.mark.parametrize(("cached", "told"), [(5, [5]), (None, [])])
def test_all_ranks_must_expect_their_bytes_soon(cached: int | None, told: list[int]) -> None:
    async def main() -> None:
        ranks: Any = (Rank(), Rank())
        seen: list[int] = []
        waiting = asyncio.create_task(KvTransfers({"home": ranks}).wait(a_ticket(), 1.0, 2.5, seen.append))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [rank.lead_s for rank in ranks] == [2.5, 2.5]
        ranks[0].soon(cached)
        assert seen == []
        ranks[1].soon(cached)
        assert seen == told
        ranks[0].over.set_result(COMPLETE)
        ranks[1].over.set_result(replace(COMPLETE, phase=TransferPhase.FAILED, reason="lost"))
        with pytest.raises(TransferFailedError, match="lost"):
            await waiting

    asyncio.run(main())


class Told:
    """A rank's KV port, which tells what became of the transfers that it knows by now."""

    def __init__(self) -> None:
        self.statuses: dict[bytes, TransferStatus] = {}
        self.asked: list[bytes] = []
        self.abandoned: list[bytes] = []

    async def wait(self, transfer_id: bytes, *_: object) -> TransferStatus:
        self.asked.append(transfer_id)
        while transfer_id not in self.statuses:
            await asyncio.sleep(0)
        return self.statuses[transfer_id]

    def announced(self, transfer_id: bytes) -> bool:
        return transfer_id in self.statuses

    async def abandon(self, transfer_id: bytes, reason: str, *, keep: bool = False) -> None:
        self.abandoned.append(transfer_id)


def members(**stages: int) -> Any:
    """Instances with so many pipeline stages."""
    return [SimpleNamespace(name=name, rank_grid=SimpleNamespace(stages=n)) for name, n in stages.items()]


def test_nothing_waits_any_more_at_who_has_left() -> None:
    closed = []

    class Port:
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)

    async def main() -> None:
        transfers = KvTransfers({})

        def ranks_of(each: Any) -> Any:
            return (Port(each.name),)

        transfers.follow(members(home=1, east=1), ranks_of)
        kept = transfers._watchers["home"]
        transfers.follow(members(home=1, west=1), ranks_of)
        assert transfers._watchers.keys() == {"home", "west"} and transfers._watchers["home"] is kept
        await asyncio.sleep(0)
        assert closed == ["east"]
        await transfers.close()
        assert sorted(closed) == ["east", "home", "west"]

    asyncio.run(main())


def test_each_stage_of_the_producer_sends_to_every_rank() -> None:
    async def main() -> None:
        ticket = a_ticket()
        home: Any = (Told(), Told())
        east: Any = (Told(), Told())
        transfers = KvTransfers({})
        transfers.follow(members(home=1, east=2), lambda each: {"home": home, "east": east}[each.name])
        ids = [ticket.transfer_id, part_id(ticket.transfer_id, 1)]
        for rank in home:
            rank.statuses |= dict.fromkeys(ids, COMPLETE)
        assert (await transfers.wait(ticket, 1.0)).total_bytes == 4 * COMPLETE.total_bytes
        assert [sorted(rank.asked) for rank in home] == [sorted(ids)] * 2

    asyncio.run(main())


def test_what_several_ranks_send_to_one_is_waited_for_and_given_up_as_a_whole() -> None:
    async def main() -> None:
        ticket = a_ticket()
        home: Any = Told()
        east: Any = (Told(), Told())
        transfers = KvTransfers({"home": (home,), "east": east})
        ids = [ticket.transfer_id, part_id(ticket.transfer_id, 1)]
        waiting = asyncio.create_task(transfers.wait(ticket, 1.0))
        home.statuses[ids[0]] = COMPLETE
        for _ in range(5):
            await asyncio.sleep(0)
        assert sorted(home.asked) == sorted(ids)
        assert not waiting.done()
        assert not transfers.announced(ticket)
        # NIXL's reader tells of one transfer a rank, whoever has sent.
        assert transfers.announced(ticket, pulled=True)
        home.statuses[ids[1]] = COMPLETE
        assert transfers.announced(ticket)
        assert (await waiting).total_bytes == 2 * COMPLETE.total_bytes
        transfers.abandon(ticket, "a test")
        await transfers.abandoning.finish()
        assert home.abandoned == ids
        # Of a part that has broken nothing is kept, so nothing can be gone on from.
        home.statuses[ids[1]] = replace(COMPLETE, phase=TransferPhase.FAILED, reason="lost")
        assert await transfers.keep(ticket, "a test") == 0
        assert home.abandoned == ids * 2
        # One that is complete has its checkpoints, until it is taken.
        whole = replace(COMPLETE, usable_tokens=64, usable_ends=(32, 64))
        broken = replace(whole, phase=TransferPhase.FAILED, usable_tokens=32, usable_ends=(32,))
        for told, tokens in (
            ((whole, broken), 32),
            ((replace(whole, taken=True), broken), 0),
            ((whole, whole), ticket.num_tokens),
        ):
            home.statuses = dict(zip(ids, told, strict=True))
            assert await transfers.keep(ticket, "a test") == tokens

    asyncio.run(main())
