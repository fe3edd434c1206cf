"""What runs together ends together, and a cancellation that comes with a failure is not lost."""

import asyncio

import pytest

from prfaas.serving.tasks import run_together


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
