"""What ranks of one engine tell each other of transfers that they lend, over a local socket."""

import socket
import struct

import msgspec

from prfaas.serving.transport.wire import TransferPhase

_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame, behind the descriptor of the staging."""

    staging_bytes: int
    block_bytes: int


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """A transfer has its staging."""

    transfer_id: bytes
    num_tokens: int
    skip_tokens: int
    lease_bytes: int
    blocks: tuple[int, ...]
    region_starts: tuple[int, ...]
    region_bytes: tuple[int, ...]


class Came(msgspec.Struct, frozen=True, tag="came"):
    """How far a transfer is that was lent."""

    transfer_id: bytes
    covered: tuple[tuple[tuple[int, int], ...], ...]
    """By region."""
    phase: TransferPhase
    reason: str = ""
    is_kept: bool = False
    """It has failed, and some of it can be used."""


class GaveBack(msgspec.Struct, frozen=True, tag="gave_back"):
    """A reader needs no more of it."""

    transfer_id: bytes


Frame = Hello | Lent | Came | GaveBack
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def send_frame(sock: socket.socket, frame: Frame) -> None:
    """Raises OSError: the other side is gone."""
    body = msgspec.msgpack.encode(frame)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def sample_of(sock: socket.socket) -> Frame:
    """The next one.

    Raises:
        OSError: the other side is gone.
        EOFError: it has closed the socket.
        MsgspecError: it sent something else.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _DECODER.decode(_exactly(sock, length))


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    got = bytearray()
    while len(got) < nbytes:
        piece = sock.recv(nbytes - len(got))
        if not piece:
            raise EOFError
        got += piece
    return bytes(got)
