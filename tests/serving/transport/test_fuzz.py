"""Peers that have the key and send anything: refused, no thread fails, and no byte lies outside its region."""

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.mutations import no_exception_logged

from prfaas.core.deployment import CONTROL, GATEWAY, TOOLS
from prfaas.serving.transport.io.greeting import greet
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sockets import ConnectionEnded, receive_exactly
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.handshake import NONCE_BYTES, ROLE_OBSERVER, ClientHello
from prfaas.serving.transport.protocol.requests import PullAnswer, PullOrder
from prfaas.serving.transport.protocol.staging import StagingLease
from prfaas.serving.transport.protocol.ticket import Ticket
from prfaas.serving.transport.protocol.wire import (
    END_REGION,
    HEADER_BYTES,
    NO_TRANSFER,
    FrameType,
    TransferPhase,
    WireError,
    checksum,
    pack_header,
    parse_control,
    ping,
    read_body,
    unpack_header,
)

from .harness import (
    FAST_RECEIVER,
    FAST_SENDER,
    KEY,
    SizesByTokens,
    World,
    await_true,
    make_receiver,
    make_sender,
    make_ticket,
    server_handshake,
)
from .raw_peer import RawProducer

CANARY = 0xA5
UNIT_BYTES = 100
SIZES = [UNIT_BYTES, 2 * UNIT_BYTES, 3 * UNIT_BYTES]
TRANSFERS = 3

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    "ticket regions resume cached_tokens total_bytes overlapped_bytes reason lead_s links hold_ms phase "
    "received_bytes num_tokens skip_tokens taken soon tokens salt adapter geometry pages have ranks checksums"
)
fields = st.sampled_from(FIELDS.split())
counts = st.sampled_from([0, 1, 6 * UNIT_BYTES, 6 * UNIT_BYTES - 1, -1, 1 << 44, 1 << 70])
bodies = st.dictionaries(fields | st.text(max_size=8), values | counts, max_size=5)
offsets = st.integers(0, 3 * UNIT_BYTES) | st.sampled_from([1 << 44, (1 << 44) + 1, (1 << 64) - 1])
numbers = st.sampled_from([0, 0, 0, 1, 2])
regions = st.integers(0, 3) | st.sampled_from([END_REGION, 65535, 65536, 1 << 31])


@dataclass(frozen=True)
class Step:
    """One frame; `transfer` is the number of a ticket, -1: no transfer."""

    kind: int
    transfer: int
    region: int
    offset: int
    payload: bytes
    damage: int
    flags: int


data = st.builds(
    Step,
    kind=st.just(int(FrameType.DATA)),
    transfer=numbers,
    region=regions,
    offset=offsets,
    payload=st.integers(0, 3 * UNIT_BYTES).map(lambda count: b"\x5a" * count),
    damage=st.sampled_from([0, 0, 0, 1]),
    flags=st.just(0),
)
likely = st.builds(
    replace,
    data,
    region=st.integers(0, 2),
    offset=st.sampled_from([0, 50, 100, 150]),
    payload=st.sampled_from([50, 51, 100, 150]).map(lambda count: b"\x5a" * count),
    damage=st.just(0),
)
controls = st.builds(
    Step,
    kind=st.sampled_from([int(kind) for kind in FrameType]) | st.integers(0, 255),
    transfer=st.just(-1) | numbers,
    region=regions,
    offset=offsets,
    payload=st.one_of(
        st.just(b""), bodies.map(lambda body: json.dumps(body).encode()), st.binary(max_size=40)
    ),
    damage=st.sampled_from([0, 0, 0, 1]),
    flags=st.sampled_from([0, 0, 0, 0, 0, 1, 0x8000]),
)
told = st.builds(
    replace,
    controls,
    kind=st.sampled_from([int(getattr(FrameType, kind)) for kind in ["STATUS", "STATS", "COPIED", "PULLED"]]),
    region=st.just(0),
    offset=st.just(0),
    payload=bodies.map(lambda body: json.dumps(body).encode()),
    damage=st.just(0),
    flags=st.just(0),
)
opens = st.builds(
    Step,
    kind=st.just(-1),
    transfer=numbers,
    region=st.just(0),
    offset=st.just(0),
    payload=st.just(b""),
    damage=st.sampled_from([0, 0, 0, 0, 1, 2]),
    flags=st.just(0),
)
ends = st.builds(
    Step,
    kind=st.just(int(FrameType.END)),
    transfer=numbers,
    region=st.just(0),
    offset=st.just(0),
    payload=st.tuples(counts, counts).map(
        lambda pair: json.dumps({"total_bytes": pair[0], "overlapped_bytes": pair[1]}).encode()
    ),
    damage=st.just(0),
    flags=st.just(0),
)


