"""Studies: simulations to run on several processes, and the section that describes their outcomes."""

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.workload.traffic import Traffic
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import ScenarioOptions
from prfaas.lab.simulator.simulation import simulate
from prfaas.lab.studies.context import StudyContext

Key = tuple[str | float, ...]


class LostProcessError(Exception):
    """A process that simulated is gone; the text says with what."""


class StudyRun(Protocol):
    """One simulation of a study, as it is sent to another process."""

    @property
    def key(self) -> Key:
        """The run's name within its study."""

    @property
    def expected_requests(self) -> float:
        """About how many requests it has."""

    def outcome(self) -> "StudyOutcome":
        """Simulate it; the same run gives the same numbers and course wherever that is done."""


@dataclass(frozen=True, slots=True)
class Run(ScenarioOptions):
    """A deployment under load, and the options of its scenario."""

    key: Key
    """The run's name within its study."""
    planned: PlannedDeployment
    traffic: Traffic
    requests: int
    """How many arrive, where `duration_s` is None."""
    seed: int
    duration_s: float | None = None
    """Simulated seconds of arrivals, in place of `requests`."""
    warmup_share: float = 0.1

    @property
    def expected_requests(self) -> float:
        """Requests that arrive, about."""
        return self.requests if self.duration_s is None else self.duration_s * self.traffic.mean_per_s

    def outcome(self) -> "StudyOutcome":
        """Simulate it: the same run gives the same numbers wherever that is done."""
        started_s = time.perf_counter()
        result = simulate(
            self.scenario(self.planned),
            # Every policy and variant of a seed meets the same requests.
            self.traffic.chunks(np.random.default_rng(self.seed)),
            seed=self.seed,
            requests=None if self.duration_s is not None else self.requests,
            duration_s=self.duration_s,
            warmup_share=self.warmup_share,
        )
        return StudyOutcome(self.numbers(result), time.perf_counter() - started_s)

    def numbers(self, result: Result) -> dict[str, Any]:
        """What the study knows of the run: the simulator's summary. Studies that ask for more add it here."""
        return result.summary()


Verdict = Literal["stable", "grows", "too short to say"]
"""Whether a run could have gone on without end, or its queues grow for as long as requests come."""


@dataclass(frozen=True, slots=True)
class StudyOutcome:
    """The outcome of one run."""

    numbers: Mapping[str, Any]
    """What its `numbers` say: plain numbers, texts, lists and dicts."""
    wall_s: float
    """How long the simulation itself took."""

    def number(self, name: str) -> float:
        """A field of the summary; NaN where there is none."""
        value = self.numbers[name]
        return float("nan") if value is None else float(value)

    @property
    def verdict(self) -> Verdict:
        """The simulator's verdict on its queues."""
        stable = self.numbers["stable"]
        return "too short to say" if stable is None else "stable" if stable else "grows"

    @property
    def is_stable(self) -> bool:
        """True if it could have gone on without end, as far as a run of its length can say."""
        return self.verdict == "stable"


Outcomes = Mapping[Key, StudyOutcome]


@dataclass(frozen=True, slots=True)
class StudyTable:
    """A table of text."""

    columns: Sequence[str]
    """Titles; the first column names the row."""
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class StudyFigure:
    """A drawing beside the page."""

    name: str
    """Of its file, without the ending."""
    svg: str
    """The whole file."""
    caption: str


