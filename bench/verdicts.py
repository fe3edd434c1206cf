"""Plans against the simulator and against brute force, on random deployments and random laws of lengths.

    python bench/verdicts.py [--deployments 200] [--several 50] [--first-seed 0] [--json FILE]

Of each deployment with one PrfaaS and one PD cluster:

- **stable rate**: the simulator runs it with the roles and the threshold of the plan. Its queues must stay at 0.97 of
  the planned rate and grow at 1.03; else plan and simulator contradict each other.
- **search**: no threshold and split of a brute-force search may be better than the plan by more than 1 %.
- **survival**: the same comparison for what is planned to be left at once without the link, without the PrfaaS
  cluster and without one instance, which fail in the simulation before the first request comes.

Of each deployment with two PrfaaS and two PD clusters (`--several`) the rate that the default policy keeps stable, with
the roles that were planned and the thresholds that live loops would find for them, must not be below the plan's. It may
be above: where a PD cluster has no prefill instance its decode instances prefill, which plans do not count on.

Prompts are no random sample here: lengths are the quantiles of their law in an order that repeats none of them for long
(van der Corput's sequence), and come at equal intervals. So a few thousand show an overload of 1 %.

Exit code 1 if anything contradicts a plan.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    FixedLengths,
    LengthsSpec,
    LogNormalLengths,
    UniformLengths,
)
from prfaas.core.latency.profile import Curve, DecodeCurve
from prfaas.core.planner import OperatingPoint, PlanProblem, best_operation, problem_of
from prfaas.core.planner.survival import losses
from prfaas.core.planner.two_clusters import best_threshold
from prfaas.core.units import BITS_PER_BYTE
from prfaas.core.workload.lengths import LengthDistribution
from prfaas.core.workload.traffic import RequestChunk
from prfaas.lab.simulator.result import Result, backlog_growth
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TOLERANCE, SEARCH_TOLERANCE = 0.03, 0.01

_LOW, _HIGH = 256, 131_072
# A class of requests whose backlog grows by this part of its arrivals can't be served.
_GROWS = 0.008
# Nor are so few more of them anything but chance.
_CHANCE = 5
_FEWEST, _MOST, _OF_A_CLASS, _PER_SLOT = 2500, 10_000, 500, 10
_BISECTIONS = 3
# Of what is planned: where less is left, nothing is simulated.
_ANYTHING = 0.02
_ATOMS = 2048


@dataclass(frozen=True)
class Verdict:
    """One comparison."""

    seed: int
    kind: str
    """ "stable rate", "search", "survival of NAME" or "several clusters"."""
    what: str
    """The deployment in a line."""
    planned_rps: float
    found_rps: float
    tolerance: float

    @property
    def error(self) -> float:
        """How far what was found is from the plan, in proportion to it."""
        if self.planned_rps <= 0:
            return 0.0 if self.found_rps <= 0 else math.inf
        return self.found_rps / self.planned_rps - 1

    @property
    def contradicts(self) -> bool:
        return self.size > self.tolerance

    @property
    def size(self) -> float:
        """How far it is from the plan in the direction that counts."""
        if self.kind == "search":
            return max(self.error, 0.0)
        return max(-self.error, 0.0) if self.kind == "several clusters" else abs(self.error)


def random_lengths(rng: np.random.Generator) -> LengthsSpec:
    """A law of one of six kinds: log-normal, uniform, narrow, of one length, of some, of a clipped sample."""
    kind = rng.integers(6)
    if kind == 0:
        return LogNormalLengths(float(rng.uniform(7.5, 10.5)), float(rng.uniform(0.4, 1.6)), _LOW, _HIGH)
    if kind == 1:
        low = float(rng.integers(_LOW, 20_000))
        return UniformLengths(low, low + float(rng.integers(1000, 100_000)))
    if kind == 2:
        low = float(rng.integers(1000, 100_000))
        return UniformLengths(low, low * 1.02)
    if kind == 3:
        return FixedLengths(float(rng.integers(1000, 120_000)))
    if kind == 4:
        count = int(rng.integers(2, 7))
        lengths = rng.choice(np.arange(500, 120_000), count, replace=False)
        return EmpiricalLengths(tuple(map(float, lengths)), tuple(map(float, rng.integers(1, 10, count))))
    sample = np.clip(rng.lognormal(9.3, 1.1, 400), _LOW, float(rng.integers(10_000, 60_000)))
    return EmpiricalLengths(tuple(map(float, np.rint(sample))))


def random_deployment(seed: int, *, has_several: bool = False) -> PlannedDeployment:
    """Clusters of random sizes and speeds, with random links and a random law of lengths.

    One PrfaaS and one PD cluster, or two of each (`has_several`).
    """
    rng = np.random.default_rng(seed)
    base = load_planned(
        EXAMPLES / ("multi.yaml" if has_several else str(rng.choice(["paper.yaml", "dense.yaml"])))
    )
    slow = rng.uniform(0.05, 0.8), rng.uniform(3e-5, 3e-4), rng.uniform(0, 2e-9)
    clusters = []
    for cluster in base.clusters:
        is_far = cluster.kind == "prfaas"
        speed = rng.uniform(1, 4) if is_far else 1.0
        prefill = Curve(1, 2 * _HIGH, coefficients=tuple(float(each / speed) for each in slow))
        batch, step_s = int(rng.integers(4, 48)), rng.uniform(0.6, 1.0) * 0.025
        steps = Curve.through_points(((1.0, step_s / 2), (float(batch), step_s)), "linear")
        decode = None if is_far else DecodeCurve(steps)
        clusters.append(
            replace(
                cluster,
                profile=replace(cluster.profile, prefill=prefill, decode=decode),
                instance_count=int(rng.integers(1, 7)) if is_far else int(rng.integers(2, 11)),
            )
        )
    links = tuple(
        replace(link, bandwidth_bits_per_s=float(10 ** rng.uniform(8.7, 11.3))) for link in base.links
    )
    workload = replace(
        base.workload, lengths=random_lengths(rng), output_tokens=float(rng.integers(32, 1500))
    )
    return replace(base, name=f"seed {seed}", clusters=tuple(clusters), links=links, workload=workload)


def even_traffic(lengths: LengthDistribution, output: int, rate_rps: float, count: int) -> RequestChunk:
    """Requests at equal intervals, whose lengths are spread evenly over their law in every part of the run."""
    quantiles = np.array([lengths.quantile((k + 0.5) / _ATOMS) for k in range(_ATOMS)])
    places = np.arange(count)
    turn = np.zeros(count)
    for bit in range(int(math.log2(_ATOMS))):
        turn += ((places >> bit) & 1) / 2.0 ** (bit + 1)
    tokens = np.rint(quantiles[(turn * _ATOMS).astype(np.int64)]).astype(np.int64)
    return RequestChunk(
        arrival_s=np.asarray((places + 0.5) / rate_rps, np.float64),
        input_tokens=tokens,
        output_tokens=np.full(count, output),
        block_ids=np.empty(0, dtype=np.int64),
        block_starts=np.zeros(count + 1, dtype=np.int64),
        block_tokens=512,
    )


def grows(result: Result) -> bool:
    """Whether the backlog of the requests that are offloaded, or that of the others, grows with time."""
    left_s = result.arrival_s + result.e2e_s
    for some in (result.offloaded, ~result.offloaded):
        if some.any():
            growth, between = backlog_growth(
                result.arrival_s[some], left_s[some], result.start_s, result.end_s
            )
            if growth > max(_GROWS * between, _CHANCE):
                return True
    return False


def stable_rate(scenario: Scenario, problem: PlanProblem, point: OperatingPoint) -> float:
    """The rate from which on queues grow, to 1 %; near that of a planned point it takes few simulations."""
    planned_rps, p = point.lambda_max, point.offloaded_fraction
    slots = sum(cluster.instances * cluster.decode_slots for cluster in scenario.clusters)
    smallest = min(each for each in (p, 1 - p) if each > 0)
    count = int(min(max(_FEWEST, _PER_SLOT * slots, _OF_A_CLASS / smallest), _MOST))
    output = round(problem.workload.output_tokens)

    def is_calm(factor: float) -> bool:
        chunk = even_traffic(problem.workload.lengths, output, factor * planned_rps, count)
        return not grows(simulate(scenario, [chunk]))

    low, high, step = 1 - TOLERANCE, 1 + TOLERANCE, 2 * TOLERANCE
    if not is_calm(low):
        while not is_calm(low) and low > 0.1:
            high, low, step = low, max(low - step, 0.05), 2 * step
    else:
        while is_calm(high) and high < 4:
            low, high, step = high, high + step, 2 * step
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_calm(middle) else (low, middle)
    return (low + high) / 2 * planned_rps


def brute_force(problem: PlanProblem) -> float:
    """The best Λ over all splits and all divisions of a sample in the order of length, by plain sums."""
    lengths = problem.workload.lengths
    tokens = np.array([lengths.quantile((k + 0.5) / _ATOMS) for k in range(_ATOMS)])
    (far,), (near,), (link,) = problem.prfaas, problem.pd, problem.links
    far_s = np.append(np.cumsum(far.prefill_s(tokens)[::-1])[::-1], 0.0) / _ATOMS
    bits = problem.kv_bytes_over(link.name)(tokens) * BITS_PER_BYTE
    link_bits = np.append(np.cumsum(bits[::-1])[::-1], 0.0) / _ATOMS
    near_s = np.append(0.0, np.cumsum(near.prefill_s(tokens))) / _ATOMS
    best = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        shared = np.minimum(far.instances / far_s, link.bandwidth_bits_per_s / link_bits)
        for n_prefill in near.splits:
            here = np.where(near_s > 0, n_prefill / near_s, np.inf)
            decode = (near.instances - n_prefill) * near.decode_rate(problem.workload.output_tokens)
            best = max(best, float(np.minimum(np.minimum(shared, here), decode).max()))
    return best


def planned_scenario(
    planned: PlannedDeployment, point: OperatingPoint, prefill: int | None = None, gone: Sequence[str] = ()
) -> Scenario:
    """The deployment at a point's threshold: neither it nor the roles change, and what is gone stays gone.

    `prefill`: instances that do; None: as `prfaas simulate` takes them.
    """
    return scenario_of(
        planned,
        policy="static_threshold",
        threshold_tokens=math.inf if point.threshold_tokens is None else point.threshold_tokens,
        roles=None if prefill is None else {each.cluster: prefill for each in point.roles},
        adapts=False,
        allocation=False,
        failures=[Failure(name, 0.0, 1e12) for name in gone],
    )


def survivals(
    planned: PlannedDeployment, problem: PlanProblem, point: OperatingPoint
) -> Iterator[tuple[str, Scenario, OperatingPoint]]:
    """Of each loss its name, the scenario, and the point for what is left, at the rate that the plan has for it.

    Of an instance of the PD cluster the role whose loss costs more is lost.
    """
    (far,), (near,), (link,) = problem.prfaas, problem.pd, problem.links
    alone = replace(problem, prfaas=(), links=())
    fewer_near = replace(problem, pd=(replace(near, instances=near.instances - 1),))
    n_prefill = point.n_prefill
    first, last = (f"{near.name}-{number}" for number in (0, near.instances - 1))
    all_far = [f"{far.name}-{number}" for number in range(far.instances)]
    without = {
        f"link {link.name}": (alone, n_prefill, [link.name]),
        f"cluster {far.name}": (alone, n_prefill, all_far),
    }
    if far.instances > 1:
        fewer_far = replace(problem, prfaas=(replace(far, instances=far.instances - 1),))
        without[f"an instance of {far.name}"] = (fewer_far, n_prefill, all_far[:1])
    roles = [(n_prefill, last), *([(n_prefill - 1, first)] if n_prefill else [])]
    left = min(roles, key=lambda each: best_threshold(fewer_near, each[0], "by length").lambda_max)
    without[f"an instance of {near.name}"] = (fewer_near, left[0], [left[1]])
    planned_rps = {str(loss): loss.rate_at_once for loss in losses(problem, point)}
    for name, (here, count, gone) in without.items():
        best = best_threshold(here, count, "by length")
        if best.lambda_max > _ANYTHING * point.lambda_max:
            scenario = planned_scenario(planned, best, n_prefill, gone)
            yield name, scenario, replace(best, lambda_max=planned_rps[name])


def verdicts_of(seed: int) -> Iterator[Verdict]:
    """All comparisons of one random deployment."""
    planned = random_deployment(seed)
    problem = problem_of(planned)
    point = best_operation(problem)
    what = in_a_line(problem, point)
    found = stable_rate(planned_scenario(planned, point), problem, point)
    yield Verdict(seed, "stable rate", what, point.lambda_max, found, TOLERANCE)
    yield Verdict(seed, "search", what, point.lambda_max, brute_force(problem), SEARCH_TOLERANCE)
    for name, scenario, left in survivals(planned, problem, point):
        found = stable_rate(scenario, problem, left)
        yield Verdict(seed, f"survival of {name}", what, left.lambda_max, found, TOLERANCE)


def verdict_of_several(planned: PlannedDeployment, seed: int = 0) -> Verdict:
    """The default policy on a deployment of several clusters."""
    problem = problem_of(planned)
    point = best_operation(problem)
    scenario = scenario_of(planned, policy="tilted", adapts=False, allocation=False)
    found = stable_rate(scenario, problem, point)
    return Verdict(seed, "several clusters", in_a_line(problem, point), point.lambda_max, found, TOLERANCE)


def in_a_line(problem: PlanProblem, point: OperatingPoint) -> str:
    """A planned deployment: instances of PrfaaS clusters, roles of PD clusters, lengths, links."""
    far = [str(cluster.instances) for cluster in problem.prfaas]
    near = [f"{roles.prefill}+{roles.decode}" for roles in point.roles]
    lengths = problem.workload.lengths
    gbits = [f"{link.bandwidth_bits_per_s / 1e9:.3g}" for link in problem.links]
    return (
        f"{'+'.join([*far, *near])}, {type(lengths).__name__} {lengths.low:.0f} to {lengths.high:.0f}, "
        f"{', '.join(gbits)} Gbit/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deployments", type=int, default=200)
    parser.add_argument("--several", type=int, default=50, help="deployments of several clusters")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write all comparisons to this file")
    options = parser.parse_args()
    seeds, several = (
        range(options.first_seed, options.first_seed + count)
        for count in (options.deployments, options.several)
    )
    found: list[Verdict] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for seed in progress.track(seeds):
            found += verdicts_of(seed)
        for seed in progress.track(several):
            found.append(verdict_of_several(random_deployment(seed, has_several=True), seed))
    report(Console(width=120), found)
    if options.json is not None:
        document: list[dict[str, Any]] = [asdict(each) | {"error": each.error} for each in found]
        options.json.write_text(json.dumps({"verdicts": document}, indent=2) + "\n", encoding="utf-8")
    if any(each.contradicts for each in found):
        sys.exit(1)


def report(console: Console, found: Sequence[Verdict]) -> None:
    """How many of each kind contradict a plan, and the worst five of all."""
    table = Table("comparison", "made", "contradict", "median error", "largest")
    for kind in dict.fromkeys(each.kind.split(" of ")[0] for each in found):
        some = [each for each in found if each.kind.startswith(kind)]
        errors = [each.size for each in some]
        wrong = sum(each.contradicts for each in some)
        table.add_row(kind, str(len(some)), str(wrong), f"{np.median(errors):.2%}", f"{max(errors):.2%}")
    console.print(table)
    worst = Table("the worst five", "seed", "planned (req/s)", "found", "error", "deployment")
    for each in sorted(found, key=lambda each: each.size / each.tolerance, reverse=True)[:5]:
        worst.add_row(
            each.kind,
            str(each.seed),
            f"{each.planned_rps:.4g}",
            f"{each.found_rps:.4g}",
            f"{each.error:+.2%}",
            each.what,
        )
    console.print(worst)


if __name__ == "__main__":
    main()
