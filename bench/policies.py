"""A policy beside `paper` on the same requests: what it does to short and to long prompts, and whether that is enough.

    python bench/policies.py [--policy NAME] [--param NAME=VALUE ...] [--base NAME] [--seeds N] [--first-seed N]
        [--requests N] [--cases NAME ...] [--quick] [--slow-loops] [--keep FILE] [--json FILE]
        [--sweep NAME VALUE ... [--plot FILE]]

The simulator runs `examples/paper.yaml`: Poisson arrivals at 0.8, 0.9 and 0.95 of Λ_max, and bursts at a mean of 0.7,
0.8 and 0.9 (phases of 15 s on average at 2.2 times the mean rate, between calms of 60 s). Roles and thresholds are as
planned and stay so, unless with --slow-loops. There are no caches.

The gates, as ratios of TTFT to the base: mean at most 0.8, P90 below 1, P99 at most 1.1, P99.9 at most 1.3, P99 of
prompts over 100K tokens at most 1.4. Each ratio is the geometric mean over seeds, with the 95 % interval of Student's
t: both policies meet the same requests with a seed. A gate is "met" or "missed" by the ratio, and marked "?" while the
interval has its limit inside. Exit code 1 if one is missed.

--sweep shows what a parameter does: per value, the geometric means of the ratios over the Poisson cases and over the
bursts. No gates then. --plot draws them as an SVG file.

--keep writes every run to a file as it ends, and takes from there those that it has; remove it when code has changed.
Two runs at a time; a request takes about 0.1 ms of CPU time with each policy.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import t as student

from prfaas.core.deployment import load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate

# The plots and bursts of the project's studies.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from studies._figures import Panel, PlotCurve, lines
from studies._traffic import bursts

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "paper.yaml"
LONG_TOKENS = 100 * 1024
PEAK = 2.2
# Case → (share of Λ_max, peak rate over the mean rate).
CASES = {
    "poisson-0.8": (0.8, 1.0),
    "poisson-0.9": (0.9, 1.0),
    "poisson-0.95": (0.95, 1.0),
    "bursts-0.7": (0.7, PEAK),
    "bursts-0.8": (0.8, PEAK),
    "bursts-0.9": (0.9, PEAK),
}
# Measure → the most that its ratio may be.
GATES = {"mean": 0.8, "p90": 1.0, "p99": 1.1, "p99.9": 1.3, "long p99": 1.4}
QUICK_REQUESTS, QUICK_SEEDS = 10_000, 2


@dataclass(frozen=True)
class Run:
    case: str
    policy: str
    params: tuple[tuple[str, float | str], ...]
    seed: int
    requests: int
    slow_loops: bool

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


Pairs = Mapping[str, Sequence[tuple[Run, Run]]]
"""By case, the runs of the policy and of the base by seed."""


@dataclass(frozen=True)
class Row:
    case: str
    measure: str
    limit: float
    base_s: float
    policy_s: float
    ratio: float
    low: float
    high: float

    @property
    def is_met(self) -> bool:
        return self.ratio < self.limit if self.measure == "p90" else self.ratio <= self.limit

    @property
    def is_clear(self) -> bool:
        return not self.low <= self.limit <= self.high

    @property
    def verdict(self) -> str:
        return ("met" if self.is_met else "missed") + ("" if self.is_clear else "?")


def measured(run: Run) -> dict[str, float]:
    """TTFTs of one run in seconds, by measure."""
    planned = load_planned(EXAMPLE)
    problem = problem_of(planned)
    share, peak = CASES[run.case]
    arrivals = bursts(share * best_operation(problem, "mean length").lambda_max, peak)
    workload = problem.workload
    traffic = IndependentTraffic(arrivals, workload.uncached, fixed(workload.output_tokens))
    scenario = scenario_of(
        planned,
        policy=run.policy,
        params=dict(run.params),
        adapts=run.slow_loops,
        allocation=run.slow_loops,
    )
    chunks = traffic.chunks(np.random.default_rng(run.seed))
    result = simulate(scenario, chunks, seed=run.seed, requests=run.requests)
    ttft_s = result.ttft_s[result.counted]
    long_s = ttft_s[result.input_tokens[result.counted] > LONG_TOKENS]
    p90, p99, p999 = np.quantile(ttft_s, [0.9, 0.99, 0.999])
    return {
        "mean": float(ttft_s.mean()),
        "p90": float(p90),
        "p99": float(p99),
        "p99.9": float(p999),
        "long p99": float(np.quantile(long_s, 0.99)),
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
        results = zip(missing, pool.map(measured, missing), strict=True)
        for run, values in progress.track(results, total=len(missing)):
            found[run] = values
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": run.key, "ttft_s": values}) + "\n")
    return found


def ratio_of(values: Sequence[float], bases: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of value / base over pairs, and its 95 % interval."""
    logs = np.log(np.array(values) / np.array(bases))
    middle = float(logs.mean())
    if len(logs) < 2:
        return math.exp(middle), 0.0, math.inf
    half = float(student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def rows_of(cases: Iterable[str], pairs: Pairs, found: Mapping[Run, Mapping[str, float]]) -> Iterator[Row]:
    for case in cases:
        for measure, limit in GATES.items():
            values = [found[mine][measure] for mine, _ in pairs[case]]
            bases = [found[other][measure] for _, other in pairs[case]]
            means = float(np.mean(bases)), float(np.mean(values))
            yield Row(case, measure, limit, *means, *ratio_of(values, bases))


def parameter(text: str) -> tuple[str, float | str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"a parameter is NAME=VALUE, not {text!r}")
    try:
        return name, float(value)
    except ValueError:
        return name, value


def table_of(rows: Sequence[Row], cases: Sequence[str], title: str) -> Table:
    table = Table("case", *(f"{name} ≤ {limit:g}" for name, limit in GATES.items()), title=title)
    by_place = {(row.case, row.measure): row for row in rows}
    for case in cases:
        cells = []
        for measure in GATES:
            row = by_place[case, measure]
            cells.append(
                f"{row.ratio:.2f} ({row.low:.2f}–{row.high:.2f}) {row.verdict}\n"
                f"{row.base_s:.3g} → {row.policy_s:.3g} s"
            )
        table.add_row(case, *cells)
    return table


def group_of(case: str) -> str:
    return case.partition("-")[0]


def group_ratios(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """(group of cases, measure) → the geometric mean of the ratios."""
    logs: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        logs.setdefault((group_of(row.case), row.measure), []).append(math.log(row.ratio))
    return {place: math.exp(sum(each) / len(each)) for place, each in logs.items()}


def sweep(options: argparse.Namespace, requests: int, seeds: Sequence[int]) -> None:
    """Ratios over the values of one parameter, as a table and as a drawing."""
    name, values = options.sweep[0], [float(value) for value in options.sweep[1:]]
    runs = {value: pairs_of(options, (*options.param, (name, value)), requests, seeds) for value in values}
    found = all_measured(
        list(dict.fromkeys(each for pairs in runs.values() for each in flat(pairs))), options.keep
    )
    ratios = {value: group_ratios(list(rows_of(options.cases, runs[value], found))) for value in values}
    groups = list(dict.fromkeys(map(group_of, options.cases)))
    table = Table(
        "arrivals",
        name,
        *GATES,
        title=f"TTFT of {options.policy} over that of {options.base}: geometric means",
    )
    for group in groups:
        for value in values:
            table.add_row(group, f"{value:g}", *(f"{ratios[value][group, measure]:.2f}" for measure in GATES))
    Console(width=110).print(table)
    if options.plot is not None:
        panels = [
            Panel(
                group,
                [
                    PlotCurve(measure, values, [ratios[value][group, measure] for value in values], number)
                    for number, measure in enumerate(GATES)
                ],
                is_log=True,
            )
            for group in groups
        ]
        options.plot.write_text(lines(name, "", name, panels).svg, encoding="utf-8")
    if options.json is not None:
        entries = [
            {"arrivals": group, name: value, "measure": measure, "ratio": ratio}
            for value in values
            for (group, measure), ratio in ratios[value].items()
        ]
        options.json.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def pairs_of(
    options: argparse.Namespace,
    params: tuple[tuple[str, float | str], ...],
    requests: int,
    seeds: Sequence[int],
) -> Pairs:
    return {
        case: [
            (
                Run(case, options.policy, params, seed, requests, options.slow_loops),
                Run(case, options.base, (), seed, requests, options.slow_loops),
            )
            for seed in seeds
        ]
        for case in options.cases
    }


def flat(pairs: Pairs) -> list[Run]:
    return [run for each in pairs.values() for pair in each for run in pair]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="tilted")
    parser.add_argument("--param", type=parameter, nargs="*", default=[], help="of the policy: NAME=VALUE")
    parser.add_argument("--base", default="paper", help="what it is compared with")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=40_000, help="per run; a tenth is warm-up")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="few requests and seeds: only to explore")
    parser.add_argument("--slow-loops", action="store_true", help="thresholds and roles change as live")
    parser.add_argument("--keep", type=Path, help="file of the runs that are done")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--sweep", nargs="+", metavar="NAME VALUE", help="a parameter and its values")
    parser.add_argument("--plot", type=Path, help="with --sweep: draw it into this file (SVG)")
    options = parser.parse_args()
    requests = min(options.requests, QUICK_REQUESTS) if options.quick else options.requests
    count = min(options.seeds, QUICK_SEEDS) if options.quick else options.seeds
    seeds = range(options.first_seed, options.first_seed + count)
    if options.sweep:
        sweep(options, requests, seeds)
        return
    pairs = pairs_of(options, tuple(options.param), requests, seeds)
    rows = list(rows_of(options.cases, pairs, all_measured(flat(pairs), options.keep)))
    given = "".join(f", {name} {value}" for name, value in options.param)
    console = Console(width=150)
    console.print(
        table_of(
            rows,
            options.cases,
            f"TTFT of {options.policy}{given} over that of {options.base}: ratio (95 % interval); "
            f"{count} seeds of {requests:,} requests",
        )
    )
    missed = [row for row in rows if not row.is_met]
    console.print(f"{len(rows) - len(missed)} of {len(rows)} gates are met", highlight=False)
    if options.json is not None:
        document = {
            "policy": options.policy,
            "params": dict(options.param),
            "base": options.base,
            "first_seed": options.first_seed,
            "seeds": count,
            "requests": requests,
            "slow_loops": options.slow_loops,
            "rows": [asdict(row) | {"met": row.is_met, "clear": row.is_clear} for row in rows],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
