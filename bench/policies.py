"""Which policy is better for whom: ten deployments under many loads, the same requests with `paper` and with others.

    python bench/policies.py [--policies SPEC ...] [--base SPEC] [--deployments NAME ...] [--cases NAME ...]
        [--seeds N] [--first-seed N] [--requests N] [--fixed] [--keep FILE] [--json FILE] [--plot FILE]

A SPEC is a policy with parameters, for example tilted:fairness=0.2. Deployments are examples and recipes whose plan
offloads. Each has Poisson arrivals at 0.5, 0.7, 0.85 and 0.95 of what its plan can carry (E[T(L)]), and bursts at a
mean of 0.7 and 0.85: phases of 15 s on average at 2.2 times the mean rate, between calms of 60 s. Thresholds and roles
change as live; with --fixed they stay as planned. There are no caches. A tenth of each run is warm-up.

What is compared is TTFT. A ratio is the geometric mean over seeds, with the 95 % interval of Student's t: with one seed
every policy meets the same requests. Over several cells the logarithms are averaged first, then the interval is taken
over seeds. Short prompts are those up to a deployment's median, long ones its longest tenth.

The rule by which a default is chosen, stated before the runs: of the policies that keep to all of this, the one with
the least mean; if none does, the base.

1. Over all cells its mean TTFT is below the base's, beyond the interval.
2. On no deployment is its mean TTFT above the base's beyond the interval.
3. Its P99 is at most 1.1 times the base's over all cells, and at most 1.25 times on each deployment.

--keep writes every run to a file as it ends, and takes from there those that it has; remove it when code has changed.
By the compiled copy (`make fast`, PYTHONPATH=build/fast) all of it takes a quarter of an hour on two cores.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import t as student

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate

# The plots and bursts of the project's studies.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from studies._figures import Panel, PlotCurve, lines
from studies._traffic import bursts

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RECIPES = ("kimi-linear-48b", "qwen3.5-397b", "mimo-v2-flash", "ring-2.5-1t", "gpt-oss-120b", "deepseek-v3.2")
DEPLOYMENTS = {name: EXAMPLES / f"{name}.yaml" for name in ("paper", "multi", "eight-ranks")} | {
    name: EXAMPLES / "recipes" / f"{name}.yaml" for name in RECIPES
}
PEAK = 2.2
# Case → (share of what the plan can carry, peak rate over the mean rate).
CASES = {
    "0.5": (0.5, 1.0),
    "0.7": (0.7, 1.0),
    "0.85": (0.85, 1.0),
    "0.95": (0.95, 1.0),
    "bursts 0.7": (0.7, PEAK),
    "bursts 0.85": (0.85, PEAK),
}
POLICIES = tuple(f"tilted:fairness={value}" for value in (0, 0.2, 0.35, 0.5, 0.65, 0.8, 1))
MEASURES = ("mean", "p90", "p99", "short mean", "middle mean", "long mean", "long p99")
MOST_P99, MOST_P99_OF_ONE = 1.1, 1.25


@dataclass(frozen=True)
class Spec:
    """A policy with parameters."""

    policy: str
    params: tuple[tuple[str, float], ...] = ()

    @property
    def text(self) -> str:
        given = ",".join(f"{name}={value:g}" for name, value in self.params)
        return f"{self.policy}:{given}" if given else self.policy


@dataclass(frozen=True)
class Run:
    deployment: str
    case: str
    spec: Spec
    seed: int
    requests: int
    slow_loops: bool

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


Found = Mapping[Run, Mapping[str, float]]
"""TTFTs in seconds, by measure."""


@dataclass(frozen=True)
class Ratio:
    """A geometric mean with its 95 % interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}–{self.high:.2f})"


@cache
def planned_of(name: str) -> tuple[PlannedDeployment, float]:
    """The deployment, and the requests per second that its plan can carry."""
    planned = load_planned(DEPLOYMENTS[name])
    return planned, best_operation(problem_of(planned)).lambda_max


def measured(run: Run) -> dict[str, float]:
    """TTFTs of one run in seconds, by measure."""
    planned, lambda_max = planned_of(run.deployment)
    share, peak = CASES[run.case]
    workload = problem_of(planned).workload
    traffic = IndependentTraffic(
        bursts(share * lambda_max, peak), workload.uncached, fixed(workload.output_tokens)
    )
    scenario = scenario_of(
        planned,
        policy=run.spec.policy,
        params=dict(run.spec.params),
        adapts=run.slow_loops,
        allocation=run.slow_loops,
    )
    chunks = traffic.chunks(np.random.default_rng(run.seed))
    result = simulate(scenario, chunks, seed=run.seed, requests=run.requests)
    ttft_s, tokens = result.ttft_s[result.counted], result.input_tokens[result.counted]
    median, longest = np.quantile(tokens, [0.5, 0.9])
    is_short, is_long = tokens <= median, tokens > longest
    return {
        "mean": float(ttft_s.mean()),
        "p90": float(np.quantile(ttft_s, 0.9)),
        "p99": float(np.quantile(ttft_s, 0.99)),
        "short mean": float(ttft_s[is_short].mean()),
        "middle mean": float(ttft_s[~is_short & ~is_long].mean()),
        "long mean": float(ttft_s[is_long].mean()),
        "long p99": float(np.quantile(ttft_s[is_long], 0.99)),
    }


