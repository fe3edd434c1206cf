"""A prefix that another cluster holds moves to the prefill instance first; if that fails, everything is computed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from tests.ports import free_ports

from prfaas.core.deployment import GATEWAY, LedgerConfig
from prfaas.core.scheduling.decision import CacheTransfer, Decision, Route
from prfaas.serving.ledger_file import open_ledger
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.region_layout import AskedTransfers
from prfaas.serving.transport.protocol.requests import CopyOrder, CopyResult, PeerRequest
from prfaas.serving.transport.protocol.ticket import Ticket

from . import world as worlds
from .stand_in import answer_text
from .world import HASTY, World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5


def with_prefix(world: World, num_tokens: int, skip_tokens: int = 0) -> None:
    """Every prefill at the far instance starts from what the near one sends."""

    def edit(decision: Decision) -> Decision:
        if decision.route is not Route.OFFLOAD:
            return decision
        return structs.replace(
            decision,
            prefill_tokens=len(LONG) - num_tokens,
            cache_transfer=CacheTransfer("local", num_tokens, skip_tokens, 4 * (num_tokens - skip_tokens)),
        )

    world.plane.edit = edit


@pytest.mark.parametrize(("asked", "sent"), [(601, 601), (5000, len(LONG) - 2)])
def test_the_prefix_moves_first(in_world: InWorld, asked: int, sent: int) -> None:
    async def body(world: World) -> None:
        with_prefix(world, asked, skip_tokens=256)
        route, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.remote.prefixes == [sent - 256] and world.decode.loaded == [len(LONG) - 1]
        assert route["cache_transfer"] == f"local:{4 * (sent - 256)}"
        (source,), (prefill,) = world.local.generated(), world.remote.generated()
        assert source.body["prompt"] == LONG[:sent] and source.body["max_tokens"] == 1
        params = prefill.body["kv_transfer_params"]
        assert params["prfaas_from"] == source.body["kv_transfer_params"]["prfaas"] != params["prfaas"]
        assert list(params) == ["prfaas", "prfaas_from"]
        moves, own = world.local._ticket(params["prfaas_from"]), world.local._ticket(params["prfaas"])
        assert moves is not None and moves.attributes.service.background
        assert own is not None and not own.attributes.service.background
        assert await world.metric('prfaas_gateway_cache_transfers_total{outcome="done"}') == 1
        assert await world.metric("prfaas_gateway_cache_transferred_bytes_total") == 4 * (sent - 256)
        assert world.plane.measured == ["remote"]

    in_world(body)


def test_bytes_over_links_have_their_price(in_world: InWorld, tmp_path: Path) -> None:
    """The prefix goes from `local` to `remote` at twice the price of the way back."""
    there, back, file = 4 * 601, 4 * (len(LONG) - 1), tmp_path / "ledger.sqlite"

    async def body(world: World) -> None:
        with_prefix(world, 601, skip_tokens=0)
        await world.complete(LONG)
        name = 'prfaas_gateway_egress_cost_total{link="%s"}'
        assert await world.metric(name % "pd->far") == pytest.approx(there * 2e3)
        assert await world.metric(name % "far->pd") == pytest.approx(back * 1e3)

    config = replace(worlds.GATEWAY, ledger=LedgerConfig(file))
    in_world(body, egress_per_gb=1e12, gateway_config=config)
    # The request's row has the same bill.
    with contextlib.closing(open_ledger(file, read_only=True)) as ledger:
        (row,) = ledger.execute("SELECT egress_bytes, egress_cost, kv_bytes FROM requests")
    assert row == (there + back, pytest.approx(there * 2e3 + back * 1e3), back)


def test_free_bytes_have_no_series(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.complete(LONG)
        assert await world.metric("prfaas_gateway_egress_cost_total{") == 0

    in_world(body)


@pytest.mark.parametrize("fault", ["refuses", "http-500", "not-announced", "link-slow", "http-400", "short"])
def test_without_the_prefix_everything_is_computed(in_world: InWorld, fault: str) -> None:
    async def body(world: World) -> None:
        with_prefix(world, 601, skip_tokens=601 if fault == "short" else 0)
        if fault == "refuses":
            await world.local.stop_http()
        world.local.fails = {"http-500": 500, "http-400": 400}.get(fault)
        world.local.sends = fault != "not-announced"
        world.local.stalls = fault == "link-slow"
        route, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert route["route"] == "offload" and "cache_transfer" not in route and "fallback" not in route
        (prefill,) = world.remote.generated()
        assert list(prefill.body["kv_transfer_params"]) == ["prfaas"] and world.remote.prefixes == []
        outcome = {"refuses": "unreachable"}.get(fault, fault)
        assert await world.metric(f'prfaas_gateway_cache_transfers_total{{outcome="{outcome}"}}') == 1

    in_world(body, options=HASTY)


def test_a_prefix_that_nobody_takes_is_freed(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        with_prefix(world, 601)
        world.remote.dies = "before-headers"
        await world.remote.stop_http()
        route, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (route["prefill"], route["fallback"]) == ("local", "unreachable")
        assert await world.metric('prfaas_gateway_cache_transfers_total{outcome="done"}') == 1

    in_world(body)


@asynccontextmanager
async def pool_port(
    world: World, name: str, answers: list[CopyResult | None]
) -> AsyncIterator[list[PeerRequest]]:
    """The KV port of a pool that answers copies with what it is told to, None: never."""
    pool = world.plane._deployment.pool_named(name)
    asked: list[PeerRequest] = []

    def on_request(request: PeerRequest) -> None:
        asked.append(request)
        answer = answers.pop(0)
        if answer is not None:
            request.answer(answer)

    receiver = Receiver(
        name=name,
        key=load_key(world.plane._deployment.security.key_file),
        host=pool.host,
        port=pool.kv_port,
        arena=StagingArena(1 << 16, 1 << 16),
        layout=AskedTransfers(),
        fingerprint={},
        on_request=on_request,
    )
    receiver.start()
    try:
        yield asked
    finally:
        await asyncio.to_thread(receiver.close)


def with_pool_prefix(world: World, prefill: str, source: str, num_tokens: int) -> None:
    """Every prefill is at `prefill`, whose machine's pool gets the beginning from the pool `source` first."""

    def edit(decision: Decision) -> Decision:
        return structs.replace(
            decision,
            prefill=prefill,
            prefill_tokens=len(LONG) - num_tokens,
            cache_transfer=CacheTransfer(source, num_tokens, 0, 4 * num_tokens, from_pool=True),
        )

    world.plane.edit = edit


