"""How often intervals of `prfaas worth` hold what is true: of experiments in slices of time, and of holdouts.

    python bench/worth.py [--runs N] [--pairs N] [--share S] [--seed N] [--json FILE]

The simulator runs a deployment many times, with other traffic each time, and once more for very long:

experiment  `tilted` against `local_only` in pairs of slices, as `gateway.experiment` has them. True is the difference
            of the mean TTFTs of long runs in which one of them decides all the time.
holdout     `tilted`, whose offloaded requests stay for a share of them (`gateway.ledger.holdout`). True is the same
            difference in a run that is a hundred times as long.

Rows of each run go through a ledger's table and the code of `prfaas worth`. Ends with 1 if a 95 % interval held what is
true in less than 93 or more than 97 % of the runs.
"""

import argparse
import hashlib
import json
import sqlite3
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.experiment import Slices
from prfaas.core.ledger import COLUMNS
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.planner.survival import losses
from prfaas.core.scheduling.decision import HELD_OUT, Decision, Route, RoutingRequest
from prfaas.core.scheduling.policy import make_policy
from prfaas.core.scheduling.view import View
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate
from prfaas.serving.worth import effects, worth

EXAMPLE = Path(__file__).parents[1] / "examples" / "paper.yaml"
SLICE_S, WASHOUT_S = 600.0, 60.0
COVERED = (0.93, 0.97)
LONG_SEEDS = range(1_000_000, 1_000_020)


@dataclass
class Switching:
    """`tilted` and `local_only` in turns, as an experiment has them."""

    secret: int = 0

    def __post_init__(self) -> None:
        self._slices = slices(self.secret)
        self._arms = {"as-is": make_policy("tilted"), "other": make_policy("local_only")}

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        return self._arms[self._slices.at(view.now_s).arm].decide(request, view)


@dataclass
class HoldingOut:
    """`tilted`, but a share of what it offloads stays."""

    share: float = 0.0
    secret: int = 0

    def __post_init__(self) -> None:
        self._key = self.secret.to_bytes(8, "little")
        self._policy, self._local = make_policy("tilted"), make_policy("local_only")

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        decision = self._policy.decide(request, view)
        if decision.route is not Route.OFFLOAD:
            return decision
        drawn = hashlib.blake2b(request.ordinal.to_bytes(8, "little"), digest_size=4, key=self._key).digest()
        if int.from_bytes(drawn, "little") >= self.share * (1 << 32):
            return decision
        return replace(self._local.decide(request, view), reason=HELD_OUT)


def slices(secret: int) -> Slices:
    return Slices(SLICE_S, WASHOUT_S, b"worth" + secret.to_bytes(8, "little"))


@cache
def planned() -> tuple[PlannedDeployment, float]:
    """The deployment, and the rate that it carries while nothing is offloaded."""
    deployment = load_planned(EXAMPLE)
    problem = problem_of(deployment)
    left = losses(problem, best_operation(problem))
    return deployment, min(each.rate_at_once for each in left if each.kind == "link")


@dataclass(frozen=True)
class Run:
    """One simulation."""

    policy: str
    params: tuple[tuple[str, float], ...]
    load: float
    duration_s: float
    seed: int


def simulated(run: Run) -> Result:
    deployment, rate_rps = planned()
    workload = problem_of(deployment).workload
    traffic = IndependentTraffic(
        Poisson(run.load * rate_rps), workload.uncached, fixed(workload.output_tokens)
    )
    # Roles as they stand: a whole day without PrfaaS would change them, slices do not.
    scenario = scenario_of(
        deployment, policy=run.policy, params=dict(run.params), adapts=False, allocation=False
    )
    chunks = traffic.chunks(np.random.default_rng(run.seed))
    return simulate(scenario, chunks, seed=run.seed, duration_s=run.duration_s)


