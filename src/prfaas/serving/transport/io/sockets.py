"""Blocking sockets of the data plane: options, exact reads and writes, and the kernel's counters.

The kernel's view is struct tcp_info of <linux/tcp.h>; to read it takes 0.23 µs.
"""

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Sequence

from prfaas.core.deployment import TransferLimits
from prfaas.core.link.samples import ArrivalReport
from prfaas.serving.transport.protocol.liveness import TcpInfo

_TCP_INFO_BYTES = 232
# Offsets into struct tcp_info: the layout only ever grows at its end.
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_UNACKED, _RTT, _RCV_RTT, _TOTAL_RETRANS, _BYTES_ACKED, _BYTES_RECEIVED = 24, 68, 92, 100, 120, 128
_NOTSENT, _MIN_RTT, _DELIVERY_RATE, _BUSY, _RWND_LIMITED = 144, 148, 160, 168, 176
_RCV_MSS, _DATA_SEGS_IN, _BYTES_SENT, _BYTES_RETRANS = 20, 152, 200, 208
# The kernel's value for a least round trip that it has not seen yet.
_NO_RTT = 0xFFFFFFFF


def read_arrived(sock: socket.socket) -> ArrivalReport:
    """The kernel's present numbers.

    Raises:
        OSError: the socket is gone.
    """
    info = read_tcp_info(sock)
    try:
        unread = fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4))
    except ValueError:
        # Its own thread has closed it just now: there is no descriptor any more.
        raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
    return ArrivalReport(
        bytes_total=info.bytes_received,
        segments_total=info.data_segments_in,
        mss_bytes=info.receive_mss,
        unread_bytes=int.from_bytes(unread, sys.byteorder),
        rtt_s=info.receive_rtt_s,
    )


def read_tcp_info(sock: socket.socket) -> TcpInfo:
    """The kernel's present numbers.

    Raises:
        OSError: the socket is gone.
    """
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    raw = raw.ljust(_TCP_INFO_BYTES, b"\x00")

    def u32(at: int) -> int:
        return int(_U32.unpack_from(raw, at)[0])

    def u64(at: int) -> int:
        return int(_U64.unpack_from(raw, at)[0])

    return TcpInfo(
        rtt_s=u32(_RTT) / 1e6,
        retransmits=u32(_TOTAL_RETRANS),
        delivery_bits_per_s=u64(_DELIVERY_RATE) * 8.0,
        bytes_acked=u64(_BYTES_ACKED),
        bytes_received=u64(_BYTES_RECEIVED),
        data_segments_in=u32(_DATA_SEGS_IN),
        receive_mss=u32(_RCV_MSS),
        in_flight=u32(_UNACKED),
        notsent_bytes=u32(_NOTSENT),
        busy_s=u64(_BUSY) / 1e6,
        least_rtt_s=0.0 if u32(_MIN_RTT) == _NO_RTT else u32(_MIN_RTT) / 1e6,
        receive_rtt_s=u32(_RCV_RTT) / 1e6,
        receiver_limited_s=u64(_RWND_LIMITED) / 1e6,
        sent_bytes=u64(_BYTES_SENT),
        resent_bytes=u64(_BYTES_RETRANS),
    )


# <asm-generic/socket.h>; Python 3.11 names neither.
SO_RCVLOWAT = 18
SO_MAX_PACING_RATE = 47
UNPACED = 0xFFFFFFFFFFFFFFFF

# A path with a longer round trip is not within one datacenter.
LONG_PATH_RTT_S = 0.001

_KEEPALIVE_PROBES = 4
# Up to this rate of one connection its reader is not woken for each segment; above it the segments come together.
_SLOW_BYTES_PER_S = 250e6
# More than a receive buffer takes would never be there.
_WAKE_BYTES = 64 << 10
# Should the kernel ever hold less than the mark for ever, the reader looks by itself.
_LOOK_AGAIN_MS = 200
_MAX_PACKET_BYTES = 64 << 10
# UIO_MAXIOV of <linux/uio.h>.
_MAX_PIECES = 1024


class ConnectionEnded(ConnectionError):
    """The peer closed the connection, or it was shut down on this side."""


def tune(sock: socket.socket, *, user_timeout_s: float, keepalive_s: float) -> None:
    """Set the options that every data connection gets.

    Buffer sizes are left to the kernel: its autotuning beats every fixed value (notes on transport).

    Args:
        sock: a TCP socket, connected or not.
        user_timeout_s: unacknowledged bytes that old end the connection.
        keepalive_s: a connection that is silent that long is probed, and probed again every third of it. The
            kernel counts whole seconds, 1 at least.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock, user_timeout_s=user_timeout_s, keepalive_s=keepalive_s)


def choose_congestion_control(sock: socket.socket, wanted: str | None) -> str:
    """Switch a connection over a long path to another congestion control; nearby, the kernel's default stays.

    bbr halves what a loss costs on a long path, and costs a third of the rate on a loopback.

    Args:
        sock: a connection that has exchanged a few segments, so that the kernel knows its round trip.
        wanted: its name; None: the kernel's default everywhere.

    Returns:
        The congestion control that is in use.
    """
    if wanted is not None and read_tcp_info(sock).least_rtt_s > LONG_PATH_RTT_S:
        # Where the kernel lacks it or forbids it the default serves, and the return value says so.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return raw.split(b"\x00", 1)[0].decode("ascii", "replace")


def keep_alive(
    sock: socket.socket, *, user_timeout_s: float, keepalive_s: float = TransferLimits().keepalive_s
) -> None:
    """Have the kernel end a TCP connection whose other machine is gone; the arguments are those of `tune`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(keepalive_s)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(keepalive_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))


