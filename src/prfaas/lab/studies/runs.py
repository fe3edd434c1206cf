"""One simulation of a study, as something that can be sent to another process, and what comes back.

Many runs on several processes.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.workload.traffic import Traffic
from prfaas.lab.simulator import CacheOptions, CapacityProcess, Result, scenario_of, simulate

Key = tuple[str | float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What to simulate. `key` is the run's name within its study.

    Requests end after `requests`, or with `duration_s` if that is given. `roles` and `threshold_tokens`: None takes
    the planner's for `planned`. `course_parts`: into how many equal parts of the counted time `Outcome.course` is cut.
    """

    key: Key
    planned: PlannedDeployment
    traffic: Traffic
    requests: int
    seed: int
    policy: str = "paper"
    params: Mapping[str, object] = field(default_factory=dict)
    roles: Mapping[str, int] | None = None
    threshold_tokens: float | None = None
    caches: CacheOptions | None = None
    links: Mapping[str, CapacityProcess] = field(default_factory=dict)
    adapts: bool = True
    allocation: bool = True
    duration_s: float | None = None
    warmup_share: float = 0.1
    course_parts: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`numbers`: the simulator's summary. `course`: by name a value per part of the counted time: `at_s` (its middle),
    `ttft_s` (mean of what arrived then), and thresholds and roles. `wall_s` says nothing about the deployment.
    """

    numbers: Mapping[str, Any]
    course: Mapping[str, list[float | None]]
    wall_s: float

    def number(self, name: str) -> float:
        """A field of the summary; NaN where there is none."""
        value = self.numbers[name]
        return float("nan") if value is None else float(value)

    @property
    def is_stable(self) -> bool:
        """Whether it could have gone on for ever."""
        return bool(self.numbers["stable"])


def carried_out(run: Run) -> Outcome:
    """Simulate a run; the same run gives the same numbers and course wherever that is done."""
    started_s = time.perf_counter()
    scenario = scenario_of(
        run.planned,
        policy=run.policy,
        params=run.params,
        roles=run.roles,
        threshold_tokens=run.threshold_tokens,
        adapts=run.adapts,
        allocation=run.allocation,
        caches=run.caches,
        links=run.links,
    )
    result = simulate(
        scenario,
        # Every policy and variant of a seed meets the same requests.
        run.traffic.chunks(np.random.default_rng(run.seed)),
        seed=run.seed,
        requests=None if run.duration_s is not None else run.requests,
        duration_s=run.duration_s,
        warmup_share=run.warmup_share,
    )
    course = _course(result, run.course_parts) if run.course_parts else {}
    return Outcome(result.summary(), course, time.perf_counter() - started_s)


def _course(result: Result, parts: int) -> dict[str, list[float | None]]:
    edges = np.linspace(result.start_s, result.end_s, parts + 1)
    groups = np.split(result.ttft_s, np.searchsorted(result.arrival_s, edges))[1:-1]
    course = {
        "at_s": _plain((edges[:-1] + edges[1:]) / 2 - result.start_s),
        "ttft_s": _plain(np.array([group.mean() if len(group) else np.nan for group in groups])),
    }
    time_s = result.series["time_s"]
    latest = np.clip(np.searchsorted(time_s, (edges[:-1] + edges[1:]) / 2, side="right") - 1, 0, None)
    for name, values in result.series.items():
        if name.startswith(("threshold_tokens_", "prefill_instances_")):
            course[name] = _plain(values[latest])
    return course


def _plain(values: "np.ndarray[Any, np.dtype[np.float64]]") -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


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
