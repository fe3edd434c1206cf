"""An unauthenticated peer keeps no other out, forges no log line, and uses up neither threads nor file descriptors."""

import io
import logging
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from prfaas.serving.logs import LogSettings, set_up_logging
from prfaas.serving.transport.io.greeting import greet
from prfaas.serving.transport.io.sockets import ConnectionEnded
from prfaas.serving.transport.io.unauthenticated import UnauthenticatedPeers, network_of
from prfaas.serving.transport.protocol.handshake import (
    NONCE_BYTES,
    ROLE_PRODUCER,
    ClientHello,
    HandshakeError,
)
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.wire import HEADER_BYTES, FrameType, pack_control, pack_header

from .harness import (
    FAST_RECEIVER,
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    PATIENT_RECEIVER,
    PATIENT_SENDER,
    World,
    await_over,
    await_true,
    our_threads,
    receive_control,
    with_options,
)

MakeWorld = Callable[..., World]


def connected(world: World) -> socket.socket:
    return socket.create_connection(("127.0.0.1", world.receiver.port), timeout=20)


def hello(*, name: str = "p/0", key: bytes = KEY) -> ClientHello:
    return ClientHello(
        nonce=secrets.token_hex(NONCE_BYTES),
        key=key,
        name=name,
        server_name="c/0",
        role=ROLE_PRODUCER,
        session="s",
        fingerprint=FINGERPRINT,
    )


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionError:
        return True


@contextmanager
def dripping(world: World, count: int) -> Iterator[list[socket.socket]]:
    """`count` unauthenticated peers: each sends a byte of its HELLO every 50 ms, and comes again when it is closed."""
    frame = hello().frame()
    socks, over = [connected(world) for _ in range(count)], threading.Event()
    sent = [0] * count

    def drip() -> None:
        while not over.wait(0.05):
            for index in range(count):
                try:
                    socks[index].send(frame[sent[index] : sent[index] + 1])
                    sent[index] += 1
                except OSError:
                    socks[index].close()
                    with suppress(OSError):
                        socks[index], sent[index] = connected(world), 0

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield socks
    finally:
        over.set()
        thread.join()
        for sock in socks:
            sock.close()


def test_a_byte_now_and_then_does_not_stretch_the_handshake(make_world: MakeWorld) -> None:
    world = make_world(receiver_options=replace(FAST_RECEIVER, handshake_s=0.4))
    frame = hello().frame()
    with connected(world) as sock:
        began_s = time.monotonic()
        with pytest.raises(OSError):
            for index in range(len(frame)):
                sock.send(frame[index : index + 1])
                time.sleep(0.05)
                assert time.monotonic() - began_s < 10, "still open"
    await_true(lambda: world.receiver.stats()["strangers"] == 0, 5.0, lambda: "closed")


def is_welcome(world: World) -> bool:
    """Whether a peer with the key gets through its handshake, at one try."""
    with connected(world) as sock:
        try:
            greet(sock, hello())
        except (ConnectionEnded, OSError):
            return False
        return True


def test_slow_unauthenticated_peers_keep_no_peer_out(make_world: MakeWorld) -> None:
    options = replace(FAST_RECEIVER, max_connections=12, max_unauthenticated=8, handshake_s=60.0)
    world = make_world(receiver_options=options)
    with dripping(world, 40):
        await_true(lambda: world.receiver.stats()["closed_strangers"] >= 30, 5.0, lambda: "flood")
        assert world.receiver.stats()["strangers"] <= 8
        _, transfer, _ = world.send(100_000)
        await_over(transfer)
        assert transfer.phase == "complete", transfer.reason
        # Peers that come while the flood goes on. One whose machine is busy may be the oldest, and tries again.
        for _ in range(4):
            await_true(lambda: is_welcome(world), 30.0, lambda: "a peer is kept out")


def test_the_oldest_unauthenticated_peer_goes_first(make_world: MakeWorld) -> None:
    world = make_world(receiver_options=replace(FAST_RECEIVER, max_unauthenticated=3, handshake_s=60.0))
    await_true(lambda: world.receiver.stats()["connections"] == 4, 5.0, lambda: "up")
    # Its own four connections were unauthenticated at first, too.
    at_first = world.receiver.stats()["closed_strangers"]
    socks = []
    for count in range(1, 6):
        socks.append(connected(world))
        await_true(lambda: world.receiver.stats()["strangers"] == min(count, 3), 5.0, lambda: "in")  # noqa: B023
        await_true(
            lambda: world.receiver.stats()["closed_strangers"] - at_first == max(count - 3, 0),  # noqa: B023
            5.0,
            lambda: "out",
        )
    assert [is_closed(sock) for sock in socks[:2]] == [True, True]
    for sock in socks[2:]:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    assert world.receiver.stats()["connections"] == 4
    for sock in socks:
        sock.close()


