"""A day whose mix of requests changes: long answers at night, long prompts at noon."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from prfaas.core.planner import PlanProblem, best_operation
from prfaas.core.workload import Empirical, Workload, fixed
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.traffic import IndependentTraffic, RequestChunk, Traffic
from prfaas.lab.studies.setup import Setting, mixed, stretched

DAY_S = 14_400.0
"""A day in simulated seconds: six times as quick as a real one."""

NIGHT_PROMPTS, NIGHT_ANSWERS = 0.6, 1.5
NOON_PROMPTS, NOON_ANSWERS = 1.0, 0.5
"""Of the file's lengths of prompts and mean answer."""

_HOURS = 24


@dataclass(frozen=True, slots=True)
class DayOfMixes(Traffic):
    """Poisson arrivals; at time t a request is noon's with probability (1 − cos(2π t / `day_s`)) / 2, else night's."""

    rate_per_s: float
    night: Empirical
    noon: Empirical
    night_output_tokens: float
    noon_output_tokens: float
    day_s: float = DAY_S

    @property
    def mean_per_s(self) -> float:
        return self.rate_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; without end."""
        nights, noons, choice = rng.spawn(3)
        # The same times for both kinds, so that each request's place in the day is known before its kind.
        arrivals = Poisson(self.rate_per_s)
        night = IndependentTraffic(arrivals, self.night, fixed(self.night_output_tokens)).chunks(nights)
        noon = IndependentTraffic(arrivals, self.noon, fixed(self.noon_output_tokens)).chunks(noons)
        for one, other in zip(night, noon, strict=False):
            is_noon = choice.random(len(one)) < noon_share(one.arrival_s / self.day_s)
            inputs = np.where(is_noon, other.input_tokens, one.input_tokens)
            outputs = np.where(is_noon, other.output_tokens, one.output_tokens)
            # No two prompts begin alike, so blocks are of no use to any cache.
            empty = np.zeros(0, dtype=np.int64)
            starts = np.zeros(len(one) + 1, dtype=np.int64)
            yield RequestChunk(one.arrival_s, inputs, outputs, empty, starts, one.block_tokens)


@dataclass(frozen=True, slots=True)
class DayPlan:
    """`rate_rps` is `load` times the least that the best roles of any hour can carry (`hourly_rps`), `prefill` are
    those roles, `mean_prefill` the best for the mean of the day, at whose `threshold_tokens` it starts.
    """

    traffic: DayOfMixes
    rate_rps: float
    hourly_rps: tuple[float, ...]
    prefill: tuple[int, ...]
    mean_prefill: int
    threshold_tokens: float


def day_plan(setting: Setting, load: float) -> DayPlan:
    """A day for a deployment, which some roles can carry at every hour."""
    low, high = setting.range_tokens
    lengths = setting.problem.workload.uncached
    night = stretched(lengths, NIGHT_PROMPTS, low, high)
    noon = stretched(lengths, NOON_PROMPTS, low, high)
    output = setting.problem.workload.output_tokens
    night_output, noon_output = max(output * NIGHT_ANSWERS, 1.0), max(output * NOON_ANSWERS, 1.0)

    def problem(share: float) -> PlanProblem:
        answers = night_output * (1 - share) + noon_output * share
        return replace(setting.problem, workload=Workload(mixed(night, noon, share), answers))

    points = [best_operation(problem(float(noon_share(hour / _HOURS)))) for hour in range(_HOURS)]
    rate = load * min(point.lambda_max for point in points)
    mean = best_operation(problem(0.5))
    count = setting.problem.pd[0].instances
    threshold = math.inf if mean.threshold_tokens is None else mean.threshold_tokens
    return DayPlan(
        traffic=DayOfMixes(rate, night, noon, round(night_output), round(noon_output)),
        rate_rps=rate,
        hourly_rps=tuple(point.lambda_max for point in points),
        prefill=tuple(point.n_prefill for point in points),
        mean_prefill=min(max(mean.n_prefill, 1), count - 1),
        threshold_tokens=threshold,
    )


def noon_share(
    days: "np.ndarray[tuple[int], np.dtype[np.float64]] | float",
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The part of requests that are noon's, `days` after midnight."""
    return np.asarray((1 - np.cos(2 * np.pi * np.asarray(days))) / 2)
