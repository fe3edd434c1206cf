"""What each mechanism of the scheduler is worth: many situations, the same requests with and without it.

    python bench/mechanisms.py [--policy NAME] [--seeds N] [--first-seed N] [--requests N] [--situations NAME ...]
        [--without NAME ...] [--jobs N] [--json FILE]

Each cell is how much longer the mean TTFT is without the mechanism, with the 95 % interval of Student's t over seeds.
Both meet the same requests. `*` marks an interval without 0. "changes" are those of thresholds and roles, and copies of
hot prefixes, a run on average.

The rule, stated before the runs: a mechanism pays where its interval lies above 0. One of ours that pays nowhere is
cut; one of the paper's stays.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.deployment.planned import EmpiricalLengths
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.scheduling.rebalancing import Rebalancer
from prfaas.core.units import GIB
from prfaas.core.workload.arrivals import Arrivals, Poisson
from prfaas.core.workload.empirical import Empirical, fixed
from prfaas.core.workload.requests import read_requests
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.capacity import Fluctuating
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.studies import StudyContext, context_of
from prfaas.lab.studies.study import Run, StudyOutcome, run_all

# The traffic and intervals of the project's studies.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from studies._figures import difference, seed_mean
from studies._runs import trace_lambda_max
from studies._traffic import DAY_S, bursts, day_plan, stretched
from studies._variants import times, with_bandwidth

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TRACES = EXAMPLES / "traces"
NEVER = 1e12
"""Above every queue and utilisation there is."""
LOAD, BURST_LOAD, PEAK = 0.9, 0.75, 2.2


@dataclass(frozen=True, slots=True)
class MechanismRun(Run):
    """A run whose world lacks what no option takes away."""

    without: str = ""

    def outcome(self) -> StudyOutcome:
        with _taken_away(self.without):
            return Run.outcome(self)

    def numbers(self, result: Result) -> dict[str, Any]:
        moves = {
            name: len(result.changes.get(name, ()))
            for name in ("threshold_changes", "conversions", "prefix_copies")
        }
        return Run.numbers(self, result) | moves


@contextmanager
def _taken_away(name: str) -> Iterator[None]:
    if name == "hot copies":
        with mock.patch.object(Rebalancer, "decide", lambda *_: ()):
            yield
    else:
        yield


Change = Callable[[MechanismRun], MechanismRun | None]
"""A run without a mechanism; None where it can't make a difference."""


def _param(policy: str | None, **params: float) -> Change:
    def change(run: MechanismRun) -> MechanismRun | None:
        if policy is not None and run.policy != policy:
            return None
        return replace(run, params={**run.params, **params})

    return change


def _own_caches(run: MechanismRun) -> MechanismRun | None:
    if run.caches is None:
        return None
    return replace(run, params={**run.params, "abundance_utilisation": 0.0, "abundance_queue_s": 0.0})


MECHANISMS: Mapping[str, Change] = {
    "utilisation trigger": _param("paper", utilisation_mark=NEVER),
    "queue trigger": _param("paper", queue_mark=NEVER),
    "tilt": _param("tilted", beta=0.0),
    "order": _param("tilted", fairness=1.0),
    "threshold search": lambda run: replace(run, adapts=False),
    "role changes": lambda run: replace(run, allocation=False),
    "others' caches": _own_caches,
    "hot copies": lambda run: replace(run, without="hot copies") if run.pools else None,
}


@dataclass(frozen=True, slots=True)
class Situation:
    """A deployment under load."""

    text: str
    run: Callable[[int, int], MechanismRun]
    """Of a number of requests, with a seed."""


def _poisson(rate_rps: float) -> Arrivals:
    return Poisson(rate_rps)


def _bursty(rate_rps: float) -> Arrivals:
    return bursts(rate_rps, PEAK)


