"""One request and its answer over the pool's Unix socket, as a client sees it: blocking, with a deadline."""

import errno
import os
import select
import socket
import time
from typing import TypeVar

import msgspec

from prfaas.serving.pool.protocol import (
    LENGTH_BYTES,
    MOST_MESSAGE_BYTES,
    Answer,
    Done,
    Figures,
    Matched,
    Opened,
    Refused,
    Request,
    Reserved,
)

A = TypeVar("A", Opened, Matched, Reserved, Figures, Done)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Answer)


class Unavailable(Exception):
    """The daemon cannot be asked now; the text says why."""


def has_hung_up(connection: socket.socket, timeout_s: float) -> bool:
    """Wait for the end of a connection; answers that arrive are passed over. A closed socket has ended, too."""
    file = connection.fileno()
    if file < 0:
        return True
    poll = select.poll()
    poll.register(file, select.POLLRDHUP)
    return bool(poll.poll(timeout_s * 1000))


def exchange(
    connection: socket.socket, message: Request, expected: type[A], timeout_s: float
) -> tuple[A, list[int]]:
    """Send a request and receive its answer, and the file descriptors that come with it.

    Raises:
        Unavailable: it took too long, the connection is gone, or the daemon refuses.
    """
    deadline_s = time.monotonic() + timeout_s
    body = _ENCODER.encode(message)
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 1)
        head += _receive(connection, LENGTH_BYTES - len(head), deadline_s) if head else b""
        length = int.from_bytes(head, "little")
        if not 0 < length <= MOST_MESSAGE_BYTES:
            raise Unavailable("the daemon is gone" if not head else "its answer is garbage")
        answer = _DECODER.decode(_receive(connection, length, deadline_s))
        if isinstance(answer, Refused):
            raise Unavailable(answer.reason)
        if not isinstance(answer, expected):
            raise Unavailable("it answers something else than was asked")
    except BaseException as error:
        for each in descriptors:
            os.close(each)
        if isinstance(error, TimeoutError):
            raise Unavailable(f"no answer within {timeout_s:g} s") from None
        if isinstance(error, OSError):
            raise Unavailable(f"the daemon is gone ({error.strerror})") from None
        if isinstance(error, msgspec.DecodeError):
            raise Unavailable("its answer is garbage") from None
        raise
    return answer, descriptors


def _receive(connection: socket.socket, size_bytes: int, deadline_s: float) -> bytearray:
    """Exactly so many bytes.

    Raises:
        OSError: the connection ended, or the deadline has passed (TimeoutError).
    """
    received = bytearray(size_bytes)
    view = memoryview(received)
    while view:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        view = view[count:]
    return received
