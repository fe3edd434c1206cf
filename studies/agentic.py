"""Agents at work: sessions of many turns with the pauses of tools, where nearly all of every prompt was seen before."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from prfaas.core.planner import best_operation, problem_of_trace
from prfaas.core.units import GIB, format_bits_per_s, format_bytes
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.lengths import TruncatedLogNormal
from prfaas.core.workload.requests import RequestTrace
from prfaas.core.workload.trace_columns import BLOCK_TOKENS
from prfaas.core.workload.traffic import RequestChunk, Traffic, take
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudySection, StudyTable
from studies._figures import bars, listed, percent
from studies._repeats import Repeats, tail_table
from studies._runs import Run, length_classes
from studies._sessions import SessionTraffic
from studies._variants import cache_of

_MEAN_TURNS = 12.0
_SYSTEM_TOKENS = 8 * BLOCK_TOKENS
# TraceLab (arXiv 2606.30560; github.com/uw-syfi/TraceLab, 357,161 steps of coding agents): a tool call takes 16.8 s on
# average and 0.3 s in the median; a log-normal distribution with these has a P90 of 11 s, they count 13.6 s.
_TOOL_MEAN_S, _TOOL_MEDIAN_S = 16.8, 0.3
_TOOL_SIGMA = math.sqrt(2 * math.log(_TOOL_MEAN_S / _TOOL_MEDIAN_S))
# Of the same: a step adds about 870 tokens in the median and is answered with 523 on average. The spread is assumed.
_ADDED_TOKENS, _ANSWER_TOKENS, _SPREAD = 870, 523, 1.3
_LONGEST_ANSWER_TOKENS = 8_192

_LOADS = {"as without caches": 0.7, "as with all hits": 0.6}
_CACHES, _HITS = _LOADS
"""Of Λ_max for whole prompts, and of that for what an infinite cache leaves of them."""
_POLICIES = ("paper", "tilted")
_REQUESTS = 3_000
_SEEDS = 5
_SAMPLE = 40_000
# Twice what the longest sessions but a few take: as many are in progress as ever.
_STEADY_S = 1_800.0

_ENGINE_BYTES, _POOL_BYTES = 16 * GIB, 272 * GIB
_STATES_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class _Store:
    """What is kept of prompts, and whether it may move between clusters."""

    label: str
    has_caches: bool = True
    has_pools: bool = False
    moves: bool = True
    has_way_back: bool = False
    """Whether there is a link as wide from the PD to the PrfaaS cluster too."""


_NONE = _Store("nothing kept", has_caches=False)
_ALONE = _Store("engines' caches, no moves", moves=False)
_MOVED = _Store("engines' caches, moves")
_POOLS = _Store("and pools, no moves", has_pools=True, moves=False)
_POOLS_MOVED = _Store("and pools, moves", has_pools=True)
_BOTH_WAYS = _Store("and pools, moves both ways", has_pools=True, has_way_back=True)
_STORES = (_NONE, _ALONE, _MOVED, _POOLS, _POOLS_MOVED, _BOTH_WAYS)
# The other rate is more than any deployment can carry that keeps nothing.
_STORES_AT = {_CACHES: _STORES, _HITS: _STORES[1:]}
_OWN_ONLY: Mapping[str, object] = {"abundance_utilisation": 0.0, "abundance_queue_s": 0.0}


@dataclass(frozen=True, slots=True)
class SteadySessions(Traffic):
    """Sessions as they are long after the first began."""

    sessions: SessionTraffic
    from_s: float
    """What comes before is left out; times count from here."""
    mean_per_s: float = field(default=math.nan)
    """Turns per second."""

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; without end."""
        for chunk in self.sessions.chunks(rng):
            first = int(np.searchsorted(chunk.arrival_s, self.from_s))
            if first < len(chunk):
                start = chunk.block_starts[first]
                yield RequestChunk(
                    chunk.arrival_s[first:] - self.from_s,
                    chunk.input_tokens[first:],
                    chunk.output_tokens[first:],
                    chunk.block_ids[start:],
                    chunk.block_starts[first:] - start,
                    chunk.block_tokens,
                )