# TCP_THIN_LINEAR_TIMEOUTS of <linux/tcp.h> and the DSCP class "expedited forwarding" (RFC 3246), as IP_TOS has it.
_THIN_LINEAR_TIMEOUTS = 16
_EXPEDITED = 0xB8
_HIGH_PRIORITY = 6


def expedite(sock: socket.socket) -> None:
    """Ask kernel and network to let a connection of few small frames overtake bulk data.

    A lost segment is sent again after equal pauses and not after doubled ones. Routers may ignore the class.
    """
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_PRIORITY, _HIGH_PRIORITY),
        (socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1),
        (socket.IPPROTO_IP, socket.IP_TOS, _EXPEDITED),
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _EXPEDITED),
    ):
        # Each helps alone; which of the last two exists depends on the address.
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)


def set_pacing(sock: socket.socket, bytes_per_s: int | None) -> None:
    """Cap the socket's send rate in the kernel; None lifts the cap."""
    rate = UNPACED if bytes_per_s is None else max(1, bytes_per_s)
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", rate))


def packet_bytes(sock: socket.socket) -> int:
    """What the kernel sends at once on a slow connection: two segments, up to a packet of the network layer.

    It holds all that follows until that has left at the present pace, even if the pace is raised meanwhile.

    Raises:
        OSError: the socket is gone.
    """
    return min(2 * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), _MAX_PACKET_BYTES)


def set_unsent_limit(sock: socket.socket, nbytes: int | None) -> None:
    """Let at most about `nbytes` wait unsent in the kernel, so that what is urgent can still overtake.

    None lifts the limit: without pacing it costs more processor time than everything else.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes or 0)


def receive_exactly(sock: socket.socket, view: memoryview, deadline_s: float | None = None) -> None:
    """Fill `view`.

    Args:
        sock: a blocking socket.
        view: where the bytes go.
        deadline_s: by `time.monotonic`, for all of it; the socket is left with a timeout. None: there is none.

    Raises:
        ConnectionEnded: the stream ends first.
        TimeoutError: the deadline has passed, however steadily bytes came.
    """
    while view.nbytes:
        if deadline_s is not None:
            limit(sock, deadline_s)
        count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionEnded("connection ended")
        view = view[count:]


class BulkReader:
    """Reads long payloads from one blocking socket.

    A segment that arrives wakes a waiting reader, which on a slow path costs more than the bytes. So there it
    waits until 64 KiB are there, or all that is still to come: a mark above that would never be reached.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._slow = False

    def fill(self, view: memoryview) -> None:
        """Fill `view`.

        Raises:
            ConnectionEnded: the stream ends first.
        """
        if view.nbytes <= _WAKE_BYTES:
            receive_exactly(self._sock, view)
            return
        began_s = time.monotonic()
        if self._slow:
            self._fill_sparingly(view)
        else:
            receive_exactly(self._sock, view)
        self._slow = view.nbytes < (time.monotonic() - began_s) * _SLOW_BYTES_PER_S

    def _fill_sparingly(self, view: memoryview) -> None:
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        mark_bytes = 1
        try:
            while view.nbytes:
                # Not a read that waits: what it had taken already would not count towards the mark.
                with contextlib.suppress(BlockingIOError):
                    count = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
                    if count == 0:
                        raise ConnectionEnded("connection ended")
                    view = view[count:]
                    if not view.nbytes:
                        break
                wanted_bytes = min(_WAKE_BYTES, view.nbytes)
                if mark_bytes != wanted_bytes:
                    mark_bytes = wanted_bytes
                    self._sock.setsockopt(socket.SOL_SOCKET, SO_RCVLOWAT, mark_bytes)
                readable.poll(_LOOK_AGAIN_MS)
        finally:
            self._sock.setsockopt(socket.SOL_SOCKET, SO_RCVLOWAT, 1)


def drain(sock: socket.socket, deadline_s: float) -> None:
    """End sending, and read on until the peer closes too or the deadline (by `time.monotonic`) has passed.

    If a socket is closed with bytes left unread, the peer may lose what was said to it last.
    """
    scrap = bytearray(4096)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        limit(sock, deadline_s)
        while sock.recv_into(scrap):
            limit(sock, deadline_s)


def limit(sock: socket.socket, deadline_s: float) -> None:
    """Let the next call on the socket end at `deadline_s`, by `time.monotonic`.

    Raises:
        TimeoutError: that time has passed.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(left_s)


def send_pieces(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Send scattered memory in order, as many pieces a system call as the kernel takes.

    Args:
        sock: a blocking socket.
        pieces: of bytes.
    """
    for first in range(0, len(pieces), _MAX_PIECES):
        left = deque(pieces[first : first + _MAX_PIECES])
        while left:
            sent = sock.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.popleft().nbytes
            if sent:
                left[0] = left[0][sent:]


def shut(sock: socket.socket) -> None:
    """Wake every thread blocked on the socket; harmless if it is gone already."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
