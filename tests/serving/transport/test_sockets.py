"""Blocking sockets: memory arrives in order and whole, whatever the kernel takes at once and however slowly."""

import random
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.io.sockets import (
    SO_RCVLOWAT,
    BulkReader,
    ConnectionEnded,
    choose_congestion_control,
    read_arrived,
    receive_exactly,
    send_pieces,
    set_unsent_limit,
)


def carry(pieces: list[bytes]) -> bytes:
    """What arrives of `pieces` through a pair of sockets with small buffers."""
    near, far = socket.socketpair()
    out = bytearray(sum(map(len, pieces)))
    with near, far:
        for sock in (near, far):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        receiver = threading.Thread(target=receive_exactly, args=(far, memoryview(out)), daemon=True)
        receiver.start()
        send_pieces(near, [memoryview(piece) for piece in pieces])
        receiver.join(10)
        assert not receiver.is_alive()
    return bytes(out)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=20))
def test_scattered_memory_arrives_in_order(pieces: list[bytes]) -> None:
    assert carry(pieces) == b"".join(pieces)


def test_more_pieces_than_the_kernel_takes_at_once() -> None:
    rng = random.Random(7)
    pieces = [rng.randbytes(rng.randrange(1, 200)) for _ in range(2500)]
    assert carry(pieces) == b"".join(pieces)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of a TCP connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near, far


SEGMENT_BYTES = 1448
SLOW_PAYLOADS = (200_000, 65_537, 131_072, 70_000, 300_001)


def trickle(sock: socket.socket, data: bytes, pause_s: float) -> None:
    """As a slow link delivers it: segment by segment."""
    for start in range(0, len(data), SEGMENT_BYTES):
        sock.sendall(data[start : start + SEGMENT_BYTES])
        time.sleep(pause_s)


def test_a_slow_payload_never_waits_for_more_than_is_still_to_come(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender goes on only when the reader has all, so a mark beyond the end would never be reached."""
    monkeypatch.setattr("prfaas.serving.transport.io.sockets._LOOK_AGAIN_MS", 20_000)
    near, far = ends
    started_s = time.monotonic()
    reader = BulkReader(far)
    rng = random.Random(3)
    for nbytes in SLOW_PAYLOADS:
        data = rng.randbytes(nbytes)
        out = bytearray(nbytes)
        sending = threading.Thread(target=trickle, args=(near, data, 0.0002), daemon=True)
        sending.start()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        reader.fill(memoryview(out))
        woken = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        sending.join()
        assert out == data
        assert far.getsockopt(socket.SOL_SOCKET, SO_RCVLOWAT) == 1
        if nbytes != SLOW_PAYLOADS[0]:  # the first one shows how slow the path is
            assert woken < nbytes / SEGMENT_BYTES / 4
    assert time.monotonic() - started_s < 20


def test_a_slow_payload_that_breaks_off(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    reader = BulkReader(far)
    trickling = threading.Thread(target=trickle, args=(near, bytes(100_000), 0.001), daemon=True)
    trickling.start()
    reader.fill(memoryview(bytearray(100_000)))
    trickling.join()
    near.sendall(bytes(10_000))
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionEnded):
        reader.fill(memoryview(bytearray(100_000)))


def test_nearby_the_kernels_congestion_control_stays(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    near.sendall(b"x")
    far.recv(1)
    kernels = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
    other = "reno" if kernels != "reno" else "cubic"
    assert choose_congestion_control(near, other) == kernels
    assert choose_congestion_control(near, None) == kernels


def test_a_long_path_gets_the_one_asked_for(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    near.sendall(b"x")
    far.recv(1)
    monkeypatch.setattr("prfaas.serving.transport.io.sockets.LONG_PATH_RTT_S", 0.0)
    kernels = choose_congestion_control(near, None)
    assert choose_congestion_control(near, "none of that name") == kernels
    assert choose_congestion_control(near, "reno") == "reno"


def test_the_unsent_limit_is_lifted(ends: tuple[socket.socket, socket.socket]) -> None:
    near, _ = ends
    before = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
    set_unsent_limit(near, 20_000)
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 20_000
    set_unsent_limit(near, None)
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == before


def test_a_socket_that_another_thread_closes_meanwhile_is_gone() -> None:
    """Its counters may still be read when its descriptor can't be asked any more."""

    class Closing(socket.socket):
        def fileno(self) -> int:
            return -1

    with Closing() as sock, pytest.raises(OSError, match="Bad file descriptor"):
        read_arrived(sock)