def ledger_of(result: Result, secret: int) -> sqlite3.Connection:
    """A ledger with a row for each counted request."""
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE requests ({', '.join(COLUMNS)})")
    reasons = np.array(result.reasons)[result.reason]
    drawn, rows = slices(secret), []
    for number in np.flatnonzero(result.counted & np.isfinite(result.ttft_s)):
        at, ttft_s = drawn.at(float(result.arrival_s[number])), float(result.ttft_s[number])
        route = "offload" if result.offloaded[number] else "local"
        held_out = bool(reasons[number] == HELD_OUT)
        arm = at.arm if at.arm == "as-is" else "local_only"
        rows.append(
            (
                float(result.arrival_s[number]),
                "ok",
                route,
                held_out,
                ttft_s,
                ttft_s,
                0.0,
                at.number,
                arm,
                not at.counts,
            )
        )
    columns = "at_s, outcome, route, held_out, first_token_s, ttft_s, other_s, slice, arm, washout"
    connection.executemany(f"INSERT INTO requests ({columns}) VALUES ({', '.join('?' * 10)})", rows)
    return connection


def experiment(run: Run) -> tuple[float, float]:
    """What it says PrfaaS is worth, in seconds of TTFT, and half its interval."""
    found = effects([ledger_of(simulated(run), run.seed)])["local_only"]
    return found.saved_s, found.half_s


def holdout(run: Run) -> tuple[float, float]:
    """What it says one more offloaded request is worth, and half its interval."""
    found = worth([ledger_of(simulated(run), run.seed)])[0].marginal_s()
    assert found is not None, "too few requests were held out"
    return found


def mean_ttft_s(run: Run) -> float:
    result = simulated(run)
    return float(np.nanmean(result.ttft_s[result.counted]))


def coverage(measured: list[tuple[float, float]], true_s: float) -> dict[str, Any]:
    saved_s, half_s = np.array(measured).T
    covered = float(np.mean(np.abs(saved_s - true_s) <= half_s))
    return {
        "runs": len(measured),
        "true_s": true_s,
        "mean_s": float(saved_s.mean()),
        "median_half_s": float(np.median(half_s)),
        "covered": covered,
        "goal_met": COVERED[0] <= covered <= COVERED[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=24, help="of slices in a run")
    parser.add_argument(
        "--share", type=float, default=0.1, help="of the offloaded requests that are held out"
    )
    parser.add_argument(
        "--load", type=float, default=0.7, help="of what is carried while nothing is offloaded"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    # One more, since the first tenth is the simulator's warm-up.
    duration_s = 2 * SLICE_S * options.pairs / 0.9

    def run(policy: str, seed: int, times: float = 1.0, **params: float) -> Run:
        return Run(policy, tuple(params.items()), options.load, duration_s * times, seed)

    seeds = range(options.seed, options.seed + options.runs)
    found = {}
    with ProcessPoolExecutor(2) as pool, Progress(console=Console(stderr=True), transient=True) as progress:

        def all_of(what: Any, runs: list[Run]) -> list[Any]:
            return list(progress.track(pool.map(what, runs), total=len(runs), description=what.__name__))

        means = {
            policy: np.mean(all_of(mean_ttft_s, [run(policy, seed, 5.0) for seed in LONG_SEEDS]))
            for policy in ("tilted", "local_only")
        }
        switched = all_of(experiment, [run("worth:Switching", seed, secret=seed) for seed in seeds])
        found["experiment"] = coverage(switched, float(means["local_only"] - means["tilted"]))
        held = {"share": options.share}
        long = all_of(
            holdout, [run("worth:HoldingOut", seed, 5.0, secret=seed, **held) for seed in LONG_SEEDS]
        )
        held_out = all_of(holdout, [run("worth:HoldingOut", seed, secret=seed, **held) for seed in seeds])
        found["holdout"] = coverage(held_out, float(np.mean([saved_s for saved_s, _ in long])))
    for name, each in found.items():
        print(
            f"{'yes' if each['goal_met'] else 'NO ':4s}{name}: {each['covered']:.1%} of {each['runs']} intervals "
            f"hold the true {each['true_s']:.3f} s (mean {each['mean_s']:.3f} ± {each['median_half_s']:.3f} s)"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(each["goal_met"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