@dataclass(frozen=True, slots=True)
class _Plans:
    """What the planner makes of the sessions' prompts."""

    turns: float
    """Of a session that fit into the longest prompt, on average."""
    whole_rps: float
    """Λ_max if every prompt is computed whole."""
    uncached_rps: float
    """Λ_max if an infinite cache spares all it can."""
    hit_ratio: float
    """Of prompt tokens, what an infinite cache of every token spares."""

    def rate_rps(self, load: str) -> float:
        return _LOADS[load] * (self.whole_rps if load == _CACHES else self.uncached_rps)


def _sessions(context: StudyContext, sessions_per_s: float) -> SessionTraffic:
    step_s = context.problem.pd[0].decode_step_s
    mean_of_log = math.log(_ANSWER_TOKENS) - _SPREAD**2 / 2
    return SessionTraffic(
        Poisson(sessions_per_s),
        _MEAN_TURNS,
        _TOOL_MEAN_S,
        TruncatedLogNormal(math.log(_ADDED_TOKENS), _SPREAD, 16, context.range_tokens[1] / 4),
        TruncatedLogNormal(mean_of_log, _SPREAD, 1, _LONGEST_ANSWER_TOKENS),
        shared_tokens=_SYSTEM_TOKENS,
        think_sigma=_TOOL_SIGMA,
        answer_token_s=step_s,
        longest_tokens=context.range_tokens[1],
    )


@lru_cache(maxsize=1)
def _plans(context: StudyContext) -> _Plans:
    """Of a sample that is the same for every context's seed."""
    sessions = _sessions(context, 1.0)
    sample = list(take(sessions.chunks(np.random.default_rng(0)), limit=_SAMPLE))
    trace = RequestTrace.of("sessions", sample, "made up")
    whole = sum(each.input_tokens for each in sample)
    half_s = sample[-1].arrival_s / 2
    # As often as sessions begin once a second, when as many are in progress as ever.
    turns = sum(each.arrival_s >= half_s for each in sample) / half_s
    whole_rps, uncached_rps = (
        best_operation(problem_of_trace(context.problem, trace, context.range_tokens[0], uncached)).lambda_max
        for uncached in (None, trace.uncached_tokens())
    )
    return _Plans(turns, whole_rps, uncached_rps, 1 - sum(trace.uncached_tokens()) / whole)


def _runs(context: StudyContext) -> Sequence[Run]:
    plans, model = _plans(context), context.planned.kv_model
    runs = []
    for load in _LOADS:
        rate_rps = plans.rate_rps(load)
        traffic = SteadySessions(_sessions(context, rate_rps / plans.turns), _STEADY_S, rate_rps)
        for policy in _POLICIES:
            for store in _STORES_AT[load]:
                planned = context.planned
                if store.has_way_back:
                    (link,) = planned.links
                    back = replace(link, source=link.target, target=link.source)
                    planned = replace(planned, links=(link, back))
                pool = PoolOptions(_POOL_BYTES, checkpoint_tokens=_STATES_TOKENS)
                runs += [
                    Run(
                        (load, policy, store.label, seed),
                        planned,
                        traffic,
                        context.requests(_REQUESTS),
                        seed,
                        policy=policy,
                        params={} if store.moves else _OWN_ONLY,
                        caches=cache_of(model, _ENGINE_BYTES) if store.has_caches else None,
                        pools=dict.fromkeys((each.name for each in planned.clusters), pool)
                        if store.has_pools and model.token_bytes
                        else {},
                        classes=length_classes(context),
                    )
                    for seed in context.seeds(_SEEDS)
                ]
    return runs


