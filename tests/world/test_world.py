"""Some hundred schedules of faults, and the world itself: `make swarm` runs as many as one likes."""

import pytest

from prfaas.serving.transport.protocol.handshake import ROLE_PRODUCER, PeerIdentity
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


def test_a_stranger_that_opens_another_s_transfer_is_refused_and_costs_it_nothing() -> None:
    ticket = Ticket.issue(
        transfer_id=bytes(range(16)),
        producer="p",
        consumer="c",
        num_tokens=8,
        skip_tokens=0,
        prompt_digest=bytes(16),
        lifetime_s=60.0,
        now_s=0.0,
    )
    body = {"ticket": ticket.seal(KEY), "regions": [8]}
    opening = Header(FrameType.OPEN, ticket.transfer_id, 0, 0, 0, 0)
    table = TransferTable(
        name="c/0", key=KEY, arena=CountedStaging(4), layout=Layout(1, has_checkpoints=False), options=OPTIONS
    )
    for name, answer in (("q/0", FrameType.REFUSE), ("p/0", FrameType.ACCEPT)):
        heard = Heard()
        session = table.connected(PeerIdentity(name, ROLE_PRODUCER, "s"), heard)
        table.take_frame(session, heard, opening, body, now_s=1.0, unix_s=1.0)
        assert heard.kinds == [answer]
