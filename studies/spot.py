"""Prefill capacity that is cheap because it can be taken away: PrfaaS instances that vanish and come back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import best_operation
from prfaas.core.units import SECONDS_PER_HOUR
from prfaas.lab.simulator.scenario import Failure
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudyFigure, StudySection, StudyTable
from studies._figures import NONE, Panel, PlotCurve, lines, listed, percent
from studies._repeats import TTFT, Repeats, tail_table
from studies._runs import Run, length_classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

_LOAD = 0.6
_POLICIES = ("paper", "tilted")
_WAYS = ("lost", "kept")
"""What becomes of a killed prefill: all of it is lost, or the decode instance goes on from what has come."""
_REQUESTS = 8_000
_SEEDS = 5
_KILLS_PER_HOUR = (2.0, 6.0, 20.0)
_NOTICES_S = (0.0, 10.0, 30.0)
"""Google Cloud and Azure tell spot machines 30 s before, which may also be used late; some capacity goes without a
word."""
_RETURN_S = 120.0
_RETURNS_S = (30.0, 120.0, 600.0)
_USUAL_KILLS = 6.0
_SPARE_RETURNS_S = (30.0, 120.0)
_GOAL = 1.3
"""Times the P99 of TTFT without kills: what the most kills may cost, with spares."""
# After the last arrival, until everything has its answer.
_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Spot:
    """How PrfaaS instances are taken away."""

    kills_per_hour: float
    """Of every instance while it is up; 0: never."""
    notice_s: float = 0.0
    return_s: float = _RETURN_S
    has_spares: bool = False
    """There are more instances, so that on average as many are up as without kills."""

    @property
    def label(self) -> str:
        if not self.kills_per_hour:
            return "none"
        spares = ", with spares" if self.has_spares else ""
        return f"{self.kills_per_hour:g} per hour, notice {self.notice_s:g} s, back after {self.return_s:g} s{spares}"

    @property
    def up_share(self) -> float:
        """The part of the time that an instance is up, on average."""
        return 1 / (1 + self.kills_per_hour * self.return_s / SECONDS_PER_HOUR)

    def instances(self, wanted: int) -> int:
        """How many there are where `wanted` should be up."""
        return math.ceil(wanted / self.up_share) if self.has_spares else wanted

    def failures(self, instances: Sequence[str], until_s: float, seed: int) -> list[Failure]:
        """Up for an exponential time, then away; the same for any notice."""
        if not self.kills_per_hour:
            return []
        found = []
        for instance, rng in zip(instances, np.random.default_rng(seed).spawn(len(instances)), strict=True):
            at_s = 0.0
            while True:
                at_s += float(rng.exponential(SECONDS_PER_HOUR / self.kills_per_hour))
                if at_s >= until_s:
                    break
                found.append(Failure(instance, at_s, self.return_s, min(self.notice_s, at_s)))
                at_s += self.return_s
        return found


_NEVER = _Spot(0.0)
_USUAL = tuple(_Spot(kills, notice_s) for kills in _KILLS_PER_HOUR for notice_s in _NOTICES_S)
_LONGER = tuple(_Spot(_USUAL_KILLS, 0.0, return_s) for return_s in _RETURNS_S)
_SPARES = tuple(
    _Spot(max(_KILLS_PER_HOUR), notice_s, return_s, has_spares=True)
    for return_s in _SPARE_RETURNS_S
    for notice_s in _NOTICES_S
)
_ALL = tuple(dict.fromkeys((_NEVER, *_USUAL, *_LONGER, *_SPARES)))


def _ways(spot: _Spot) -> tuple[str, ...]:
    """Where nothing is killed there is one way."""
    return _WAYS if spot.kills_per_hour else _WAYS[-1:]


def _runs(context: StudyContext) -> Sequence[Run]:
    cluster = context.planned.prfaas_clusters[0]
    requests = context.requests(_REQUESTS)
    traffic = context.poisson(_LOAD)
    until_s = requests / traffic.mean_per_s + _AFTER_S
    return [
        Run(
            (policy, spot.label, seed, way),
            _told(context.planned, spot),
            traffic,
            requests,
            seed,
            policy=policy,
            failures=spot.failures(
                [f"{cluster.name}-{number}" for number in range(spot.instances(cluster.instance_count))],
                until_s,
                seed,
            ),
            classes=length_classes(context),
            keeps_transfers=way == "kept",
        )
        for policy in _POLICIES
        for spot in _ALL
        for seed in context.seeds(_SEEDS)
        for way in _ways(spot)
    ]


def _told(planned: PlannedDeployment, spot: _Spot) -> PlannedDeployment:
    """The deployment with a file that says how often instances are taken away, and with spares."""
    clusters = [
        replace(
            each,
            kills_per_hour=spot.kills_per_hour,
            instance_count=spot.instances(each.instance_count),
        )
        if each.kind == "prfaas"
        else each
        for each in planned.clusters
    ]
    return replace(planned, clusters=tuple(clusters))


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    found = {
        (policy, spot, way): Repeats.of(
            outcomes,
            [
                (policy, spot.label, seed, way if way in _ways(spot) else "kept")
                for seed in context.seeds(_SEEDS)
            ],
        )
        for policy in _POLICIES
        for spot in _ALL
        for way in _WAYS
    }
    rate = _LOAD * context.lambda_max
    tables = {
        "Instances that are up, and what is done twice": StudyTable(
            [
                "kills of an instance",
                "up",
                "planned Λ_max",
                *(
                    f"{policy}: {what}"
                    for policy in _POLICIES
                    for what in ("prefilled again", "offloaded, lost", "offloaded, kept")
                ),
            ],
            [
                [
                    spot.label,
                    percent(spot.up_share),
                    f"{_planned_rate(context, spot.up_share):.3g}",
                    *(
                        cell
                        for policy in _POLICIES
                        for cell in _twice(found, policy, spot, context.requests(_REQUESTS))
                    ),
                ]
                for spot in _ALL
            ],
        ),
        "P99 of TTFT with spares, in times of that without kills": _goal_table(found),
    }
    for policy in _POLICIES:
        tables[f"TTFT in seconds with `{policy}`: all lost, and kept"] = _ways_table(found, policy)
        rows = {spot.label: found[policy, spot, "kept"] for spot in _ALL}
        tables[f"TTFT in seconds with `{policy}`, kept"] = tail_table(
            "kills of an instance", rows, length_classes(context)
        )
    return StudySection(
        question="What if prefill capacity can vanish?",
        setup=(
            f"{rate:.3g} req/s, {_LOAD:g} of Λ_max, {len(context.seeds(_SEEDS))} seeds of "
            f"{context.requests(_REQUESTS):,} requests. Every PrfaaS instance is up for an exponentially distributed "
            "time and then gone. Without notice its prefills are then lost: all of them, or what of them had not "
            "arrived (kept). What is lost starts again in the PD cluster at once; what is kept, the decode instance "
            "goes on from. With linear states or windows that is the newest checkpoint, and checkpoints take their "
            "part of the link. With notice it begins only what it ends in time, and what it can't end goes to another "
            "instance at once. `tilted` knows how often instances are taken away, and what a kill takes back. The "
            "planned Λ_max is that of instances which are slower by as much as they are away."
        ),
        findings=[
            *(_kills(found, policy, way) for policy in _POLICIES for way in _WAYS),
            *(_worth(found, policy) for policy in _POLICIES),
            *(_notice(found, policy) for policy in _POLICIES),
            *(_return(found, policy) for policy in _POLICIES),
            *(_goal(found, way) for way in _WAYS),
            _lost(found),
        ],
        tables=tables,
        figures=[_figure(found)],
        notes=[
            "Prefilled again: attempts per 100 requests, where what has come is kept. A prompt that waits when no "
            "PrfaaS instance is left counts too, though nothing of it was computed.",
            "Notice gives no capacity back: an instance that is away is away. It spares what would be computed twice.",
            "Instances come back as they were, after a fixed time. Kills are independent of each other and of the "
            "load; real ones often come together.",
        ],
    )


def _planned_rate(context: StudyContext, up_share: float) -> float:
    """Λ_max if PrfaaS instances took longer by as much as they are away."""
    problem = context.problem

    def slower(tokens: "FloatArray") -> "FloatArray":
        seconds: FloatArray = problem.prfaas[0].prefill_s(tokens) / up_share
        return seconds

    prfaas = (replace(problem.prfaas[0], prefill_s=slower),)
    return best_operation(replace(problem, prfaas=prfaas)).lambda_max


_Found = dict[tuple[str, _Spot, str], Repeats]


def _twice(found: _Found, policy: str, spot: _Spot, requests: int) -> list[str]:
    retries = found[policy, spot, "kept"].mean("retries")
    return [
        retries.text(2, factor=100 / requests),
        *(found[policy, spot, way].mean("offloaded_fraction").percent() for way in _WAYS),
    ]


def _ways_table(found: _Found, policy: str) -> StudyTable:
    fields = {"mean": TTFT, "P99": "ttft_p99_s", "P99.9": "ttft_p999_s"}

    def cell(runs: Repeats, field: str) -> str:
        return runs.grows if runs.verdict == "grows" else runs.mean(field).seconds

    return StudyTable(
        ["kills of an instance", *(f"{name}, {way}" for name in fields for way in _WAYS)],
        [
            [
                spot.label,
                *(cell(found[policy, spot, way], field) for field in fields.values() for way in _WAYS),
            ]
            for spot in _ALL
        ],
    )


def _change(runs: Repeats, base: Repeats) -> str:
    if "grows" in (runs.verdict, base.verdict):
        return "queues grow"
    return f"{runs.against(base)} mean, {runs.against(base, 'ttft_p999_s')} P99.9"


def _kills(found: _Found, policy: str, way: str) -> str:
    base = found[policy, _NEVER, way]
    told = [
        f"{_change(found[policy, spot, way], base)} at {spot.kills_per_hour:g} kills per hour"
        for spot in _USUAL
        if not spot.notice_s
    ]
    where = "all is lost" if way == "lost" else "what has come is kept"
    return (
        f"Without notice and back after {_RETURN_S:g} s the TTFT of `{policy}` changes, where {where}, by "
        f"{'; '.join(told)}."
    )


def _worth(found: _Found, policy: str) -> str:
    told = []
    for kills in _KILLS_PER_HOUR:
        kept, lost = (found[policy, _Spot(kills), way] for way in ("kept", "lost"))
        told.append(f"{_change(kept, lost)} at {kills:g} kills per hour")
    return f"To keep what has come changes the TTFT of `{policy}` by {'; '.join(told)}, against losing it."


def _notice(found: _Found, policy: str) -> str:
    told = []
    for notice_s in _NOTICES_S[1:]:
        for kills in _KILLS_PER_HOUR:
            without, with_notice = (found[policy, _Spot(kills, each_s), "kept"] for each_s in (0.0, notice_s))
            before, after = (sum(each.values("retries")) for each in (without, with_notice))
            worth = (
                "queues grow"
                if "grows" in (without.verdict, with_notice.verdict)
                else f"mean TTFT {with_notice.against(without)}"
            )
            told.append(f"{before:.0f} to {after:.0f} with {notice_s:g} s at {kills:g} kills ({worth})")
    return f"Notice takes the attempts that `{policy}` makes again from {listed(told)}."


def _return(found: _Found, policy: str) -> str:
    told = [
        f"{_change(found[policy, spot, 'kept'], found[policy, _NEVER, 'kept'])} if back after {spot.return_s:g} s"
        for spot in _LONGER
    ]
    return f"At {_USUAL_KILLS:g} kills per hour without notice that is {'; '.join(told)} (`{policy}`, kept)."


def _of_goal(found: _Found, policy: str, spot: _Spot, way: str) -> str:
    """The ratio and the verdict: "1.12 ± 0.05 times (met)"; open where the interval has the goal in it."""
    runs, base = found[policy, spot, way], found[policy, _NEVER, way]
    if "grows" in (runs.verdict, base.verdict):
        return "queues grow (not met)"
    ratio = runs.against(base, "ttft_p99_s")
    if not math.isfinite(ratio.mean):
        return NONE
    low, high = 1 + ratio.mean - ratio.half, 1 + ratio.mean + ratio.half
    return f"{ratio.times} ({'met' if high <= _GOAL else 'not met' if low > _GOAL else 'open'})"


def _goal_table(found: _Found) -> StudyTable:
    return StudyTable(
        ["kills of an instance", *(f"{policy}, {way}" for policy in _POLICIES for way in _WAYS)],
        [
            [spot.label, *(_of_goal(found, policy, spot, way) for policy in _POLICIES for way in _WAYS)]
            for spot in _SPARES
        ],
    )


def _goal(found: _Found, way: str) -> str:
    told = [
        f"{_of_goal(found, policy, spot, way)} with `{policy}` if back after {spot.return_s:g} s"
        for policy in _POLICIES
        for spot in _SPARES
        if not spot.notice_s
    ]
    where = "all is lost" if way == "lost" else "what has come is kept"
    return (
        f"The goal is a P99 of TTFT of at most {_GOAL:g} times that without kills, at {max(_KILLS_PER_HOUR):g} kills "
        f"per hour, with so many more instances that as many are up on average. Where {where}, and without notice, it "
        f"is {listed(told)}."
    )


def _lost(found: _Found) -> str:
    lost = sum(sum(each.values("lost")) for (_, spot, way), each in found.items() if way in _ways(spot))
    return "No request is lost in any run." if lost == 0 else f"{lost:.0f} requests are lost."


def _figure(found: _Found) -> StudyFigure:
    kills = [0.0, *_KILLS_PER_HOUR]

    def values(policy: str, way: str, field: str) -> list[float | None]:
        each = [found[policy, _Spot(rate) if rate else _NEVER, way] for rate in kills]
        return [None if here.verdict == "grows" else here.mean(field).mean for here in each]

    return lines(
        "spot",
        f"TTFT over the kills of every PrfaaS instance, which is back after {_RETURN_S:g} s, without notice; solid: "
        "what has come is kept, dashed: all is lost. Nothing is drawn where queues grow.",
        "kills per hour and instance",
        [
            Panel(
                title,
                [
                    PlotCurve(
                        policy if way == "kept" else "",
                        kills,
                        values(policy, way, field),
                        number,
                        is_dashed=way == "lost",
                    )
                    for number, policy in enumerate(_POLICIES)
                    for way in _WAYS
                ],
            )
            for title, field in (
                ("mean TTFT (s)", TTFT),
                ("P99 of TTFT (s)", "ttft_p99_s"),
                ("P99.9 of TTFT (s)", "ttft_p999_s"),
            )
        ],
    )


SPOT = Study("spot", "Prefill capacity that vanishes", _runs, _describe)
