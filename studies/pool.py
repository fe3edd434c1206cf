"""What a prefix-cache pool keeps: its size, its eviction, where states are kept; and what that does to a deployment."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from prfaas.core.deployment.pool import EvictionName
from prfaas.core.kv.model import KvModel
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.shipped import example_path
from prfaas.core.units import GIB, format_bytes
from prfaas.core.workload.requests import read_requests
from prfaas.core.workload.trace_columns import BLOCK_TOKENS
from prfaas.core.workload.traffic import ReplayedTraffic, Traffic, take
from prfaas.lab.simulator.machine_pool import MachinePool, PoolOptions, replayed
from prfaas.lab.simulator.pools import TIERS
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import (
    Key,
    Outcomes,
    Study,
    StudyFigure,
    StudyOutcome,
    StudyRun,
    StudySection,
    StudyTable,
)
from studies._figures import Panel, PlotCurve, SeedMean, lines, listed, seed_mean
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes, trace_lambda_max
from studies._traffic import ChatsAndDocuments
from studies._variants import cache_of

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
        return StudyOutcome(numbers, time.perf_counter() - started_s)


def _options(memory_bytes: int, ssd_bytes: int = 0, eviction: EvictionName = "lru") -> PoolOptions:
    return PoolOptions(memory_bytes, ssd_bytes, _CHECKPOINT_TOKENS, eviction=eviction)


def _traffic() -> dict[str, Traffic]:
    return {
        _CONVERSATION: ReplayedTraffic(read_requests(example_path("traces/mooncake_conversation.jsonl.gz"))),
        _SYNTHETIC: ReplayedTraffic(read_requests(example_path("traces/mooncake_synthetic.jsonl.gz"))),
        _DAY: ChatsAndDocuments(_SESSIONS_PER_S, _DOCUMENTS_PER_S),
    }


def _seeds(context: StudyContext, name: str) -> Sequence[int]:
    """Recorded traces have nothing to draw."""
    return context.seeds() if name == _DAY else (context.seed,)


def _runs(context: StudyContext) -> Sequence[StudyRun]:
    runs: list[StudyRun] = []
    traffic = _traffic()
    seeded = [(name, each, seed) for name, each in traffic.items() for seed in _seeds(context, name)]
    for name, each, seed in seeded:

        def replay(
            key: Key,
            options: PoolOptions,
            machines: int = _MACHINES,
            traffic: Traffic = each,
            requests: int = context.requests(_TRAFFIC[name]),
            seed: int = seed,
        ) -> PoolReplay:
            return PoolReplay(
                (*key, seed),
                traffic,
                requests,
                seed,
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
    traffic = ReplayedTraffic.at_rate(trace.trace, _LOAD * trace_lambda_max(context))
    return [
        Run(
            (_RUN, name, seed),
            context.planned,
            traffic,
            context.requests(_DEPLOYED_REQUESTS),
            seed,
            classes=length_classes(context),
            caches=cache_of(context.planned.kv_model, _ENGINE_BYTES),
            pools={cluster.name: _options(memory * GIB, ssd * GIB) for cluster in context.planned.clusters}
            if memory
            else {},
        )
        for name, (memory, ssd) in _DEPLOYED.items()
        for seed in context.seeds()
    ]


class _Hits:
    """What part of the prompts' tokens replays hit."""

    def __init__(self, context: StudyContext, outcomes: Outcomes) -> None:
        self._context = context
        self._outcomes = outcomes

    def at(self, kind: str, name: str, *rest: str | float) -> SeedMean:
        return seed_mean(self._values(kind, name, *rest))

    def gain(self, key: Key, base: Key) -> SeedMean:
        """How much more one replay hits than another of the same requests."""
        pairs = zip(self._values(*key), self._values(*base), strict=True)
        return seed_mean([value - other for value, other in pairs])

    def _values(self, *key: str | float) -> list[float]:
        seeds = _seeds(self._context, str(key[1]))
        return Repeats.seeded(self._outcomes, seeds, *key).values("hit_ratio")


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    hits = _Hits(context, outcomes)
    deployed = {name: Repeats.seeded(outcomes, context.seeds(), _RUN, name) for name in _DEPLOYED}
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
            _deployment_finding(deployed),
        ],
        tables={
            f"Tokens hit, by eviction and by the memory of each of {_MACHINES} machines": _eviction_table(
                hits
            ),
            f"Tokens hit, by where states are kept: {_MACHINES} × {_USUAL_GIB} GiB / infinite": _rule_table(
                hits
            ),
            "The deployment with pools: tokens hit, by whence they came": _deployment_table(deployed),
            TAIL_TITLE + ", the deployment": tail_table(
                "pool of a machine", deployed, length_classes(context)
            ),
        },
        figures=[_figure(hits)],
        notes=[
            "A replay has no time: what is evicted while a prompt waits or runs is not seen. Real pools lose a few "
            "percent of their room to pages of unequal size, which is not simulated.",
            "A replay of a recorded trace has nothing to draw, so that its numbers have no interval; they say nothing "
            "of other traces. In the deployment seeds only move arrivals within the step of the trace's clock.",
            "Chats and documents of *day* are made up; only the order of the policies can be read from it.",
        ],
    )


