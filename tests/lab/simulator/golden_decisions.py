"""Hashes of what the simulator decides: whoever makes it faster must leave every bit as it is.

    python -m tests.lab.simulator.golden_decisions [--write] [--results]

compares, or makes tests/data/golden_decisions.json anew where results are meant to change. `--results` compares only
what came out, not the decisions: those of a compiled copy of the package cannot be watched.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from studies._sessions import SessionTraffic

from prfaas.core.deployment import load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.policy import POLICIES, Policy, make_policy
from prfaas.core.scheduling.view import View
from prfaas.core.units import GIB
from prfaas.core.workload.arrivals import Arrivals, Mmpp, Phase, Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import TruncatedLogNormal
from prfaas.core.workload.traffic import IndependentTraffic, Traffic
from prfaas.lab.simulator.capacity import Fluctuating
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Overheads, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "data" / "golden_decisions.json"
PAPER, MULTI = ROOT / "examples" / "paper.yaml", ROOT / "examples" / "multi.yaml"
COMMAND = "python -m tests.lab.simulator.golden_decisions --write"


@dataclass(frozen=True)
class Case:
    """A deployment under load, for every policy."""

    name: str
    file: Path
    load: float
    requests: int
    """Of each policy."""
    options: dict[str, Any]
    """Of `scenario_of`."""
    has_sessions: bool = False
    has_bursts: bool = False

    def scenario(self, policy: str) -> Scenario:
        """What is simulated."""
        params = {"threshold_tokens": 20_000.0} if policy == "static_threshold" else {}
        return scenario_of(load_planned(self.file), policy=policy, params=params, **self.options)

    def traffic(self) -> Traffic:
        """Its requests."""
        problem = problem_of(load_planned(self.file))
        rate_per_s = self.load * best_operation(problem).lambda_max
        if self.has_sessions:
            questions = TruncatedLogNormal(9.0, 1.0, 128, 60_000)
            return SessionTraffic(
                Poisson(rate_per_s / 2), 4.0, 30.0, questions, fixed(256), shared_tokens=2048
            )
        arrivals: Arrivals = Poisson(rate_per_s)
        if self.has_bursts:
            arrivals = Mmpp((Phase(0.7 * rate_per_s, 60.0), Phase(2.2 * rate_per_s, 15.0)))
        workload = problem.workload
        return IndependentTraffic(arrivals, workload.uncached, fixed(workload.output_tokens))


_STILL = {"adapts": False, "allocation": False}
CASES = (
    Case("paper, no slow loops", PAPER, 0.9, 12_000, _STILL),
    Case("paper, slow loops and bursts", PAPER, 0.8, 8_000, {}, has_bursts=True),
    Case(
        "conversations, caches, slow loops",
        PAPER,
        0.8,
        6_000,
        {"caches": CacheOptions(600_000, 8192, 4096)},
        has_sessions=True,
    ),
    Case(
        "several clusters, caches",
        MULTI,
        0.7,
        6_000,
        {**_STILL, "caches": CacheOptions(400_000)},
        has_sessions=True,
    ),
    Case(
        "pools",
        PAPER,
        0.7,
        2_000,
        {
            **_STILL,
            "caches": CacheOptions(100_000, 8192, 4096),
            "pools": {
                "home": PoolOptions(40 * GIB, 80 * GIB, instances_per_machine=4),
                "east": PoolOptions(40 * GIB, instances_per_machine=2),
            },
        },
        has_sessions=True,
    ),
    Case(
        "failures, a link that fluctuates",
        PAPER,
        0.6,
        4_000,
        {
            "links": {"east->home": Fluctuating(60e9, 0.5, 30.0)},
            "failures": (
                Failure("home-0", 200.0, 60.0),
                Failure("east-1", 500.0, 100.0),
                Failure("home-7", 700.0, 30.0),
                Failure("east->home", 900.0, 40.0),
            ),
            "overheads": Overheads(0.002, 0.005, True),
            "transfer_grace_s": 5.0,
        },
        has_bursts=True,
    ),
)


class _Watched:
    """A policy whose decisions go into a digest."""

    def __init__(self, policy: Policy, digest: "hashlib.blake2b") -> None:
        self._policy = policy
        self._digest = digest
        self.count = 0

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        decision = self._policy.decide(request, view)
        self.count += 1
        self._digest.update(_line(decision).encode())
        return decision


def _line(decision: Decision) -> str:
    moved = decision.cache_transfer
    numbers = (
        decision.uncached_tokens,
        decision.prefill_tokens,
        decision.skip_tokens,
        decision.kv_bytes,
        decision.threshold_tokens,
        decision.predicted_ttft_s,
        -math.inf if decision.urgency_s is None else decision.urgency_s,
        decision.load_s,
        decision.decode_wait_s,
    )
    names = f"{decision.route} {decision.prefill} {decision.decode} {decision.reason} {decision.is_bound}"
    cache = (
        ""
        if moved is None
        else f"{moved.source} {moved.num_tokens} {moved.skip_tokens} {moved.kv_bytes} {moved.from_pool}"
    )
    return f"{names} {' '.join(float(number).hex() for number in numbers)} {cache}\n"


def _digest_of(result: Result) -> str:
    digest = hashlib.blake2b(digest_size=16)
    columns = {
        "arrival_s": result.arrival_s,
        "ttft_s": result.ttft_s,
        "e2e_s": result.e2e_s,
        "uncached_tokens": result.uncached_tokens,
        "hit_tokens": result.hit_tokens,
        "offloaded": result.offloaded,
        "reason": result.reason,
        "retries": result.retries,
        "link_bytes": result.link_bytes,
        **{f"tier {name}": values for name, values in result.tier_tokens.items()},
        **{f"series {name}": values for name, values in result.series.items()},
    }
    for name, values in columns.items():
        digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
    digest.update(" ".join(result.reasons).encode())
    digest.update(json.dumps(result.changes, default=float).encode())
    return digest.hexdigest()


def simulated(case: Case, policy: str) -> dict[str, Any]:
    """How many decisions were made, their hash, and that of what came of them."""
    digest = hashlib.blake2b(digest_size=16)
    made: list[_Watched] = []

    def watched(name: str, params: Any = None) -> _Watched:
        made.append(_Watched(make_policy(name, params), digest))
        return made[-1]

    with mock.patch("prfaas.lab.simulator.world.make_policy", watched):
        result = simulate(
            case.scenario(policy),
            case.traffic().chunks(np.random.default_rng(7)),
            seed=7,
            requests=case.requests,
        )
    return {
        "decisions": sum(each.count for each in made),
        "hash": digest.hexdigest(),
        "results": _digest_of(result),
    }


def arithmetic() -> str:
    """A hash of elementary functions: where it differs, so do last digits, and hashes of results say nothing."""
    rng = np.random.default_rng(0)
    some = rng.lognormal(size=4096)
    knots = np.geomspace(1, 1e6, 999)
    arrays = [
        some,
        rng.standard_normal(999),
        rng.exponential(size=999),
        np.exp(some / 10),
        np.log(some),
        np.exp2(some / 10),
        np.power(some, 1.7),
        np.interp(some, knots, np.sqrt(knots)),
        np.cumsum(some),
        np.array([some.sum(), (some * some).sum(), some.mean()]),
        np.array(
            [
                value
                for each in some[:999].tolist()
                for value in (math.log(each), math.exp(-each), math.expm1(-each), each**1.3, math.log2(each))
            ]
        ),
    ]
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def pairs() -> Iterator[tuple[Case, str]]:
    """Every case with every policy."""
    for case in CASES:
        for policy in POLICIES:
            yield case, policy


def written() -> dict[str, Any]:
    """The golden file."""
    document: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="make the golden file anew")
    parser.add_argument("--results", action="store_true", help="compare what came out alone")
    options = parser.parse_args()
    if not options.write and written()["arithmetic"] != arithmetic():
        sys.exit("elementary functions give other last digits here: nothing can be compared")
    golden: dict[str, dict[str, Any]] = {} if options.write else written()["cases"]
    wrong = 0
    for case, policy in pairs():
        found = simulated(case, policy)
        if options.write:
            golden.setdefault(case.name, {})[policy] = found
        else:
            expected = golden[case.name][policy]
            names = ["results"] if options.results else ["decisions", "hash", "results"]
            is_same = all(found[name] == expected[name] for name in names)
            wrong += not is_same
            print(f"{'same ' if is_same else 'OTHER'} {case.name}: {policy}", flush=True)
    if options.write:
        document = {"command": COMMAND, "arithmetic": arithmetic(), "cases": golden}
        GOLDEN.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(sum(each["decisions"] for case in golden.values() for each in case.values()), "decisions")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
