"""A simulation for people: policies beside each other, then what they decided and how busy everything was."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.experiment import mean_and_half
from prfaas.core.scheduling.parameters import Setting, shown
from prfaas.core.units import format_bits_per_s, format_bytes, format_s
from prfaas.lab.report.plan import NONE, new_table
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.pools import TIERS
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class SimulationReport:
    """The results of one or more policies under the same requests, with all that was simulated."""

    deployment: PlannedDeployment
    results: Mapping[str, Result]
    """By policy; the first is what the others are compared with."""
    summaries: Mapping[str, Mapping[str, Any]]
    """`Result.summary` of each."""
    rate_rps: float
    """Requests per second that arrive on average."""
    lambda_max_rps: float
    """What the planner finds, which the load is a share of."""
    seed: int
    requests: int | None
    """How many arrive; None: as many as come in `duration_s`."""
    duration_s: float | None
    arrivals: Mapping[str, Any]
    """The traffic as it stands in JSON."""
    arrivals_text: str
    """The traffic in a line."""
    notes: Sequence[str] = ()
    """What to know about the traffic before one believes the numbers."""
    caches: CacheOptions | None = None
    pools: Mapping[str, PoolOptions] = field(default_factory=dict)
    """Of each machine, by cluster."""
    link_fluctuation: str | None = None
    """SD:CORRELATION_S, as it was asked for."""
    bandwidth_steps: Sequence[str] = ()
    """LINK@T=BANDWIDTH, as they were asked for."""
    failures: Sequence[Failure] = ()
    """Links and instances that are gone for a time."""
    changes: Mapping[str, float] | None = None
    """Fields of the deployment file that were given another number."""
    changes_text: Sequence[str] = ()
    """The same as they were asked for: FIELD=VALUE."""
    params: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    """Parameters that are not the defaults', by policy."""
    repeats: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """`Result.summary` of further seeds, by policy: each policy meets the same requests under a seed."""
    command: str = ""
    """The command line that gives this report again."""

    @property
    def load(self) -> float:
        """The share of Λ_max that arrives."""
        return self.rate_rps / self.lambda_max_rps

    @property
    def title(self) -> str:
        return (
            f"{self.deployment.name}: {self.rate_rps:.4g} requests/s, {self.load:.3g} of the planner's Λ_max"
        )

    @property
    def lead(self) -> str:
        return f"{self.deployment.model_title}; simulated with prfaas simulate, seed {self.seed}"

    def facts(self) -> list[tuple[str, str]]:
        """The simulated deployment and load in words: a name and a text each."""
        length = (
            f"{self.requests:,} requests"
            if self.requests is not None
            else f"{format_s(self.duration_s or 0.0)} of arrivals"
        )
        facts = [("clusters", "; ".join(_clusters(self.deployment)))]
        if links := self.deployment.links:
            rates = [f"{link.name} {format_bits_per_s(link.bandwidth_bits_per_s)}" for link in links]
            facts.append(("links", "; ".join(rates) + _fluctuation(self.link_fluctuation)))
        facts += [
            ("arrivals", self.arrivals_text),
            (
                "load",
                f"{self.load:.3g} × Λ_max, which is {self.lambda_max_rps:.4g} requests/s by `prfaas plan`",
            ),
            ("length", f"{length}, a tenth of the time warm-up; seed {self.seed}"),
            ("caches", _caches(self.deployment, self.caches)),
        ]
        if self.pools:
            facts.append(("pools", "; ".join(_pools(self.pools))))
        if self.deployment.first_token == "prefill":
            facts.append(("first tokens", "from the prefill, for every request"))
        if self.failures:
            gone = [f"{each.what} from {each.at_s:g} s on for {each.lasts_s:g} s" for each in self.failures]
            facts.append(("gone", "; ".join(gone)))
        if self.bandwidth_steps:
            facts.append(("bandwidth steps", "; ".join(self.bandwidth_steps)))
        if self.changes_text:
            facts.append(("changed in the file", "; ".join(self.changes_text)))
        if self.params:
            facts.append(("parameters", "; ".join(_parameters(self.params))))
        return facts

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            "deployment": self.deployment.name,
            "load": self.load,
            "rate_rps": self.rate_rps,
            "lambda_max_rps": self.lambda_max_rps,
            "seed": self.seed,
            "requests": self.requests,
            "duration_s": self.duration_s,
            "arrivals": self.arrivals,
            "caches": None if self.caches is None else asdict(self.caches),
            "pools": {name: asdict(options) for name, options in self.pools.items()},
            "link_fluctuation": self.link_fluctuation,
            "bandwidth_steps": [*self.bandwidth_steps],
            "failures": [asdict(each) for each in self.failures],
            "changes": self.changes or {},
            "params": {policy: dict(params) for policy, params in self.params.items()},
            "policies": self.summaries,
            "seeds": self.over_seeds(),
        }

    def over_seeds(self) -> dict[str, dict[str, tuple[float, float]]]:
        """By policy and number of the summary: its mean over the seeds, and half of the 95 % interval (Student's t).

        Numbers that a seed lacks are left out. Empty with one seed.
        """
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for policy, others in self.repeats.items():
            for _, key, _, _ in _ROWS:
                values = [_number(each.get(key)) for each in (self.summaries[policy], *others)]
                known = [value for value in values if value is not None]
                if len(known) == len(values):
                    found.setdefault(policy, {})[key] = mean_and_half(known)
        return found