def _eviction_table(hits: _Hits) -> StudyTable:
    rows = [
        [
            f"{name}, {eviction}",
            *(hits.at(_SIZE, name, eviction, size).percent(1) for size in _SIZES_GIB),
            hits.at(_EVICTED, name, eviction, "ssd").percent(1),
        ]
        for name in _TRAFFIC
        for eviction in _EVICTIONS
    ]
    return StudyTable(
        ["", *(f"{size} GiB" for size in _SIZES_GIB), f"{_USUAL_GIB} GiB, SSD {_SSD_GIB // 1024} TiB"], rows
    )


def _rule_table(hits: _Hits) -> StudyTable:
    rows = [
        [
            rule,
            *(
                " / ".join(hits.at(_RULE, name, rule, size).percent(1) for size in ("usual", "infinite"))
                for name in _TRAFFIC
            ),
        ]
        for rule in _RULES
    ]
    return StudyTable(["states at", *_TRAFFIC], rows)


def _deployment_table(deployed: Mapping[str, Repeats]) -> StudyTable:
    rows = []
    for name, each in deployed.items():
        tiers = [
            [float(outcome.numbers.get(f"hit_ratio_{tier}", 0.0)) for outcome in each.outcomes]
            for tier in TIERS
        ]
        own = [hit - sum(shares) for hit, *shares in zip(each.values("hit_ratio"), *tiers, strict=True)]
        rows.append(
            [
                name,
                each.mean("hit_ratio").percent(1),
                seed_mean(own).percent(1),
                *(seed_mean(shares).percent(1) for shares in tiers),
                each.ttft,
                each.mean("egress_bits_per_s").gigabits,
            ]
        )
    columns = ["pool of a machine", "hits", "own blocks", "memory", "SSD", "other machine", "other cluster"]
    return StudyTable([*columns, "TTFT mean (P90), s", "egress"], rows)


def _size_finding(hits: _Hits) -> str:
    rule = "ends, junctions, every 32K"
    found = [
        f"{hits.at(_SIZE, name, 'lru', _USUAL_GIB).percent(1)} of {name} (infinite: "
        f"{hits.at(_RULE, name, rule, 'infinite').percent(1)}; {_MACHINES} × {_SIZES_GIB[0]} GiB: "
        f"{hits.at(_SIZE, name, 'lru', _SIZES_GIB[0]).percent(1)})"
        for name in _TRAFFIC
    ]
    return f"{_MACHINES} × {_USUAL_GIB} GiB with `lru` hit {listed(found)}."


def _rule_finding(hits: _Hits) -> str:
    def gain(rule: str, name: str) -> str:
        more = hits.gain((_RULE, name, rule, "usual"), (_RULE, name, "ends", "usual"))
        return f"{_points(more)} of {name}"

    junctions, both = (
        listed([gain(rule, name) for name in _TRAFFIC])
        for rule in ("ends, junctions", "ends, junctions, every 32K")
    )
    return (
        f"States at junctions, besides those at ends, change the hits by {junctions}; states there and every 32K "
        f"tokens by {both}."
    )


def _eviction_finding(hits: _Hits) -> str:
    told = []
    for eviction in _EVICTIONS[1:]:
        gains = [
            (hits.gain((_SIZE, name, eviction, size), (_SIZE, name, "lru", size)), name, size)
            for name in _TRAFFIC
            for size in _SIZES_GIB
        ]
        best = max(gains, key=lambda each: each[0].mean)
        worst = min(gains, key=lambda each: each[0].mean)
        told.append(
            f"`{eviction}` differs from `lru` by {_points(worst[0])} ({worst[1]}, {worst[2]} GiB) to "
            f"{_points(best[0])} ({best[1]}, {best[2]} GiB)"
        )
    return f"{'; '.join(told)}."


def _ssd_finding(hits: _Hits) -> str:
    more = [
        f"{_points(hits.gain((_EVICTED, name, 'lru', 'ssd'), (_SIZE, name, 'lru', _USUAL_GIB)))} of {name}"
        for name in _TRAFFIC
    ]
    return f"{_SSD_GIB // 1024} TiB of SSD behind each {_USUAL_GIB} GiB change the hits by {listed(more)}."


def _deployment_finding(deployed: Mapping[str, Repeats]) -> str:
    without, usual = deployed["none"], deployed[f"{_USUAL_GIB} GiB"]
    return (
        f"In the deployment, pools of {_USUAL_GIB} GiB raise the hits from {without.mean('hit_ratio').percent(1)} to "
        f"{usual.mean('hit_ratio').percent(1)}. They change the mean TTFT by {usual.against(without)}, its P90 by "
        f"{usual.against(without, 'ttft_p90_s')} and egress by {usual.against(without, 'egress_bits_per_s')}."
    )


def _points(share: SeedMean) -> str:
    """0.012 → "+1.2 points"."""
    sign = "" if share.mean < 0 else "+"
    return (sign + share.text(1, " points", 100)).replace("-", "−")


def _figure(hits: _Hits) -> StudyFigure:
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
                        [100 * hits.at(_SIZE, name, eviction, size).mean for size in _SIZES_GIB],
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
