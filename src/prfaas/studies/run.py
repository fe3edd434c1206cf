"""One simulation of a study, as something that can be sent to another process, and what comes back."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prfaas.deployment import PlannedDeployment
from prfaas.simulator import CacheOptions, CapacityProcess, Result, scenario_of, simulate
from prfaas.workload.traffic import Traffic

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
