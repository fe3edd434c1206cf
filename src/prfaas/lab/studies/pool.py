"""What a prefix-cache pool keeps: its size, its eviction, where states are kept; and what that does to a deployment."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from prfaas.core.deployment import EvictionName
from prfaas.core.deployment.examples import example_path
from prfaas.core.kv import KvModel
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.units import GIB, format_bits_per_s, format_bytes
from prfaas.core.workload import read_requests
from prfaas.core.workload.requests import BLOCK_TOKENS
from prfaas.core.workload.traffic import ReplayedTraffic, Traffic, take
from prfaas.lab.simulator import PoolOptions
from prfaas.lab.simulator.machine_pool import MachinePool, replayed
from prfaas.lab.simulator.pools import TIERS
from prfaas.lab.studies.context import StudyContext, cache_of
from prfaas.lab.studies.figures import Panel, PlotCurve, lines, listed, mean_and_p90, percent
from prfaas.lab.studies.study import (
    Key,
    Outcomes,
    Run,
    Study,
    StudyFigure,
    StudyOutcome,
    StudyRun,
    StudySection,
    StudyTable,
)
from prfaas.lab.studies.traffic import ChatsAndDocuments

_EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)
_CONVERSATION, _SYNTHETIC, _DAY = "conversation", "synthetic", "day"
_TRAFFIC = {_CONVERSATION: 12_031, _SYNTHETIC: 3_993, _DAY: 36_000}
"""Each is replayed once, whole; about so many requests."""
_MACHINES = 4
_SIZES_GIB = (16, 64, 272, 1088)
_USUAL_GIB = 272
_SSD_GIB = 4096
_INFINITE_BYTES = 1 << 60
_CHECKPOINT_TOKENS = 32_768
# Where states are kept besides ends of prompts: (at junctions, every so many tokens).
_RULES = {
    "ends": (False, 0),
    "ends, every 8K": (False, 8_192),
    "ends, junctions": (True, 0),
    "ends, junctions, every 32K": (True, _CHECKPOINT_TOKENS),
    "ends, junctions, every 8K": (True, 8_192),
}
_SESSIONS_PER_S, _DOCUMENTS_PER_S = 0.06, 0.03
_LOAD = 0.9
_ENGINE_BYTES = 16 * GIB
_DEPLOYED_REQUESTS = 12_000
_DEPLOYED: dict[str, tuple[int, int]] = {
    "none": (0, 0),
    "16 GiB": (16, 0),
    "64 GiB": (64, 0),
    "272 GiB": (272, 0),
    "272 GiB, SSD 4 TiB": (272, _SSD_GIB),
}
"""GiB of memory and SSD of each machine."""

_SIZE, _EVICTED, _RULE, _RUN = "size", "eviction", "rule", "deployment"


@dataclass(frozen=True, slots=True)
class PoolReplay:
    """A `StudyRun` that has pools and prompts, but no time: see `machine_pool.replayed`."""

    key: Key
    traffic: Traffic
    """Of blocks of the usual size."""
    requests: int
    """At most."""
    seed: int
    machines: int
    options: PoolOptions
    """Of each machine."""
    model: KvModel
    profile: LatencyProfile
    """What computing takes, for the policy "cost"."""

    @property
    def expected_requests(self) -> float:
        """See `StudyRun`."""
        return self.requests

    def outcome(self) -> StudyOutcome:
        """See `StudyRun`."""
        started_s = time.perf_counter()
        between_s = ServiceCurve.of_profile(self.profile).between_s
        pools = [MachinePool(self.options, self.model, BLOCK_TOKENS, between_s) for _ in range(self.machines)]
        requests = take(self.traffic.chunks(np.random.default_rng(self.seed)), limit=self.requests)
        tokens = reused = on_ssd = 0
        for each in replayed(requests, pools):
            tokens += each.input_tokens
            reused += each.reused_tokens
            on_ssd += each.ssd_tokens
        numbers = {
            "hit_ratio": reused / tokens,
            "hit_ratio_ssd": on_ssd / tokens,
            "memory_bytes": sum(pool.memory_bytes for pool in pools),
            "ssd_bytes": sum(pool.ssd_bytes for pool in pools),
        }
        return StudyOutcome(numbers, {}, time.perf_counter() - started_s)


def _options(memory_bytes: int, ssd_bytes: int = 0, eviction: EvictionName = "lru") -> PoolOptions:
    return PoolOptions(memory_bytes, ssd_bytes, _CHECKPOINT_TOKENS, eviction=eviction)


def _traffic() -> dict[str, Traffic]:
    return {
        _CONVERSATION: ReplayedTraffic(read_requests(example_path("traces/mooncake_conversation.jsonl.gz"))),
        _SYNTHETIC: ReplayedTraffic(read_requests(example_path("traces/mooncake_synthetic.jsonl.gz"))),
        _DAY: ChatsAndDocuments(_SESSIONS_PER_S, _DOCUMENTS_PER_S),
    }


def _runs(context: StudyContext) -> Sequence[StudyRun]:
    runs: list[StudyRun] = []
    traffic = _traffic()
    for name, each in traffic.items():

        def replay(
            key: Key,
            options: PoolOptions,
            machines: int = _MACHINES,
            traffic: Traffic = each,
            requests: int = context.requests(_TRAFFIC[name]),
        ) -> PoolReplay:
            return PoolReplay(
                key,
                traffic,
                requests,
                context.seed,
                machines,
                options,
                context.planned.kv_model,
                context.planned.pd_clusters[0].profile,
            )

        for eviction in _EVICTIONS:
            runs += [
                replay((_SIZE, name, eviction, size), _options(size * GIB, 0, eviction))
                for size in _SIZES_GIB
            ]
            runs.append(
                replay(
                    (_EVICTED, name, eviction, "ssd"),
                    _options(_USUAL_GIB * GIB, _SSD_GIB * GIB, eviction),
                )
            )
        for rule, (junctions, tokens) in _RULES.items():
            runs += [
                replay((_RULE, name, rule, "usual"), PoolOptions(_USUAL_GIB * GIB, 0, tokens, junctions)),
                replay(
                    (_RULE, name, rule, "infinite"), PoolOptions(_INFINITE_BYTES, 0, tokens, junctions), 1
                ),
            ]
    return [*runs, *_deployed(context, traffic[_CONVERSATION])]


def _deployed(context: StudyContext, trace: Traffic) -> Sequence[Run]:
    assert isinstance(trace, ReplayedTraffic)
    traffic = ReplayedTraffic.at_rate(
        trace.trace.cut_to(int(context.range_tokens[1])), _LOAD * context.trace_lambda_max
    )
    return [
        Run(
            (_RUN, name),
            context.planned,
            traffic,
            context.requests(_DEPLOYED_REQUESTS),
            context.seed,
            caches=cache_of(context.planned.kv_model, _ENGINE_BYTES),
            pools={cluster.name: _options(memory * GIB, ssd * GIB) for cluster in context.planned.clusters}
            if memory
            else {},
        )
        for name, (memory, ssd) in _DEPLOYED.items()
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    def hits(*key: str | float) -> float:
        return outcomes[key].number("hit_ratio")

    model = context.planned.kv_model
    state_bytes = model.fixed_bytes + model.window_bytes
    return StudySection(
        question="What does a prefix-cache pool keep, and what is that worth?",
        setup=(
            "*Replays*: every prompt once, in its order and without time, through the pools of "
            f"{_MACHINES} machines. A prompt goes to the machine that holds most of it, unless that has computed a "
            "tenth and 200,000 tokens more than the mean. *conversation* and *synthetic* are Mooncake's traces; "
            f"*day* is 24 hours of chats, at {_SESSIONS_PER_S:g} new ones per second, and of long documents that "
            f"are read once, at {_DOCUMENTS_PER_S:g} per second, most of them at night. The model keeps "
            f"{model.token_bytes:,} B per token"
            + (f" and {format_bytes(state_bytes)} per state. " if state_bytes else ". ")
            + "Where nothing else is said, eviction is `lru`, and states are kept at ends of prompts, at junctions "
            f"and every {_CHECKPOINT_TOKENS:,} tokens. *Deployment*: the file's, with a pool on every instance's "
            f"machine and {format_bytes(_ENGINE_BYTES)} of prefix cache in every engine, under *conversation* at "
            f"{_LOAD:g} of what the planner finds for its lengths without caches."
        ),
        findings=[
            _size_finding(hits),
            _rule_finding(hits),
            _eviction_finding(hits),
            _ssd_finding(hits),
            _deployment_finding(outcomes),
        ],
        tables={
            f"Tokens hit, by eviction and by the memory of each of {_MACHINES} machines": _eviction_table(
                hits
            ),
            f"Tokens hit, by where states are kept: {_MACHINES} × {_USUAL_GIB} GiB / infinite": _rule_table(
                hits
            ),
            "The deployment with pools: tokens hit, by whence they came": _deployment_table(outcomes),
        },
        figures=[_figure(hits)],
        notes=[
            "A replay has no time: what is evicted while a prompt waits or runs is not seen. Real pools lose a few "
            "percent of their room to pages of unequal size, which is not simulated.",
            "Chats and documents of *day* are made up; only the order of the policies can be read from it.",
        ],
    )


def _eviction_table(hits: Callable[..., float]) -> StudyTable:
    rows = [
        [
            f"{name}, {eviction}",
            *(percent(hits(_SIZE, name, eviction, size), 1) for size in _SIZES_GIB),
            percent(hits(_EVICTED, name, eviction, "ssd"), 1),
        ]
        for name in _TRAFFIC
        for eviction in _EVICTIONS
    ]
    return StudyTable(
        ["", *(f"{size} GiB" for size in _SIZES_GIB), f"{_USUAL_GIB} GiB, SSD {_SSD_GIB // 1024} TiB"], rows
    )


def _rule_table(hits: Callable[..., float]) -> StudyTable:
    rows = [
        [
            rule,
            *(
                " / ".join(percent(hits(_RULE, name, rule, size), 1) for size in ("usual", "infinite"))
                for name in _TRAFFIC
            ),
        ]
        for rule in _RULES
    ]
    return StudyTable(["states at", *_TRAFFIC], rows)


def _deployment_table(outcomes: Outcomes) -> StudyTable:
    rows = []
    for name in _DEPLOYED:
        outcome = outcomes[_RUN, name]
        shares = [float(outcome.numbers.get(f"hit_ratio_{tier}", 0.0)) for tier in TIERS]
        rows.append(
            [
                name,
                percent(outcome.number("hit_ratio"), 1),
                percent(outcome.number("hit_ratio") - sum(shares), 1),
                *(percent(share, 1) for share in shares),
                mean_and_p90(
                    outcome.number("ttft_mean_s"), outcome.number("ttft_p90_s"), is_stable=outcome.is_stable
                ),
                format_bits_per_s(outcome.number("egress_bits_per_s")),
            ]
        )
    columns = ["pool of a machine", "hits", "own blocks", "memory", "SSD", "other machine", "other cluster"]
    return StudyTable([*columns, "TTFT mean (P90), s", "egress"], rows)


def _size_finding(hits: Callable[..., float]) -> str:
    rule = "ends, junctions, every 32K"
    found = [
        f"{percent(hits(_SIZE, name, 'lru', _USUAL_GIB), 1)} of {name} (infinite: "
        f"{percent(hits(_RULE, name, rule, 'infinite'), 1)}; {_MACHINES} × {_SIZES_GIB[0]} GiB: "
        f"{percent(hits(_SIZE, name, 'lru', _SIZES_GIB[0]), 1)})"
        for name in _TRAFFIC
    ]
    return f"{_MACHINES} × {_USUAL_GIB} GiB with `lru` hit {listed(found)}."


def _rule_finding(hits: Callable[..., float]) -> str:
    def gain(rule: str, name: str) -> str:
        more = hits(_RULE, name, rule, "usual") - hits(_RULE, name, "ends", "usual")
        return f"{_points(more)} of {name}"

    junctions, both = (
        listed([gain(rule, name) for name in _TRAFFIC])
        for rule in ("ends, junctions", "ends, junctions, every 32K")
    )
    return (
        f"States at junctions, besides those at ends, change the hits by {junctions}; states there and every 32K "
        f"tokens by {both}."
    )


def _eviction_finding(hits: Callable[..., float]) -> str:
    told = []
    for eviction in _EVICTIONS[1:]:
        gains = [
            (hits(_SIZE, name, eviction, size) - hits(_SIZE, name, "lru", size), name, size)
            for name in _TRAFFIC
            for size in _SIZES_GIB
        ]
        best, worst = max(gains), min(gains)
        told.append(
            f"`{eviction}` differs from `lru` by {_points(worst[0])} ({worst[1]}, {worst[2]} GiB) to "
            f"{_points(best[0])} ({best[1]}, {best[2]} GiB)"
        )
    return f"{'; '.join(told)}."


def _ssd_finding(hits: Callable[..., float]) -> str:
    more = [
        f"{_points(hits(_EVICTED, name, 'lru', 'ssd') - hits(_SIZE, name, 'lru', _USUAL_GIB))} of {name}"
        for name in _TRAFFIC
    ]
    return f"{_SSD_GIB // 1024} TiB of SSD behind each {_USUAL_GIB} GiB change the hits by {listed(more)}."


def _deployment_finding(outcomes: Outcomes) -> str:
    without, usual = outcomes[_RUN, "none"], outcomes[_RUN, f"{_USUAL_GIB} GiB"]
    return (
        f"In the deployment, pools of {_USUAL_GIB} GiB raise the hits from "
        f"{percent(without.number('hit_ratio'), 1)} to {percent(usual.number('hit_ratio'), 1)}; the TTFT's mean (P90) "
        f"goes from {mean_and_p90(without.number('ttft_mean_s'), without.number('ttft_p90_s'))} s to "
        f"{mean_and_p90(usual.number('ttft_mean_s'), usual.number('ttft_p90_s'))} s, egress from "
        f"{format_bits_per_s(without.number('egress_bits_per_s'))} to "
        f"{format_bits_per_s(usual.number('egress_bits_per_s'))}."
    )


def _points(share: float) -> str:
    """0.012 → "+1.2 points"."""
    return f"{share * 100:+.1f} points".replace("-", "−")


def _figure(hits: Callable[..., float]) -> StudyFigure:
    return lines(
        "pool",
        f"Tokens hit over the memory of each of {_MACHINES} machines' pools.",
        "GiB",
        [
            Panel(
                f"{name} (%)",
                [
                    PlotCurve(
                        eviction,
                        list(_SIZES_GIB),
                        [100 * hits(_SIZE, name, eviction, size) for size in _SIZES_GIB],
                        number,
                    )
                    for number, eviction in enumerate(_EVICTIONS)
                ],
            )
            for name in _TRAFFIC
        ],
        x_log=True,
    )


POOL = Study("pool", "What a prefix-cache pool keeps", _runs, _describe)
