"""Seconds in which work was open are counted once, however much of it there was."""

from prfaas.serving.pool.ssd_tier import BusyClock


def test_work_that_overlaps_is_counted_once() -> None:
    now_s = 100.0
    clock = BusyClock(lambda: now_s)
    clock.begin()
    now_s = 101.0
    clock.begin()
    now_s = 102.0
    clock.end(10)
    assert (clock.busy_s, clock.done_bytes) == (0.0, 10)
    now_s = 103.0
    clock.end(0)
    assert (clock.busy_s, clock.done_bytes) == (3.0, 10)
    now_s = 110.0
    clock.begin()
    now_s = 110.5
    clock.end(5)
    assert (clock.busy_s, clock.done_bytes) == (3.5, 15)
