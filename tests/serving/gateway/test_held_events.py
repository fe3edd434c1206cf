"""Held events: their order is kept, none is lost, and a reader sees no pause that was announced."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serving.jumping_loop import JumpingLoop

from prfaas.serving.gateway.held_events import STRETCH, HeldEvents

STEP_S = 0.01


class Client:
    """Has what was written, and when."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.times_s: list[float] = []
        self.takes_s = 0.0
        self.leaves_after: int | None = None

    async def write(self, event: bytes, /) -> None:
        if self.leaves_after is not None and len(self.events) >= self.leaves_after:
            raise ConnectionResetError("the client has left")
        self.events.append(event)
        self.times_s.append(asyncio.get_running_loop().time())
        # A slow client's events have left before it has taken them.
        await asyncio.sleep(self.takes_s)

    def gaps_s(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.times_s, self.times_s[1:], strict=False)]


def in_time(work: Callable[[HeldEvents, Client], Awaitable[None]]) -> Client:
    client = Client()

    async def body() -> None:
        events = HeldEvents(client, asyncio.get_running_loop().time)
        try:
            await work(events, client)
        finally:
            await events.close()
        assert len(asyncio.all_tasks()) == 1

    loop = JumpingLoop()
    try:
        loop.run_until_complete(body())
    finally:
        loop.close()
    return client


def number(index: int) -> bytes:
    return b"%d" % index


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.floats(0, 0.05)),
            st.tuples(st.just("write"), st.floats(0, 0.05)),
            st.tuples(st.just("hold"), st.floats(0, 0.5)),
            st.tuples(st.just("wait"), st.floats(0, 0.3)),
        ),
        max_size=40,
    ),
    st.sampled_from([0.0, 0.02]),
)
def test_order_is_kept_and_nothing_is_lost(deeds: list[tuple[str, float]], takes_s: float) -> None:
    async def work(events: HeldEvents, client: Client) -> None:
        client.takes_s = takes_s
        for index, (deed, seconds) in enumerate(deeds):
            if deed == "add":
                await events.add(number(index))
            elif deed == "write":
                await events.write(number(index))
                assert client.events[-1] == number(index)
            elif deed == "hold":
                events.hold(seconds)
            await asyncio.sleep(seconds)
        await events.release()

    given = [number(index) for index, (deed, _) in enumerate(deeds) if deed in ("add", "write")]
    assert in_time(work).events == given


@given(st.integers(20, 60), st.floats(0.01, 0.3))
def test_a_pause_that_was_announced_is_not_seen(before: int, pause_s: float) -> None:
    """Nor is it seen while events are being held back for it. Without `hold` the longest gap is the pause."""

    async def work(events: HeldEvents, client: Client) -> None:
        for index in range(before):
            await events.add(number(index))
            await asyncio.sleep(STEP_S)
        events.hold(pause_s)
        index, filling = before, asyncio.ensure_future(events.filled())
        while not filling.done():
            await events.add(number(index))
            index += 1
            await asyncio.sleep(STEP_S)
        # Held back is no longer than that takes.
        assert (index - before) * STEP_S <= 4 * pause_s + 8 * STEP_S
        await asyncio.sleep(pause_s - STEP_S)
        for after in range(10):
            await events.write(number(index + after))
            await asyncio.sleep(STEP_S)
        assert events.pause_s == pytest.approx(pause_s, abs=2 * STEP_S)

    client = in_time(work)
    assert max(client.gaps_s()) <= STRETCH * STEP_S * 1.001


def test_nobody_waits_for_events_that_do_not_come() -> None:
    async def work(events: HeldEvents, client: Client) -> None:
        loop = asyncio.get_running_loop()
        await events.add(b"1")
        events.hold(0.1)
        begun_s = loop.time()
        await events.filled()
        assert 0.1 <= loop.time() - begun_s <= 1
        waiting = asyncio.ensure_future(events.filled())
        await asyncio.sleep(0)
        events.end_filling()
        await waiting
        assert loop.time() - begun_s <= 1

    in_time(work)


def test_who_writes_to_a_client_that_has_left_is_told() -> None:
    async def work(events: HeldEvents, client: Client) -> None:
        client.leaves_after = 2
        for index in range(2):
            await events.add(number(index))
            await asyncio.sleep(STEP_S)
        events.hold(0.1)
        await events.add(b"2")
        await asyncio.sleep(1)
        with pytest.raises(ConnectionResetError):
            await events.add(b"3")
        with pytest.raises(ConnectionResetError):
            await events.write(b"4")

    assert in_time(work).events == [b"0", b"1"]


def test_closing_drops_what_is_held() -> None:
    async def work(events: HeldEvents, client: Client) -> None:
        for index in range(3):
            await events.add(number(index))
            await asyncio.sleep(STEP_S)
        events.hold(1.0)
        for index in range(3, 9):
            await events.add(number(index))

    assert in_time(work).events == [b"0", b"1", b"2"]
