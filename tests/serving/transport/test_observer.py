"""Watching from asyncio: before, during, after; told at once; told when the receiver is gone."""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop

from prfaas.serving.own_process import LoopClock
from prfaas.serving.transport.io import observer as observer_module
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol import handshake
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.handshake import HandshakeError, frames_of
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.requests import CopyOrder, FollowOrder
from prfaas.serving.transport.protocol.wire import (
    MAX_DATA_BYTES,
    FrameType,
    TransferPhase,
    TransferStatus,
    pack_header,
)

from .harness import (
    KEY,
    PATIENCE_S,
    World,
    await_over,
    await_true,
    make_receiver,
    make_ticket,
    server_handshake,
)
from .proxy import FaultyProxy

MakeWorld = Callable[..., World]


def observer_of(
    world: World, *, key: bytes = KEY, port: int = 0, clock: Callable[[], float] = time.monotonic
) -> Observer:
    return Observer("gateway", key, "127.0.0.1", port or world.receiver.port, "c/0", clock=clock)


def test_waits_before_during_and_after(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        ticket = make_ticket(1000)
        early = [asyncio.create_task(observer.wait(ticket.transfer_id, 10)) for _ in range(3)]
        await asyncio.sleep(0.05)
        transfer = world.sender.open(ticket, ticket.seal(KEY), [1000, 2000, 3000])
        during = asyncio.create_task(observer.wait(ticket.transfer_id, 10))
        for region in range(3):
            transfer.put(region, 0, BytesSource(bytes(1000 * (region + 1))))
        transfer.end()
        statuses = await asyncio.gather(*early, during)
        statuses.append(await observer.wait(ticket.transfer_id, 10))
        assert {status.phase for status in statuses} == {TransferPhase.COMPLETE}
        assert statuses[0].received_bytes == 6000
        assert (await observer.stats())["completed"] == 1
        world.take(ticket)
        assert (await observer.wait(ticket.transfer_id, 10)).taken
        await observer.close()
        await observer.close()

    asyncio.run(main())
    world.await_clean()
    assert world.receiver.stats()["watched"] == 0


def test_told_of_every_completion(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        await observer.connect()
        for _ in range(15):
            ticket, transfer, content = world.open(20_000)
            waiting = asyncio.create_task(observer.wait(ticket.transfer_id, 10))
            await asyncio.sleep(0.005)
            for region, data in enumerate(content):
                transfer.put(region, 0, BytesSource(data))
            transfer.end()
            assert (await waiting).phase is TransferPhase.COMPLETE
            world.take(ticket)
        await observer.close()

    asyncio.run(main())


def test_failure_is_told_and_abandon_drops(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        ticket, transfer, _ = world.open(1000)
        waiting = asyncio.create_task(observer.wait(ticket.transfer_id, 10))
        # Abandoned before its OPEN comes, it would be refused instead.
        await asyncio.to_thread(
            await_true, lambda: transfer.phase is SendPhase.SENDING, 5.0, lambda: str(transfer.phase)
        )
        for _ in range(2):
            await observer.abandon(ticket.transfer_id, "client left")
        status = await waiting
        assert (status.phase, status.reason) == (TransferPhase.FAILED, "client left")
        await asyncio.to_thread(await_over, transfer)
        assert transfer.reason == "c/0 aborted: client left"
        never = make_ticket(1000)
        await observer.abandon(never.transfer_id, "changed my mind")
        assert (await observer.wait(never.transfer_id, 10)).reason == "changed my mind"
        await observer.close()

    asyncio.run(main())
    world.await_clean()


def test_a_refused_transfer_is_told(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        ticket = make_ticket(1 << 26)
        waiting = asyncio.create_task(observer.wait(ticket.transfer_id, 10))
        await asyncio.sleep(0.05)
        assert not observer.announced(ticket.transfer_id)
        sizes = [1 << 26, 2 << 26, 3 << 26]
        transfer = world.sender.open(ticket, ticket.seal(KEY), sizes)
        status = await waiting
        assert (status.phase, "can never fit" in status.reason) == (TransferPhase.FAILED, True)
        await asyncio.to_thread(transfer.await_quiescent, 5)
        await observer.close()

    asyncio.run(main())
    world.await_clean()


def test_timeout(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            await observer.wait(bytes(16), 0.1)
        assert time.monotonic() - began_s < 20.0
        await observer.close()
        with pytest.raises(ConnectionError, match="closed"):
            await observer.wait(bytes(16), 0.1)

    asyncio.run(main())


def test_connection_lost_and_found_again(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        ticket, transfer, content = world.open(1000)
        waiting = asyncio.create_task(observer.wait(ticket.transfer_id, 10))
        await asyncio.sleep(0.05)
        for connection in list(world.receiver._connections):
            connection.shut()
        await asyncio.sleep(0.05)
        for region, data in enumerate(content):
            transfer.put(region, 0, BytesSource(data))
        transfer.end()
        assert (await waiting).phase is TransferPhase.COMPLETE
        world.take(ticket)
        await observer.close()

    asyncio.run(main())
    world.await_clean()


def test_receiver_gone_or_restarted(make_world: MakeWorld) -> None:
    world = make_world()

    async def main() -> None:
        observer = observer_of(world)
        port = world.receiver.port
        # Or it would know no other receiver than the next one.
        await observer.connect()
        waiting = asyncio.create_task(observer.wait(bytes(16), 30))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(world.receiver.close)
        world.receiver = make_receiver(world.arena, layout=world.layout, port=port)
        with pytest.raises(ConnectionError, match="restarted"):
            await waiting
        waiting = asyncio.create_task(observer.wait(bytes(16), 30))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(world.receiver.close)
        began_s = time.monotonic()
        with pytest.raises(ConnectionError, match="c/0"):
            await waiting
        assert time.monotonic() - began_s < 20.0
        with pytest.raises(ConnectionError, match=r"c/0 at 127\.0\.0\.1"):
            await observer.wait(bytes(16), 30)
        world.receiver = make_receiver(world.arena, layout=world.layout, port=port)
        assert (await observer.stats())["completed"] == 0
        await observer.close()

    asyncio.run(main())


def test_wrong_key(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world, key=bytes(32))
        with pytest.raises(HandshakeError, match="key"):
            await observer.connect()
        await observer.close()

    asyncio.run(main())


def test_a_rank_tells_all_gateways_that_it_is_to_end(world: World) -> None:
    def named(name: str) -> Observer:
        return Observer(name, KEY, "127.0.0.1", world.receiver.port, "c/0")

    async def main() -> None:
        itself, gateways = named("c"), [named("control"), named("control")]
        for each in gateways:
            stats = await each.stats()
            assert (stats["leaving"], stats["gateways_unaware"]) == (False, 1 + gateways.index(each))
        await itself.leave()
        assert ((await itself.stats())["leaving"], (await itself.stats())["gateways_unaware"]) == (True, 2)
        # What is asked of links alone says nothing of it.
        await gateways[0].telemetry()
        assert (await itself.stats())["gateways_unaware"] == 2
        for left, each in ((1, gateways[0]), (0, gateways[1])):
            assert (await each.stats())["leaving"] is True
            assert (await itself.stats())["gateways_unaware"] == left
        for each in (itself, *gateways):
            await each.close()

    asyncio.run(main())


def test_an_older_engine_is_not_told_to_leave(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "frames_of", lambda _challenge: frames_of({}))

    async def main() -> None:
        itself = Observer("c", KEY, "127.0.0.1", world.receiver.port, "c/0")
        with pytest.raises(ConnectionError, match="c/0 is of an older release: it takes no LEAVE"):
            await itself.leave()
        await itself.close()

    asyncio.run(main())


@pytest.mark.parametrize("told", [None, sorted(set(FrameType) - {FrameType.FOLLOW})])
def test_an_older_receiver_is_not_sent_what_it_does_not_know(
    world: World, monkeypatch: pytest.MonkeyPatch, told: list[int] | None
) -> None:
    def older(challenge: Mapping[str, Any]) -> frozenset[int]:
        return frames_of({"frames": told} if told else {})

    monkeypatch.setattr(handshake, "frames_of", older)

    async def main() -> None:
        observer = observer_of(world)
        with pytest.raises(ConnectionError, match="c/0 is of an older release: it takes no FOLLOW"):
            await observer.request(bytes(16), FollowOrder("", 0), 5)
        # The connection goes on.
        refused = await observer.request(bytes(16), CopyOrder.of("ticket", (1,), "", ""), 5)
        assert "no pool here" in refused["reason"]
        await observer.close()

    asyncio.run(main())
    assert world.receiver.stats()["rejected"] == {}


def test_what_a_peer_says_that_it_knows_may_be_anything() -> None:
    assert frames_of({"frames": [43, "x", None, {}, 1 << 70]}) == {43, 1 << 70}
    assert frames_of({"frames": "43"}) == frozenset()


def test_a_watcher_is_told_before_the_end_once_half_is_there_at_a_pace(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        told: list[TransferStatus] = []
        ticket = make_ticket(1000)
        wait = asyncio.create_task(observer.wait(ticket.transfer_id, 60, 30.0, told.append))
        other = asyncio.create_task(observer.wait(ticket.transfer_id, 60))
        transfer = world.sender.open(ticket, ticket.seal(KEY), [1000, 2000, 3000], cached_tokens=100)
        for region, received_bytes, is_told in ((0, 1000, False), (2, 4000, True)):
            transfer.put(region, 0, BytesSource(bytes(1000 * (region + 1))))
            await asyncio.to_thread(world.await_received, ticket, received_bytes)
            await observer.stats()  # what was told before has come before this answer
            assert bool(told) is is_told
        assert (told[0].soon, told[0].cached_tokens, told[0].phase) == (True, 100, TransferPhase.RECEIVING)
        assert not wait.done()
        transfer.put(1, 0, BytesSource(bytes(2000)))
        transfer.end()
        assert (await wait).phase is (await other).phase is TransferPhase.COMPLETE
        assert len(told) == 1
        world.take(ticket)
        await observer.close()

    asyncio.run(main())
    world.await_clean()


def test_what_comes_too_slowly_is_not_soon_there(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        told: list[TransferStatus] = []
        ticket = make_ticket(1000)
        wait = asyncio.create_task(observer.wait(ticket.transfer_id, 60, 0.001, told.append))
        transfer = world.sender.open(ticket, ticket.seal(KEY), [1000, 2000, 3000])
        await asyncio.sleep(0.05)
        transfer.put(2, 0, BytesSource(bytes(3000)))
        await asyncio.to_thread(world.await_received, ticket, 3000)
        await observer.stats()
        assert told == []
        for region in range(2):
            transfer.put(region, 0, BytesSource(bytes(1000 * (region + 1))))
        transfer.end()
        assert (await wait).cached_tokens is None
        world.take(ticket)
        await observer.close()

    asyncio.run(main())
    world.await_clean()


def test_a_watcher_that_comes_late_is_told_at_once(world: World) -> None:
    async def main() -> None:
        observer = observer_of(world)
        told: list[TransferStatus] = []
        ticket, transfer, content = world.open(1000)
        transfer.put(2, 0, BytesSource(content[2]))
        await asyncio.to_thread(world.await_received, ticket, 3000)
        wait = asyncio.create_task(observer.wait(ticket.transfer_id, 60, 60.0, told.append))
        while observer._writer is None:
            await asyncio.sleep(0.01)
        await observer.stats()
        assert [status.soon for status in told] == [True]
        for region in range(2):
            transfer.put(region, 0, BytesSource(content[region]))
        transfer.end()
        await wait
        assert len(told) == 1
        world.take(ticket)
        await observer.close()

    asyncio.run(main())
    world.await_clean()


def test_a_question_on_a_connection_that_has_just_ended_is_a_lost_connection(world: World) -> None:
    """uvloop, which the gateway uses, raises RuntimeError for a write to it: that would end the gateway."""

    async def main() -> None:
        observer = observer_of(world)
        assert "completed" in await observer.stats()
        writer = observer._writer
        assert writer is not None
        writer.transport.abort()
        # It has ended, and its reader has not been told.
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(observer.stats(), 30)
        await observer.close()

    uvloop.run(main())


def test_a_slow_handshake_goes_on_when_a_question_is_given_up(world: World, proxy: FaultyProxy) -> None:
    """Else an engine that starves could never be met by those who ask it every second."""

    async def main(port: int) -> None:
        observer = observer_of(world, port=port)
        proxy.freeze()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await observer.stats()
        waiting = asyncio.create_task(observer.wait(bytes(16), 0.2))
        with pytest.raises(TimeoutError):
            await waiting
        proxy.thaw()
        assert (await asyncio.wait_for(observer.stats(), 30))["observer_connections"] == 1
        # Of each connection there are two ends.
        assert len(proxy._sockets) == 2
        await observer.close()

    asyncio.run(main(proxy.start(world.receiver.port)))


def test_a_handshake_that_never_ends_is_given_up(
    world: World, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.serving.transport.io.observer._HANDSHAKE_S", 0.2)

    async def main(port: int) -> None:
        observer = observer_of(world, port=port)
        proxy.freeze()
        with pytest.raises(ConnectionError, match="c/0 did not answer"):
            await asyncio.wait_for(observer.stats(), 30)
        # Who closes it ends an attempt that is under way.
        asking = asyncio.create_task(observer.stats())
        await asyncio.sleep(0.05)
        await observer.close()
        with pytest.raises(ConnectionError, match="was closed"):
            await asking

    asyncio.run(main(proxy.start(world.receiver.port)))


def test_time_in_which_the_loop_stood_still_is_no_time_to_shake_hands(
    world: World, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.serving.transport.io.observer._HANDSHAKE_S", 0.5)

    async def main(port: int) -> None:
        clock = LoopClock()
        ticking = asyncio.create_task(clock.run())
        observer = observer_of(world, port=port, clock=clock)
        proxy.freeze()
        asking = asyncio.create_task(observer.stats())
        await asyncio.sleep(0.05)
        proxy.thaw()
        time.sleep(1.5)
        assert "completed" in await asking
        ticking.cancel()
        await observer.close()

    asyncio.run(main(proxy.start(world.receiver.port)))


def test_a_receiver_that_ends_a_handshake_is_asked_again(world: World, proxy: FaultyProxy) -> None:
    async def main(port: int) -> None:
        observer = observer_of(world, port=port)
        proxy.freeze()
        asking = asyncio.create_task(observer.stats())
        await asyncio.sleep(0.1)
        for sock in tuple(proxy._sockets):
            sock.shutdown(socket.SHUT_RDWR)
        proxy.thaw()
        assert "completed" in await asyncio.wait_for(asking, 30)
        assert len(proxy._sockets) == 4
        await observer.close()

    asyncio.run(main(proxy.start(world.receiver.port)))


@pytest.mark.parametrize("kind", ["answers nothing", "reads nothing"])
def test_who_is_asked_without_end_costs_no_memory_without_end(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def main() -> None:
        observer = observer_of(world)
        await observer.connect()
        writer = observer._writer
        assert writer is not None
        if kind == "answers nothing":
            monkeypatch.setattr(observer_module, "_MOST_UNANSWERED", 10)
            # All are sent before the first answer is read.
            asked = [asyncio.create_task(observer.stats()) for _ in range(50)]
            with pytest.raises(ConnectionError):
                await asyncio.gather(*asked)
            await asyncio.gather(*asked, return_exceptions=True)
        else:
            monkeypatch.setattr(observer_module, "_MOST_UNSENT_BYTES", 1 << 20)
            writer.transport.write(bytes(64 << 20))
            observer._send(b"")
        assert writer.transport.is_closing()
        async with asyncio.timeout(30):
            while observer._writer in (None, writer):
                await asyncio.sleep(0.005)
            assert "completed" in await observer.stats()
        await observer.close()

    asyncio.run(main())


def test_a_frame_that_is_not_for_observers_ends_the_connection_before_its_payload() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def consumer() -> bytes:
            sock, _ = listener.accept()
            with sock:
                server_handshake("c/0").welcome(sock, producers=None)
                sock.sendall(pack_header(FrameType.DATA, length_bytes=MAX_DATA_BYTES))
                sock.settimeout(PATIENCE_S)
                return sock.recv(1)

        async def main() -> None:
            playing = asyncio.create_task(asyncio.to_thread(consumer))
            observer = Observer("gateway", KEY, "127.0.0.1", listener.getsockname()[1], "c/0")
            await observer.connect()
            assert await playing == b""
            await observer.close()

        asyncio.run(main())
