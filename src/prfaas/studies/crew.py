"""Many runs on several processes."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from prfaas.studies.run import Outcome, Run, carried_out


def carry_out(
    runs: Sequence[Run], *, jobs: int, on_done: Callable[[Run, Outcome], None] | None = None
) -> list[Outcome]:
    """An outcome per run, in their order and the same for any number of `jobs`.

    `on_done` is told of each as it ends, in any order. An exception of a run ends the others and passes through.
    """
    if jobs == 1:
        return [_told(run, carried_out(run), on_done) for run in runs]
    found: dict[int, Outcome] = {}
    # Not forked: whoever shows progress may have threads.
    context = multiprocessing.get_context("spawn")
    crew = ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_leave_with_parent)
    try:
        # Long ones first, so that all end at about the same time.
        order = sorted(range(len(runs)), key=lambda index: -expected_requests(runs[index]))
        numbers = {crew.submit(carried_out, runs[index]): index for index in order}
        for future in as_completed(numbers):
            index = numbers[future]
            found[index] = _told(runs[index], future.result(), on_done)
    finally:
        crew.shutdown(wait=True, cancel_futures=True)
    return [found[index] for index in range(len(runs))]


def expected_requests(run: Run) -> float:
    """About how many requests a run has."""
    return run.requests if run.duration_s is None else run.duration_s * run.traffic.mean_per_s


def _leave_with_parent() -> None:
    """A parent that is killed can't tell its processes to stop: they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _told(run: Run, outcome: Outcome, on_done: Callable[[Run, Outcome], None] | None) -> Outcome:
    if on_done is not None:
        on_done(run, outcome)
    return outcome
