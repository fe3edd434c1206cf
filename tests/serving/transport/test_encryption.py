"""Encrypted connections end to end: exact, closed to unauthenticated peers, and nothing that was altered counts."""

import asyncio
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.io.greeting import TlsState, converse, greet
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.sockets import receive_exactly
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.handshake import (
    NONCE_BYTES,
    ROLE_PRODUCER,
    ClientHello,
    HandshakeError,
)
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.sealing import SEALED_HEADER_BYTES, Sealing
from prfaas.serving.transport.protocol.wire import (
    FrameType,
    Header,
    TransferPhase,
    checksum,
    pack_control,
    pack_header,
    unpack_header,
)

from .authority import Authority
from .harness import (
    FAST_RECEIVER,
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    PATIENCE_S,
    PATIENT_RECEIVER,
    PATIENT_SENDER,
    SizesByTokens,
    World,
    await_over,
    await_true,
    make_receiver,
    make_sender,
    make_ticket,
    server_handshake,
    with_options,
)
from .proxy import FaultyProxy

MakeWorld = Callable[..., World]


def identities(authority: Authority) -> dict[str, TlsIdentity]:
    """For `make_world`: who both sides are."""
    return {"server_tls": authority.identity("c"), "tls": authority.identity("p")}


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(20)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_transfers_are_exact(make_world: MakeWorld, authority: Authority) -> None:
    # Blocks smaller than chunks: a chunk lies in several pieces of staging.
    world = make_world(block_bytes=64 << 10, **identities(authority))
    sent = [world.send(unit) for unit in (1, 1000, 65_537, 700_000, 1_000_000)]
    for ticket, transfer, content in sent:
        await_over(transfer)
        assert transfer.phase is SendPhase.COMPLETE, transfer.reason
        assert world.take(ticket) == content
    world.await_clean()
    # Transfers don't wait for the last connection's handshake.
    await_true(
        lambda: world.receiver.stats()["encrypted_connections"] == 4,
        PATIENCE_S,
        lambda: "four encrypted connections",
    )
    stats = world.receiver.stats()
    assert (stats["connections"], stats["encrypted_connections"], stats["forged_frames"]) == (4, 4, 0)
    assert world.sender.stats()["peers"]["c/0"]["encrypted"] is True


