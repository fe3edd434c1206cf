"""Some hundred schedules of faults, and the world itself: `make swarm` runs as many as one likes."""

import pytest

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
