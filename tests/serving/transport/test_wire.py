"""Frames: what was packed comes back; what was not, is refused without a crash."""

import json
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    FrameType,
    Header,
    TransferPhase,
    TransferStatus,
    WireError,
    body_of,
    checksum,
    checksum_of,
    count_field,
    pack_control,
    pack_header,
    parse_control,
    read_body,
    text_field,
    unpack_header,
)


@given(
    st.sampled_from(FrameType),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 65535),
    st.integers(0, 1 << 44),
    st.integers(0, MAX_CONTROL_BYTES),
    st.integers(0, (1 << 64) - 1),
)
def test_header_round_trip(
    kind: FrameType, transfer_id: bytes, region: int, offset: int, length: int, payload_checksum: int
) -> None:
    raw = pack_header(
        kind,
        transfer_id,
        region=region,
        offset=offset,
        length_bytes=length,
        payload_checksum=payload_checksum,
    )
    assert len(raw) == HEADER_BYTES == 56
    assert unpack_header(raw) == Header(kind, transfer_id, region, offset, length, payload_checksum)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_noticed(bit: int) -> None:
    raw = bytearray(pack_header(FrameType.DATA, bytes(range(16)), region=3, offset=77, length_bytes=1000))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        unpack_header(raw)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_no_header(raw: bytes) -> None:
    with pytest.raises(WireError):
        unpack_header(raw)


@given(st.binary(max_size=200))
def test_noise_is_no_control_payload(payload: bytes) -> None:
    header = Header(FrameType.OPEN, bytes(16), 0, 0, len(payload), checksum(payload))
    with suppress(WireError):
        assert isinstance(parse_control(header, payload), dict)


def test_bounds() -> None:
    for kind, limit in ((FrameType.DATA, 4 << 20), (FrameType.OPEN, 1 << 20), (FrameType.END, 64 << 10)):
        assert unpack_header(pack_header(kind, length_bytes=limit)).length_bytes == limit
        with pytest.raises(WireError, match=f"{kind.name} frame of {limit + 1} bytes is over {limit}"):
            unpack_header(pack_header(kind, length_bytes=limit + 1))
    with pytest.raises(WireError, match="out of bounds"):
        unpack_header(pack_header(FrameType.DATA, region=65536))
    with pytest.raises(WireError, match="out of bounds"):
        unpack_header(pack_header(FrameType.DATA, offset=(1 << 44) + 1))
    with pytest.raises(WireError, match="version 5, this side 4"):
        unpack_header(pack_header(FrameType.HELLO, version=5))
    with pytest.raises(WireError, match="DATA frame has flags 0x8000"):
        unpack_header(pack_header(FrameType.DATA, flags=0x8000))
    with pytest.raises(WireError, match="over 65536"):
        pack_control(FrameType.ABORT, body={"reason": "x" * 70_000})


@pytest.mark.parametrize(
    "payload",
    [
        b'{"n": NaN}',
        b'{"n": Infinity}',
        b'{"n": 1e400}',
        b'{"n": %d}' % 10**400,
        b'{"n": %d}' % 2**70,
        b'{"n": %d}' % -(2**70),
        b'{"n": ' + b"[" * 9 + b"]" * 9 + b"}",
        b'{"n": ' + b'{"n": ' * 9 + b"1" + b"}" * 10,
        b'{"n": ' + b"[" * 30_000,
        b'{"n": "\xff"}',
        b'["n"]',
        b"7",
    ],
)
def test_control_payloads_are_finite_and_flat(payload: bytes) -> None:
    with pytest.raises(WireError, match="holds no JSON object of the protocol"):
        parse_control(Header(FrameType.OPEN, bytes(16), 0, 0, len(payload), checksum(payload)), payload)


def test_a_payload_may_be_as_deep_as_the_deepest_answer() -> None:
    payload = b'{"n": ' + b"[" * 8 + b"]" * 8 + b"}"
    parse_control(Header(FrameType.STATS, bytes(16), 0, 0, len(payload), checksum(payload)), payload)


def test_fields() -> None:
    body = {"n": 5, "big": 10**30, "flag": True, "t": "text"}
    assert count_field(body, "n", 5) == 5
    assert text_field(body, "t") == "text"
    for name in ("big", "flag", "t", "missing"):
        with pytest.raises(WireError, match=f"field '{name}'"):
            count_field(body, name, 100)
    with pytest.raises(WireError, match="at most 3"):
        text_field(body, "t", 3)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_checksum_of_pieces(pieces: list[bytes]) -> None:
    assert checksum_of([memoryview(piece) for piece in pieces]) == checksum(b"".join(pieces))


def test_status_round_trip() -> None:
    status = TransferStatus(
        TransferPhase.FAILED, "why", 1, 2, 3, 4, 5, taken=True, dropped=True, spared_bytes=6
    )
    body = body_of(status)
    assert read_body(TransferStatus, json.loads(json.dumps(body))) == status
    for absurd in ({"phase": "odd"}, {"total_bytes": -1}, {"num_tokens": True}, {"reason": 5}, {"taken": 1}):
        (name,) = absurd
        with pytest.raises(WireError, match=rf"transferstatus of another form: .*\$\.{name}"):
            read_body(TransferStatus, body | absurd)
    del body["total_bytes"]
    with pytest.raises(WireError, match="missing required field `total_bytes`"):
        read_body(TransferStatus, body)


@pytest.mark.parametrize(
    "value",
    [
        TransferStatus(
            TransferPhase.COMPLETE, "", 1, 2, 3, 4, 5, soon=True, usable_tokens=7, usable_ends=(3, 7)
        ),
        Offer("sealed", (1, 2), cached_tokens=3, form="f", part=1, checkpoint=4, resume=True),
    ],
)
def test_releases_with_unlike_sets_of_attributes_agree_on_what_both_know(value: Any) -> None:
    kind, body = type(value), body_of(value)
    assert read_body(kind, body | {"of_a_newer_release": {"a": [1]}}) == value
    for field in fields(kind):
        if field.default is not MISSING:
            older = {name: said for name, said in body.items() if name != field.name}
            assert read_body(kind, older) == replace(value, **{field.name: field.default})