@pytest.mark.slow("connections wait for each other, and for time limits")
def test_many_unauthenticated_peers_at_once_cost_few_threads(make_world: MakeWorld) -> None:
    world = make_world(
        sender_options=PATIENT_SENDER, receiver_options=replace(PATIENT_RECEIVER, max_unauthenticated=8)
    )
    await_true(lambda: world.receiver.stats()["connections"] == 4, 5.0, lambda: "up")
    await_true(lambda: sum(name.endswith("-acks") for name in our_threads()) == 4, 5.0, lambda: "reading")
    before, most = len(our_threads()), 0
    held: list[socket.socket] = []
    for count in range(600):
        held.append(connected(world))
        if len(held) > 100:
            held.pop(0).close()
        if count % 20 == 0:
            most = max(most, len(our_threads()) - before)
    # One may be ending while its successor starts.
    assert most <= 2 * 8
    for sock in held:
        sock.close()
    await_true(lambda: len(our_threads()) == before, 5.0, lambda: f"{our_threads()}")


@pytest.mark.parametrize("kind", [FrameType.HELLO, FrameType.OPEN])
def test_a_long_first_frame_is_refused_before_it_is_read(world: World, kind: FrameType) -> None:
    with connected(world) as sock:
        sock.sendall(pack_header(kind, length_bytes=32 << 10))
        header, body = receive_control(sock)
        assert header.kind is FrameType.REJECT
        assert "32768 bytes has no place here" in str(body["reason"])
        assert is_closed(sock)


@pytest.mark.parametrize(
    "name", ["p/0\nWARNING all is lost", "p\r", "", "p/0/1", "ä", "a" * 64, "p 0", "\x1b[2J"]
)
def test_a_name_forges_no_log_line(world: World, caplog: pytest.LogCaptureFixture, name: str) -> None:
    with caplog.at_level(logging.DEBUG), connected(world) as sock:
        with pytest.raises(HandshakeError, match="is no name of an engine"):
            greet(sock, hello(name=name))
        await_true(lambda: world.receiver.stats()["failed_connections"] == 1, 5.0, lambda: "closed")
    assert caplog.records
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_unauthenticated_peers_that_fail_are_logged_rarely_with_their_number(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(times: int) -> None:
        before = world.receiver.stats()["failed_connections"]
        for _ in range(times):
            with connected(world) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0\r\n\r\n\r\n")
                with suppress(OSError):
                    receive_control(sock)
        await_true(
            lambda: world.receiver.stats()["failed_connections"] == before + times, 5.0, lambda: "closed"
        )

    with caplog.at_level(logging.INFO):
        fail(30)
        assert len(caplog.records) == 1
        world.receiver._unauthenticated._noted_at_s = float("-inf")
        fail(1)
    assert "29 more since the last such line" in caplog.records[1].getMessage()


def test_a_refused_peer_is_named_once_and_forgiven(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with connected(world) as sock, pytest.raises(HandshakeError, match="takes no KV"):
            greet(sock, hello(name="q/0"))
    await_true(lambda: world.receiver.stats()["failed_connections"] == 3, 5.0, lambda: "closed")
    assert len([r for r in caplog.records if "c/0 rejects q/0" in r.getMessage()]) == 1
    assert world.receiver.stats()["rejected"] == {
        "q/0": "c/0 takes no KV from q/0: it is not among its producers"
    }
    # Who lacks the key is not reported by name: it may call itself anything.
    with connected(world) as sock, pytest.raises(HandshakeError, match="this deployment's key"):
        sock.sendall(hello(name="r/0", key=bytes(32)).frame())
        receive_control(sock)
        sock.sendall(pack_control(FrameType.AUTH, body={"proof": "00" * 32}))
        header, body = receive_control(sock)
        assert header.kind is FrameType.REJECT
        raise HandshakeError(str(body["reason"]))
    assert "r/0" not in world.receiver.stats()["rejected"]


def test_no_file_descriptors_left_is_waited_out(make_world: MakeWorld) -> None:
    world = make_world()
    await_true(lambda: world.receiver.stats()["connections"] == 4, 5.0, lambda: "up")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock:
        sock.settimeout(20)
        try:
            # All lower numbers are taken: the newest socket got the lowest.
            resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))
            sock.connect(("127.0.0.1", world.receiver.port))
            await_true(lambda: world.receiver.stats()["accept_failures"] >= 1, 5.0, lambda: "EMFILE")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Some kernels close what they could not give a number to; the next one is served.
    with connected(world) as again:
        greet(again, hello())
    assert world.receiver.stats()["thread_errors"] == 0


def test_full_of_peers_is_no_rejection(make_world: MakeWorld) -> None:
    """A consumer that has its connections takes another one later; nothing is wrong with whom it sends away."""
    world = make_world(connections=2, receiver_options=replace(FAST_RECEIVER, max_connections=2))
    await_true(lambda: world.receiver.stats()["connections"] == 2, 5.0, lambda: "up")
    with connected(world) as sock, pytest.raises((ConnectionEnded, ConnectionResetError)):
        greet(sock, hello())
    assert world.receiver.stats()["rejected"] == {}


