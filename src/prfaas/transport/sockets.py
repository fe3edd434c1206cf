"""Blocking sockets of the data plane: options, exact reads, and an orderly end."""

import contextlib
import socket
import struct

from prfaas.transport.wire import HEADER_BYTES, Header, WireError, parse_control, unpack_header

# <asm-generic/socket.h>; Python 3.11 does not name it.
SO_MAX_PACING_RATE = 47
UNPACED = 0xFFFFFFFFFFFFFFFF

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 3
_KEEPALIVE_PROBES = 4


class ConnectionEnded(ConnectionError):
    """The peer closed the connection, or it was shut down on this side."""


def tune(sock: socket.socket, *, user_timeout_s: float, congestion: str | None) -> str:
    """Options every data connection gets; returns the congestion control that is really in use.

    Buffer sizes are left to the kernel: its autotuning beats every fixed value (notes on transport).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))
    if congestion is not None:
        # Where the kernel lacks it or forbids it the default serves, and the return value says so.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return raw.split(b"\x00", 1)[0].decode("ascii", "replace")


def set_pacing(sock: socket.socket, bytes_per_s: int | None) -> None:
    """Cap the socket's send rate in the kernel; None lifts the cap."""
    rate = UNPACED if bytes_per_s is None else max(1, bytes_per_s)
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", rate))


def set_unsent_limit(sock: socket.socket, nbytes: int) -> None:
    """Let at most about `nbytes` wait unsent in the kernel, so that what is urgent can still overtake."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`; raises ConnectionEnded when the stream ends first."""
    while view.nbytes:
        count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionEnded("connection ended")
        view = view[count:]


def receive_pieces(sock: socket.socket, pieces: list[memoryview]) -> None:
    """Fill scattered `pieces` in order; raises ConnectionEnded when the stream ends first."""
    for piece in pieces:
        receive_exactly(sock, piece)


def receive_control(sock: socket.socket) -> tuple[Header, dict[str, object]]:
    """One whole control frame (used while shaking hands); raises WireError, ConnectionEnded, OSError."""
    raw = bytearray(HEADER_BYTES)
    receive_exactly(sock, memoryview(raw))
    header = unpack_header(raw)
    if header.length_bytes > 1 << 20:
        raise WireError(f"{header.kind.name} frame has no place here")
    payload = bytearray(header.length_bytes)
    receive_exactly(sock, memoryview(payload))
    return header, parse_control(header, payload)


def send_all(sock: socket.socket, header: bytes, payload: memoryview | None = None) -> None:
    """Send header and payload with one system call where possible; the socket must be blocking."""
    if payload is None:
        sock.sendall(header)
        return
    sent = sock.sendmsg([header, payload])
    if sent < len(header):
        sock.sendall(header[sent:])
        sent = len(header)
    if sent - len(header) < payload.nbytes:
        sock.sendall(payload[sent - len(header) :])


def shut(sock: socket.socket) -> None:
    """Wake every thread blocked on the socket; harmless if it is gone already."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