def frame(step: Step, tickets: list[Ticket]) -> bytes:
    if step.kind == -1:
        ticket = tickets[step.transfer]
        sizes: Any = [SIZES, SIZES[:2], [*SIZES[:2], SIZES[2] + 1]][step.damage]
        body = json.dumps({"ticket": ticket.seal(KEY), "regions": sizes, "resume": False}).encode()
        return raw(int(FrameType.OPEN), ticket.transfer_id, 0, 0, body, 0, 0)
    transfer_id = NO_TRANSFER if step.transfer < 0 else tickets[step.transfer].transfer_id
    return raw(step.kind, transfer_id, step.region, step.offset, step.payload, step.damage, step.flags)


def raw(
    kind: int, transfer_id: bytes, region: int, offset: int, payload: bytes, damage: int, flags: int
) -> bytes:
    """A frame whose header is whole, whatever it says."""
    header = pack_header(
        kind,  # type: ignore[arg-type]
        transfer_id,
        region=region,
        offset=offset,
        length_bytes=len(payload),
        payload_checksum=(checksum(payload) if payload else 0) ^ damage,
        flags=flags,
    )
    return header + payload


class GuardedArena(StagingArena):
    """Its memory is a canary, and it knows which bytes of it were ever a lease's."""

    def __init__(self, total_bytes: int, block_bytes: int) -> None:
        self.memory = bytearray(total_bytes)
        super().__init__(total_bytes, block_bytes, memoryview(self.memory))
        self.memory[:] = bytes([CANARY]) * total_bytes
        self.leases: list[StagingLease] = []

    def allocate(self, nbytes: int) -> StagingLease | None:
        lease = super().allocate(nbytes)
        if lease is not None:
            self.leases.append(lease)
            # Of all that it may get, so that it can be told after it was freed.
            lease.extents = tuple(lease._extents)  # type: ignore[attr-defined]
        return lease

    def strays(self) -> int:
        """Changed bytes that lie in no region of any lease."""
        allowed = bytearray(len(self.memory))
        for lease in self.leases:
            start = 0
            for nbytes in SIZES:
                for extent in lease.extents:  # type: ignore[attr-defined]
                    low, high = max(start, extent.start), min(start + nbytes, extent.start + extent.nbytes)
                    if low < high:
                        at = extent.physical + low - extent.start
                        allowed[at : at + high - low] = b"\1" * (high - low)
                start += -(-nbytes // 64) * 64
        return sum(byte != CANARY and not fine for byte, fine in zip(self.memory, allowed, strict=True))


@pytest.fixture(scope="module")
def consumer() -> Iterator[tuple[Receiver, GuardedArena]]:
    arena = GuardedArena(16 << 10, 256)
    receiver = make_receiver(arena, options=replace(FAST_RECEIVER, max_tombstones=1 << 12))
    yield receiver, arena
    receiver.close()
    assert arena.used_blocks == 0


@pytest.fixture(autouse=True)
def nothing_left(consumer: object) -> None:
    """In place of the check of that name: the consumer serves all tests of this module."""


@pytest.fixture(autouse=True)
def no_exception() -> Iterator[None]:
    with no_exception_logged():
        yield


FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def drain(sock: socket.socket, number: int) -> bool:
    """Read until the PONG of `number`; False: the connection has ended."""
    try:
        sock.sendall(ping(number))
        while True:
            header = bytearray(HEADER_BYTES)
            receive_exactly(sock, memoryview(header))
            told = unpack_header(header)
            body = bytearray(told.length_bytes)
            receive_exactly(sock, memoryview(body))
            parse_control(told, body)
            if told.kind is FrameType.PONG and told.offset == number:
                return True
    except (ConnectionEnded, OSError):
        return False


@pytest.mark.slow("a connection for each of many examples")
@FUZZ
@given(
    first=st.lists(opens, max_size=3),
    steps=st.lists(st.one_of(data, likely, ends, controls, opens), min_size=2, max_size=20),
)
def test_a_producer_may_send_anything(
    consumer: tuple[Receiver, GuardedArena], first: list[Step], steps: list[Step]
) -> None:
    """Invariant: no byte is written outside a region, no thread fails, what is staged is what was verified."""
    receiver, arena = consumer
    world = World(receiver, None, arena, SizesByTokens())  # type: ignore[arg-type]
    tickets = [make_ticket(UNIT_BYTES) for _ in range(TRANSFERS)]
    producer = RawProducer(world, session="fuzz")
    try:
        for step in [*first, *steps]:
            alive = True
            with suppress(OSError):
                producer.sock.sendall(frame(step, tickets))
            # A PING inside a payload that is not whole would be a part of it: all payloads here are whole.
            alive = drain(producer.sock, 12345)
            if not alive:
                producer.sock.close()
                producer = RawProducer(world, session="fuzz")
        for ticket in tickets:
            status = receiver.transfers.state(ticket.transfer_id)
            if status is not None and status.phase is TransferPhase.COMPLETE:
                staged = receiver.transfers.take(ticket.transfer_id)
                assert staged is not None
                for region, nbytes in enumerate(SIZES):
                    assert b"".join(staged.region_views(region, 0, nbytes)) == b"\x5a" * nbytes
                staged.free()
    finally:
        producer.sock.close()
        for ticket in tickets:
            receiver.transfers.drop(ticket.transfer_id, "over")
    await_true(lambda: arena.used_blocks == 0, 5.0, lambda: str(receiver.stats()))
    assert receiver.stats()["thread_errors"] == 0
    assert arena.strays() == 0


# One for each row of the permissions.
OBSERVERS = (GATEWAY, CONTROL, TOOLS, "a-pool")


@pytest.mark.slow("a connection for each of many examples")
@FUZZ
@given(steps=st.lists(st.one_of(controls, data), max_size=25), name=st.sampled_from(OBSERVERS))
def test_an_observer_may_send_anything(
    consumer: tuple[Receiver, GuardedArena], steps: list[Step], name: str
) -> None:
    receiver, arena = consumer
    tickets = [make_ticket(UNIT_BYTES) for _ in range(TRANSFERS)]

    def connect() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", receiver.port), timeout=60)
        greet(
            sock,
            ClientHello(
                nonce=secrets.token_hex(NONCE_BYTES),
                key=KEY,
                name=name,
                server_name="c/0",
                role=ROLE_OBSERVER,
                session="fuzz",
                fingerprint={},
            ),
        )
        return sock

    sock = connect()
    try:
        for step in steps:
            with suppress(OSError):
                sock.sendall(frame(step, tickets))
            if not drain(sock, 12345):
                sock.close()
                sock = connect()
    finally:
        sock.close()
    assert receiver.stats()["thread_errors"] == 0
    assert arena.strays() == 0


class RawConsumer:
    """Lets one producer in at a time, reads its frames off, and answers what it is told to."""

    def __init__(self, answers: list[Callable[[bytes], bytes]], name: str = "c/0") -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._name = name
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.failures: list[BaseException] = []
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="test-consumer", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._socks]:
            sock.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), name="test-consumer", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, WireError):
            server = server_handshake(self._name)
            server.welcome(sock, producers=None)
            sock.settimeout(None)
            while True:
                header = bytearray(HEADER_BYTES)
                receive_exactly(sock, memoryview(header))
                asked = unpack_header(header)
                receive_exactly(sock, memoryview(bytearray(asked.length_bytes)))
                if self._answers:
                    sock.sendall(self._answers.pop(0)(asked.transfer_id))


