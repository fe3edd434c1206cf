"""A log of events told to several that follow it, each as far as it has come."""

import secrets
from functools import partial

import pytest

from prfaas.core.prefix.digests import decode_events
from prfaas.core.prefix.events import Event, RemovedBlocks
from prfaas.serving.transport.protocol import event_log
from prfaas.serving.transport.protocol.event_log import EventLog
from prfaas.serving.transport.protocol.requests import FollowedEvents, FollowOrder, PeerRequest
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    FrameType,
    parse_control,
    read_body,
    unpack_header,
)


class Asking:
    """One connection's questions, and what was answered."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.told: list[FollowedEvents] = []

    def ask(self, session: str = "", first: int = 0) -> None:
        self.log.answer(PeerRequest("control", bytes(16), FollowOrder(session, first), self.post))

    def post(self, frame: bytes) -> None:
        header = unpack_header(frame[:HEADER_BYTES])
        assert header.kind is FrameType.EVENTS
        self.told.append(read_body(FollowedEvents, parse_control(header, frame[HEADER_BYTES:])))

    def numbers(self) -> list[int]:
        """The hash that each batch of the last answer removes."""
        return [decode_events(batch)[0].hashes[0] for batch in self.told[-1].batches]  # type: ignore[union-attr]


def gone(number: int) -> list[Event]:
    return [RemovedBlocks([number])]


@pytest.fixture
def log() -> EventLog:
    made = EventLog(1, partial(secrets.token_hex, 8))
    for number in range(3):
        made.add(gone(number))
    return made


def end(answer: FollowedEvents) -> int:
    return answer.first + len(answer.batches)


def test_who_is_up_to_date_waits_for_more(log: EventLog) -> None:
    one, other = Asking(log), Asking(log)
    for each in (one, other):
        each.ask()
        assert each.numbers() == [0, 1, 2]
        each.ask(each.told[0].session, end(each.told[0]))
    # The newest question of a connection counts.
    one.ask(one.told[0].session, end(one.told[0]))
    assert len(one.told) == len(other.told) == 1
    log.add(gone(3))
    assert [len(each.told) for each in (one, other)] == [2, 2]
    assert one.numbers() == other.numbers() == [3] and one.told[1].first == end(one.told[0])


def test_a_new_session_is_told_to_who_waits(log: EventLog) -> None:
    one = Asking(log)
    one.ask()
    one.ask(one.told[0].session, end(one.told[0]))
    log.begin("restart")
    assert (one.told[1].batches, one.told[1].reason) == ([], "restart")
    assert one.told[1].session != one.told[0].session


@pytest.mark.parametrize("missed", [0, 1, 2])
def test_a_snapshot_ends_the_session_of_who_lags_and_of_nobody_else(log: EventLog, missed: int) -> None:
    one = Asking(log)
    one.ask()
    session, reached = one.told[0].session, end(one.told[0]) - missed
    log.replace([gone(10), gone(11)])
    one.ask(session, reached)
    if missed:
        assert one.numbers() == [10, 11] and one.told[-1].session != session
        assert one.told[-1].reason == "gap"
    else:
        assert len(one.told) == 1
    log.add(gone(12))
    if not missed:
        assert one.numbers() == [12] and (one.told[-1].session, one.told[-1].first) == (session, reached)


def test_what_is_no_longer_kept_is_not_told(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 2)
    log.begin("again")
    early = Asking(log)
    log.add(gone(0))
    early.ask()
    for number in range(1, 5):
        log.add(gone(number))
    order = FollowOrder(early.told[0].session, end(early.told[0]))
    assert log.is_behind(order)
    early.ask(order.session, order.first)
    assert early.numbers() == [3, 4] and early.told[1].first > order.first


def test_an_answer_is_bounded(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_ANSWER_BYTES", 1)
    one = Asking(log)
    one.ask()
    for number in range(3):
        assert one.numbers() == [number]
        one.ask(one.told[-1].session, end(one.told[-1]))
    assert len(one.told) == 3