class Recorder:
    """A relay that keeps what the client sends."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.sent: list[bytearray] = []
        """What each client has sent, by connection."""

    def start(self, target_port: int) -> int:
        self._spawn(self._accept, target_port)
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _spawn(self, job: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=job, args=args))
        self._threads[-1].start()

    def _accept(self, target_port: int) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", target_port))
                self._sockets += [client, server]
                self.sent.append(bytearray())
                self._spawn(self._relay, client, server, self.sent[-1])
                self._spawn(self._relay, server, client, bytearray())

    def _relay(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                kept += data
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()


@pytest.mark.slow("connections wait for each other, and for time limits")
def test_the_wire_shows_nothing_and_a_replayed_session_is_refused(
    make_world: MakeWorld, authority: Authority, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(connections=1, through=recorder.start, **identities(authority))
    ticket, transfer, content = world.send(50_000)
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    assert world.take(ticket) == content
    (sent,) = recorder.sent
    assert len(sent) > 300_000
    for secret in (
        content[0][:32],
        content[2][-32:],
        b"PFAS",
        b"producer",
        ticket.seal(KEY).encode(),
    ):
        assert secret not in sent

    before = world.receiver.stats()
    with (
        caplog.at_level(logging.INFO),
        socket.create_connection(("127.0.0.1", world.receiver.port)) as replay,
    ):
        replay.sendall(sent)
        assert is_closed(replay)
        await_true(lambda: world.receiver.stats()["strangers"] == 0, 5.0, lambda: "gone")
    after = world.receiver.stats()
    assert after["received_bytes"] == before["received_bytes"]
    assert after["opened"] == before["opened"]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "closed a connection in its handshake" in caplog.text


@pytest.mark.slow("connections wait for each other, and for time limits")
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 16),
    connections=st.integers(1, 4),
    unit_bytes=st.integers(50_000, 500_000),
    cut_after_bytes=st.integers(100_000, 2_000_000),
    cuts=st.integers(0, 6),
    flips=st.integers(0, 3),
)
def test_result_is_exact_through_a_faulty_link(
    tmp_path: Path, seed: int, connections: int, unit_bytes: int, cut_after_bytes: int, cuts: int, flips: int
) -> None:
    """Invariant: whatever is cut or altered on the way, a COMPLETE transfer has exactly the bytes that were put."""
    authority = Authority(tmp_path / "tls")
    proxy = FaultyProxy(seed=seed, cut_after_bytes=cut_after_bytes, cuts=cuts, flips=flips)
    arena = StagingArena(16 << 20, 256 << 10)
    layout = SizesByTokens()
    receiver = make_receiver(
        arena,
        layout=layout,
        options=with_options(PATIENT_RECEIVER, progress_deadline_s=10.0),
        tls=authority.identity("c"),
    )
    sender = make_sender(
        proxy.start(receiver.port),
        connections=connections,
        options=with_options(PATIENT_SENDER, chunk_bytes=64 << 10, progress_deadline_s=10.0),
        tls=authority.identity("p"),
    )
    world = World(receiver, sender, arena, layout, seed)
    try:
        sent = [world.send(unit_bytes) for _ in range(3)]
        for ticket, transfer, content in sent:
            await_over(transfer)
            assert transfer.phase is SendPhase.COMPLETE, transfer.reason
            assert world.status(ticket).received_bytes == transfer.total_bytes
            assert world.take(ticket) == content
        world.await_clean()
    finally:
        proxy.close()
        world.close()


def test_sealed_memory_is_free_before_it_is_sent(make_world: MakeWorld, authority: Authority) -> None:
    """Encryption is a copy: whoever recalls memory breaks no connection, however stuck the socket is."""
    proxy = FaultyProxy(seed=1)
    try:
        world = make_world(
            through=proxy.start,
            connections=1,
            staging_bytes=64 << 20,
            sender_options=with_options(FAST_SENDER, progress_deadline_s=60.0, transfer_deadline_s=120.0),
            receiver_options=with_options(FAST_RECEIVER, progress_deadline_s=60.0, silence_s=60.0),
            **identities(authority),
        )
        world.layout.regions = 1
        ticket, transfer, (content,) = world.open(24 << 20)
        await_true(lambda: transfer.phase is SendPhase.SENDING, 5.0, lambda: transfer.phase)
        proxy.freeze()
        memory = bytearray(content)
        transfer.put(0, 0, BytesSource(memory))
        queue = world.sender._queues["c/0"]
        # Chunks leave until the socket is full; the last of them is stuck in it.
        await_steady(lambda: queue.queue.stats()["in_flight_chunks"])
        assert not transfer.reading
        proxy.thaw()
        transfer.end()
        await_over(transfer)
        assert world.take(ticket) == [content]
        world.await_clean()
    finally:
        proxy.close()


def await_steady(value: Callable[[], int]) -> None:
    seen = [0]

    def steady() -> bool:
        seen.append(value())
        time.sleep(0.1)
        return seen[-1] > 0 and len(set(seen[-4:])) == 1

    await_true(steady, 10.0, lambda: str(seen))


def test_the_reason_of_a_refusal_arrives_though_the_client_has_said_more(
    make_world: MakeWorld, authority: Authority
) -> None:
    world = make_world(connections=1, **identities(authority))
    expired = authority.identity("p", file="old", expired=True)
    with socket.create_connection(("127.0.0.1", world.receiver.port), timeout=20) as sock:
        tls = TlsState(expired.client_context(), server_side=False)
        converse(sock, tls.shake_hands(), None)
        for _ in range(20):
            sock.sendall(tls.encrypted(bytes(1000)))
            time.sleep(0.01)

        def one_byte() -> Generator[tuple[bytes, int], bytes | bytearray, None]:
            yield b"", 1

        with pytest.raises(ssl.SSLError, match="CERTIFICATE_EXPIRED"):
            converse(sock, tls.inside(one_byte()), None)


def test_each_connection_has_its_own_secret(make_world: MakeWorld, authority: Authority) -> None:
    tls = authority.identity("p")
    world = make_world(connections=1, server_tls=authority.identity("c"), tls=tls)
    producers = [Producer(world, tls) for _ in range(2)]
    frame = pack_header(FrameType.ACK)
    assert len({producer.sealing.sealer.seal(frame) for producer in producers}) == 2
    for producer in producers:
        producer.sock.close()


def foreign(authority: Authority, name: str) -> TlsIdentity:
    """A certificate of somebody else's authority; it trusts the right one."""
    other = Authority(authority.folder / "foreign", "other CA").identity(name)
    return TlsIdentity(other.certificate, other.key, authority.file)


