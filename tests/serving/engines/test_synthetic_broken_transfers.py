"""A stand-in that prefills dies; the decode engine goes on from what has come."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serving.engines.synthetic_world import World, random_ids, running, write_deployment

from prfaas.serving.engines.synthetic.endpoints import PrefillSend
from prfaas.serving.transport.protocol.ticket import Ticket, TransferAttributes
from prfaas.serving.transport.protocol.wire import TransferPhase

TOKENS, CHUNK, BLOCK = 8192 + 300, 1024, 128
# Slow enough that each layer of a chunk leaves by itself.
FAR_SPEEDUP = 2.0


@pytest.fixture
def stalled_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[World, float], None]:
    """Let far-0 stall once it has produced this share: on a busy machine its end may come before the kill."""

    def stall_at(world: World, share: float) -> None:
        layers_done = PrefillSend.layers_done

        def until_then(sending: PrefillSend, layers: range, end_tokens: int) -> None:
            layers_done(sending, layers, end_tokens)
            if sending.transfer.put_bytes >= share * sending.transfer.total_bytes:
                world.nodes["far-0"].engine.stall(600)

        monkeypatch.setattr(PrefillSend, "layers_done", until_then)

    return stall_at


async def _killed_at(world: World, ticket: Ticket, ids: list[int], share: float) -> int:
    """Kill the producer once so much has come, and have kept what is of use; how many tokens that is."""
    sealed = ticket.seal(world.key)
    asked = asyncio.create_task(world.complete("far-0", ids, sealed, max_tokens=1))
    receiver = world.nodes["home-0"].engine.endpoints.receiver
    while (status := receiver.transfers.state(ticket.transfer_id)) is None or (
        status.received_bytes < share * status.total_bytes
    ):
        await asyncio.sleep(0.005)
    world.nodes["far-0"]._kill()
    await asyncio.gather(asked, return_exceptions=True)
    observer = world._observer(ticket)
    await observer.abandon(ticket.transfer_id, "its prefill engine is dead", keep=True)
    status = await world.arrival(ticket)
    assert status.phase is TransferPhase.FAILED
    came_tokens = TOKENS * status.received_bytes // status.total_bytes
    if not ticket.attributes.checkpoint_tokens:
        assert came_tokens - CHUNK - BLOCK <= status.usable_tokens <= came_tokens + BLOCK
    return status.usable_tokens


async def _went_on_after(world: World, usable_tokens: int) -> None:
    """home-0 has computed what was not kept, nothing of which was damaged."""
    counts = world.nodes["home-0"].engine.counts
    assert counts.prefilled_tokens == TOKENS + 1 - usable_tokens
    assert counts.damaged_loads == 0
    assert await world.metric("home-0", "prfaas_loads_resumed_total") == 1
    await world.settled()


@pytest.mark.slow("a prefill that is cut off takes its time")
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("page_digests", [True, False])
def test_what_is_lost_is_a_chunk_and_what_had_not_arrived(
    tmp_path: Path, stalled_at: Callable[[World, float], None], share: float, page_digests: bool
) -> None:
    deployment = write_deployment(
        tmp_path, model="qwen3", far_speedup=FAR_SPEEDUP, page_digests=page_digests, staging="64 MiB"
    )

    async def check() -> None:
        ids = random_ids(TOKENS + 1, 5)
        async with running(deployment, "far-0", "home-0", "other-0") as world:
            local = (await world.complete("other-0", ids)).ids
            ticket = world.ticket("far-0", "home-0", ids[:-1])
            stalled_at(world, share)
            usable_tokens = await _killed_at(world, ticket, ids[:-1], share)
            assert usable_tokens > (share - 0.01) * TOKENS - CHUNK - BLOCK
            answer = await world.complete("home-0", ids, ticket.seal(world.key))
            assert answer.ids == local
            await _went_on_after(world, usable_tokens)

    asyncio.run(check())


@pytest.mark.slow("a prefill that is cut off takes its time")
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize(
    ("model", "page_digests"), [("qwen3-next", True), ("gpt-oss", True), ("qwen3-next", False)]
)
def test_with_states_and_windows_it_goes_on_from_a_checkpoint(
    tmp_path: Path,
    stalled_at: Callable[[World, float], None],
    model: str,
    page_digests: bool,
    share: float,
) -> None:
    """One at each chunk's end: what is lost is a chunk, and what had not arrived."""
    deployment = write_deployment(
        tmp_path, model=model, far_speedup=FAR_SPEEDUP, page_digests=page_digests, staging="64 MiB"
    )

    async def check() -> None:
        ids = random_ids(TOKENS + 1, 5)
        async with running(deployment, "far-0", "home-0", "other-0") as world:
            local = (await world.complete("other-0", ids)).ids
            ticket = replace(
                world.ticket("far-0", "home-0", ids[:-1]), attributes=TransferAttributes(checkpoint_tokens=1)
            )
            stalled_at(world, share)
            usable_tokens = await _killed_at(world, ticket, ids[:-1], share)
            assert usable_tokens % CHUNK == 0 or usable_tokens > TOKENS - CHUNK
            # The checkpoint of the last whole chunk may not have arrived.
            assert share * TOKENS - 2 * CHUNK < usable_tokens < TOKENS
            answer = await world.complete("home-0", ids, ticket.seal(world.key))
            assert answer.ids == local
            await _went_on_after(world, usable_tokens)

    asyncio.run(check())


@pytest.mark.slow("a prefill that is cut off takes its time")
def test_with_states_and_no_checkpoint_the_prompt_is_computed_from_its_beginning(
    tmp_path: Path, stalled_at: Callable[[World, float], None]
) -> None:
    deployment = write_deployment(tmp_path, far_speedup=FAR_SPEEDUP, staging="64 MiB")

    async def check() -> None:
        ids = random_ids(TOKENS + 1, 5)
        async with running(deployment, "far-0", "home-0") as world:
            ticket = world.ticket("far-0", "home-0", ids[:-1])
            stalled_at(world, 0.5)
            asked = asyncio.create_task(
                world.complete("far-0", ids[:-1], ticket.seal(world.key), max_tokens=1)
            )
            receiver = world.nodes["home-0"].engine.endpoints.receiver
            while (
                status := receiver.transfers.state(ticket.transfer_id)
            ) is None or not status.received_bytes:
                await asyncio.sleep(0.005)
            world.nodes["far-0"]._kill()
            await asyncio.gather(asked, return_exceptions=True)
            await world._observer(ticket).abandon(ticket.transfer_id, "dead", keep=True)
            assert (await world.arrival(ticket)).usable_tokens == 0
            assert (await world.complete("home-0", ids, ticket.seal(world.key))).status == 200
            assert world.nodes["home-0"].engine.counts.prefilled_tokens == TOKENS + 1
            await world.settled()

    asyncio.run(check())
