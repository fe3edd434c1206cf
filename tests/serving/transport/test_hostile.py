"""A peer that has the key but breaks the protocol, or lacks the key: refused, and others are unharmed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sockets import ConnectionEnded
from prfaas.serving.transport.protocol import incoming
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.handshake import HandshakeError
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.wire import (
    END_REGION,
    FrameType,
    TransferPhase,
    abort,
    checksum,
    pack_control,
    pack_header,
)

from .harness import (
    FAST_RECEIVER,
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    World,
    await_over,
    await_true,
    make_sender,
    make_ticket,
)
from .raw_peer import RawProducer

MakeWorld = Callable[..., World]


def test_acks_nacks_duplicates_and_completion(world: World) -> None:
    ticket = make_ticket(1000)
    with RawProducer(world) as raw:
        assert raw.open(ticket, [1000, 2000, 3000])[0].kind is FrameType.ACCEPT
        assert raw.open(ticket, [1000, 2000, 3000])[0].kind is FrameType.ACCEPT  # asked again: same answer
        raw.data(ticket.transfer_id, 0, 0, b"a" * 500, damage=1)
        header, _ = raw.answer()
        assert (header.kind, header.region, header.offset) == (FrameType.NACK, 0, 0)
        for _ in range(3):
            raw.data(ticket.transfer_id, 0, 0, b"a" * 500)
            assert raw.answer()[0].kind is FrameType.ACK
        assert world.status(ticket).received_bytes == 500
        raw.end(ticket.transfer_id, 6000)
        assert raw.answer()[0].region == END_REGION
        for region, offset, nbytes in ((0, 500, 500), (1, 0, 2000), (2, 0, 3000)):
            assert world.status(ticket).phase is TransferPhase.RECEIVING
            raw.data(ticket.transfer_id, region, offset, bytes(nbytes))
            raw.answer()
        assert world.status(ticket).phase is TransferPhase.COMPLETE
        raw.data(ticket.transfer_id, 0, 0, b"x" * 500)  # late and different: drained, changes nothing
        assert raw.answer()[0].kind is FrameType.ACK
        assert world.take(ticket)[0] == b"a" * 500 + bytes(500)
        raw.data(ticket.transfer_id, 0, 0, b"x" * 500)
        assert raw.answer()[0].kind is FrameType.ACK
        raw.end(ticket.transfer_id, 6000)
        assert raw.answer()[0].kind is FrameType.ACK
    assert world.receiver.stats()["checksum_failures"] == 1


@pytest.mark.parametrize(
    ("region", "offset", "nbytes", "why"),
    [
        (3, 0, 10, "names region 3"),
        (0, 991, 10, "outside region 0"),
        (0, 1 << 40, 10, "outside region 0"),
        (0, 0, 0, "outside region 0"),
        (0, 250, 10, "half in place"),
    ],
)
def test_out_of_bounds_data_fails_the_transfer(
    world: World, region: int, offset: int, nbytes: int, why: str
) -> None:
    ticket = make_ticket(1000)
    with RawProducer(world) as raw:
        raw.open(ticket, [1000, 2000, 3000])
        raw.data(ticket.transfer_id, 0, 0, bytes(255))
        raw.answer()
        raw.data(ticket.transfer_id, region, offset, bytes(nbytes))
        raw.assert_closed()
    status = world.await_phase(ticket, TransferPhase.FAILED)
    assert why in status.reason
    world.await_clean()


def test_what_is_remembered_of_a_transfer_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MAX_PIECES", 20)
    ticket = make_ticket(1000)
    with RawProducer(world) as raw:
        raw.open(ticket, [1000, 2000, 3000])
        for offset in range(0, 1000, 2):
            with suppress(OSError):
                raw.data(ticket.transfer_id, 0, offset, b"x")
        raw.assert_closed()
    status = world.await_phase(ticket, TransferPhase.FAILED)
    assert status.reason == "what has come lies in more than 20 pieces"
    for number in range(100):
        ticket = make_ticket(1000)
        world.receiver.transfers.drop(ticket.transfer_id, f"{number}" * 4096)
        said = world.receiver.transfers.state(ticket.transfer_id)
        assert said is not None
        assert len(said.reason) == 512
    world.await_clean()


def test_rogue_bytes_close_only_their_connection(world: World) -> None:
    ticket, transfer, content = world.open(1000)
    transfer.put(0, 0, BytesSource(content[0]))
    await_true(transfer.idle, 5.0, lambda: "idle")
    huge = pack_header(FrameType.DATA, ticket.transfer_id, length_bytes=(4 << 20) + 1)
    open_too_long = pack_header(FrameType.OPEN, ticket.transfer_id, length_bytes=(1 << 20) + 1)
    damaged = bytearray(pack_header(FrameType.ABORT, ticket.transfer_id))
    damaged[30] ^= 1
    deep = b'{"a":' * 10_000
    nested = pack_header(
        FrameType.ABORT, ticket.transfer_id, length_bytes=len(deep), payload_checksum=checksum(deep)
    )
    foreign = pack_header(
        FrameType.DATA, ticket.transfer_id, length_bytes=4, payload_checksum=checksum(b"evil")
    )
    frames = [
        huge,
        open_too_long,
        bytes(damaged),
        bytes(56),
        nested + deep,
        foreign + b"evil",  # another session's transfer
        pack_control(FrameType.END, ticket.transfer_id, {"total_bytes": 6000, "overlapped_bytes": 0}),
        pack_control(FrameType.END, ticket.transfer_id, {"total_bytes": -1, "overlapped_bytes": 0}),
        pack_control(FrameType.WATCH, ticket.transfer_id),
        pack_header(FrameType.ACK, version=9),
    ]
    for frame in frames:
        with RawProducer(world) as raw:
            raw.sock.sendall(frame)
            raw.assert_closed()
    with RawProducer(world) as raw:  # a foreign ABORT is ignored
        raw.sock.sendall(pack_control(FrameType.ABORT, ticket.transfer_id, {"reason": "evil"}))
    for region in (1, 2):
        transfer.put(region, 0, BytesSource(content[region]))
    transfer.end()
    await_over(transfer)
    assert world.take(ticket) == content
    await_true(lambda: world.receiver.stats()["failed_connections"] >= len(frames), 5.0, lambda: "closed")
    world.await_clean()


def test_open_is_checked(world: World) -> None:
    good = make_ticket(1000)
    sizes = [1000, 2000, 3000]
    with RawProducer(world) as raw:
        for ticket, regions, sealed, why in (
            (make_ticket(1000), [1000, 2000], None, "announced 2 regions, c/0 expects 3"),
            (
                make_ticket(1000),
                [1000, 2001, 3000],
                None,
                "announced 2001 bytes in region 1, c/0 expects 2000",
            ),
            (make_ticket(1000), [1000, 2000.0, 3000], None, "got `float` - at `$.regions[1]`"),
            (make_ticket(1000), "many", None, "offer of another form"),
            (good, sizes, good.seal(bytes(32)), "not sealed with this deployment's key"),
            (make_ticket(1000), sizes, make_ticket(1000).seal(KEY), "belongs to another transfer"),
            (make_ticket(1000, lifetime_s=-5), sizes, None, "expired"),
            (make_ticket(1000, consumer="d"), sizes, None, "ticket names consumer d"),
            (make_ticket(1000, producer="q"), sizes, None, "ticket names producer q"),
            (make_ticket(1 << 29), [1 << 29, 2 << 29, 3 << 29], None, "can never fit"),
        ):
            header, body = raw.open(ticket, regions, sealed=sealed)
            assert header.kind is FrameType.REFUSE
            assert why in body["reason"]
        # A refused id is over, for whoever waits for it too.
        status = world.receiver.transfers.state(good.transfer_id)
        assert status is not None
        assert status.phase is TransferPhase.FAILED
        assert "used already" in raw.open(good, sizes)[1]["reason"]
        good = make_ticket(1000)
        assert raw.open(good, sizes)[0].kind is FrameType.ACCEPT
        with RawProducer(world, session="other") as thief:
            assert "used already" in thief.open(good, sizes)[1]["reason"]
        world.receiver.transfers.drop(good.transfer_id, "over")
        assert raw.answer()[0].kind is FrameType.ABORT
        assert "used already" in raw.open(good, sizes)[1]["reason"]  # a replayed OPEN
        raw.data(good.transfer_id, 0, 0, bytes(1000))  # late DATA is drained and answered
        header, body = raw.answer()
        assert (header.kind, body["reason"]) == (FrameType.ABORT, "over")
    world.await_clean()


def test_given_up_before_it_came(world: World) -> None:
    """Whoever waits is told, although no OPEN has come; and one that comes late opens nothing."""
    ticket = make_ticket(1000)
    with RawProducer(world) as raw:
        raw.sock.sendall(abort(ticket.transfer_id, "the client left"))
        status = world.await_phase(ticket, TransferPhase.FAILED)
        assert status.reason == "producer aborted: the client left"
        header, body = raw.open(ticket, [1000, 2000, 3000])
        assert header.kind is FrameType.REFUSE and "used already" in body["reason"]
    world.await_clean()


def test_dropped_before_it_came(world: World) -> None:
    ticket = make_ticket(1000)
    world.receiver.transfers.drop(ticket.transfer_id, "client left early")
    transfer = world.sender.open(ticket, ticket.seal(KEY), [1000, 2000, 3000])
    await_over(transfer)
    assert "used already" in transfer.reason


def test_same_chunk_twice_at_once(world: World) -> None:
    """The older, stuck connection is closed; its half-written chunk cannot spoil the newer one."""
    ticket = make_ticket(1000)
    payload = bytes(range(250)) * 4
    with RawProducer(world) as old, RawProducer(world) as new:
        old.open(ticket, [1000, 2000, 3000])
        header = pack_header(
            FrameType.DATA, ticket.transfer_id, length_bytes=1000, payload_checksum=checksum(payload)
        )
        old.sock.sendall(header + b"z" * 400)
        await_true(
            lambda: bool(world.receiver.transfers.table._transfers[ticket.transfer_id]._arriving),
            5.0,
            lambda: "half",
        )
        new.data(ticket.transfer_id, 0, 0, payload)
        # The ACCEPT may have been lost with the old connection.
        while (kind := new.answer()[0].kind) in (FrameType.ACCEPT, FrameType.PING):
            pass
        assert kind is FrameType.ACK
        with suppress(OSError):
            old.sock.sendall(b"z" * 600)
        old.assert_closed()
        for region in (1, 2):
            new.data(ticket.transfer_id, region, 0, bytes(1000 * (region + 1)))
            new.answer()
        new.end(ticket.transfer_id, 6000)
        new.answer()
    assert world.take(ticket)[0] == payload


def test_staging_is_held_while_a_dropped_chunk_arrives(world: World) -> None:
    """Dropping must not free memory that a connection still writes into."""
    ticket = make_ticket(1000)
    with RawProducer(world) as raw:
        raw.open(ticket, [1000, 2000, 3000])
        header = pack_header(FrameType.DATA, ticket.transfer_id, length_bytes=1000)
        raw.sock.sendall(header + b"z" * 400)
        await_true(
            lambda: bool(world.receiver.transfers.table._transfers[ticket.transfer_id]._arriving),
            5.0,
            lambda: "half",
        )
        world.receiver.transfers.drop(ticket.transfer_id, "client left")
        assert world.arena.used_blocks > 0
        raw.sock.sendall(b"z" * 600)
        await_true(lambda: world.arena.used_blocks == 0, 5.0, lambda: "freed")


@pytest.mark.slow("connections wait for each other, and for time limits")
def test_stuck_inside_a_frame_is_closed(world: World) -> None:
    ticket = make_ticket(1000)
    with RawProducer(world) as raw:
        raw.open(ticket, [1000, 2000, 3000])
        raw.sock.sendall(pack_header(FrameType.DATA, ticket.transfer_id, length_bytes=1000) + b"z")
        raw.assert_closed()
    world.await_phase(ticket, TransferPhase.FAILED)
    world.await_clean()


def test_wrong_key_and_unknown_producer(world: World) -> None:
    with pytest.raises(HandshakeError, match="does not have this deployment's key"):
        RawProducer(world, key=bytes(32))
    with pytest.raises(HandshakeError, match="c/0 takes no KV from q/0"):
        RawProducer(world, name="q/0")
    # The one with the wrong key left first: the consumer could not prove itself to it.
    await_true(lambda: world.receiver.stats()["failed_connections"] == 1, 5.0, lambda: "closed")


def test_sender_with_wrong_layout_fails_at_once_and_says_why(world: World) -> None:
    other = make_sender(world.receiver.port, fingerprint=FINGERPRINT | {"dtype": "fp8"})
    world.senders.append(other)
    _, transfer, _ = world.open(1000, sender=other)
    await_over(transfer)
    assert transfer.phase is SendPhase.FAILED
    assert "KV layout differs in 'dtype': c/0 has 'bf16', p/0 has 'fp8'" in transfer.reason
    _, transfer, _ = world.open(1000, sender=other)
    await_over(transfer, 1.0)
    assert "KV layout differs" in transfer.reason


def test_a_repaired_consumer_is_found(make_world: MakeWorld) -> None:
    world = make_world()
    port = world.receiver.port
    options = replace(FAST_SENDER, rejected_backoff_max_s=0.3)
    other = make_sender(port, fingerprint=FINGERPRINT | {"dtype": "fp8"}, options=options)
    world.senders.append(other)
    await_true(lambda: bool(other.telemetry()["rejected"]), 5.0, lambda: "rejected")
    (sentence,) = other.telemetry()["rejected"].values()
    assert "KV layout differs in 'dtype': c/0 has 'bf16', p/0 has 'fp8'" in sentence
    world.receiver.close()
    # Nobody listens there now: whoever comes next may be another engine.
    await_true(lambda: not other.telemetry()["rejected"], 5.0, lambda: "forgotten")
    world.receiver = Receiver(
        name="c/0",
        key=KEY,
        host="127.0.0.1",
        port=port,
        arena=world.arena,
        layout=world.layout,
        fingerprint=FINGERPRINT | {"dtype": "fp8"},
        options=FAST_RECEIVER,
    )
    world.receiver.start()
    _, transfer, content = world.open(1000, sender=other)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    assert other.telemetry()["rejected"] == {}
    await_true(lambda: bool(world.sender.telemetry()["rejected"]), 5.0, lambda: "the other way round")


def test_sender_with_wrong_key_fails(world: World) -> None:
    other = make_sender(world.receiver.port, key=bytes(32))
    world.senders.append(other)
    _, transfer, _ = world.open(1000, sender=other)
    await_over(transfer)
    assert "does not have this deployment's key" in transfer.reason


def test_too_many_connections(make_world: MakeWorld) -> None:
    world = make_world(connections=1, receiver_options=replace(FAST_RECEIVER, max_connections=2))
    await_true(lambda: world.receiver.stats()["connections"] == 1, 5.0, lambda: "up")
    with RawProducer(world), pytest.raises((ConnectionEnded, OSError)):
        RawProducer(world)


@pytest.mark.slow("says it thousands of times")
def test_what_producers_say_without_end_pushes_out_no_transfer(make_world: MakeWorld) -> None:
    world = make_world(receiver_options=replace(FAST_RECEIVER, max_tombstones=20))
    sizes = [1000, 2000, 3000]
    ended = make_ticket(1000)
    with RawProducer(world) as raw, RawProducer(world, session="evil") as evil:
        assert raw.open(ended, sizes)[0].kind is FrameType.ACCEPT
        world.receiver.transfers.drop(ended.transfer_id, "over")
        assert raw.answer()[0].kind is FrameType.ABORT
        for number in range(200):
            ticket = make_ticket(1000)
            if number % 2:
                evil.sock.sendall(abort(ticket.transfer_id, "nothing"))
            else:
                assert evil.open(ticket, sizes, sealed="x")[0].kind is FrameType.REFUSE
        status = world.receiver.transfers.state(ended.transfer_id)
        assert status is not None and status.reason == "over"
        assert "used already" in raw.open(ended, sizes)[1]["reason"]
        assert world.receiver.stats()["tombstones"] <= 40
    world.await_clean()