def _clusters(deployment: PlannedDeployment) -> Iterator[str]:
    for cluster in deployment.clusters:
        does = "prefill for others" if cluster.kind == "prfaas" else "prefill and decode"
        yield f"{cluster.name}: {cluster.instance_count} × {cluster.gpus_per_instance} {cluster.hardware}, {does}"


def _caches(deployment: PlannedDeployment, caches: CacheOptions | None) -> str:
    if caches is None:
        return "none"
    size = format_bytes(caches.capacity_tokens * deployment.kv_model.token_bytes)
    text = f"{size} on every instance ({caches.capacity_tokens:,} tokens)"
    if caches.checkpoint_tokens is not None:
        text += (
            f"; hybrid model: a state, as large as {caches.state_tokens:,} tokens, every "
            f"{caches.checkpoint_tokens:,} tokens and at the end of a prompt"
        )
    return text


def _pools(pools: Mapping[str, PoolOptions]) -> Iterator[str]:
    for name, options in pools.items():
        text = f"{name}: {format_bytes(options.memory_bytes)} of memory"
        if options.ssd_bytes:
            text += f" and {format_bytes(options.ssd_bytes)} of SSD"
        together = options.instances_per_machine
        yield f"{text} on every machine" + (f", which has {together} instances" if together > 1 else "")


def _parameters(params: Mapping[str, Mapping[str, Setting]]) -> Iterator[str]:
    for policy, given in params.items():
        yield f"{policy}: " + ", ".join(f"{name} = {shown(value)}" for name, value in given.items())


def _fluctuation(text: str | None) -> str:
    if text is None:
        return ""
    relative_sd, _, correlation_s = text.partition(":")
    return f"; fluctuating by {float(relative_sd):.0%} (standard deviation), correlated over {float(correlation_s):g} s"


def headline(report: SimulationReport) -> list[list[str]]:
    """The main table: a row per number, a cell per policy; after a line break what is said of it in small print.

    Rows that no policy has anything to say about are left out.
    """
    rows = []
    for label, key, format_value, compared in _ROWS:
        values = [_number(summary.get(key)) for summary in report.summaries.values()]
        unknown = _UNKNOWN.get(key, NONE)
        cells = [label]
        for number, value in enumerate(values):
            text = unknown if value is None else format_value(value)
            if compared and number > 0:
                text += _difference(values[0], value)
            cells.append(text)
        is_known = any(values if key in _ONLY_IF_ANY else (value is not None for value in values))
        if is_known or key in _UNKNOWN:
            rows.append(cells)
    return rows


def seed_rows(report: SimulationReport) -> list[list[str]]:
    """The numbers of the main table that say how a policy fares, over all seeds."""
    found = report.over_seeds().values()
    return [
        [label, *(f"{shown_as(each[key][0])} ± {shown_as(each[key][1])}" for each in found)]
        for label, key, shown_as, is_compared in _ROWS
        if (is_compared or key.endswith("_rps")) and all(key in each for each in found)
    ]


def _number(value: Any) -> float | None:
    """A number of a summary; of what the slow loops did, how often they did it."""
    return len(value) if isinstance(value, list) else value


def decision_rows(report: SimulationReport) -> list[list[str]]:
    """Shares of all decisions by their reason, the most frequent first."""
    decisions = [summary["decisions"] for summary in report.summaries.values()]
    reasons = dict.fromkeys(reason for each in decisions for reason in each)
    by_frequency = sorted(
        reasons, key=lambda reason: (-sum(each.get(reason, 0) for each in decisions), reason)
    )
    return [[reason, *(_share_cell(each, reason) for each in decisions)] for reason in by_frequency]


def _share_cell(decisions: Mapping[str, int], reason: str) -> str:
    count = decisions.get(reason, 0)
    return f"{count / sum(decisions.values()):.1%}\n{count:,}" if count else NONE


def stage_rows(report: SimulationReport) -> list[list[str]]:
    """Every stage: the share of its time, decode slots or bandwidth in use, and in small print what waited.

    All are means after the warm-up.
    """
    results, rows = report.results.values(), []

    def add(label: str, cells: list[str]) -> None:
        if any(cell != NONE for cell in cells):
            rows.append([label, *cells])

    for cluster in report.deployment.clusters:
        for what, queue in (("prefill", "queue"), ("decode", "decode_queue")):
            keys = f"{what}_utilisation_{cluster.name}", f"{queue}_{cluster.name}"
            add(f"{cluster.name} {what}", [_busy_cell(*map(result.mean_of, keys)) for result in results])
    for link in report.deployment.links:
        rates = [result.mean_of(f"egress_bits_per_s_{link.name}") for result in results]
        add(
            f"{link.name} link",
            [
                NONE if rate is None else f"{rate / link.bandwidth_bits_per_s:.1%}\n{format_bits_per_s(rate)}"
                for rate in rates
            ],
        )
    return rows


