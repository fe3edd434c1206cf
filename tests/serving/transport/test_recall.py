"""Memory that a source has shown is free for others once it is recalled, however stuck the socket is."""

import threading
import time
from collections.abc import Callable

import pytest

from prfaas.serving.transport.io.sender_connection import SenderConnection
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.wire import FrameType, Header

from .harness import FAST_RECEIVER, FAST_SENDER, World, await_over, await_true, with_options
from .proxy import FaultyProxy

MakeWorld = Callable[..., World]
# More than sockets can hold: the writer blocks inside a chunk.
MEMORY_BYTES = 48 << 20
PATIENT = with_options(FAST_SENDER, progress_deadline_s=60.0, transfer_deadline_s=120.0, resume_s=60.0)


class Memory:
    """Shows its memory, and a private copy of it once it is detached."""

    def __init__(self, data: bytes) -> None:
        self.memory = bytearray(data)
        self.nbytes = len(data)
        self._shown = memoryview(self.memory)

    def views(self, start: int, nbytes: int) -> list[memoryview]:
        return [self._shown[start : start + nbytes]]

    def read_into(self, start: int, out: memoryview) -> None:
        raise AssertionError("it can be shown")

    def detach(self) -> None:
        self._shown = memoryview(bytes(self.memory))


@pytest.mark.parametrize("checksums", [True, False])
def test_recalled_memory_may_be_overwritten_while_the_socket_is_blocked(
    make_world: MakeWorld, proxy: FaultyProxy, checksums: bool
) -> None:
    world = make_world(
        through=proxy.start,
        staging_bytes=2 * MEMORY_BYTES,
        connections=2,
        sender_options=with_options(PATIENT, checksums=checksums),
        receiver_options=with_options(FAST_RECEIVER, progress_deadline_s=60.0, silence_s=60.0, resume_s=60.0),
    )
    world.layout.regions = 1
    ticket, transfer, (content,) = world.open(MEMORY_BYTES)
    source = Memory(content)
    await_true(lambda: transfer.phase is SendPhase.SENDING, 5.0, lambda: transfer.phase)
    # A frozen proxy lets no further connection through its handshake.
    await_true(lambda: world.sender.stats()["peers"]["c/0"]["connects"] == 2, 5.0, world.sender.stats)
    proxy.freeze()
    transfer.put(0, 0, source)
    await_blocked(transfer.reading)
    source.detach()
    transfer.recall(0.01)
    source.memory[:] = bytes(MEMORY_BYTES)
    proxy.thaw()
    transfer.end()
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    assert world.take(ticket) == [content]
    assert world.sender.stats()["peers"]["c/0"]["requeued_chunks"] > 0
    # A chunk of overwritten bytes was never taken for a whole one, and a checksum was not what told.
    assert world.sender.stats()["peers"]["c/0"]["resent_chunks"] == 0
    world.await_clean()


def await_blocked(reading: dict[object, object]) -> None:
    """Both connections are inside the same chunk for a while."""

    def blocked() -> bool:
        before = list(reading)
        time.sleep(0.3)
        return len(before) == 2 and before == list(reading)

    await_true(blocked, 10.0, lambda: reading)


def test_recall_waits_for_whoever_is_nearly_done(make_world: MakeWorld) -> None:
    """A connection that finishes in time is left alone."""
    world = make_world(connections=1)
    world.layout.regions = 1
    ticket, transfer, (content,) = world.open(100_000)
    source = SlowMemory(content)
    transfer.put(0, 0, source)
    assert source.asked.wait(60)
    threading.Timer(0.1, source.go_on.set).start()
    transfer.recall(60.0)
    assert source.go_on.is_set()
    transfer.end()
    await_over(transfer)
    assert world.take(ticket) == [content]
    stats = world.sender.stats()["peers"]["c/0"]
    assert (stats["connects"], stats["requeued_chunks"]) == (1, 0)


class SlowMemory(Memory):
    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def views(self, start: int, nbytes: int) -> list[memoryview]:
        self.asked.set()
        assert self.go_on.wait(60)
        return super().views(start, nbytes)


def test_memory_is_not_free_while_a_damaged_chunk_and_its_second_sending_read_it(
    make_world: MakeWorld,
) -> None:
    """The consumer may report a chunk before its writer is done with it; another connection sends it again."""
    world = make_world(connections=2)
    world.layout.regions = 1
    ticket, transfer, (content,) = world.open(1000)
    await_true(lambda: world.sender.stats()["peers"]["c/0"]["connects"] == 2, 5.0, world.sender.stats)
    source = SlowMemory(content)
    transfer.put(0, 0, source)
    assert source.asked.wait(60)
    [(chunk, carrier)] = transfer.reading.items()
    assert isinstance(carrier, SenderConnection)
    with carrier.queue as queue:
        [window] = [each for each in queue._windows if each.connection is carrier]
        damaged = Header(FrameType.NACK, ticket.transfer_id, chunk.region, chunk.start, 0, 0)
        queue.take_frame(window, damaged, b"", time.monotonic())
    await_true(lambda: len(set(transfer.reading.values())) == 2, 5.0, lambda: transfer.reading)
    source.go_on.set()
    transfer.end()
    await_over(transfer)
    assert world.take(ticket) == [content]
    assert world.sender.stats()["thread_errors"] == 0
    stats = world.sender.stats()["peers"]["c/0"]
    assert (stats["connects"], stats["resent_chunks"]) == (2, 1)
