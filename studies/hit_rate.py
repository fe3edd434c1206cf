"""What prefix caches change: prompts that share more and more, and caches that keep more and more."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prfaas.core.units import GIB, format_bytes
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudySection, StudyTable
from studies._figures import Panel, PlotCurve, lines
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes, trace_lambda_max, trace_name
from studies._traffic import SharedPrefixes
from studies._variants import cache_of

_LOAD = 0.9
_SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
_DOCUMENTS = 32
_CACHE_BYTES = 64 * GIB
_CAPACITIES_GIB = (0, 2, 4, 8, 16, 32, 64)
_POLICIES = ("paper", "tilted")
_REQUESTS = 8_000
SHARED, TRACE = "shared", "trace"


def _runs(context: StudyContext) -> Sequence[Run]:
    model, runs = context.planned.kv_model, []
    requests = context.requests(_REQUESTS)
    rate = _LOAD * trace_lambda_max(context)
    for policy in _POLICIES:
        for seed in context.seeds():
            shared = Run(
                (),
                context.planned,
                context.poisson(_LOAD),
                requests,
                seed,
                policy=policy,
                caches=cache_of(model, _CACHE_BYTES),
                classes=length_classes(context),
            )
            runs += [
                replace(
                    shared,
                    key=(SHARED, policy, share, seed),
                    traffic=SharedPrefixes(context.poisson(_LOAD), share, _DOCUMENTS),
                )
                for share in _SHARES
            ]
            runs += [
                replace(
                    shared,
                    key=(TRACE, policy, capacity, seed),
                    traffic=context.replayed(rate),
                    caches=cache_of(model, capacity * GIB),
                )
                for capacity in _CAPACITIES_GIB
            ]
    return runs


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    shared, trace = (
        {
            (policy, value): Repeats.seeded(outcomes, context.seeds(), kind, policy, value)
            for value in values
            for policy in _POLICIES
        }
        for kind, values in ((SHARED, _SHARES), (TRACE, _CAPACITIES_GIB))
    )
    told = {f"{share:.0%} shared": (shared, share) for share in (_SHARES[0], _SHARES[4], _SHARES[-1])} | {
        f"trace, {_cache(capacity)}": (trace, capacity)
        for capacity in (_CAPACITIES_GIB[0], _CAPACITIES_GIB[-1])
    }
    return StudySection(
        question="What do prefix caches change?",
        setup=(
            f"*Shared prefixes*: the file's arrivals and lengths at {_LOAD:g} of the Λ_max without "
            "caches, where the first part "
            f"of every prompt is the beginning of one of {_DOCUMENTS} documents (the k-th as popular as 1 "
            "/ k) and every "
            f"instance has a cache of {format_bytes(_CACHE_BYTES)}. *Trace*: `{trace_name(context)}` "
            f"repeated, at {_LOAD:g} of "
            "what the planner finds for its lengths without caches, and caches of growing size. The rate "
            "stays the same "
            f"throughout, so more hits mean less work. {context.requests(_REQUESTS):,} requests."
        ),
        findings=[
            *(_finding(shared, _SHARES, policy, "shared prefixes") for policy in _POLICIES),
            *(_finding(trace, _CAPACITIES_GIB, policy, "the trace") for policy in _POLICIES),
        ],
        tables={
            "Shared prefixes": _table(shared, "shared part", {share: f"{share:.0%}" for share in _SHARES}),
            "Trace": _table(
                trace, "cache of an instance", {capacity: _cache(capacity) for capacity in _CAPACITIES_GIB}
            ),
            TAIL_TITLE: tail_table(
                "case, policy",
                {
                    f"{name}, {policy}": found[policy, value]
                    for name, (found, value) in told.items()
                    for policy in _POLICIES
                },
                length_classes(context),
            ),
        },
        figures=[
            lines(
                "hit-rate",
                "Shared prefixes: TTFT, egress and offloaded part over the part of all prompt tokens that "
                "came from caches.",
                "hit ratio",
                [
                    Panel(
                        title,
                        [
                            PlotCurve(
                                policy,
                                [shared[policy, share].mean("hit_ratio").mean for share in _SHARES],
                                [
                                    shared[policy, share].mean(field).mean / unit
                                    if shared[policy, share].is_stable
                                    else None
                                    for share in _SHARES
                                ],
                                number,
                            )
                            for number, policy in enumerate(_POLICIES)
                        ],
                    )
                    for title, field, unit in (
                        ("mean TTFT (s)", "ttft_mean_s", 1.0),
                        ("egress (Gbit/s)", "egress_bits_per_s", 1e9),
                        ("offloaded", "offloaded_fraction", 1.0),
                    )
                ],
            )
        ],
        notes=[
            "Seeds move the trace's arrivals within the step of its clock and nothing else: its intervals say nothing "
            "of other traces.",
            "Hybrid models can go on only from a state: one is kept every 8,192 tokens and at a prompt's "
            "last full block, so "
            "the hit ratio stays below the shared part.",
        ][: 2 if context.planned.kv_model.is_hybrid else 1],
    )


def _cache(capacity_gib: int) -> str:
    return f"{capacity_gib} GiB" if capacity_gib else "none"


def _table(found: Mapping[tuple[str, float], Repeats], first: str, names: Mapping[float, str]) -> StudyTable:
    columns = [first]
    for policy in _POLICIES:
        columns += [f"{policy}: hits", "TTFT mean (P90), s", "egress", "offloaded"]
    rows = []
    for value, name in names.items():
        cells = [name]
        for policy in _POLICIES:
            each = found[policy, value]
            cells += [
                each.mean("hit_ratio").percent(1),
                each.ttft,
                each.mean("egress_bits_per_s").gigabits,
                each.mean("offloaded_fraction").percent(),
            ]
        rows.append(cells)
    return StudyTable(columns, rows)


def _finding(
    found: Mapping[tuple[str, float], Repeats], values: Sequence[float], policy: str, what: str
) -> str:
    first, last = found[policy, values[0]], found[policy, values[-1]]
    grows = sum(found[policy, value].verdict == "grows" for value in values)
    return (
        f"With `{policy}` and {what} hits go from {first.mean('hit_ratio').percent()} to "
        f"{last.mean('hit_ratio').percent()} of all prompt tokens. The mean TTFT changes by {last.against(first)}, "
        f"egress by {last.against(first, 'egress_bits_per_s')}. The offloaded part goes from "
        f"{first.mean('offloaded_fraction').percent()} to {last.mean('offloaded_fraction').percent()}."
        + (f" In {grows} of {len(values)} cases queues grow." if grows else "")
    )


HIT_RATE = Study("hit-rate", "What prefix caches change", _runs, _describe)