_Found = Mapping[tuple[str, str, _Store], Repeats]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    plans = _plans(context)
    found = {
        (load, policy, store): Repeats.of(
            outcomes, [(load, policy, store.label, seed) for seed in context.seeds(_SEEDS)]
        )
        for load in _LOADS
        for policy in _POLICIES
        for store in _STORES_AT[load]
    }
    tables: dict[str, StudyTable] = {}
    for load in _LOADS:
        shown = f"{plans.rate_rps(load):.3g} req/s"
        tables[f"Hits and egress at {shown}"] = _hits_table(found, load)
        for policy in _POLICIES:
            rows = {store.label: found[load, policy, store] for store in _STORES_AT[load]}
            tables[f"TTFT in seconds with `{policy}` at {shown}"] = tail_table(
                "kept", rows, length_classes(context)
            )
    return StudySection(
        question="What are caches, pools and moves worth to agents?",
        setup=(
            f"Sessions of {_MEAN_TURNS:g} turns on average (geometric) that all begin with {_SYSTEM_TOKENS:,} tokens, "
            f"up to prompts of {context.range_tokens[1]:,.0f}. A turn adds {_ADDED_TOKENS} tokens (median) and is "
            f"answered with {_ANSWER_TOKENS} (mean). The next one comes after the answer, at the pace of the limit, "
            f"and a tool's pause: log-normal, mean {_TOOL_MEAN_S:g} s, median {_TOOL_MEDIAN_S:g} s. Pauses and lengths "
            "are those of TraceLab (arXiv 2606.30560); spread, sharing and the number of turns are assumed. An "
            f"infinite cache would spare {percent(plans.hit_ratio)} of all tokens. Rates: {_LOADS[_CACHES]:g} of Λ_max "
            f"for whole prompts, and {_LOADS[_HITS]:g} of Λ_max for what such a cache leaves. "
            f"{len(context.seeds(_SEEDS))} seeds of {context.requests(_REQUESTS):,} requests, "
            f"engines' caches of {format_bytes(_ENGINE_BYTES)}, "
            f"pools of {format_bytes(_POOL_BYTES)} on every machine, empty at first."
        ),
        findings=[
            *(_worth(found, plans, load, policy) for load in _LOADS for policy in _POLICIES),
            _policies(found, plans),
        ],
        tables=tables,
        figures=[
            bars(
                "agentic",
                f"Mean TTFT with `{_POLICIES[-1]}` at {plans.rate_rps(_HITS):.3g} req/s; where queues grow there is no "
                "bar.",
                "mean TTFT (s)",
                [store.label for store in _STORES_AT[_HITS]],
                [
                    math.nan if each.verdict == "grows" else each.mean().mean
                    for each in (found[_HITS, _POLICIES[-1], store] for store in _STORES_AT[_HITS])
                ],
            )
        ],
        notes=[
            "Moves are prefixes that one cluster sends to the other; without them a request finds what its cluster "
            "holds. The deployment's only link leads to the PD cluster; both ways: one as wide leads back.",
            "Sessions don't wait for late answers: turns come at the same times for everything that is compared.",
        ],
    )


def _hits_table(found: _Found, load: str) -> StudyTable:
    columns = ["kept"]
    for policy in _POLICIES:
        columns += [f"{policy}: hits", "offloaded", "egress"]
    return StudyTable(
        columns,
        [
            [
                store.label,
                *(
                    cell
                    for policy in _POLICIES
                    for each in [found[load, policy, store]]
                    for cell in (
                        each.mean("hit_ratio").percent(1),
                        each.mean("offloaded_fraction").percent(),
                        format_bits_per_s(each.mean("egress_bits_per_s").mean),
                    )
                ),
            ]
            for store in _STORES_AT[load]
        ],
    )


def _worth(found: _Found, plans: _Plans, load: str, policy: str) -> str:
    at = f"At {plans.rate_rps(load):.3g} req/s with `{policy}`"
    bad = [store.label for store in _STORES_AT[load] if found[load, policy, store].verdict == "grows"]
    steps = (
        ("engines' caches", _NONE, _ALONE),
        ("moves without pools", _ALONE, _MOVED),
        ("pools", _ALONE, _POOLS),
        ("moves with pools", _POOLS, _POOLS_MOVED),
        ("a way back", _POOLS_MOVED, _BOTH_WAYS),
    )
    told = [
        f"{what} {found[load, policy, after].against(found[load, policy, before])}"
        for what, before, after in steps
        if before in _STORES_AT[load] and not {before.label, after.label} & set(bad)
    ]
    text = f"{at} the mean TTFT changes by: {', '.join(told)}" if told else f"{at} nothing can be compared"
    return f"{text}; queues grow with {listed([f'*{label}*' for label in bad])}." if bad else f"{text}."


def _policies(found: _Found, plans: _Plans) -> str:
    told = []
    for load in _LOADS:
        one, other = (found[load, policy, _POOLS_MOVED] for policy in _POLICIES)
        if "grows" not in (one.verdict, other.verdict):
            told.append(
                f"{other.against(one)} mean and {other.against(one, 'ttft_p99_s')} P99 at "
                f"{plans.rate_rps(load):.3g} req/s"
            )
    if not told:
        return "With pools and moves the policies can't be compared: queues grow."
    return f"With pools and moves `{_POLICIES[1]}` differs from `{_POLICIES[0]}` by {listed(told)}."


AGENTIC = Study("agentic", "Sessions of agents", _runs, _describe)
