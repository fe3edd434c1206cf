"""Ranks of one engine that read each other's staging: what is lent, until when, and what is told of it."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from prfaas.core.deployment import TransferLimits
from prfaas.serving.transport.io import sibling_staging
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.io.sibling_staging import Follow, Lent, LentTransfer, SiblingStaging
from prfaas.serving.transport.io.staging_memory import StagingArena, shared_memory
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket
from prfaas.serving.transport.protocol.wire import TransferPhase

KEY = b"k" * 32
SIZES = [5000, 3000]
BLOCK_BYTES = 1 << 10


class Fixed:
    """A layout of two regions."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        return SIZES


@dataclass
class Ranks:
    """Two ranks of a decode engine, and one that sends to rank 0."""

    arenas: list[StagingArena]
    receivers: list[Receiver]
    siblings: list[SiblingStaging]
    sender: Sender

    def open(self, *, lends: bool = True) -> tuple[bytes, SentTransfer]:
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer="east",
            consumer="home",
            num_tokens=9,
            skip_tokens=0,
            prompt_digest=bytes(16),
            expires_at_s=time.time() + 60,
        )
        if lends:
            self.siblings[0].begin(ticket.transfer_id, (1,))
        return ticket.transfer_id, self.sender.open(ticket, ticket.seal(KEY), SIZES, "home/0")

    def claimed(self, transfer_id: bytes, uses: int = 1) -> LentTransfer:
        found: list[LentTransfer | None] = []
        until(lambda: found.append(self.siblings[1].claim(0, transfer_id, uses)) or found[-1] is not None)
        assert found[-1] is not None
        return found[-1]


def until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def content(region: int) -> bytes:
    return bytes((place * 7 + region) % 251 for place in range(SIZES[region]))


def put(transfer: SentTransfer, region: int, start: int = 0, end: int | None = None) -> None:
    transfer.put(region, start, Bytes(content(region)[start:end]))