@pytest.mark.parametrize(
    ("who", "sentence", "heard"),
    [
        ("foreign client", "c/0 does not accept this side's certificate", "self-signed|unable to get"),
        ("expired client", "c/0 does not accept this side's certificate", "certificate has expired"),
        ("other client", "p/0 has shown the certificate of q", "p/0 has shown the certificate of q"),
        (
            "foreign server",
            "the certificate of c/0 is not accepted",
            "does not accept this side's certificate",
        ),
        ("expired server", "the certificate of c/0 is not accepted: certificate has expired", "expired"),
        ("other server", "does not belong to c/0: its names are d", ""),
        ("wrong key", "does not have this deployment's key", ""),
        ("plain client", "c/0 takes only encrypted connections from p/0", "takes only encrypted connections"),
        ("plain server", "c/0 does not encrypt", "c/0 takes no encrypted connections"),
    ],
)
def test_unauthenticated_peers_are_refused_and_logged_once(
    make_world: MakeWorld,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    who: str,
    sentence: str,
    heard: str,
) -> None:
    said: dict[str, Any] = identities(authority) | {"connections": 1}
    said |= {
        "foreign client": lambda: {"tls": foreign(authority, "p")},
        "expired client": lambda: {"tls": authority.identity("p", expired=True)},
        "other client": lambda: {"tls": authority.identity("q")},
        "foreign server": lambda: {"server_tls": foreign(authority, "c")},
        "expired server": lambda: {"server_tls": authority.identity("c", expired=True)},
        "other server": lambda: {"server_tls": authority.identity("d")},
        "wrong key": lambda: {"key": bytes(32)},
        "plain client": lambda: {"tls": None},
        "plain server": lambda: {"server_tls": None},
    }[who]()
    with caplog.at_level(logging.INFO):
        world = make_world(**said, sender_options=replace(FAST_SENDER, rejected_backoff_max_s=0.05))
        # It tries again and again.
        await_true(
            lambda: world.sender.stats()["peers"]["c/0"]["connect_failures"] >= 4,
            10.0,
            lambda: str(world.sender.stats()),
        )
        _, transfer, _ = world.send(1000)
        await_over(transfer)
    assert transfer.phase is SendPhase.FAILED
    assert sentence in transfer.reason
    stats = world.receiver.stats()
    assert (stats["connections"], stats["received_bytes"], stats["opened"]) == (0, 0, 0)
    by_sender = [r.getMessage() for r in caplog.records if r.name.endswith("shared_queue")]
    by_receiver = [r.getMessage() for r in caplog.records if r.name.endswith("unauthenticated")]
    assert len(by_sender) == 1 and sentence in by_sender[0]
    assert len(by_receiver) <= 1
    if heard:
        assert any(words in by_receiver[0] for words in heard.split("|")), by_receiver


def test_plain_connections_only_from_those_that_may(make_world: MakeWorld, authority: Authority) -> None:
    world = make_world(server_tls=authority.identity("c"), plain_peers=["p"])
    ticket, transfer, content = world.send(10_000)
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    assert world.take(ticket) == content
    assert world.receiver.stats()["encrypted_connections"] == 0


def test_an_encrypted_peer_needs_an_identity() -> None:
    from prfaas.serving.transport.io.sender import Sender
    from prfaas.serving.transport.protocol.options import Peer

    peer = Peer("c/0", "127.0.0.1", 1, "wan", 1, None, encrypted=True)
    with pytest.raises(ValueError, match="peer c/0 is encrypted, and p/0 has no TLS identity"):
        Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint=FINGERPRINT)


# One connection, frame by frame


