"""How far policies are from what nobody can beat: mean TTFT beside bounds that know all arrivals beforehand.

    python bench/policy_bounds.py [--deployments NAME ...] [--loads X ...] [--seeds N] [--requests N] [--json FILE]

Each seed draws Poisson arrivals; everybody meets the same requests from an empty system to its end. Roles are as
planned, and stay; so do thresholds. Nothing is cached. Deployments have one PrfaaS and one PD cluster.

- bound: a linear programme (scipy's HiGHS). Machine time is dealt out in slots of an eighth of the mean prefill. Work
  may be cut at will and split over clusters, but one machine of a cluster works on a request at a time. Links cost
  nothing, and what is done in a slot counts as done at its begin. The mean of the times at which a request's work is
  done, and half of its work, is never later than its end: so no rule, whatever it knows, has a lower mean.
- preemptive: by the planned threshold, the prompt with the least left to do goes first and interrupts others (SRPT).
  Links cost nothing. Engines can't do that; it says what the route costs.
- the policies, simulated with their links.
"""

import argparse
import heapq
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.optimize import linprog
from scipy.sparse import coo_array

from policies import DEPLOYMENTS, Spec, spec_of
from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate

Floats = NDArray[np.float64]
POLICIES = ("tilted:fairness=0", "tilted", "paper")
SLOTS_PER_PREFILL = 8
# What is done later than so long after the arrival counts as done then, by machines of its own.
WINDOW_PREFILLS = 25


class Case:
    """One deployment with the requests of one seed."""

    def __init__(self, planned: PlannedDeployment, load: float, requests: int, seed: int) -> None:
        problem = problem_of(planned)
        (far,), (near,) = problem.prfaas, problem.pd
        best = best_operation(problem)
        self.planned, self._requests, self._seed = planned, requests, seed
        self._traffic = IndependentTraffic(
            Poisson(load * best.lambda_max), problem.workload.uncached, fixed(problem.workload.output_tokens)
        )
        drawn = next(iter(self._traffic.chunks(np.random.default_rng(seed))))
        self.arrivals_s: Floats = np.asarray(drawn.arrival_s[:requests], dtype=float)
        if len(self.arrivals_s) < requests:
            raise SystemExit(f"one chunk of traffic has {len(self.arrivals_s)} requests, not {requests}")
        tokens = np.asarray(drawn.input_tokens[:requests], dtype=float)
        self.is_long = tokens > best.threshold_tokens
        self.work_s: tuple[Floats, Floats] = (near.prefill_s(tokens), far.prefill_s(tokens))
        """In the PD cluster, and in the PrfaaS cluster."""
        self.machines = (best.n_prefill, far.instances)

    def bound_s(self) -> float:
        """The least mean TTFT that the linear programme allows."""
        shortest_s = np.minimum(*self.work_s)
        slot_s = float(shortest_s.mean()) / SLOTS_PER_PREFILL
        window = WINDOW_PREFILLS * SLOTS_PER_PREFILL
        first = (self.arrivals_s // slot_s).astype(int)
        number = len(first)
        requests, slots = np.repeat(np.arange(number), window), (first[:, None] + np.arange(window)).ravel()
        is_last = slots - first[requests] == window - 1
        begins_s = np.maximum(slots * slot_s, self.arrivals_s[requests])
        costs, rows, columns, values, most = [], [], [], [], []
        span = int(slots.max()) + 1
        for cluster, work_s in enumerate(self.work_s):
            # A variable is a share of the request's work.
            own_s = work_s[requests]
            costs.append(begins_s - self.arrivals_s[requests] + own_s / 2)
            rows.append(cluster * span + slots)
            columns.append(cluster * len(slots) + np.arange(len(slots)))
            values.append(np.where(is_last, 0.0, own_s))
            most.append(np.where(is_last, 1.0, np.minimum(slot_s / own_s, 1.0)))
        limits = np.repeat([count * slot_s for count in self.machines], span)
        capacity = coo_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
            shape=(2 * span, 2 * len(slots)),
        )
        whole = coo_array(
            (np.ones(2 * len(slots)), (np.tile(requests, 2), np.arange(2 * len(slots)))),
            shape=(number, 2 * len(slots)),
        )
        found = linprog(
            np.concatenate(costs),
            A_ub=capacity.tocsr(),
            b_ub=limits,
            A_eq=whole.tocsr(),
            b_eq=np.ones(number),
            bounds=np.column_stack([np.zeros(2 * len(slots)), np.concatenate(most)]),
            method="highs-ipm",
        )
        if found.status != 0:
            raise SystemExit(f"the linear programme has no solution: {found.message}")
        return float(found.fun) / number

    def preemptive_s(self) -> float:
        """The mean TTFT by the planned threshold where the least left goes first, and interrupts."""
        total_s = 0.0
        for cluster, (work_s, machines) in enumerate(zip(self.work_s, self.machines, strict=True)):
            is_here = self.is_long == bool(cluster)
            total_s += float(_least_left_first(self.arrivals_s[is_here], work_s[is_here], machines).sum())
        return total_s / len(self.arrivals_s)

    def policy_s(self, spec: Spec) -> float:
        """The mean TTFT of a policy in the simulator, thresholds and roles fixed."""
        scenario = scenario_of(
            self.planned, policy=spec.policy, params=dict(spec.params), adapts=False, allocation=False
        )
        chunks = self._traffic.chunks(np.random.default_rng(self._seed))
        result = simulate(scenario, chunks, seed=self._seed, requests=self._requests, warmup_share=0.0)
        return float(result.ttft_s.mean())


