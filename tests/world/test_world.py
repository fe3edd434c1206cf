"""Some hundred schedules of faults, and the world itself: `make swarm` runs as many as one likes."""

import pytest

from prfaas.serving.transport.protocol.handshake import ROLE_PRODUCER, PeerIdentity
from prfaas.serving.transport.protocol.incoming import ProducerFrame
from prfaas.serving.transport.protocol.ticket import Ticket
from prfaas.serving.transport.protocol.transfer_table import TransferTable
from prfaas.serving.transport.protocol.wire import HEADER_BYTES, FrameType, Header, unpack_header

from .consumer import KEY, OPTIONS, CountedStaging, Layout
from .network import Connection, Direction, Events
from .swarm import IMPOSSIBLE, PAIRS, run
from .world import World

SEEDS, PART = 1200, 100


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_no_schedule_of_faults_breaks_what_must_hold(first: int) -> None:
    violations, _, _ = run(first, PART)
    assert violations == []


def test_frames_come_in_nearly_every_state() -> None:
    _, coverage, _ = run(0, 150)
    assert len(PAIRS - IMPOSSIBLE - coverage.keys()) <= 10


def test_a_seed_is_a_schedule() -> None:
    def log(seed: int) -> tuple[list[str], int]:
        world = World(seed)
        world.run()
        return world.log, world.events.happened

    assert log(7) == log(7) != log(8)


def test_what_is_sent_arrives_in_order_and_in_time() -> None:
    events = Events()
    way, arrived = Direction(events, bytes_per_s=10.0, delay_s=1.0), []
    for number in range(3):
        way.send(10, lambda n=number: arrived.append((n, events.now_s)))
    while events.step(100.0):
        pass
    assert arrived == [(0, 2.0), (1, 3.0), (2, 4.0)]


@pytest.mark.parametrize("how", ["shut", "reset", "dead"])
def test_an_end_of_a_connection_is_heard_of_by_whom_the_path_lets(how: str) -> None:
    events = Events()
    connection, heard = Connection(events, 1e3, 0.1), []
    connection.client_ended = lambda: heard.append("client")
    connection.server_ended = lambda: heard.append("server")
    connection.to_server.send(1, lambda: heard.append("frame"))
    if how == "reset":
        connection.reset()
    else:
        if how == "dead":
            connection.freeze(1e9)
        connection.shut(by_client=True)
    while events.step(100.0):
        pass
    assert (
        heard
        == {
            "shut": ["client", "frame", "server"],
            "reset": ["client", "server"],
            "dead": ["client"],
        }[how]
    )


class Heard:
    """A connection that keeps what is said."""

    def __init__(self) -> None:
        self.kinds: list[FrameType] = []

    def post(self, frame: bytes) -> None:
        self.kinds.append(unpack_header(frame[:HEADER_BYTES]).kind)

    def shut(self) -> None:
        raise AssertionError("nobody is shut out here")


class Table:
    """A consumer's table, and one producer; the clock is that of the test."""

    def __init__(self, blocks: int) -> None:
        self.table = TransferTable(
            name="c/0",
            key=KEY,
            arena=CountedStaging(blocks),
            layout=Layout(1, has_checkpoints=False),
            options=OPTIONS,
        )

    def open(self, number: int, tokens: int, now_s: float, producer: str = "p/0") -> list[FrameType]:
        """What it answers to an OPEN of the producer `p`'s ticket, as somebody sends it."""
        ticket = Ticket(
            transfer_id=number.to_bytes(16),
            producer="p",
            consumer="c",
            num_tokens=tokens,
            skip_tokens=0,
            prompt_digest=bytes(16),
            expires_at_s=60.0,
        )
        heard = Heard()
        session = self.table.connected(PeerIdentity(producer, ROLE_PRODUCER, "s"), heard)
        self.table.take_frame(
            ProducerFrame(
                session=session,
                connection=heard,
                header=Header(FrameType.OPEN, ticket.transfer_id, 0, 0, 0, 0),
                body={"ticket": ticket.seal(KEY), "regions": [tokens]},
                now_s=now_s,
                unix_s=1.0,
            )
        )
        return heard.kinds

    def drop(self, number: int, now_s: float) -> None:
        self.table.drop(number.to_bytes(16), "enough", now_s)

    def phases(self, *numbers: int) -> list[str]:
        found = [self.table.state(number.to_bytes(16)) for number in numbers]
        return [status.phase.value for status in found if status is not None]


def test_a_stranger_that_opens_another_s_transfer_is_refused_and_costs_it_nothing() -> None:
    consumer = Table(4)
    assert consumer.open(1, 8, 1.0, "q/0") == [FrameType.REFUSE]
    assert consumer.open(1, 8, 1.0) == [FrameType.ACCEPT]


def test_who_fits_may_pass_a_large_one_for_a_while() -> None:
    consumer = Table(4)
    for number, tokens in ((1, 3 * 64), (2, 2 * 64), (3, 64)):
        consumer.open(number, tokens, 10.0)
    assert consumer.phases(1, 2, 3) == ["receiving", "waiting", "receiving"]
    # The large one has waited for long: the next that would fit waits behind it.
    consumer.drop(3, 10.6)
    consumer.open(4, 64, 10.6)
    assert consumer.phases(2, 4) == ["waiting", "waiting"]
    consumer.drop(1, 10.7)
    assert consumer.phases(2, 4) == ["receiving", "receiving"]