class Bytes:
    """A source of a transfer's bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self.nbytes = len(content)

    def views(self, start: int, nbytes: int) -> list[memoryview]:
        return [self._content[start : start + nbytes]]

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._content[start : start + len(out)]


@contextmanager
def ranks(ttl_s: float = 30.0, keep_s: float = 30.0, total_bytes: int = 64 << 10) -> Iterator[Ranks]:
    memories = [shared_memory(total_bytes) for _ in range(2)]
    arenas = [StagingArena(total_bytes, BLOCK_BYTES, memory) for _, memory in memories]
    receivers = [
        Receiver(
            name=f"home/{rank}",
            key=KEY,
            host="127.0.0.1",
            port=0,
            arena=arena,
            layout=Fixed(),
            fingerprint={},
            options=ReceiverOptions(limits=TransferLimits(resume_s=0.3, staging_ttl_s=30.0)),
        )
        for rank, arena in enumerate(arenas)
    ]
    pair = socket.socketpair()
    with ThreadPoolExecutor(2) as threads:
        siblings = list(
            threads.map(
                lambda rank: SiblingStaging(
                    *(arenas[rank], memories[rank][0], receivers[rank], {1 - rank: pair[rank]}),
                    ReceiverOptions(
                        limits=TransferLimits(staging_ttl_s=ttl_s, staging_wait_s=0.5), keep_partial_s=keep_s
                    ),
                ),
                range(2),
            )
        )
    for receiver in receivers:
        receiver.start()
    peer = Peer("home/0", "127.0.0.1", receivers[0].port, "east->home", 1, None)
    sender = Sender(
        name="east/0",
        key=KEY,
        peers={"home/0": peer},
        fingerprint={},
        options=SenderOptions(limits=TransferLimits(resume_s=0.3)),
    )
    sender.start()
    try:
        yield Ranks(arenas, receivers, siblings, sender)
    finally:
        sender.close()
        for sibling in siblings:
            sibling.close()
        for receiver in receivers:
            receiver.close()
        for fd, _ in memories:
            os.close(fd)
    assert [arena.used_blocks for arena in arenas] == [0, 0]


def read(lent: LentTransfer, region: int) -> bytes:
    return b"".join(bytes(piece) for piece in lent.region_views(region, 0, SIZES[region]))


def is_complete(both: Ranks, transfer_id: bytes) -> bool:
    state = both.receivers[0].transfers.state(transfer_id)
    return state is not None and state.phase is TransferPhase.COMPLETE


def test_what_comes_to_one_is_read_by_the_other_while_it_comes() -> None:
    with ranks() as both:
        transfer_id, transfer = both.open()
        lent = both.claimed(transfer_id)
        put(transfer, 1, 1000, 2000)
        until(lambda: lent.ends([(1, 1000)]) == [2000])
        assert lent.ends([(0, 0), (1, 0)]) == [0, 0] and lent.phase is TransferPhase.RECEIVING
        put(transfer, 0)
        put(transfer, 1, 0, 1000)
        put(transfer, 1, 2000)
        transfer.end()
        until(lambda: lent.phase is TransferPhase.COMPLETE)
        assert [read(lent, region) for region in range(2)] == [content(0), content(1)]
        # Its own engine is done first: the staging stays as long as it is read elsewhere.
        staged = both.receivers[0].transfers.take(transfer_id)
        assert staged is not None
        staged.free()
        assert both.arenas[0].used_blocks > 0 and read(lent, 0) == content(0)
        both.siblings[1].release(lent)
        until(lambda: both.arenas[0].used_blocks == 0)
        assert both.siblings[1].is_refused(0, transfer_id)


def test_only_who_loads_is_told_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    send = sibling_staging.send_frame

    def noted(sock: socket.socket, frame: sibling_staging.Frame) -> None:
        told.append(frame)
        send(sock, frame)

    monkeypatch.setattr(sibling_staging, "send_frame", noted)
    with ranks() as both:
        told.clear()
        transfer_id, transfer = both.open()
        put(transfer, 0)
        until(lambda: (0, transfer_id) in both.siblings[1]._borrowed)
        until(lambda: _received(both, transfer_id) == SIZES[0])
        both.siblings[0]._report_loans()
        assert [type(frame) for frame in told] == [Lent]
        # Who begins to load is told what came before, though nothing comes now.
        lent = both.claimed(transfer_id)
        until(lambda: lent.ends([(0, 0)]) == [SIZES[0]])
        # A second load of the same needs not be asked for.
        assert both.claimed(transfer_id) is lent
        assert sum(isinstance(frame, Follow) for frame in told) == 1
        transfer.abort("a test")
        until(lambda: lent.phase is TransferPhase.FAILED)
        both.siblings[1].release(lent, used=False)
        both.siblings[1].release(lent)


def _received(both: Ranks, transfer_id: bytes) -> int:
    state = both.receivers[0].transfers.state(transfer_id)
    return 0 if state is None else state.received_bytes


def test_an_end_is_told_to_who_does_not_load() -> None:
    with ranks() as both:
        transfer_id, transfer = both.open()
        for region in range(2):
            put(transfer, region)
        transfer.end()
        until(lambda: (0, transfer_id) in both.siblings[1]._borrowed)
        lent = both.siblings[1]._borrowed[0, transfer_id]
        until(lambda: lent.phase is TransferPhase.COMPLETE)
        assert lent.ends([(0, 0), (1, 0)]) == SIZES
        both.receivers[0].transfers.drop(transfer_id, "a test")
        both.siblings[1].refuse(0, transfer_id)


def test_several_requests_read_one_transfer() -> None:
    with ranks() as both:
        transfer_id, transfer = both.open()
        for region in range(2):
            put(transfer, region)
        transfer.end()
        first = both.claimed(transfer_id, uses=2)
        until(lambda: first.phase is TransferPhase.COMPLETE)
        both.receivers[0].transfers.drop(transfer_id, "a test")
        both.siblings[1].release(first)
        second = both.claimed(transfer_id, uses=2)
        assert second is first and both.arenas[0].used_blocks > 0
        both.siblings[1].release(second)
        until(lambda: both.arenas[0].used_blocks == 0)


@pytest.mark.parametrize("when", ["before it comes", "while it comes"])
def test_what_is_refused_is_given_back(when: str) -> None:
    with ranks() as both:
        if when == "before it comes":
            transfer_id, transfer = both.open(lends=False)
            both.siblings[1].refuse(0, transfer_id)
            both.siblings[0].begin(transfer_id, (1,))
        else:
            transfer_id, transfer = both.open()
            until(lambda: (0, transfer_id) in both.siblings[1]._borrowed)
            both.siblings[1].refuse(0, transfer_id)
        until(lambda: not both.siblings[0]._begun and not both.siblings[0]._loans)
        transfer.abort("a test")
        until(lambda: both.arenas[0].used_blocks == 0)


def test_what_breaks_is_told_and_read_as_far_as_it_came() -> None:
    with ranks() as both:
        transfer_id, transfer = both.open()
        lent = both.claimed(transfer_id)
        put(transfer, 0, 0, 4096)
        until(lambda: lent.ends([(0, 0)]) == [4096])
        both.sender.close()
        until(lambda: lent.phase is TransferPhase.FAILED)
        assert "lost" in lent.reason
        got = b"".join(bytes(piece) for piece in lent.region_views(0, 0, 4096))
        assert got == content(0)[:4096]
        both.siblings[1].release(lent)
        until(lambda: both.arenas[0].used_blocks == 0)


def test_what_no_load_asks_for_is_given_back_after_a_while() -> None:
    with ranks(ttl_s=0.2) as both:
        transfer_id, transfer = both.open()
        for region in range(2):
            put(transfer, region)
        transfer.end()
        until(lambda: both.siblings[0]._loans or both.siblings[1].is_refused(0, transfer_id))
        until(lambda: is_complete(both, transfer_id))
        staged = both.receivers[0].transfers.take(transfer_id)
        assert staged is not None
        staged.free()
        until(lambda: both.siblings[1].is_refused(0, transfer_id))


def test_a_transfer_without_staging_is_told_as_failed() -> None:
    with ranks(total_bytes=9 << 10) as both:
        held = both.arenas[0].allocate(4 << 10)
        assert held is not None
        transfer_id, transfer = both.open()
        until(lambda: both.siblings[1].is_refused(0, transfer_id))
        transfer.abort("a test")
        held.free()


def test_a_sibling_that_is_gone_holds_nothing() -> None:
    with ranks() as both:
        transfer_id, transfer = both.open()
        lent = both.claimed(transfer_id)
        both.siblings[1].close()
        transfer.abort("a test")
        until(lambda: both.arenas[0].used_blocks == 0)
        assert both.siblings[1].is_refused(0, transfer_id)
        assert lent.phase is TransferPhase.FAILED
