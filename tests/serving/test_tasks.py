"""What runs together ends together, and a cancellation that comes with a failure is not lost."""

import asyncio

import pytest

from prfaas.core.backoff import Backoff
from prfaas.serving import tasks
from prfaas.serving.tasks import BackgroundTasks, LoopFailures, run_together


class BrokenError(Exception):
    pass


async def after(steps: int, value: int | None = None) -> int:
    for _ in range(steps):
        await asyncio.sleep(0)
    if value is None:
        raise BrokenError(steps)
    return value


@pytest.mark.parametrize("cancelled_after", range(8))
@pytest.mark.parametrize("fails_after", range(8))
def test_who_handles_failures_is_cancelled_at_any_moment(cancelled_after: int, fails_after: int) -> None:
    async def work() -> None:
        while True:
            try:
                await run_together(after(fails_after), asyncio.sleep(60.0))
            except BrokenError:
                await asyncio.sleep(60.0)

    async def main() -> None:
        task = asyncio.create_task(work())
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=10.0)
        assert task.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_all_results_come_in_the_order_of_the_works() -> None:
    assert asyncio.run(run_together(after(3, 30), after(0, 0), after(1, 10))) == [30, 0, 10]


def test_the_first_failure_ends_the_others_and_is_raised_as_it_is() -> None:
    async def main() -> None:
        with pytest.raises(BrokenError, match="2"):
            await run_together(asyncio.sleep(60.0), after(5), after(2), after(0, 1))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_loop_that_raises_goes_on_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_BACKOFF", Backoff(0.001, 10.0))
    failures, rounds = LoopFailures(), 0

    async def loop() -> None:
        nonlocal rounds
        rounds += 1
        await asyncio.sleep(0)
        if rounds < 4:
            raise BrokenError(rounds)
        if rounds == 4:
            # Something that it waits for is cancelled, and not the loop.
            waited = asyncio.ensure_future(asyncio.sleep(60.0))
            waited.cancel()
            await waited
        await asyncio.sleep(60.0)

    async def main() -> None:
        task = asyncio.create_task(failures.keep("a loop", loop))
        async with asyncio.timeout(30.0):
            while rounds < 5:
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=10.0)
        assert task.cancelled()

    asyncio.run(main())
    assert failures.counts == {"a loop": 4}
    # One line for each place in the code that failed.
    assert [record.getMessage() for record in caplog.records] == ["a loop failed, and goes on"] * 2
    assert caplog.records[0].exc_info is not None


def test_a_loop_that_has_ended_is_not_begun_again() -> None:
    async def main() -> None:
        await LoopFailures().keep("a loop", lambda: asyncio.sleep(0))

    asyncio.run(asyncio.wait_for(main(), 30.0))


def test_one_member_of_a_round_is_spared(caplog: pytest.LogCaptureFixture) -> None:
    failures, served = LoopFailures(), []
    for member in ("a", "b", "c"):
        with failures.spared("a loop", member):
            if member == "b":
                raise BrokenError(member)
            served.append(member)
    assert served == ["a", "c"]
    assert failures.counts == {"a loop": 1}
    assert caplog.messages == ["a loop failed for b, and goes on"]


def test_a_failure_in_the_background_is_logged_when_it_happens(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise BrokenError

    async def main() -> None:
        background = BackgroundTasks()
        background.start(fail())
        await background.finish()
        await asyncio.sleep(0)
        assert len(background) == 0

    asyncio.run(main())
    assert caplog.messages == ["a task in the background failed, and goes on"]
