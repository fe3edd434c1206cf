"""The TTFT of roles at a given rate, prefill and decode queues included."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prfaas.core.arrays import np
from prfaas.core.planner.network import network_work
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.planner.role_works import work_with_prefill
from prfaas.core.planner.ttft import NO_WAIT, DecodeQueue, PrefillPoolLoad, StageWork, Wait, erlang_c, wait_of


@dataclass(frozen=True, slots=True)
class QueueingModel:
    """Assumptions about the queues."""

    is_shortest_first: bool = False
    """Short prefills go before long ones; False: first come, first served."""
    answer_variation: float = 1.0
    """The squared coefficient of variation of the lengths of answers; 1: exponential."""


@dataclass(frozen=True, slots=True)
class RoleLatency:
    """The mean TTFT that is predicted for some roles. Infinite waits: some stage has more work than time."""

    prefill: Mapping[str, int]
    """Prefill instances by PD cluster."""
    requests_per_s: float
    """The rate of arrivals."""
    utilisation: float
    """Of the fullest prefill pool (by E[T(L)]), link or decode side."""
    prefill_s: float
    """Mean service time of a prefill."""
    prefill_wait_s: float
    """Mean wait for a prefill instance."""
    decode_wait_s: float
    """Mean wait for a decode slot."""

    @property
    def ttft_s(self) -> float:
        """The mean."""
        return self.prefill_s + self.prefill_wait_s + self.decode_wait_s


def latency_with_roles(
    problem: PlanProblem, prefill: Mapping[str, int], requests_per_s: float, queues: QueueingModel
) -> RoleLatency:
    """The mean TTFT if `prefill[cluster]` instances of each PD cluster prefill, with the best thresholds for them.

    Every prefill pool is M/G/k and every PD cluster's decode slots are M/G/c: the wait of M/M/k (Erlang C) times
    (1 + C²) / 2 (Allen, Probability, Statistics and Queueing Theory, 1990: the Allen-Cunneen approximation).
    Where short prefills go first, a pool's mean wait is that times (1 − ρ) · E[1 / ((1 − ρ(<T)) (1 − ρ(≤T)))], ρ(≤T)
    being the pool's utilisation by what is no longer than T (Cobham, Priority Assignment in Waiting Line Problems,
    1954, with every length its own priority; Phipps 1956).
    Links are stages that can be full, but no queues: transfers overlap their prefill. Policies that balance queues
    wait less than behind a threshold that stays, so a prediction is rather too long.

    Raises:
        PlanError: no request gets through with these roles.
    """
    work = (
        work_with_prefill(problem, prefill[problem.pd[0].name])
        if problem.is_two_cluster
        else network_work(problem, prefill)
    )
    return latency_of_work(problem, prefill, requests_per_s, queues, work)


def latency_of_work(
    problem: PlanProblem,
    prefill: Mapping[str, int],
    requests_per_s: float,
    queues: QueueingModel,
    work: StageWork,
) -> RoleLatency:
    """`latency_with_roles`, given the stages' work per request."""
    decode_rates = _decode_rates(problem, prefill, work)
    full_rates = (
        *(_full_rate(pool) for pool in work.pools),
        *work.link_rates.values(),
        *decode_rates.values(),
    )
    least = min(full_rates)
    utilisation = requests_per_s / least if least > 0 else math.inf
    prefill_s = sum((pool.work_s for pool in work.pools), 0.0)
    if utilisation >= 1:
        return RoleLatency(prefill, requests_per_s, utilisation, prefill_s, math.inf, decode_wait_s=math.inf)
    prefill_wait_s = sum(
        (pool.part * _prefill_wait_s(pool, requests_per_s, queues) for pool in work.pools), 0.0
    )
    answer_s = {pd.name: pd.decode_step_s * problem.workload.output_tokens for pd in problem.pd}
    decode_wait_s = sum(
        (
            part * _decode_wait_s(requests_per_s * part, decode_rates[name] * part, answer_s[name], queues)
            for name, part in work.decode_parts.items()
            if part > 0
        ),
        0.0,
    )
    return RoleLatency(
        prefill, requests_per_s, utilisation, prefill_s, prefill_wait_s, decode_wait_s=decode_wait_s
    )


def decode_queues(
    problem: PlanProblem,
    prefill: Mapping[str, int],
    work: StageWork,
    requests_per_s: float,
) -> tuple[DecodeQueue, ...]:
    """The decode slots of every PD cluster that decodes, at a rate of the whole system."""
    rates, parts = _decode_rates(problem, prefill, work), work.decode_parts
    found = []
    for pd in problem.pd:
        if pd.name not in rates:
            continue
        rate, part = rates[pd.name], parts[pd.name]
        answer_s = pd.decode_step_s * problem.workload.output_tokens
        wait = _decode_wait(requests_per_s * part, rate * part, answer_s, QueueingModel())
        utilisation = requests_per_s / rate if rate > 0 else math.inf
        # Slots are whole: they can be too few a little before the rate is reached.
        if wait is None:
            utilisation = max(utilisation, 1.0)
        found.append(DecodeQueue(part, utilisation, wait or NO_WAIT))
    return tuple(found)


def _decode_rates(problem: PlanProblem, prefill: Mapping[str, int], work: StageWork) -> dict[str, float]:
    """Requests per second of the whole system at which each PD cluster's decode is full, where it has any."""
    output = problem.workload.output_tokens
    return {
        pd.name: (pd.instances - prefill[pd.name]) * pd.decode_rate(output) / part
        for pd in problem.pd
        if (part := work.decode_parts[pd.name]) > 0
    }


def _full_rate(pool: PrefillPoolLoad) -> float:
    return pool.instances / pool.work_s if pool.work_s > 0 else math.inf


def _prefill_wait_s(pool: PrefillPoolLoad, requests_per_s: float, queues: QueueingModel) -> float:
    wait = wait_of(pool, requests_per_s)
    factor = _shortest_first_factor(pool, requests_per_s) if queues.is_shortest_first else 1.0
    return wait.chance * wait.mean_s * factor


def _shortest_first_factor(pool: PrefillPoolLoad, requests_per_s: float) -> float:
    """The mean wait with short ones first over that of first come, first served."""
    share = pool.part
    if share <= 0:
        return 1.0
    order = np.argsort(pool.seconds)
    weights = pool.weights[order]
    loads = requests_per_s * weights * pool.seconds[order] / pool.instances
    with_equal = np.cumsum(loads)
    left = (1 - with_equal) * (1 - (with_equal - loads))
    return float((weights / share / left).sum() * (1 - loads.sum()))


def _decode_wait(
    requests_per_s: float, full_rate: float, answer_s: float, queues: QueueingModel
) -> Wait | None:
    """None: more work than time."""
    mean_s = _decode_wait_s(requests_per_s, full_rate, answer_s, queues)
    if not math.isfinite(mean_s) or requests_per_s >= full_rate:
        return None
    chance = erlang_c(_slots(full_rate, answer_s), requests_per_s * answer_s)
    return Wait(chance, mean_s / chance) if chance > 0 else NO_WAIT


def _slots(full_rate: float, answer_s: float) -> int:
    return max(round(full_rate * answer_s), 1)


def _decode_wait_s(requests_per_s: float, full_rate: float, answer_s: float, queues: QueueingModel) -> float:
    slots = _slots(full_rate, answer_s)
    offered = requests_per_s * answer_s
    if offered >= slots:
        return math.inf
    chance = erlang_c(slots, offered)
    return chance * (1 + queues.answer_variation) / 2 * answer_s / (slots - offered)