def _busy_cell(utilisation: float | None, waiting: float | None) -> str:
    if utilisation is None:
        return NONE
    if waiting is None:
        return f"{utilisation:.1%}"
    return f"{utilisation:.1%}\n{f'{waiting:.2f}' if waiting < 10 else f'{waiting:,.0f}'} waiting"


def print_simulation(console: "Console", report: SimulationReport) -> None:
    """Write a simulation to a rich console."""
    from rich.text import Text

    console.print(Text(report.title, style="bold"))
    for name, text in report.facts():
        console.print(Text(f"{name}: {text}"))
    console.print()
    names = list(report.results)
    console.print(_table("", names, headline(report), bold=("TTFT mean", "TTFT P90")))
    if report.repeats:
        seeds = 1 + len(next(iter(report.repeats.values())))
        console.print()
        console.print(_table(f"{seeds} seeds, mean ± half of 95 %", names, seed_rows(report)))
    console.print()
    console.print(_table("decisions by reason", names, decision_rows(report)))
    console.print()
    console.print(_table("busy, and waiting on average", names, stage_rows(report)))
    for note in report.notes:
        console.print()
        console.print(Text(note, style="dim"))


def _table(
    title: str, names: Sequence[str], rows: Sequence[Sequence[str]], bold: Sequence[str] = ()
) -> "Table":
    table = new_table(title)
    # Small print has a column of its own, so that the numbers stand below each other.
    has_small = [any("\n" in row[number] for row in rows) for number in range(1, len(names) + 1)]
    for name, small in zip(names, has_small, strict=True):
        table.add_column(name, justify="right", no_wrap=True)
        if small:
            table.add_column("", no_wrap=True, style="dim")
    for label, *cells in rows:
        shown = [label]
        for cell, small in zip(cells, has_small, strict=True):
            number, _, text = cell.partition("\n")
            shown += [number, text] if small else [number]
        table.add_row(*shown, style="bold" if label in bold else None)
    return table


def _difference(first: float | None, value: float | None) -> str:
    if first is None or value is None or not first:
        return ""
    return f"\n{value / first - 1:+.1%}".replace("-", "−")


def _seconds(value: float) -> str:
    return format_s(value) if math.isfinite(value) else NONE


def _stable(value: float) -> str:
    return "yes" if value else "NO: queues grow"


_rate, _share, _count = "{:.4g} req/s".format, "{:.1%}".format, "{:,.0f}".format
_ROWS: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
    ("TTFT mean", "ttft_mean_s", _seconds, True),
    ("TTFT P50", "ttft_p50_s", _seconds, False),
    ("TTFT P90", "ttft_p90_s", _seconds, True),
    ("TTFT P99", "ttft_p99_s", _seconds, True),
    ("second token, mean", "second_token_mean_s", _seconds, True),
    ("second token, P90", "second_token_p90_s", _seconds, True),
    ("longest gap, mean", "longest_gap_mean_s", _seconds, True),
    ("longest gap, P90", "longest_gap_p90_s", _seconds, True),
    ("time per further token, mean", "tpot_mean_s", _seconds, False),
    ("time per further token, P90", "tpot_p90_s", _seconds, False),
    ("whole answer, mean", "e2e_mean_s", _seconds, False),
    ("whole answer, P90", "e2e_p90_s", _seconds, False),
    ("throughput", "throughput_rps", _rate, False),
    ("goodput under the SLO", "goodput_rps", _rate, False),
    ("egress", "egress_bits_per_s", format_bits_per_s, False),
    ("offloaded", "offloaded_fraction", _share, False),
    ("prompt tokens from caches", "hit_ratio", _share, False),
    ("  from memory of pools", "hit_ratio_memory", _share, False),
    ("  from SSD of pools", "hit_ratio_ssd", _share, False),
    ("  from other machines' pools", "hit_ratio_machine", _share, False),
    ("  from other clusters' pools", "hit_ratio_cluster", _share, False),
    ("copies of hot prefixes", "prefix_copies", _count, False),
    ("changes of the threshold", "threshold_changes", _count, False),
    ("changes of roles", "conversions", _count, False),
    ("prefilled again after a failure", "retries", _count, False),
    ("stable", "stable", _stable, False),
)
# What is said where there is no verdict.
_UNKNOWN = {"stable": "too short to say"}
# Zero is what is expected of these.
_ONLY_IF_ANY = {
    "conversions",
    "retries",
    "hit_ratio",
    "prefix_copies",
    *(f"hit_ratio_{tier}" for tier in TIERS),
}