@dataclass(frozen=True, slots=True)
class StudySection:
    """A study's part of the page."""

    question: str
    setup: str
    """What was simulated."""
    findings: Sequence[str]
    """Sentences of one paragraph."""
    tables: Mapping[str, StudyTable]
    """By title, in their order."""
    figures: Sequence[StudyFigure] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A question about the scheduler that simulations answer."""

    name: str
    title: str
    runs: Callable[[StudyContext], Sequence[StudyRun]]
    """What to simulate."""
    describe: Callable[[StudyContext, Outcomes], StudySection]
    """What it means, from the outcomes by key alone."""


def run_all(
    runs: Sequence[StudyRun], *, jobs: int, on_done: Callable[[StudyRun, StudyOutcome], None] | None = None
) -> list[StudyOutcome]:
    """An outcome per run, in their order and the same for any number of `jobs`.

    Runs that differ in nothing but their keys are simulated once. `on_done` is called with each as it ends, in any
    order. An exception of a run ends the others and passes through. What a process that ended by itself had not
    simulated is simulated again, one at a time.

    Raises:
        LostProcessError: a process ended by itself with one run alone.
    """
    twins = _twins(runs)
    found: dict[int, StudyOutcome] = {}

    def ended(first: int, outcome: StudyOutcome) -> None:
        for place in twins[first]:
            # The time was taken once.
            found[place] = outcome if place == first else replace(outcome, wall_s=0.0)
            if on_done is not None:
                on_done(runs[place], found[place])

    if jobs == 1:
        for first in twins:
            ended(first, runs[first].outcome())
        return [found[index] for index in range(len(runs))]
    # Long ones first, so that all end at about the same time.
    left = sorted(twins, key=lambda index: -runs[index].expected_requests)
    for processes in (jobs, 1):
        left = _on_processes(runs, left, processes, ended)
        if not left:
            return [found[index] for index in range(len(runs))]
    raise LostProcessError(
        f"a process ended by itself while it simulated {runs[left[0]].key}, also when it was the only one; "
        "most often the machine has too little memory for it"
    )


def _on_processes(
    runs: Sequence[StudyRun],
    places: Sequence[int],
    processes: int,
    ended: Callable[[int, StudyOutcome], None],
) -> list[int]:
    """Simulate the runs at `places`, and return those whose process was lost, in their order.

    When one process ends by itself, as the kernel ends one for want of memory, the pool loses them all.
    """
    # Not forked: a caller that shows progress may have threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=processes, mp_context=context, initializer=_leave_with_parent)
    lost = set()
    try:
        numbers = {pool.submit(_outcome_of, runs[place]): place for place in places}
        for future in as_completed(numbers):
            try:
                ended(numbers[future], future.result())
            except BrokenProcessPool:
                lost.add(numbers[future])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [place for place in places if place in lost]


def _twins(runs: Sequence[StudyRun]) -> dict[int, list[int]]:
    """By the place of the first of equal runs, the places of all of them."""
    firsts: dict[bytes, int] = {}
    twins: dict[int, list[int]] = {}
    for place, run in enumerate(runs):
        first = firsts.setdefault(_content(run), place)
        twins.setdefault(first, []).append(place)
    return twins


def _content(run: StudyRun) -> bytes:
    """Equal for runs that differ in nothing but their keys; if equal runs differ here, both are simulated."""
    if is_dataclass(run) and any(each.name == "key" for each in fields(run)):
        return pickle.dumps(replace(run, key=()))
    return pickle.dumps(run)


def _outcome_of(run: StudyRun) -> StudyOutcome:
    return run.outcome()


def _leave_with_parent() -> None:
    """A parent that is killed can't tell its processes to stop: they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_studies(
    studies: Sequence[Study],
    context: StudyContext,
    *,
    jobs: int = 1,
    on_begin: Callable[[Sequence[StudyRun]], None] | None = None,
    on_done: Callable[[StudyRun, StudyOutcome], None] | None = None,
) -> dict[str, Outcomes]:
    """Simulate all runs of several studies, which share the processes.

    Args:
        studies: What to carry out.
        context: What they share.
        jobs: Processes; the outcomes don't depend on it.
        on_begin: Called with all runs before the first.
        on_done: Called with each as it ends, in any order.

    Returns:
        The outcomes of every study by its name.
    """
    runs = {study.name: study.runs(context) for study in studies}
    everything = [run for each in runs.values() for run in each]
    if on_begin is not None:
        on_begin(everything)
    found = iter(run_all(everything, jobs=jobs, on_done=on_done))
    return {name: {run.key: next(found) for run in each} for name, each in runs.items()}
