"""What prefix caches change: prompts that share more and more, and caches that keep more and more."""

from collections.abc import Sequence

from prfaas.core.units import GIB, format_bits_per_s, format_bytes
from prfaas.lab.studies.context import StudyContext, cache_of
from prfaas.lab.studies.figures import Panel, PlotCurve, lines, mean_and_p90, percent, seconds
from prfaas.lab.studies.study import Key, Outcomes, Run, Study, StudySection, StudyTable
from prfaas.lab.studies.traffic import SharedPrefixes

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
    rate = _LOAD * context.trace_lambda_max
    for policy in _POLICIES:
        runs += [
            Run(
                (SHARED, policy, share),
                context.planned,
                SharedPrefixes(context.poisson(_LOAD), share, _DOCUMENTS),
                requests,
                context.seed,
                policy=policy,
                caches=cache_of(model, _CACHE_BYTES),
            )
            for share in _SHARES
        ]
        runs += [
            Run(
                (TRACE, policy, capacity),
                context.planned,
                context.replayed(rate),
                requests,
                context.seed,
                policy=policy,
                caches=cache_of(model, capacity * GIB),
            )
            for capacity in _CAPACITIES_GIB
        ]
    return runs


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    shared: dict[str, list[Key]] = {
        policy: [(SHARED, policy, share) for share in _SHARES] for policy in _POLICIES
    }
    trace: dict[str, list[Key]] = {
        policy: [(TRACE, policy, capacity) for capacity in _CAPACITIES_GIB] for policy in _POLICIES
    }
    return StudySection(
        question="What do prefix caches change?",
        setup=(
            f"*Shared prefixes*: the file's arrivals and lengths at {_LOAD:g} of the Λ_max without "
            "caches, where the first part "
            f"of every prompt is the beginning of one of {_DOCUMENTS} documents (the k-th as popular as 1 "
            "/ k) and every "
            f"instance has a cache of {format_bytes(_CACHE_BYTES)}. *Trace*: `{context.trace_name}` "
            f"repeated, at {_LOAD:g} of "
            "what the planner finds for its lengths without caches, and caches of growing size. The rate "
            "stays the same "
            "throughout, so more hits mean less work."
        ),
        findings=[
            *(_finding(outcomes, shared[policy], policy, "shared prefixes") for policy in _POLICIES),
            *(_finding(outcomes, trace[policy], policy, "the trace") for policy in _POLICIES),
        ],
        tables={
            "Shared prefixes": _table(outcomes, "shared part", [f"{share:.0%}" for share in _SHARES], shared),
            "Trace": _table(
                outcomes,
                "cache of an instance",
                [f"{capacity} GiB" if capacity else "none" for capacity in _CAPACITIES_GIB],
                trace,
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
                                [outcomes[key].number("hit_ratio") for key in shared[policy]],
                                [
                                    outcomes[key].number(field) / unit if outcomes[key].is_stable else None
                                    for key in shared[policy]
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
            "Hybrid models can go on only from a state: one is kept every 8,192 tokens and at a prompt's "
            "last full block, so "
            "the hit ratio stays below the shared part.",
        ]
        if context.planned.kv_model.is_hybrid
        else [],
    )


def _table(outcomes: Outcomes, first: str, names: Sequence[str], keys: dict[str, list[Key]]) -> StudyTable:
    columns = [first]
    for policy in _POLICIES:
        columns += [f"{policy}: hits", "TTFT mean (P90), s", "egress", "offloaded"]
    rows = []
    for number, name in enumerate(names):
        cells = [name]
        for policy in _POLICIES:
            outcome = outcomes[keys[policy][number]]
            cells += [
                percent(outcome.number("hit_ratio")),
                mean_and_p90(
                    outcome.number("ttft_mean_s"), outcome.number("ttft_p90_s"), is_stable=outcome.is_stable
                ),
                format_bits_per_s(outcome.number("egress_bits_per_s")),
                percent(outcome.number("offloaded_fraction")),
            ]
        rows.append(cells)
    return StudyTable(columns, rows)


def _finding(outcomes: Outcomes, keys: Sequence[Key], policy: str, what: str) -> str:
    first, last = outcomes[keys[0]], outcomes[keys[-1]]

    def moved(field: str) -> str:
        start, end = first.number(field), last.number(field)
        if field == "offloaded_fraction":
            return f"{percent(start)} to {percent(end)}"
        if field == "egress_bits_per_s":
            return f"{format_bits_per_s(start)} to {format_bits_per_s(end)}"
        return f"{seconds(start)} to {seconds(end)} s"

    falls = last.number("ttft_mean_s") < first.number("ttft_mean_s")
    unstable = sum(not outcomes[key].is_stable for key in keys)
    return (
        f"With `{policy}` and {what} hits go from {percent(first.number('hit_ratio'))} to "
        f"{percent(last.number('hit_ratio'))} of all prompt tokens; the mean TTFT "
        f"{'falls' if falls else 'rises'} from "
        f"{moved('ttft_mean_s')}, egress goes from {moved('egress_bits_per_s')}, the offloaded part from "
        f"{moved('offloaded_fraction')}"
        + (f"; in {unstable} of {len(keys)} runs queues grow." if unstable else ".")
    )


HIT_RATE = Study("hit-rate", "What prefix caches change", _runs, _describe)