@pytest.mark.slow("connections wait for each other, and for time limits")
@settings(FUZZ, max_examples=60)
@given(
    answers=st.lists(
        st.one_of(
            controls,
            st.builds(
                Step,
                kind=st.sampled_from([int(k) for k in (FrameType.ACK, FrameType.NACK, FrameType.ACCEPT)]),
                transfer=st.just(0),
                region=regions,
                offset=offsets,
                payload=st.just(b""),
                damage=st.just(0),
                flags=st.just(0),
            ),
        ),
        max_size=20,
    )
)
def test_a_consumer_may_answer_anything(answers: list[Step]) -> None:
    """Invariant: the transfer ends on the producer's side, nothing of it stays, no thread fails."""

    def answer(step: Step) -> Callable[[bytes], bytes]:
        return lambda transfer_id: raw(
            max(step.kind, 0),
            NO_TRANSFER if step.transfer < 0 else transfer_id,
            step.region,
            step.offset,
            step.payload,
            step.damage,
            step.flags,
        )

    accept = Step(int(FrameType.ACCEPT), 0, 0, 0, b"", 0, 0)
    consumer = RawConsumer([answer(accept), *(answer(step) for step in answers)])
    sender = make_sender(
        consumer.port,
        connections=2,
        options=replace(FAST_SENDER, chunk_bytes=64, min_chunk_bytes=64),
    )
    try:
        ticket = make_ticket(UNIT_BYTES)
        transfer = sender.open(ticket, ticket.seal(KEY), SIZES)
        for region, nbytes in enumerate(SIZES):
            transfer.put(region, 0, BytesSource(bytes(nbytes)))
        transfer.end()
        transfer.await_quiescent(0.1)
        transfer.abort("over")
        assert transfer.await_quiescent(10.0)
        assert transfer.acked_bytes <= transfer.total_bytes
        stats = sender.stats()
        assert stats["thread_errors"] == 0
        assert stats["peers"]["c/0"]["queued_bytes"] == stats["peers"]["c/0"]["in_flight_chunks"] == 0
    finally:
        sender.close()
        consumer.close()