def _plain(
    planned: PlannedDeployment, load: float, arrivals: Callable[[float], Arrivals] = _poisson
) -> Callable[[int, int], MechanismRun]:
    def run(requests: int, seed: int) -> MechanismRun:
        problem = problem_of(planned)
        traffic = IndependentTraffic(
            arrivals(load * best_operation(problem).lambda_max),
            problem.workload.uncached,
            fixed(problem.workload.output_tokens),
        )
        return MechanismRun(key=(), planned=planned, traffic=traffic, requests=requests, seed=seed)

    return run


def _with_lengths(planned: PlannedDeployment, lengths: Empirical) -> PlannedDeployment:
    given = EmpiricalLengths(tuple(lengths.lengths.tolist()), tuple(lengths.probabilities.tolist()))
    return replace(planned, workload=replace(planned.workload, lengths=given))


def _scarce(context: StudyContext) -> Callable[[int, int], MechanismRun]:
    """A link of 1.15 times the plan's egress on average, which fluctuates."""
    bits_per_s = 1.15 * context.optimum.egress_bits_per_s
    planned = with_bandwidth(context.planned, bits_per_s)
    links = {planned.links[0].name: Fluctuating(bits_per_s, 0.5, 10.0)}
    plain = _plain(planned, LOAD)
    return lambda requests, seed: replace(plain(requests, seed), links=links)


def _longer(context: StudyContext) -> Callable[[int, int], MechanismRun]:
    """Prompts are 15 % longer than roles and threshold were planned for."""
    lengths = stretched(context.problem.workload.uncached, 1.15, *context.range_tokens)
    plain = _plain(_with_lengths(context.planned, lengths), 0.93)
    roles = {context.pd: context.optimum.n_prefill}
    return lambda requests, seed: replace(
        plain(requests, seed), roles=roles, threshold_tokens=context.optimum.threshold_tokens
    )


def _wrong_roles(context: StudyContext, prefill: int, load: float) -> Callable[[int, int], MechanismRun]:
    """Fewer or more instances prefill than is best."""
    plain = _plain(context.planned, load)
    return lambda requests, seed: replace(plain(requests, seed), roles={context.pd: prefill})


def _day(context: StudyContext) -> Callable[[int, int], MechanismRun]:
    """A day and a quarter to settle, then one that counts."""
    plan = day_plan(context, LOAD)

    def run(_requests: int, seed: int) -> MechanismRun:
        return MechanismRun(
            key=(),
            planned=context.planned,
            traffic=plan.traffic,
            requests=0,
            seed=seed,
            duration_s=2.25 * DAY_S,
            warmup_share=1.25 / 2.25,
            roles={context.pd: plan.mean_prefill},
            threshold_tokens=plan.threshold_tokens,
        )

    return run


def _recorded(context: StudyContext, *, has_pools: bool) -> Callable[[int, int], MechanismRun]:
    """Mooncake's burst again and again, behind prefix caches of 16 GiB on every instance."""
    caches = CacheOptions.of_memory(context.planned.kv_model, 16 * GIB)
    pool = PoolOptions(64 * GIB, 0, 8192)
    pools = {cluster.name: pool for cluster in context.planned.clusters} if has_pools else {}
    traffic = context.replayed(LOAD * trace_lambda_max(context))
    return lambda requests, seed: MechanismRun(
        key=(),
        planned=context.planned,
        traffic=traffic,
        requests=requests,
        seed=seed,
        caches=caches,
        pools=pools,
    )


