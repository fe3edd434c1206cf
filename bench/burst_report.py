"""What `burst.py` found: phases, what the planner says of each, and the verdicts."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from burst_deployment import best_prefill, problem_of
from prfaas.core.deployment import Deployment
from prfaas.core.planner.fixed_roles import rate_with_roles
from prfaas.core.scheduling.threshold import ThresholdOptimiser
from prfaas.core.units import format_bits_per_s, format_s
from prfaas.core.workload.empirical import Empirical
from prfaas.tools.replay import ReplayedRequest
from prfaas.tools.replay.result import Percentiles


@dataclass(frozen=True)
class Phase:
    """So many seconds of traffic whose answers are `output_factor` times as long as recorded, with the chosen
    link at `link_factor` of its bandwidth."""

    name: str
    duration_s: float
    output_factor: float = 1.0
    link_factor: float = 1.0


@dataclass(frozen=True)
class Sample:
    """What the gateway said of itself. Thresholds by PD cluster in tokens (None: never offload), prefill
    instances by PD cluster, capacities by link."""

    at_s: float
    thresholds: dict[str, float | None]
    prefill: dict[str, int]
    capacity_bits_per_s: dict[str, float]


@dataclass
class Found:
    """One phase, when all its answers have come; what the planner says is for the phase's own lengths and links.

    `optimum`: prefill instances by PD cluster. `best_thresholds`: for the roles at the phase's end.
    """

    phase: Phase
    records: list[ReplayedRequest]
    samples: list[Sample]
    optimum: dict[str, int]
    optimum_rate: float
    rate_with_roles: float
    best_thresholds: dict[str, float]

    @property
    def lost(self) -> int:
        return sum(record.is_lost for record in self.records)

    @property
    def errors(self) -> Counter[str]:
        return Counter(record.error for record in self.records if record.error is not None)

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    def to_json(self) -> dict[str, Any]:
        ttft = Percentiles.of(record.ttft_s for record in self.records if not record.is_lost)
        return {
            "phase": self.phase.name,
            "requests": len(self.records),
            "lost": self.lost,
            "errors": dict(self.errors.most_common()),
            "offloaded": self.offloaded,
            "ttft_s": ttft and ttft.to_json(),
            "thresholds": {
                "first": self.samples[0].thresholds,
                "last": self.last.thresholds,
                "best": {
                    name: None if math.isinf(best) else best for name, best in self.best_thresholds.items()
                },
                "all": [(round(sample.at_s, 1), sample.thresholds) for sample in changes(self.samples)],
            },
            "prefill_instances": {"first": self.samples[0].prefill, "last": self.last.prefill},
            "optimum": self.optimum,
            "optimum_per_s": self.optimum_rate,
            "with_these_roles_per_s": self.rate_with_roles,
            "capacity_bits_per_s": self.last.capacity_bits_per_s,
        }

    @property
    def offloaded(self) -> float:
        return sum(record.route == "offload" for record in self.records) / max(len(self.records), 1)


def judged(
    deployment: Deployment,
    phase: Phase,
    link_name: str,
    records: list[ReplayedRequest],
    samples: list[Sample],
) -> Found:
    uncached = [
        int(record.route_fields["uncached"]) for record in records if "uncached" in record.route_fields
    ]
    answers = [record.answered_tokens for record in records if record.answered_tokens]
    lengths = Empirical([max(each, 1) for each in uncached])
    factors = {link_name: phase.link_factor}
    problem = problem_of(deployment, lengths, sum(answers) / len(answers), factors)
    optimum, prefill = best_prefill(deployment, problem), samples[-1].prefill
    change = ThresholdOptimiser().propose(problem, prefill, {}, sample_count=len(uncached), reason="start")
    assert change is not None
    return Found(
        phase,
        records,
        samples,
        optimum,
        rate_with_roles(problem, optimum),
        rate_with_roles(problem, prefill),
        dict(change.tokens),
    )


def changes(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample, and those whose thresholds differ from the one before."""
    return [
        sample
        for place, sample in enumerate(samples)
        if place == 0 or sample.thresholds != samples[place - 1].thresholds
    ]


Verdict = tuple[bool, str]
"""Whether something is as it should be, and what it is."""


def none_lost(found: Sequence[Found]) -> Verdict:
    lost = sum(each.lost for each in found)
    return lost == 0, f"{lost} of {sum(len(each.records) for each in found)} requests lost"


def threshold_verdicts(found: Sequence[Found], cluster: str) -> list[Verdict]:
    """Whether the threshold of the slow link's target rose by a tenth, and came back at least half way."""
    settled, dropped, recovered = found
    before, after = threshold(settled.last, cluster), threshold(recovered.last, cluster)
    during = max(threshold(sample, cluster) for sample in (*dropped.samples, *recovered.samples))
    return [
        (
            during > 1.1 * before,
            f"threshold of {cluster}: {shown(before)} tokens, at most {shown(during)} after the link got slow",
        ),
        (
            after < math.inf and (during == math.inf or after**2 < before * during),
            f"threshold of {cluster} when the link was as before: {shown(after)}",
        ),
    ]


def role_verdicts(found: Sequence[Found]) -> list[Verdict]:
    """Whether roles changed with the mix, and are the planner's best ones, to within an instance."""
    settled, shifted = found
    now, best = shifted.last.prefill, shifted.optimum
    moved = ", ".join(f"{name} {settled.last.prefill[name]} -> {count}" for name, count in now.items())
    wanted = ", ".join(f"{name} {count}" for name, count in best.items())
    return [
        (now != settled.last.prefill, f"prefill instances when answers got longer: {moved}"),
        (
            all(abs(now[name] - best[name]) <= 1 for name in best),
            f"the planner's optimum for that mix: {wanted} ({shifted.optimum_rate:.1f} requests/s, "
            f"with these roles {shifted.rate_with_roles:.1f})",
        ),
    ]


def threshold(sample: Sample, cluster: str) -> float:
    """In tokens; infinite if nothing is offloaded."""
    tokens = sample.thresholds[cluster]
    return math.inf if tokens is None else tokens


def shown(tokens: float) -> str:
    return "never" if math.isinf(tokens) else f"{tokens:.0f}"


def phases_table(title: str, found: Sequence[Found], link_name: str) -> Table:
    clusters = list(found[0].optimum)
    table = Table(title=title, title_justify="left")
    for name in ("phase", "requests", "lost", "offloaded", "TTFT P50", "P90", link_name):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for cluster in clusters:
        table.add_column(f"t {cluster} (best)", justify="right")
    for name in ("prefill", "best", "rate", "best rate"):
        table.add_column(name, justify="right")
    for each in found:
        ttft = Percentiles.of(record.ttft_s for record in each.records if not record.is_lost)
        table.add_row(
            each.phase.name,
            str(len(each.records)),
            str(each.lost),
            f"{each.offloaded:.0%}",
            *((format_s(ttft.p50), format_s(ttft.p90)) if ttft else ("-", "-")),
            format_bits_per_s(each.last.capacity_bits_per_s[link_name]),
            *(
                f"{shown(threshold(each.last, cluster))} ({shown(each.best_thresholds[cluster])})"
                for cluster in clusters
            ),
            " + ".join(str(each.last.prefill[cluster]) for cluster in clusters),
            " + ".join(str(each.optimum[cluster]) for cluster in clusters),
            f"{each.rate_with_roles:.1f}",
            f"{each.optimum_rate:.1f}",
        )
    return table