def all_measured(runs: Sequence[Run], keep: Path | None) -> dict[Run, dict[str, float]]:
    """Every run, those in `keep` as they are there."""
    known: dict[str, dict[str, float]] = {}
    if keep is not None and keep.exists():
        for line in keep.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            known[entry["run"]] = entry["ttft_s"]
    found = {run: known[run.key] for run in runs if run.key in known}
    missing = [run for run in runs if run not in found]
    with ProcessPoolExecutor(2) as pool, Progress(console=Console(stderr=True), transient=True) as progress:
        results = zip(missing, pool.map(measured, missing, chunksize=4), strict=True)
        for run, values in progress.track(results, total=len(missing)):
            found[run] = values
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": run.key, "ttft_s": values}) + "\n")
    return found


Chosen = Callable[[str, str], bool]
"""Whether a cell, (deployment, case), is looked at."""


def in_deployment(*names: str) -> Chosen:
    return lambda deployment, _: deployment in names


def in_cases(cases: Sequence[str]) -> Chosen:
    return lambda _, case: case in cases


class Comparison:
    """The runs of all policies beside those of the base."""

    def __init__(self, options: argparse.Namespace, seeds: Sequence[int]) -> None:
        self._options = options
        self._seeds = seeds
        self.cells = [(name, case) for name in options.deployments for case in options.cases]
        specs = [options.base, *(each for each in options.policies if each != options.base)]
        self._found: Found = all_measured(
            [self._run(cell, spec, seed) for cell in self.cells for spec in specs for seed in seeds],
            options.keep,
        )

    def _run(self, cell: tuple[str, str], spec: Spec, seed: int) -> Run:
        return Run(*cell, spec, seed, self._options.requests, not self._options.fixed)

    def seconds(self, cell: tuple[str, str], spec: Spec, measure: str) -> float:
        """The mean over seeds."""
        return float(np.mean([self._found[self._run(cell, spec, seed)][measure] for seed in self._seeds]))

    def ratio(self, spec: Spec, measure: str, chosen: Chosen = lambda *_: True) -> Ratio:
        """TTFT over the base's, of the cells whose deployment and case are chosen."""
        cells = [cell for cell in self.cells if chosen(*cell)]
        of_seeds = [
            np.mean([self._log_ratio(cell, spec, seed, measure) for cell in cells]) for seed in self._seeds
        ]
        middle = float(np.mean(of_seeds))
        if len(of_seeds) < 2:
            return Ratio(math.exp(middle), 0.0, math.inf)
        half = float(
            student.ppf(0.975, len(of_seeds) - 1) * np.std(of_seeds, ddof=1) / math.sqrt(len(of_seeds))
        )
        return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))

    def _log_ratio(self, cell: tuple[str, str], spec: Spec, seed: int, measure: str) -> float:
        mine = self._found[self._run(cell, spec, seed)][measure]
        return math.log(mine / self._found[self._run(cell, self._options.base, seed)][measure])

    def fails(self, spec: Spec) -> str:
        """What of the rule the policy does not keep to; empty: it keeps to all."""
        if self.ratio(spec, "mean").high >= 1:
            return "1: the mean over all cells is not less"
        p99 = self.ratio(spec, "p99").middle
        if p99 > MOST_P99:
            return f"3: P99 × {p99:.2f} over all cells"
        for name in self._options.deployments:
            of_one = in_deployment(name)
            if self.ratio(spec, "mean", of_one).low > 1:
                return f"2: the mean is more on {name}"
            p99 = self.ratio(spec, "p99", of_one).middle
            if p99 > MOST_P99_OF_ONE:
                return f"3: P99 × {p99:.2f} on {name}"
        return ""

    def chosen(self) -> Spec:
        """The default by the rule."""
        good = [spec for spec in self._options.policies if not self.fails(spec)]
        base: Spec = self._options.base
        return min(good, key=lambda spec: self.ratio(spec, "mean").middle, default=base)


def policies_table(comparison: Comparison, options: argparse.Namespace) -> Table:
    """Each policy over all cells."""
    table = Table("policy", *MEASURES, "the rule", title=f"TTFT over that of {options.base.text}, all cells")
    for spec in options.policies:
        ratios = [str(comparison.ratio(spec, measure)) for measure in MEASURES]
        table.add_row(spec.text, *ratios, comparison.fails(spec) or "kept")
    return table