@pytest.mark.slow("connections wait for each other, and for time limits")
@settings(FUZZ, max_examples=40)
@given(answers=st.lists(controls | told, min_size=1, max_size=12))
def test_a_consumer_may_tell_an_observer_anything(answers: list[Step]) -> None:
    """Invariant: a wait ends, with a status or a ConnectionError, and nothing else is raised."""
    consumer = RawConsumer(
        [
            lambda transfer_id, step=step: raw(  # type: ignore[misc]
                max(step.kind, 0),
                transfer_id,
                step.region,
                step.offset,
                step.payload,
                step.damage,
                step.flags,
            )
            for step in answers
        ]
    )

    async def main() -> None:
        observer = Observer("o", KEY, "127.0.0.1", consumer.port, "c/0", silence_s=0.4)
        try:
            for _ in range(2):
                with suppress(ConnectionError, TimeoutError):
                    await observer.wait(make_ticket(UNIT_BYTES).transfer_id, 0.05)
                with suppress(ConnectionError, TimeoutError):
                    async with asyncio.timeout(0.05):
                        await observer.stats()
                with suppress(ConnectionError, TimeoutError, WireError):
                    transfer_id = make_ticket(UNIT_BYTES).transfer_id
                    order = PullOrder.of("ticket", bytes(16), (bytes(17),))
                    read_body(PullAnswer, await observer.request(transfer_id, order, 0.05))
                reading = observer._connection_task
                if reading is not None and reading.done():
                    assert reading.exception() is None
        finally:
            await observer.close()

    try:
        asyncio.run(main())
    finally:
        consumer.close()