class Producer:
    """A producer's connection with its keys, to send what a producer never would."""

    def __init__(self, world: World, tls: TlsIdentity) -> None:
        self.sock = socket.create_connection(("127.0.0.1", world.receiver.port), timeout=20)
        hello = ClientHello(
            nonce=secrets.token_hex(NONCE_BYTES),
            key=KEY,
            name="p/0",
            server_name="c/0",
            role=ROLE_PRODUCER,
            session="raw",
            fingerprint=FINGERPRINT,
        )
        sealing = greet(self.sock, hello, tls=tls)
        assert sealing is not None
        self.sealing: Sealing = sealing

    def send(self, frame: bytes) -> bytes:
        sealed = self.sealing.sealer.seal(frame)
        self.sock.sendall(sealed)
        return sealed

    def receive(self) -> tuple[Header, bytes]:
        """The next answer, and how it came."""
        raw = bytearray(SEALED_HEADER_BYTES)
        receive_exactly(self.sock, memoryview(raw))
        return unpack_header(self.sealing.opener.open_header(raw)), bytes(raw)


@contextmanager
def producing(world: World, tls: TlsIdentity) -> Iterator[tuple[Producer, bytes]]:
    """A connection with an accepted transfer of 100, 200 and 300 bytes, and its id."""
    producer = Producer(world, tls)
    with producer.sock:
        ticket = make_ticket(100)
        opening = {"ticket": ticket.seal(KEY), "regions": [100, 200, 300]}
        producer.send(pack_control(FrameType.OPEN, ticket.transfer_id, opening))
        assert producer.receive()[0].kind is FrameType.ACCEPT
        yield producer, ticket.transfer_id


def data_frame(transfer_id: bytes, region: int = 0, payload: bytes = bytes(100)) -> bytes:
    return pack_header(FrameType.DATA, transfer_id, region=region, length_bytes=len(payload)) + payload


@pytest.mark.parametrize(
    "attack",
    ["header", "payload", "tag", "replayed", "left out", "swapped", "reflected", "plain", "invented"],
)
def test_an_altered_frame_ends_the_connection_and_counts_for_nothing(
    make_world: MakeWorld, authority: Authority, caplog: pytest.LogCaptureFixture, attack: str
) -> None:
    tls = authority.identity("p")
    world = make_world(server_tls=authority.identity("c"), tls=tls, connections=1)
    await_true(lambda: world.receiver.stats()["connections"] == 1, 5.0, lambda: "up")
    with caplog.at_level(logging.INFO), producing(world, tls) as (producer, transfer_id):
        first = producer.send(data_frame(transfer_id))
        header, answer = producer.receive()
        assert header.kind is FrameType.ACK
        assert world.receiver.transfers.state(transfer_id).received_bytes == 100  # type: ignore[union-attr]
        # In a frame of 72 sealed bytes of header, 200 of payload and a tag of 16.
        sealed = bytearray(producer.sealing.sealer.seal(data_frame(transfer_id, 1, bytes(200))))
        after = producer.sealing.sealer.seal(data_frame(transfer_id, 2, bytes(300)))
        if attack in ("header", "payload", "tag"):
            sealed[{"header": 30, "payload": 100, "tag": -1}[attack]] ^= 1
        wrong = {
            "replayed": first,
            "left out": after,
            "swapped": after + bytes(sealed),
            "reflected": answer,
            "plain": pack_header(
                FrameType.DATA, transfer_id, region=1, length_bytes=200, payload_checksum=checksum(bytes(200))
            )
            + bytes(200),
            "invented": Sealing.of_client(bytes(32)).sealer.seal(data_frame(transfer_id, 1, bytes(200))),
        }.get(attack, bytes(sealed))
        producer.sock.sendall(wrong)
        assert is_closed(producer.sock)
        await_true(lambda: world.receiver.stats()["forged_frames"] == 1, 5.0, lambda: "counted")
        assert world.receiver.transfers.state(transfer_id).received_bytes == 100  # type: ignore[union-attr]
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == [
        "connection from p/0 ended: a frame was altered, left out, repeated or made by somebody else"
    ]
    assert world.receiver.stats()["thread_errors"] == 0
    # The peer itself, on its own connection, has noticed nothing.
    _, transfer, _ = world.send(1000)
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason


@pytest.mark.slow("connections wait for each other, and for time limits")
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(bit=st.integers(0, 8 * 288 - 1))
def test_no_changed_bit_is_ever_acknowledged(make_world: MakeWorld, authority: Authority, bit: int) -> None:
    tls = authority.identity("p")
    world = make_world(server_tls=authority.identity("c"), tls=tls, connections=1)
    try:
        with producing(world, tls) as (producer, transfer_id):
            sealed = bytearray(producer.sealing.sealer.seal(data_frame(transfer_id, 1, bytes(200))))
            assert len(sealed) == 288
            sealed[bit // 8] ^= 1 << (bit % 8)
            producer.sock.sendall(sealed)
            assert is_closed(producer.sock)
            assert world.receiver.transfers.state(transfer_id).received_bytes == 0  # type: ignore[union-attr]
    finally:
        world.close()


def test_forged_answers_are_not_believed(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever stands between the two cannot tell the producer that its bytes have arrived."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = make_sender(listener.getsockname()[1], connections=1, tls=authority.identity("p"))
    consumers: list[socket.socket] = []
    try:
        ticket = make_ticket(100)
        transfer = sender.open(ticket, ticket.seal(KEY), [100, 200, 300])
        consumers.append(listener.accept()[0])
        server = server_handshake("c/0", authority.identity("c"))
        _, sealing = server.welcome(consumers[0], producers=["p/0"])
        assert sealing is not None
        consumers[0].settimeout(20)
        raw = bytearray(SEALED_HEADER_BYTES)
        receive_exactly(consumers[0], memoryview(raw))
        opening = unpack_header(sealing.opener.open_header(raw))
        assert opening.kind is FrameType.OPEN
        answer = bytearray(sealing.sealer.seal(pack_control(FrameType.ACCEPT, opening.transfer_id)))
        answer[20] ^= 1
        consumers[0].sendall(answer)
        assert is_closed(consumers[0])
        await_true(
            lambda: sender.stats()["peers"]["c/0"]["forged_frames"] == 1, 5.0, lambda: str(sender.stats())
        )
        assert transfer.phase is SendPhase.OPENING
        assert len([r for r in caplog.records if "made by somebody else" in r.getMessage()]) == 1
    finally:
        sender.close()
        for sock in [listener, *consumers]:
            sock.close()


def test_lost_connections_come_back(make_world: MakeWorld, authority: Authority) -> None:
    world = make_world(**identities(authority))
    for _ in range(5):
        ticket, transfer, content = world.send(500_000)
        for connection in world.sender._connections["c/0"]:
            connection.shut()
        await_over(transfer)
        assert transfer.phase is SendPhase.COMPLETE, transfer.reason
        assert world.take(ticket) == content
    world.await_clean()
    assert world.sender.stats()["peers"]["c/0"]["connects"] > 4


def test_rotated_certificates_are_used_by_new_connections(
    make_world: MakeWorld, authority: Authority
) -> None:
    client = authority.identity("p")
    world = make_world(connections=2, server_tls=authority.identity("c"), tls=client)
    await_true(lambda: world.receiver.stats()["connections"] == 2, 5.0, lambda: "up")
    # The new certificate is another one's, so that its use shows.
    authority.write("q", file="p")
    ticket, transfer, content = world.send(100_000)
    await_over(transfer)
    assert world.take(ticket) == content
    for connection in world.sender._connections["c/0"]:
        connection.shut()
    await_true(
        lambda: world.receiver.stats()["rejected"].get("p/0") == "p/0 has shown the certificate of q",
        5.0,
        lambda: str(world.receiver.stats()),
    )
    authority.write("p")
    await_true(
        lambda: world.sender.stats()["peers"]["c/0"]["connections"] == 2,
        5.0,
        lambda: str(world.sender.stats()),
    )
    ticket, transfer, content = world.send(100_000)
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    assert world.take(ticket) == content


# Unauthenticated peers


@pytest.mark.parametrize(
    "sent", [b"\x16", b"\x16\x03\x01\x01\x00", b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"]
)
def test_a_slow_tls_handshake_ends_in_time(make_world: MakeWorld, authority: Authority, sent: bytes) -> None:
    options = replace(FAST_RECEIVER, handshake_s=0.3)
    world = make_world(receiver_options=options, connections=1, **identities(authority))
    with socket.create_connection(("127.0.0.1", world.receiver.port)) as sock:
        sock.sendall(sent)
        assert is_closed(sock)
    await_true(lambda: world.receiver.stats()["strangers"] == 0, 5.0, lambda: "closed")


def test_a_byte_now_and_then_does_not_stretch_the_tls_handshake(
    make_world: MakeWorld, authority: Authority
) -> None:
    options = replace(FAST_RECEIVER, handshake_s=0.3)
    world = make_world(receiver_options=options, connections=1, **identities(authority))
    with socket.create_connection(("127.0.0.1", world.receiver.port)) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00")
        with pytest.raises(OSError):
            for _ in range(512):
                sock.send(b"\x01")
                time.sleep(0.05)


def test_slow_unauthenticated_tls_peers_keep_no_peer_out(make_world: MakeWorld, authority: Authority) -> None:
    options = replace(FAST_RECEIVER, max_unauthenticated=8, handshake_s=60.0)
    tls = authority.identity("p")
    world = make_world(receiver_options=options, server_tls=authority.identity("c"), tls=tls)
    await_true(lambda: world.receiver.stats()["connections"] == 4, 5.0, lambda: "up")
    socks = []
    for _ in range(20):
        socks.append(socket.create_connection(("127.0.0.1", world.receiver.port)))
        socks[-1].sendall(b"\x16\x03\x01\x02\x00\x01")
    await_true(lambda: world.receiver.stats()["closed_strangers"] >= 12, 5.0, lambda: "flood")
    Producer(world, tls).sock.close()
    for sock in socks:
        sock.close()


@given(junk=st.binary(min_size=1, max_size=300))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_junk_instead_of_tls_is_refused(authority: Authority, junk: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\x16" + junk)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises((OSError, ValueError)):
            tls = authority.identity("c")
            server = server_handshake("c/0", tls)
            server.welcome(theirs, producers=None)


# Observers


def test_an_observer_sees_over_an_encrypted_connection(make_world: MakeWorld, authority: Authority) -> None:
    world = make_world(**identities(authority))

    async def main() -> None:
        tls = authority.identity("gateway")
        observer = Observer("gateway", KEY, "127.0.0.1", world.receiver.port, "c/0", tls)
        ticket = make_ticket(1000)
        waiting = asyncio.create_task(observer.wait(ticket.transfer_id, 10))
        await asyncio.sleep(0)
        await observer.abandon(ticket.transfer_id, "nobody wants it")
        assert (await waiting).phase is TransferPhase.FAILED
        # The sender's connections may still shake hands.
        async with asyncio.timeout(20):
            while (stats := await observer.stats())["encrypted_connections"] < stats["connections"]:
                await asyncio.sleep(0.01)
        assert stats["encrypted_connections"] == stats["connections"] >= 1
        # A lost connection comes back with other keys.
        for connection in list(world.receiver._connections):
            connection.shut()
        again = make_ticket(1000)
        waiting = asyncio.create_task(observer.wait(again.transfer_id, 10))
        await asyncio.sleep(0.2)
        await observer.abandon(again.transfer_id, "nobody wants it")
        assert (await waiting).phase is TransferPhase.FAILED
        await observer.close()

    asyncio.run(main())


def test_observers_are_refused_as_producers_are(make_world: MakeWorld, authority: Authority) -> None:
    world = make_world(connections=1, **identities(authority))
    plain_world = make_world(connections=1)

    async def refused(port: int, tls: TlsIdentity | None) -> str:
        observer = Observer("gateway", KEY, "127.0.0.1", port, "c/0", tls)
        with pytest.raises(HandshakeError) as error:
            await observer.connect()
        await observer.close()
        return str(error.value)

    async def main() -> None:
        port = world.receiver.port
        assert "takes only encrypted connections from gateway" in await refused(port, None)
        assert "gateway has shown the certificate of p" in await refused(port, authority.identity("p"))
        expired = authority.identity("gateway", expired=True)
        assert "c/0 does not accept this side's certificate" in await refused(port, expired)
        # It trusts another authority than the one that the receiver's certificate comes from.
        own = authority.identity("gateway")
        other = TlsIdentity(own.certificate, own.key, Authority(authority.folder / "x", "x").file)
        assert "the certificate of c/0 is not accepted" in await refused(port, other)
        assert "c/0 does not encrypt" in await refused(plain_world.receiver.port, own)

    asyncio.run(main())
    assert world.receiver.stats()["thread_errors"] == 0