def situations() -> dict[str, Situation]:
    """By name."""
    paper, multi = load_planned(EXAMPLES / "paper.yaml"), load_planned(EXAMPLES / "multi.yaml")
    context = context_of(paper, read_requests(TRACES / "mooncake_burst.jsonl.gz"))
    short_answers = replace(paper, workload=replace(paper.workload, output_tokens=256))
    templates = _with_lengths(
        paper, Empirical(np.array([8192.0, 32768.0, 65536.0]), np.array([0.6, 0.3, 0.1]))
    )
    return {
        "paper": Situation("paper.yaml at 0.9", _plain(paper, LOAD)),
        "calm": Situation("paper.yaml at 0.5", _plain(paper, 0.5)),
        "few": Situation("one instance prefills, at 0.6", _wrong_roles(context, 1, 0.6)),
        "many": Situation("five instances prefill, at 0.6", _wrong_roles(context, 5, 0.6)),
        "bursts": Situation("paper.yaml, bursts at 0.75", _plain(paper, BURST_LOAD, _bursty)),
        "scarce": Situation("a link that fluctuates around 1.15 × the need", _scarce(context)),
        "answers": Situation("paper.yaml with answers of 256 tokens", _plain(short_answers, LOAD)),
        "templates": Situation("three lengths of prompts", _plain(templates, LOAD)),
        "large": Situation("four times paper.yaml", _plain(times(paper, 4), LOAD)),
        "longer": Situation("prompts 15 % longer than planned for", _longer(context)),
        "day": Situation("a day whose mix changes, after another", _day(context)),
        "trace": Situation("a trace behind caches", _recorded(context, has_pools=False)),
        "pools": Situation("the same with pools of 64 GiB", _recorded(context, has_pools=True)),
        "multi": Situation("multi.yaml at 0.85", _plain(multi, 0.85)),
        "multi-bursts": Situation("multi.yaml, bursts at 0.7", _plain(multi, 0.7, _bursty)),
    }


def cell(found: Mapping[Any, StudyOutcome], name: str, mechanism: str, seeds: Sequence[int]) -> str:
    """What the mechanism spares there."""
    if (name, mechanism, seeds[0]) not in found:
        return "–"
    without = [found[name, mechanism, seed] for seed in seeds]
    whole = [found[name, "", seed] for seed in seeds]
    if any(each.verdict == "grows" for each in whole):
        return "grows with it"
    if any(each.verdict == "grows" for each in without) and name != "day":
        return "grows without"
    values, bases = ([each.number("ttft_mean_s") for each in runs] for runs in (without, whole))
    if values == bases:
        return "same"
    spared = difference(values, bases)
    return f"{spared}{'*' if spared.is_clear else ''}"


def moves(found: Mapping[Any, StudyOutcome], name: str, seeds: Sequence[int]) -> str:
    """Changes of thresholds, roles and copies of hot prefixes with everything on."""
    return " / ".join(
        f"{seed_mean([found[name, '', seed].number(kind) for seed in seeds]).mean:.1f}"
        for kind in ("threshold_changes", "conversions", "prefix_copies")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = situations()
    parser.add_argument("--policy", default="tilted")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument(
        "--requests", type=int, default=8_000, help="per run; of a day it is the time that counts"
    )
    parser.add_argument("--situations", nargs="+", choices=list(every), default=list(every))
    parser.add_argument("--without", nargs="+", choices=list(MECHANISMS), default=list(MECHANISMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs: list[MechanismRun] = []
    for name in options.situations:
        for seed in seeds:
            whole = replace(
                every[name].run(options.requests, seed), policy=options.policy, key=(name, "", seed)
            )
            runs.append(whole)
            for mechanism in options.without:
                other = MECHANISMS[mechanism](whole)
                if other is not None:
                    runs.append(replace(other, key=(name, mechanism, seed)))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=sum(run.expected_requests for run in runs))
        outcomes = run_all(
            runs, jobs=options.jobs, on_done=lambda run, _: progress.advance(task, run.expected_requests)
        )
    found = {run.key: outcome for run, outcome in zip(runs, outcomes, strict=True)}
    shown = [
        each
        for each in options.without
        if any((name, each, seeds[0]) in found for name in options.situations)
    ]
    table = Table(
        "situation", "TTFT (s)", "changes", *shown, title=f"{options.policy}: what each part spares"
    )
    for name in options.situations:
        mean = seed_mean([found[name, "", seed].number("ttft_mean_s") for seed in seeds])
        cells = [cell(found, name, mechanism, seeds) for mechanism in shown]
        table.add_row(name, mean.seconds, moves(found, name, seeds), *cells)
    Console(width=190).print(table)
    if options.json is not None:
        rows = [
            {"situation": key[0], "without": key[1], "seed": key[2], **outcome.numbers}
            for key, outcome in found.items()
        ]
        options.json.write_text(json.dumps(rows, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