@pytest.mark.parametrize("prefill", ["remote", "decode"])
def test_a_prefix_goes_from_pool_to_pool_and_needs_no_ticket(in_world: InWorld, prefill: str) -> None:
    source, target = ("pd-pool", "far-pool") if prefill == "remote" else ("far-pool", "pd-pool")

    async def body(world: World) -> None:
        with_pool_prefix(world, prefill, source, 600)
        async with pool_port(world, target, [CopyResult(2400, 600, "")]) as asked:
            route, answer = await world.complete(LONG)
            assert answer["choices"][0]["text"] == answer_text(LONG)
            assert route["cache_transfer"] == f"{source}:2400"
            (request,) = asked
            order = request.order
            assert isinstance(order, CopyOrder) and list(order.token_ids) == LONG[:600]
            ticket = Ticket.unseal(
                order.ticket, load_key(world.plane._deployment.security.key_file), time.time()
            )
            assert (ticket.producer, ticket.consumer, ticket.num_tokens) == (source, target, 600)
            assert ticket.attributes.service.background and request.peer == GATEWAY
            assert world.local.generated() == [] and world.remote.prefixes == []
            if prefill == "remote":
                (body,) = world.remote.generated()
                assert list(body.body["kv_transfer_params"]) == ["prfaas"]
            assert await world.metric('prfaas_gateway_cache_transfers_total{outcome="done"}') == 1
            assert await world.metric("prfaas_gateway_cache_transferred_bytes_total") == 2400

    in_world(body, pool_ports=tuple(free_ports(2)))


@pytest.mark.parametrize("fault", ["gone", "unheard-of", "nobody there"])
def test_a_copy_that_fails_is_computed(in_world: InWorld, fault: str) -> None:
    async def body(world: World) -> None:
        with_pool_prefix(world, "remote", "pd-pool", 600)
        if fault == "nobody there":
            route, answer = await world.complete(LONG)
        else:
            async with pool_port(world, "far-pool", [CopyResult(0, 0, f"{fault}: some more words")]):
                route, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (route["route"], route["prefill"]) == ("offload", "remote") and "fallback" not in route
        outcome = {"unheard-of": "failed", "nobody there": "target"}.get(fault, fault)
        assert await world.metric(f'prfaas_gateway_cache_transfers_total{{outcome="{outcome}"}}') == 1

    in_world(body, pool_ports=tuple(free_ports(2)))


def test_a_copy_that_nobody_waits_for_is_given_up(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        with_pool_prefix(world, "remote", "pd-pool", 600)
        async with pool_port(world, "far-pool", [None]) as asked:
            asking = asyncio.create_task(world.complete(LONG))
            while not asked:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            observer = Observer(
                GATEWAY,
                load_key(world.plane._deployment.security.key_file),
                "127.0.0.1",
                world.plane._deployment.pool_named("far-pool").kv_port,
                "far-pool",
            )
            try:
                # A pool sees that on the copy's own id.
                status = await observer.wait(asked[0].transfer_id, 30.0)
                assert status.reason == "nobody waits for the copy any more"
            finally:
                await observer.close()

    in_world(body, pool_ports=tuple(free_ports(2)))
