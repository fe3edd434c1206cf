"""Blocking sockets: scattered memory arrives in order and whole, whatever the kernel takes at once."""

import random
import socket
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.sockets import receive_exactly, send_pieces


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
