"""Frames on the wire: a fixed 56-byte header, then a payload. Documented in docs/reference/wire-format.md.

Nothing here trusts the peer: every integer is bounded before it is used, control payloads are bounded JSON,
and both header and payload carry an xxh3_64. The checksums are against damage; against attackers, the
handshake.
"""

import enum
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

import msgspec
import xxhash

from prfaas.serving.transport.protocol.resume_points import ResumePoints

PROTOCOL_VERSION = 4
MAX_CONTROL_BYTES = 64 << 10
MAX_OPEN_BYTES = 1 << 20
MAX_COPY_BYTES = 4 << 20
MAX_EVENTS_BYTES = 24 << 20
MAX_DATA_BYTES = 4 << 20
MAX_REGIONS = 1 << 16
MAX_REGION_BYTES = 1 << 44
MAX_TRANSFER_BYTES = MAX_REGION_BYTES * MAX_REGIONS
MAX_LINK_CHARS = 255
MAX_PROBE_BYTES = 1 << 30
NO_TRANSFER = bytes(16)
# Flags of a header that this side understands; a frame with any other one is refused.
COMPRESSED = 1 << 1
UNCHECKED = 1 << 2
KNOWN_FLAGS = COMPRESSED | UNCHECKED
# The region of an ACK that acknowledges END instead of a chunk.
END_REGION = 0xFFFFFFFF

MAGIC = b"PFAS"
# magic, version, type, flags, transfer id, region, length, offset, payload xxh3_64; then xxh3_64 of those 48
# bytes
_FIELDS = struct.Struct("<4sBBH16sIIQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size


class WireError(ValueError):
    """The peer sent something that is not this protocol; the connection must be closed."""


class VersionError(WireError):
    """The peer speaks another version of the protocol."""


class FrameType(enum.IntEnum):
    """Types by number: 1 to 6 handshake, 16 to 26 transfers, 32 to 45 observers."""

    HELLO = 1
    CHALLENGE = 2
    AUTH = 3
    WELCOME = 4
    REJECT = 5
    KEYS = 6
    OPEN = 16
    ACCEPT = 17
    REFUSE = 18
    DATA = 19
    ACK = 20
    NACK = 21
    END = 22
    ABORT = 23
    PING = 24
    PONG = 25
    FILLER = 26
    WATCH = 32
    STATUS = 33
    ABANDON = 34
    STATS = 35
    PACE = 36
    ROSTER = 37
    PROBE = 38
    PULL = 39
    PULLED = 40
    COPY = 41
    COPIED = 42
    FOLLOW = 43
    EVENTS = 44
    LEAVE = 45


# JSON in which every number is finite, and nothing is nested deeper than the deepest answer, that of STATS.
_MAX_DEPTH = 8
_Scalar: Any = None | bool | Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | float | str
_Value = _Scalar
for _ in range(_MAX_DEPTH):
    _Value = _Scalar | list[_Value] | dict[str, _Value]  # type: ignore[valid-type]
_CONTROL: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, _Value])  # type: ignore[valid-type]

_TYPES = {int(kind): kind for kind in FrameType}
_LIMITS = dict.fromkeys(FrameType, MAX_CONTROL_BYTES) | {
    FrameType.OPEN: MAX_OPEN_BYTES,
    FrameType.PULLED: MAX_OPEN_BYTES,
    FrameType.ROSTER: MAX_OPEN_BYTES,
    FrameType.COPY: MAX_COPY_BYTES,
    FrameType.EVENTS: MAX_EVENTS_BYTES,
    FrameType.DATA: MAX_DATA_BYTES,
}


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a frame, in front of its payload.

    ACK and NACK repeat the region and the offset of their chunk and have no payload.
    """

    kind: FrameType
    transfer_id: bytes
    """16 bytes, all zero for a frame that belongs to no transfer."""
    region: int
    """Of DATA, ACK and NACK; `END_REGION` in the ACK of an END."""
    offset: int
    """In the region, in bytes; of DATA, ACK and NACK. Of PING a number, which its PONG repeats."""
    length_bytes: int
    """Of the payload that follows."""
    checksum: int
    """xxh3_64 of the payload, 0 without one or with flag `UNCHECKED`."""
    flags: int = 0
    """What was done to the payload: a set of `KNOWN_FLAGS`."""


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """xxh3_64 of a payload."""
    return xxhash.xxh3_64_intdigest(payload)


class RunningChecksum:
    """xxh3_64 of a payload that comes in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.update = self._state.update

    @property
    def value(self) -> int:
        """Checksum of the bytes passed to `update` so far."""
        return self._state.intdigest()


