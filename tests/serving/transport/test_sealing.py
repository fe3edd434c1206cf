"""Sealed frames: exact when nothing happened on the way, refused when anything did."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.transport.protocol import sealing
from prfaas.serving.transport.protocol.sealing import (
    SEALED_HEADER_BYTES,
    TAG_BYTES,
    ForgedFrameError,
    FrameOpener,
    Sealing,
)
from prfaas.serving.transport.protocol.wire import HEADER_BYTES, FrameType, pack_control, pack_header

SECRET = bytes(range(32))
PAYLOAD = bytes(range(256)) * 16


def pair() -> tuple[Sealing, Sealing]:
    """Client and server of one connection."""
    return Sealing.of_client(SECRET), Sealing.of_server(SECRET)


def data_frame(payload: bytes = PAYLOAD) -> bytes:
    return pack_header(FrameType.DATA, bytes(16), length_bytes=len(payload)) + payload


def opened(opener: FrameOpener, sealed: bytes) -> bytes:
    """The frame that `sealed` holds."""
    header = opener.open_header(sealed[:SEALED_HEADER_BYTES])
    rest = sealed[SEALED_HEADER_BYTES:]
    return header + (opener.open_payload(rest) if rest else b"")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_frames_open_in_their_order(kinds: list[int]) -> None:
    client, server = pair()
    frames = [
        pack_header(FrameType.ACK, secrets.token_bytes(16)),
        pack_control(FrameType.ABORT, bytes(16), {"reason": "none"}),
        data_frame(),
        data_frame(b"x"),
    ]
    for kind in kinds:
        assert opened(server.opener, client.sealer.seal(frames[kind])) == frames[kind]
        assert opened(client.opener, server.sealer.seal(frames[kind])) == frames[kind]


@given(
    cuts=st.lists(st.integers(1, 900), min_size=1, max_size=8),
    other_cuts=st.lists(st.integers(1, 900), min_size=0, max_size=8),
)
def test_scattered_memory_on_both_sides(cuts: list[int], other_cuts: list[int]) -> None:
    content = secrets.token_bytes(sum(cuts))
    source, pieces = memoryview(content), []
    for nbytes in cuts:
        pieces.append(source[:nbytes])
        source = source[nbytes:]
    target = bytearray(len(content))
    places, at = [], 0
    for nbytes in (*other_cuts, len(content)):
        if at < len(content):
            places.append(memoryview(target)[at : at + nbytes])
            at += places[-1].nbytes
    client, server = pair()
    header = pack_header(FrameType.DATA, bytes(16), length_bytes=len(content))
    # Twice, since the sealer uses its memory again.
    for _ in range(2):
        sealed_header, sealed = client.sealer.seal_pieces(header, pieces)
        assert (sealed_header.nbytes, sealed.nbytes) == (SEALED_HEADER_BYTES, len(content) + TAG_BYTES)
        target[:] = bytes(len(content))
        assert server.opener.open_header(sealed_header) == header
        server.opener.open_into(sealed, places)
        assert target == content
    # Where nobody wants it, it is verified all the same.
    sealed_header, sealed = client.sealer.seal_pieces(header, pieces)
    server.opener.open_header(sealed_header)
    server.opener.open_into(sealed, [])


@given(st.data())
def test_any_changed_bit_is_noticed(data: st.DataObject) -> None:
    frame = data_frame(PAYLOAD[: data.draw(st.sampled_from([0, 1, 16, 4096]))])
    client, server = pair()
    sealed = bytearray(client.sealer.seal(frame))
    place = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[place // 8] ^= 1 << (place % 8)
    with pytest.raises(ForgedFrameError):
        opened(server.opener, bytes(sealed))


@given(st.data())
def test_a_changed_bit_of_a_chunk_is_noticed(data: st.DataObject) -> None:
    client, server = pair()
    frame = data_frame()
    sealed_header, payload = client.sealer.seal_pieces(frame[:HEADER_BYTES], [memoryview(PAYLOAD)])
    server.opener.open_header(sealed_header)
    place = data.draw(st.integers(0, 8 * payload.nbytes - 1))
    payload[place // 8] ^= 1 << (place % 8)
    with pytest.raises(ForgedFrameError):
        server.opener.open_into(payload, [memoryview(bytearray(len(PAYLOAD)))])


def test_moved_frames_are_noticed() -> None:
    """Repeated, left out, swapped, sent back, of another connection, or a payload behind another header."""
    frame = data_frame()
    for attack in ("repeated", "left out", "sent back", "other connection"):
        client, server = pair()
        first, second = client.sealer.seal(frame), client.sealer.seal(frame)
        assert first != second
        if attack == "repeated":
            assert opened(server.opener, first) == frame
            wrong = first
        elif attack == "left out":
            wrong = second
        elif attack == "sent back":
            wrong = server.sealer.seal(frame)
        else:
            wrong = Sealing.of_client(bytes(32)).sealer.seal(frame)
        with pytest.raises(ForgedFrameError):
            opened(server.opener, wrong)
    client, server = pair()
    first, second = client.sealer.seal(frame), client.sealer.seal(frame)
    server.opener.open_header(first[:SEALED_HEADER_BYTES])
    with pytest.raises(ForgedFrameError):
        server.opener.open_payload(second[SEALED_HEADER_BYTES:])


def test_keys_change_before_they_wear_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_NONCES_PER_KEY", 3)
    client, server = pair()
    frame, seen = pack_header(FrameType.ACK), set()
    for _ in range(50):
        sealed = client.sealer.seal(frame)
        seen.add(sealed)
        assert opened(server.opener, sealed) == frame
    assert len(seen) == 50
    monkeypatch.setattr(sealing, "_NONCES_PER_KEY", 4)
    client, server = pair()
    keys = client.sealer._keys
    met = {(keys.advance()) for _ in range(20)}
    # 5 keys with 4 nonces each: no pair occurs twice.
    assert (len(met), len({cipher for cipher, _ in met}), len({nonce for _, nonce in met})) == (20, 5, 4)


def test_nothing_of_the_frame_is_legible() -> None:
    client, _ = pair()
    transfer_id = secrets.token_bytes(16)
    text = b"words that anybody may read"
    sealed = client.sealer.seal(pack_header(FrameType.OPEN, transfer_id, length_bytes=len(text)) + text)
    assert transfer_id not in sealed and b"PFAS" not in sealed and text[:8] not in sealed
