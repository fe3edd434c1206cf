"""What the distance between the clusters costs: the round trip itself, and what it leaves of a connection."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.units import BITS_PER_BYTE, MIB, format_bits_per_s
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Key, Outcomes, Study, StudyFigure, StudySection, StudyTable
from studies._figures import Panel, PlotCurve, lines, listed
from studies._repeats import TTFT, Repeats, tail_table
from studies._runs import Run, length_classes

_ROUND_TRIPS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2)
_LOAD = 0.8
_POLICIES = ("paper", "tilted")
_REQUESTS = 5_000
_SEEDS = 5
_WINDOW_BYTES = 4 * MIB
"""The most that Linux lets one connection have under way: the default of `net.ipv4.tcp_wmem` with enough memory
(Documentation/networking/ip-sysctl.rst)."""
_NO_WINDOW, _WINDOW = "no window", "window"
_LENGTHS = 512


def _with_round_trip(planned: PlannedDeployment, rtt_s: float, *, has_window: bool) -> PlannedDeployment:
    """The deployment with links of this round trip, whose connections carry a window in each of them, or anything."""
    most = BITS_PER_BYTE * _WINDOW_BYTES / rtt_s if has_window else None
    links = tuple(replace(link, rtt_s=rtt_s, connection_bits_per_s=most) for link in planned.links)
    return replace(planned, links=links)


def _key(policy: str, kind: str, rtt_s: float, seed: int) -> Key:
    return (policy, kind, rtt_s, seed)


def _runs(context: StudyContext) -> Sequence[Run]:
    return [
        Run(
            _key(policy, kind, rtt_s, seed),
            _with_round_trip(context.planned, rtt_s, has_window=kind == _WINDOW),
            context.poisson(_LOAD),
            context.requests(_REQUESTS),
            seed,
            policy=policy,
            classes=length_classes(context),
        )
        for policy in _POLICIES
        for kind in (_NO_WINDOW, _WINDOW)
        for rtt_s in _ROUND_TRIPS_S
        for seed in context.seeds(_SEEDS)
    ]


class _Found:
    """Runs by what they vary."""

    def __init__(self, context: StudyContext, outcomes: Outcomes) -> None:
        self._found = {
            (policy, kind, rtt_s): Repeats.of(
                outcomes, [_key(policy, kind, rtt_s, seed) for seed in context.seeds(_SEEDS)]
            )
            for policy in _POLICIES
            for kind in (_NO_WINDOW, _WINDOW)
            for rtt_s in _ROUND_TRIPS_S
        }

    def at(self, policy: str, kind: str, rtt_s: float) -> Repeats:
        return self._found[policy, kind, rtt_s]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    found = _Found(context, outcomes)
    link = context.planned.links[0]
    tables = {
        "Offloaded part of all requests": StudyTable(
            [
                "round trip",
                "one transfer at most",
                *(f"{policy}, {kind}" for policy in _POLICIES for kind in (_NO_WINDOW, _WINDOW)),
            ],
            [
                [
                    _milliseconds(rtt_s),
                    format_bits_per_s(_transfer_limit(context, rtt_s)),
                    *(
                        found.at(policy, kind, rtt_s).mean("offloaded_fraction").percent(1)
                        for policy in _POLICIES
                        for kind in (_NO_WINDOW, _WINDOW)
                    ),
                ]
                for rtt_s in _ROUND_TRIPS_S
            ],
        )
    }
    for policy in _POLICIES:
        rows = {
            f"{_milliseconds(rtt_s)}, {kind}": found.at(policy, kind, rtt_s)
            for kind in (_NO_WINDOW, _WINDOW)
            for rtt_s in _ROUND_TRIPS_S
        }
        tables[f"TTFT in seconds with `{policy}`"] = tail_table("round trip", rows, length_classes(context))
    return StudySection(
        question="What does the distance between the clusters cost?",
        setup=(
            f"Round trips of {listed([_milliseconds(each) for each in _ROUND_TRIPS_S])} at {_LOAD:g} of Λ_max, "
            f"{len(context.seeds(_SEEDS))} seeds of {context.requests(_REQUESTS):,} requests. Without a window a "
            "transfer gets whatever the link has left. With one, each of its "
            f"{link.connections} connections carries {_WINDOW_BYTES // MIB} MiB per round trip, Linux's default."
        ),
        findings=[
            *(_cost(found, policy) for policy in _POLICIES),
            _production(context),
            *(_window_cost(found, policy) for policy in _POLICIES),
        ],
        tables=tables,
        figures=[_figure(found)],
        notes=[
            "What is simulated of a round trip: the last byte arrives one round trip after it was sent, and a transfer "
            "never gets more than its connections' windows. Policies are told the round trip and not the window.",
            "What is not: slow start, lost segments and what congestion control makes of them, round trips of the "
            "request itself between gateway and engine.",
        ],
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:g} ms"


def _transfer_limit(context: StudyContext, rtt_s: float) -> float:
    link = context.planned.links[0]
    return min(link.connections * BITS_PER_BYTE * _WINDOW_BYTES / rtt_s, link.bandwidth_bits_per_s)


def _cost(found: _Found, policy: str) -> str:
    near, far = (found.at(policy, _NO_WINDOW, rtt_s) for rtt_s in (_ROUND_TRIPS_S[0], _ROUND_TRIPS_S[-1]))
    shown = f"From {_milliseconds(_ROUND_TRIPS_S[0])} to {_milliseconds(_ROUND_TRIPS_S[-1])}"
    if near.verdict == "grows" or far.verdict == "grows":
        return f"{shown} without a window queues of `{policy}` grow."
    return (
        f"{shown} without a window the mean TTFT of `{policy}` goes from {near.mean().seconds} to "
        f"{far.mean().seconds} s ({far.against(near)}), its P99 from {near.mean('ttft_p99_s').seconds} to "
        f"{far.mean('ttft_p99_s').seconds} s, the offloaded part from "
        f"{near.mean('offloaded_fraction').percent(1)} to {far.mean('offloaded_fraction').percent(1)}."
    )


def _production(context: StudyContext) -> str:
    """At which round trip windows become less than what one prefill makes."""
    problem = context.problem
    low, high = context.range_tokens
    lengths = np.geomspace(max(context.optimum.threshold_tokens or low, low), high, _LENGTHS).clip(low, high)
    rates = BITS_PER_BYTE * problem.kv_bytes(lengths) / problem.prfaas[0].prefill_s(lengths)
    peak = float(rates.max())
    connections = context.planned.links[0].connections
    rtt_s = connections * BITS_PER_BYTE * _WINDOW_BYTES / peak
    needed = math.ceil(peak * _ROUND_TRIPS_S[-1] / (BITS_PER_BYTE * _WINDOW_BYTES))
    return (
        f"An offloaded prefill makes up to {format_bits_per_s(peak)} of KVCache "
        f"(at {lengths[int(rates.argmax())]:,.0f} tokens); {connections} windows carry so much up to a round trip of "
        f"{rtt_s * 1000:.0f} ms, and {_milliseconds(_ROUND_TRIPS_S[-1])} take {needed} connections."
    )


def _window_cost(found: _Found, policy: str) -> str:
    clear, grows = [], []
    for rtt_s in _ROUND_TRIPS_S:
        free, limited = (found.at(policy, kind, rtt_s) for kind in (_NO_WINDOW, _WINDOW))
        if limited.verdict == "grows":
            grows.append(_milliseconds(rtt_s))
        elif free.verdict != "grows":
            longer = limited.against(free)
            if longer.is_clear and longer.mean > 0:
                clear.append(f"{longer} at {_milliseconds(rtt_s)}")
    told = (
        f"Windows lengthen the mean TTFT of `{policy}` by {listed(clear)}"
        if clear
        else (f"Windows nowhere clearly lengthen the mean TTFT of `{policy}`")
    )
    return f"{told}; with them queues grow at {listed(grows)}." if grows else f"{told}."


def _figure(found: _Found) -> StudyFigure:
    def values(policy: str, kind: str, field: str) -> list[float | None]:
        each = [found.at(policy, kind, rtt_s) for rtt_s in _ROUND_TRIPS_S]
        return [None if here.verdict == "grows" else here.mean(field).mean for here in each]

    return lines(
        "round-trip",
        "TTFT and offloaded part over the round trip; solid: without a window, dashed: with Linux's default windows. "
        "Nothing is drawn where queues grow.",
        "round trip (ms)",
        [
            Panel(
                title,
                [
                    PlotCurve(
                        policy if kind == _NO_WINDOW else "",
                        [1000 * rtt_s for rtt_s in _ROUND_TRIPS_S],
                        values(policy, kind, field),
                        number,
                        is_dashed=kind == _WINDOW,
                    )
                    for number, policy in enumerate(_POLICIES)
                    for kind in (_NO_WINDOW, _WINDOW)
                ],
            )
            for title, field in (
                ("mean TTFT (s)", TTFT),
                ("P99 of TTFT (s)", "ttft_p99_s"),
                ("offloaded", "offloaded_fraction"),
            )
        ],
        x_log=True,
    )


ROUND_TRIP = Study("round-trip", "What the distance between clusters costs", _runs, _describe)