def groups(options: argparse.Namespace) -> dict[str, Chosen]:
    """Cells that are looked at together, by what they have in common."""
    by_case = {
        case if case.startswith("bursts") else f"Poisson {case}": in_cases([case]) for case in options.cases
    }
    several = [name for name in options.deployments if len(planned_of(name)[0].pd_clusters) > 1]
    one = [name for name in options.deployments if name not in several]
    by_clusters = {"one PD cluster": one, "several PD clusters": several}
    return (
        by_case
        | {text: in_deployment(*names) for text, names in by_clusters.items() if names}
        | {name: in_deployment(name) for name in options.deployments}
    )


def groups_table(comparison: Comparison, options: argparse.Namespace, spec: Spec) -> Table:
    """One policy by load, bursts, clusters and deployment."""
    table = Table("cells", *MEASURES, title=f"TTFT of {spec.text} over that of {options.base.text}")
    for text, chosen in groups(options).items():
        table.add_row(text, *(str(comparison.ratio(spec, measure, chosen)) for measure in MEASURES))
    return table


def cells_table(comparison: Comparison, options: argparse.Namespace, spec: Spec) -> Table:
    """One policy in every cell."""
    table = Table("deployment", "case", "mean", "s", "p99", "s", title=f"{spec.text}, every cell")
    for cell in comparison.cells:
        row = []
        for measure in ("mean", "p99"):
            seconds = [comparison.seconds(cell, each, measure) for each in (options.base, spec)]
            one = comparison.ratio(spec, measure, lambda *own, cell=cell: own == cell)
            row += [str(one), f"{seconds[0]:.3g} → {seconds[1]:.3g}"]
        table.add_row(*cell, *row)
    return table


def spec_of(text: str) -> Spec:
    policy, _, rest = text.partition(":")
    params = []
    for each in rest.split(",") if rest else ():
        name, equals, value = each.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"a policy is NAME or NAME:PARAMETER=NUMBER,…, not {text!r}")
        params.append((name, float(value)))
    return Spec(policy, tuple(params))


def draw(comparison: Comparison, options: argparse.Namespace) -> str:
    """Ratios over fairness, as SVG: Poisson arrivals and bursts."""
    specs = [each for each in options.policies if dict(each.params).keys() == {"fairness"}]
    values = [dict(each.params)["fairness"] for each in specs]
    panels = []
    for title, is_bursty in (("Poisson arrivals", False), ("bursts", True)):
        chosen = in_cases([case for case in options.cases if case.startswith("bursts") == is_bursty])
        curves = [
            PlotCurve(
                measure, values, [comparison.ratio(spec, measure, chosen).middle for spec in specs], number
            )
            for number, measure in enumerate(("mean", "p90", "p99", "short mean", "long p99"))
        ]
        panels.append(Panel(title, curves, is_log=True))
    return lines("fairness", "", "fairness", panels).svg


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", type=spec_of, nargs="+", default=[spec_of(each) for each in POLICIES])
    parser.add_argument("--base", type=spec_of, default=Spec("paper"), help="what they are compared with")
    parser.add_argument("--deployments", nargs="+", choices=list(DEPLOYMENTS), default=list(DEPLOYMENTS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=20_000, help="per run")
    parser.add_argument("--fixed", action="store_true", help="thresholds and roles stay as planned")
    parser.add_argument("--keep", type=Path, help="file of the runs that are done")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw what fairness does into this file (SVG)")
    options = parser.parse_args()
    comparison = Comparison(options, range(options.first_seed, options.first_seed + options.seeds))
    chosen = comparison.chosen()
    console = Console(width=190)
    console.print(policies_table(comparison, options))
    shown = options.policies if len(options.policies) == 1 else [chosen] if chosen != options.base else []
    for spec in shown:
        console.print(groups_table(comparison, options, spec))
        console.print(cells_table(comparison, options, spec))
    console.print(f"by the rule the default is {chosen.text}", highlight=False)
    if options.plot is not None:
        options.plot.write_text(draw(comparison, options), encoding="utf-8")
    if options.json is not None:
        document = {
            "base": options.base.text,
            "chosen": chosen.text,
            "seeds": [options.first_seed, options.seeds],
            "requests": options.requests,
            "slow_loops": not options.fixed,
            "cells": [
                {
                    "policy": spec.text,
                    "deployment": cell[0],
                    "case": cell[1],
                    **{
                        measure: asdict(comparison.ratio(spec, measure, lambda *own, cell=cell: own == cell))
                        for measure in MEASURES
                    },
                }
                for spec in options.policies
                for cell in comparison.cells
            ],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