def _least_left_first(arrivals_s: Floats, work_s: Floats, machines: int) -> Floats:
    """Times from arrival to end on so many equal machines."""
    ends_s = np.empty_like(arrivals_s)
    # (seconds left, request) of all that are there; the first `machines` of them are at work.
    there: list[tuple[float, int]] = []
    now_s = 0.0
    for number, (arrival_s, own_s) in enumerate(zip(arrivals_s, work_s, strict=True)):
        there, now_s = _worked(there, machines, now_s, float(arrival_s), ends_s)
        heapq.heappush(there, (float(own_s), number))
    _worked(there, machines, now_s, np.inf, ends_s)
    return ends_s - arrivals_s


def _worked(
    there: list[tuple[float, int]], machines: int, now_s: float, until_s: float, ends_s: Floats
) -> tuple[list[tuple[float, int]], float]:
    """Who is left at `until_s`, or once nobody is."""
    while there and now_s < until_s:
        working = [heapq.heappop(there) for _ in range(min(machines, len(there)))]
        step_s = min(working[0][0], until_s - now_s)
        now_s += step_s
        for left_s, number in working:
            if left_s - step_s > 1e-12:
                heapq.heappush(there, (left_s - step_s, number))
            else:
                ends_s[number] = now_s
    return there, until_s if np.isfinite(until_s) else now_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [name for name, path in DEPLOYMENTS.items() if name != "multi"]
    parser.add_argument("--deployments", nargs="+", choices=known, default=["paper", "kimi-linear-48b"])
    parser.add_argument("--loads", nargs="+", type=float, default=[0.8, 0.95])
    parser.add_argument("--policies", type=spec_of, nargs="+", default=[spec_of(each) for each in POLICIES])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    names = ["bound", "preemptive", *(spec.text for spec in options.policies)]
    rows = []
    table = Table("deployment", "load", *names, title="mean TTFT in s, median of seeds; × the bound")
    cells = [(name, load) for name in options.deployments for load in options.loads]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("solving", total=len(cells) * options.seeds)
        for name, load in cells:
            found = []
            for seed in range(1, options.seeds + 1):
                case = Case(load_planned(DEPLOYMENTS[name]), load, options.requests, seed)
                policies = [case.policy_s(spec) for spec in options.policies]
                found.append([case.bound_s(), case.preemptive_s(), *policies])
                progress.advance(task)
            seconds = np.median(found, axis=0)
            ratios = np.median(np.array(found) / np.array(found)[:, :1], axis=0)
            table.add_row(
                name,
                f"{load:g}",
                *(f"{value:.3g} ({ratio:.2f} ×)" for value, ratio in zip(seconds, ratios, strict=True)),
            )
            rows += [
                {"deployment": name, "load": load, "seed": seed, **dict(zip(names, each, strict=True))}
                for seed, each in enumerate(found, 1)
            ]
    Console(width=150).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