def test_half_a_header_then_silence(make_world: MakeWorld) -> None:
    world = make_world(receiver_options=replace(FAST_RECEIVER, handshake_s=0.3))
    with connected(world) as sock:
        sock.sendall(hello().frame()[: HEADER_BYTES // 2])
        assert is_closed(sock)


def test_log_lines_have_the_peers_address(world: World) -> None:
    stream = io.StringIO()
    ours = logging.getLogger("prfaas")
    before = (ours.handlers[:], ours.level, ours.propagate)
    set_up_logging(LogSettings(), stream=stream)
    try:
        with connected(world) as sock, pytest.raises(HandshakeError):
            greet(sock, hello(name="no name"))
        await_true(lambda: bool(stream.getvalue()), 5.0, lambda: "logged")
    finally:
        ours.handlers[:], ours.level, ours.propagate = before
    assert " peer=127.0.0.1 " in stream.getvalue()


def test_a_dead_machine_is_noticed_by_the_kernel_as_soon_as_set(make_world: MakeWorld) -> None:
    set_to = {"user_timeout_s": 7.0, "keepalive_s": 6.0}
    world = make_world(
        connections=1,
        receiver_options=with_options(FAST_RECEIVER, **set_to),
        sender_options=with_options(FAST_SENDER, **set_to),
    )
    await_true(lambda: world.receiver.stats()["connections"] == 1, 5.0, lambda: "up")
    (received,) = world.receiver._connections
    (sent,) = world.sender._connections["c/0"]
    assert sent._sock is not None
    for sock in (received._sock, sent._sock):
        options = [socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL]
        assert [sock.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [7000, 6, 2]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_networks_are_what_one_sender_has_many_addresses_of() -> None:
    assert network_of("192.0.2.7") == network_of("192.0.2.250") == network_of("::ffff:192.0.2.9")
    assert network_of("192.0.2.7") != network_of("192.0.3.7")
    assert network_of("2001:db8:0:1::7") == network_of("2001:db8:0:1:ffff::1%eth0")
    assert network_of("2001:db8:0:1::7") != network_of("2001:db8:0:2::7")
    assert network_of("no address") == "no address"


class Handshakes:
    """Connections in their handshake at a consumer with four places, each from an address of the test's choice."""

    def __init__(self) -> None:
        self.peers = UnauthenticatedPeers("c/0", 4)
        self.socks: list[socket.socket] = []

    def enter(self, address: str) -> socket.socket:
        """One more; who is closed gives its place back, as its thread does."""
        here, there = socket.socketpair()
        self.socks += [here, there]
        there.setblocking(False)
        entering = threading.Thread(target=self.peers.enter, args=(here, address))
        entering.start()
        while entering.is_alive():
            entering.join(0.001)
            for closed in list(self.peers._closing):
                self.peers.leave(closed)
        return there

    @staticmethod
    def is_open(sock: socket.socket) -> bool:
        try:
            return sock.recv(1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        for sock in self.socks:
            sock.close()


@pytest.fixture
def handshakes() -> Iterator[Handshakes]:
    made = Handshakes()
    yield made
    made.close()


@pytest.mark.parametrize("network", ["198.51.100.{}", "2001:db8:1:2::{}"])
def test_many_addresses_of_one_network_count_as_one(handshakes: Handshakes, network: str) -> None:
    honest = [handshakes.enter(address) for address in ("192.0.2.1", "2001:db8:7::1")]
    for number in range(1, 60):
        handshakes.enter(network.format(number))
    assert all(handshakes.is_open(sock) for sock in honest)
    assert handshakes.peers.closed == 59 - 2


def test_known_addresses_have_places_of_their_own(handshakes: Handshakes) -> None:
    """A flood from as many networks as there are is closed, and none that was authenticated before."""
    handshakes.peers.know("192.0.2.1")
    honest = [handshakes.enter("192.0.2.1") for _ in range(4)]
    for number in range(60):
        handshakes.enter(f"198.51.{number}.1")
    assert all(handshakes.is_open(sock) for sock in honest)
    # Known peers' own connections are bounded, too.
    handshakes.enter("192.0.2.1")
    assert [handshakes.is_open(sock) for sock in honest] == [False, True, True, True]


def test_who_was_authenticated_or_is_on_the_peer_list_is_known(world: World) -> None:
    await_true(lambda: world.receiver.stats()["connections"] == 4, 5.0, lambda: "up")
    assert "127.0.0.1" in world.receiver._unauthenticated._known
    there = Peer("d/0", "192.0.2.7", 9, "wan", 1, None)
    world.receiver._apply_peer_list(PeerList({"d/0": there}, frozenset({"p/0"})))
    assert "192.0.2.7" in world.receiver._unauthenticated._known


def test_what_is_known_is_bounded() -> None:
    peers = UnauthenticatedPeers("c/0", 4)
    peers.know(*(f"10.{number // 250}.{number % 250}.1" for number in range(3000)))
    assert len(peers._known) == 1024
