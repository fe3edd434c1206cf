"""The traffic of studies: other lengths than the file's, bursts, shared prefixes, and a day whose mix changes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from prfaas.core.arrays import FloatArray
from prfaas.core.planner import PlanProblem, best_operation
from prfaas.core.workload.arrivals import DAY_S as REAL_DAY_S
from prfaas.core.workload.arrivals import Arrivals, Diurnal, Mmpp, Phase, Poisson
from prfaas.core.workload.empirical import Empirical, fixed
from prfaas.core.workload.lengths import LengthDistribution, TruncatedLogNormal, Workload
from prfaas.core.workload.requests import places_in, starts_of
from prfaas.core.workload.trace_columns import BLOCK_TOKENS
from prfaas.core.workload.traffic import IndependentTraffic, RequestChunk, Traffic
from prfaas.lab.studies.context import StudyContext
from studies._sessions import SessionTraffic

_BINS = 2048


def stretched(lengths: LengthDistribution, factor: float, low_tokens: float, high_tokens: float) -> Empirical:
    """factor × L; what leaves [low, high], the lengths that profiles cover, counts as the nearest that does not."""
    bins = lengths.scaled(factor).bins(_BINS)
    return Empirical(np.clip(bins.lengths, low_tokens, high_tokens), bins.weights)


def mixed(first: Empirical, second: Empirical, share_of_second: float) -> Empirical:
    """Either, by chance."""
    return Empirical(
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate([first.probabilities * (1 - share_of_second), second.probabilities * share_of_second]),
    )


CALM_S, BURST_S = 60.0, 15.0


def bursts(rate_rps: float, peak: float) -> Arrivals:
    """Bursts of `peak` × the mean rate for 15 s on average, between calms of 60 s; peak 1 is a Poisson process.

    Raises:
        ValueError: a peak below 1, or above what even silence between bursts allows (5).
    """
    share = BURST_S / (CALM_S + BURST_S)
    calm = (1 - share * peak) / (1 - share)
    if not (peak >= 1 and calm > -1e-9):
        raise ValueError(f"a peak is from 1 to {1 / share:g} times the mean rate, not {peak!r}")
    if peak == 1:
        return Poisson(rate_rps)
    return Mmpp((Phase(max(calm, 0.0) * rate_rps, CALM_S), Phase(peak * rate_rps, BURST_S)))


@dataclass(frozen=True, slots=True)
class SharedPrefixes(Traffic):
    """Traffic that differs in nothing but how much of its prompts is shared.

    Every prompt begins with a part of one of several documents. Document k = 1, 2, … is asked about in proportion to
    1 / k (Zipf's law). Arrivals, lengths and documents are the same for every share.
    """

    base: IndependentTraffic
    """Arrivals and lengths."""
    share: float
    """The part of every prompt that is the document's beginning, in whole blocks."""
    documents: int
    """How many there are."""

    @property
    def mean_per_s(self) -> float:
        return self.base.mean_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; without end."""
        of_requests, of_documents = rng.spawn(2)
        weights = 1 / np.arange(1, self.documents + 1)
        # Room for the longest prompt in every document; what is not shared comes after them all.
        room = -(-int(self.base.inputs.high) // self.base.block_tokens) + 1
        for chunk in self.base.chunks(of_requests):
            document = of_documents.choice(self.documents, size=len(chunk), p=weights / weights.sum())
            counts = np.diff(chunk.block_starts)
            places = np.arange(len(chunk.block_ids)) - np.repeat(chunk.block_starts[:-1], counts)
            shared = (self.share * chunk.input_tokens).astype(np.int64) // chunk.block_tokens
            own = chunk.block_ids + self.documents * room
            ids = np.where(
                places < np.repeat(shared, counts), np.repeat(document * room, counts) + places, own
            )
            yield RequestChunk(
                chunk.arrival_s,
                chunk.input_tokens,
                chunk.output_tokens,
                ids,
                chunk.block_starts,
                block_tokens=chunk.block_tokens,
            )


DAY_S = 14_400.0
"""A day in simulated seconds: a sixth of a real one."""

NIGHT_PROMPTS, NIGHT_ANSWERS = 0.6, 1.5
NOON_PROMPTS, NOON_ANSWERS = 1.0, 0.5
"""Of the file's lengths of prompts and mean answer."""

_HOURS = 24


@dataclass(frozen=True, slots=True)
class DayOfMixes(Traffic):
    """Poisson arrivals; at time t a request is noon's with probability (1 − cos(2π t / `day_s`)) / 2, else night's."""

    rate_per_s: float
    night: Empirical
    noon: Empirical
    night_output_tokens: float
    noon_output_tokens: float
    day_s: float = DAY_S

    @property
    def mean_per_s(self) -> float:
        return self.rate_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; without end."""
        nights, noons, choice = rng.spawn(3)
        # The same times for both kinds, so that each request's place in the day is known before its kind.
        arrivals = Poisson(self.rate_per_s)
        night = IndependentTraffic(arrivals, self.night, fixed(self.night_output_tokens)).chunks(nights)
        noon = IndependentTraffic(arrivals, self.noon, fixed(self.noon_output_tokens)).chunks(noons)
        for one, other in zip(night, noon, strict=False):
            is_noon = choice.random(len(one)) < noon_share(one.arrival_s / self.day_s)
            inputs = np.where(is_noon, other.input_tokens, one.input_tokens)
            outputs = np.where(is_noon, other.output_tokens, one.output_tokens)
            # No two prompts begin alike, so blocks are of no use to any cache.
            empty = np.zeros(0, dtype=np.int64)
            starts = np.zeros(len(one) + 1, dtype=np.int64)
            yield RequestChunk(one.arrival_s, inputs, outputs, empty, starts, block_tokens=one.block_tokens)


@dataclass(frozen=True, slots=True)
class DayPlan:
    """A day's traffic, and what the planner finds for it."""

    traffic: DayOfMixes
    rate_rps: float
    """A share of the least that the best roles of any hour can carry."""
    hourly_rps: tuple[float, ...]
    """Λ_max of every hour with its best roles."""
    prefill: tuple[int, ...]
    """Prefill instances of every hour's best roles."""
    mean_prefill: int
    """Prefill instances that are best for the mean of the day."""
    threshold_tokens: float
    """That goes with them."""


def day_plan(context: StudyContext, load: float) -> DayPlan:
    """A day for a deployment, which some roles can carry at every hour."""
    low, high = context.range_tokens
    lengths = context.problem.workload.uncached
    night = stretched(lengths, NIGHT_PROMPTS, low, high)
    noon = stretched(lengths, NOON_PROMPTS, low, high)
    output = context.problem.workload.output_tokens
    night_output, noon_output = max(output * NIGHT_ANSWERS, 1.0), max(output * NOON_ANSWERS, 1.0)

    def problem(share: float) -> PlanProblem:
        answers = night_output * (1 - share) + noon_output * share
        return replace(context.problem, workload=Workload(mixed(night, noon, share), answers))

    points = [best_operation(problem(float(noon_share(hour / _HOURS)))) for hour in range(_HOURS)]
    rate = load * min(point.lambda_max for point in points)
    mean = best_operation(problem(0.5))
    count = context.problem.pd[0].instances
    threshold = math.inf if mean.threshold_tokens is None else mean.threshold_tokens
    return DayPlan(
        traffic=DayOfMixes(rate, night, noon, round(night_output), round(noon_output)),
        rate_rps=rate,
        hourly_rps=tuple(point.lambda_max for point in points),
        prefill=tuple(point.n_prefill for point in points),
        mean_prefill=min(max(mean.n_prefill, 1), count - 1),
        threshold_tokens=threshold,
    )


def noon_share(days: FloatArray | float) -> FloatArray:
    """The part of requests that are noon's, `days` after midnight."""
    return np.asarray((1 - np.cos(2 * np.pi * np.asarray(days))) / 2)


@dataclass(frozen=True, slots=True)
class ChatsAndDocuments(Traffic):
    """One day of 24 hours: people chat, most at noon, and long documents are read once each, most at midnight.

    All chats begin with the same system prompt, and each turn's prompt holds the turns before it. No two documents
    begin alike, so that what is kept of them is of no use.
    """

    sessions_per_s: float
    """Chats that begin."""
    documents_per_s: float
    mean_turns: float = 6.0
    think_s: float = 300.0
    """From one turn to the next, on average."""

    @property
    def mean_per_s(self) -> float:
        return self.sessions_per_s * self.mean_turns + self.documents_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; the day is one."""
        of_chats, of_documents = rng.spawn(2)
        chats = SessionTraffic(
            Diurnal(self.sessions_per_s, _SWING, phase=_LOWEST),
            self.mean_turns,
            self.think_s,
            TruncatedLogNormal(math.log(_QUESTION_TOKENS), 1.0, 16, 16_384),
            fixed(_ANSWER_TOKENS),
            shared_tokens=_SYSTEM_TOKENS,
        )
        documents = IndependentTraffic(
            Diurnal(self.documents_per_s, _SWING, phase=_HIGHEST),
            TruncatedLogNormal(math.log(_DOCUMENT_TOKENS), 0.6, 8_192, 131_072),
            fixed(_ANSWER_TOKENS),
        )
        yield _together(_of_one_day(chats, of_chats), _of_one_day(documents, of_documents))


_SWING, _LOWEST, _HIGHEST = 0.9, 0.75, 0.25
# Medians; chats and documents like these are our own assumption.
_QUESTION_TOKENS, _ANSWER_TOKENS, _SYSTEM_TOKENS, _DOCUMENT_TOKENS = 600, 350, 4 * BLOCK_TOKENS, 32_000


def _of_one_day(traffic: Traffic, rng: np.random.Generator) -> list[RequestChunk]:
    chunks: list[RequestChunk] = []
    for chunk in traffic.chunks(rng):
        chunks.append(chunk)
        if chunk.arrival_s[-1] >= REAL_DAY_S:
            break
    return chunks


def _together(one: list[RequestChunk], other: list[RequestChunk]) -> RequestChunk:
    """Two streams as one, up to the end of the day; their blocks stay apart."""
    chunks = [*one, *other]
    arrival_s = np.concatenate([chunk.arrival_s for chunk in chunks])
    counts = np.concatenate([np.diff(chunk.block_starts) for chunk in chunks])
    ids = np.concatenate([2 * chunk.block_ids + (number >= len(one)) for number, chunk in enumerate(chunks)])
    order = np.argsort(arrival_s, kind="stable")
    order = order[arrival_s[order] < REAL_DAY_S]
    starts = starts_of(counts)[order]
    return RequestChunk(
        arrival_s[order],
        np.concatenate([chunk.input_tokens for chunk in chunks])[order],
        np.concatenate([chunk.output_tokens for chunk in chunks])[order],
        ids[np.repeat(starts, counts[order]) + places_in(counts[order])],
        starts_of(counts[order]),
        block_tokens=chunks[0].block_tokens,
    )