def checksum_of(pieces: list[memoryview]) -> int:
    """xxh3_64 of the concatenation of `pieces`."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    running = RunningChecksum()
    for piece in pieces:
        running.update(piece)
    return running.value


def pack_header(
    kind: FrameType,
    transfer_id: bytes = NO_TRANSFER,
    *,
    region: int = 0,
    offset: int = 0,
    length_bytes: int = 0,
    payload_checksum: int = 0,
    flags: int = 0,
    version: int = PROTOCOL_VERSION,
) -> bytes:
    """The 56 bytes in front of a payload; the arguments are `Header`'s fields."""
    fields = _FIELDS.pack(
        MAGIC, version, kind, flags, transfer_id, region, length_bytes, offset, payload_checksum
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def unpack_header(raw: bytes | bytearray | memoryview) -> Header:
    """Parse a header of exactly 56 bytes and check its bounds.

    Raises:
        WireError: it is not one of this protocol, or damaged, or out of bounds.
    """
    magic, version, kind, flags, transfer_id, region, length, offset, payload_checksum = _FIELDS.unpack_from(
        raw
    )
    if magic != MAGIC:
        raise WireError("peer does not speak the prfaas transport protocol")
    if version != PROTOCOL_VERSION:
        raise VersionError(f"peer speaks protocol version {version}, this side {PROTOCOL_VERSION}")
    (check,) = _CHECK.unpack_from(raw, _FIELDS.size)
    if check != xxhash.xxh3_64_intdigest(raw[: _FIELDS.size]):
        raise WireError("frame header is damaged: its checksum does not fit")
    frame_type = _TYPES.get(kind)
    if frame_type is None:
        raise WireError(f"frame type {kind} is unknown in protocol version {PROTOCOL_VERSION}")
    if flags & ~KNOWN_FLAGS:
        raise WireError(
            f"{frame_type.name} frame has flags {flags:#06x}, of which {KNOWN_FLAGS:#06x} are known"
        )
    if length > _LIMITS[frame_type]:
        raise WireError(f"{frame_type.name} frame of {length} bytes is over {_LIMITS[frame_type]}")
    if offset > MAX_REGION_BYTES or (region >= MAX_REGIONS and region != END_REGION):
        raise WireError(f"{frame_type.name} frame names region {region} at offset {offset}: out of bounds")
    return Header(frame_type, transfer_id, region, offset, length, checksum=payload_checksum, flags=flags)


def pack_control(
    kind: FrameType,
    transfer_id: bytes = NO_TRANSFER,
    body: Mapping[str, Any] | None = None,
    *,
    version: int = PROTOCOL_VERSION,
) -> bytes:
    """A whole control frame; `body` becomes JSON.

    Raises:
        WireError: the JSON is over the frame type's limit.
    """
    payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    if len(payload) > _LIMITS[kind]:
        raise WireError(f"{kind.name} frame of {len(payload)} bytes is over {_LIMITS[kind]}")
    header = pack_header(
        kind,
        transfer_id,
        length_bytes=len(payload),
        payload_checksum=checksum(payload) if payload else 0,
        version=version,
    )
    return header + payload


def parse_control(header: Header, payload: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object of a control frame, empty for an empty payload.

    Raises:
        WireError: the payload is damaged, no JSON object, too deep, or has numbers that are not finite or too large.
    """
    if not payload:
        return {}
    if checksum(payload) != header.checksum:
        raise WireError(f"{header.kind.name} frame is damaged: its checksum does not fit")
    try:
        return _CONTROL.decode(payload)
    except ValueError as error:
        raise WireError(f"{header.kind.name} frame holds no JSON object of the protocol: {error}") from None


BodyT = TypeVar("BodyT")


def body_of(value: object) -> dict[str, Any]:
    """The fields of a control frame that says what a dataclass says."""
    body: dict[str, Any] = msgspec.to_builtins(value)
    return body


def read_body(kind: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """A dataclass of the fields of a control frame, each within the bounds of its annotation.

    Peers of another release need not know the same fields: one that `kind` lacks is ignored, and one with a default may
    be missing.

    Raises:
        WireError: a field is missing or absurd.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"{kind.__name__.lower()} of another form: {error}") from None


def text_field(body: Mapping[str, Any], name: str, max_chars: int = 4096) -> str:
    """The text `body[name]` of a control frame.

    Raises:
        WireError: it is missing, no text or too long.
    """
    value = body.get(name)
    if not isinstance(value, str) or len(value) > max_chars:
        raise WireError(f"field {name!r} must be text of at most {max_chars} characters")
    return value


def count_field(body: Mapping[str, Any], name: str, maximum: int) -> int:
    """The integer `body[name]` of a control frame, within 0..maximum.

    Raises:
        WireError: it is missing, no integer or out of bounds.
    """
    value = body.get(name)
    if type(value) is not int or not 0 <= value <= maximum:
        raise WireError(f"field {name!r} must be an integer within 0..{maximum}")
    return value


def ack(header: Header) -> bytes:
    """The consumer has the chunk, or the END, of this header."""
    region = END_REGION if header.kind is FrameType.END else header.region
    return pack_header(FrameType.ACK, header.transfer_id, region=region, offset=header.offset)


def nack(header: Header) -> bytes:
    """The chunk of this header arrived damaged."""
    return pack_header(FrameType.NACK, header.transfer_id, region=header.region, offset=header.offset)


def ping(number: int) -> bytes:
    """Ask the other side for a heartbeat; its PONG repeats `number`."""
    return pack_header(FrameType.PING, offset=number)


def pong(header: Header) -> bytes:
    """The answer to the PING of this header."""
    return pack_header(FrameType.PONG, offset=header.offset)


def abort(transfer_id: bytes, reason: str) -> bytes:
    """A transfer is given up; `reason` is cut at 4,096 characters."""
    return pack_control(FrameType.ABORT, transfer_id, {"reason": reason[:4096]})


def refuse(transfer_id: bytes, reason: str) -> bytes:
    """An OPEN does not become a transfer; `reason` is cut at 4,096 characters."""
    return pack_control(FrameType.REFUSE, transfer_id, {"reason": reason[:4096]})


class TransferPhase(enum.StrEnum):
    """WAITING for staging → RECEIVING → COMPLETE, or FAILED from any of them; the last two are final."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (TransferPhase.COMPLETE, TransferPhase.FAILED)


_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_TRANSFER_BYTES)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """A snapshot, and the fields of a STATUS frame."""

    phase: TransferPhase
    reason: Annotated[str, msgspec.Meta(max_length=4096)]
    """Why it FAILED, else empty."""
    received_bytes: _Bytes
    """Verified bytes in staging."""
    total_bytes: _Bytes
    overlapped_bytes: _Bytes
    """Bytes that were acknowledged when the prefill ended; 0 until END has come."""
    num_tokens: TokenCount
    """The transfer is of the KV of tokens [skip_tokens, num_tokens)."""
    skip_tokens: TokenCount
    taken: bool = False
    """The engine owns the staged bytes already."""
    soon: bool = False
    """It is about to complete, so that a watcher's request for it may be sent: `IncomingTransfer.becomes_soon`."""
    cached_tokens: TokenCount | None = None
    """Tokens that the producer had cached, where its OPEN said so."""
    dropped: bool = False
    """It FAILED since the consumer's engine, or an observer, had no use for it: no fault of the producer."""
    spared_bytes: _Bytes = 0
    """Bytes of `received_bytes` that compression has saved on the link."""
    usable_tokens: TokenCount = 0
    """Tokens of a FAILED transfer from which an engine can resume, or does (`taken`).

    Of a COMPLETE one: from which it could, if another transfer of the ticket broke.
    """
    checkpoint_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    """Bytes of the transfer's checkpoints that have come."""
    usable_ends: Annotated[tuple[TokenCount, ...], msgspec.Meta(max_length=4096)] = ()
    """See `ResumePoints.ends`, of those `usable_tokens`."""

    @property
    def resume_points(self) -> ResumePoints:
        """Points from which an engine can resume, or does (`taken`)."""
        return ResumePoints(self.usable_tokens, tuple(sorted(self.usable_ends)))

    @classmethod
    def refused(cls, reason: str, *, dropped: bool = False) -> Self:
        """Status of a transfer that was never admitted."""
        return cls(
            phase=TransferPhase.FAILED,
            reason=reason,
            received_bytes=0,
            total_bytes=0,
            overlapped_bytes=0,
            num_tokens=0,
            skip_tokens=0,
            dropped=dropped,
        )


def load_obstacle(status: TransferStatus | None, usable_tokens: int = 0) -> str:
    """Why a transfer, or its first so many tokens, could not be taken and never will be; "" while they may still be."""
    if status is None:
        return "its transfer is unknown or has expired"
    if status.phase is TransferPhase.FAILED:
        return f"its transfer failed: {status.reason}"
    if status.taken:
        return "its transfer was used already"
    if usable_tokens and status.phase is TransferPhase.COMPLETE:
        return f"the checkpoint after {usable_tokens} tokens had to make room"
    return ""
