"""Sources of whole requests: made-up ones without any relation, and recorded traces played again.

Requests come as arrays of some thousand; `take` gives single ones. Prompts are blocks of ids; `prompt_ids` makes tokens
of them, the same wherever the same block stands.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas.core.arrays import FloatArray, IntArray
from prfaas.core.workload.arrivals import Arrivals, check_positive
from prfaas.core.workload.lengths import LengthDistribution, WorkloadError
from prfaas.core.workload.requests import RequestTrace, TracedRequest, places_in, single_requests, starts_of
from prfaas.core.workload.trace_columns import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class RequestChunk:
    """n requests in the order of arrival; `TracedRequest` says what the fields mean."""

    arrival_s: FloatArray
    """(n,)"""
    input_tokens: IntArray
    """(n,)"""
    output_tokens: IntArray
    """(n,)"""
    block_ids: IntArray
    """Of all requests, one after the other."""
    block_starts: IntArray
    """(n + 1,): the blocks of request i are `block_ids[block_starts[i] : block_starts[i + 1]]`."""
    block_tokens: int
    own: "Mapping[str, NDArray[Any]]" = field(default_factory=dict)
    """(n,) words of the trace's other columns, by name."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def requests(self) -> Iterator[TracedRequest]:
        """The same, one by one."""
        columns = self.arrival_s, self.input_tokens, self.output_tokens
        return single_requests(columns, self.block_ids, self.block_starts, self.block_tokens)


def take(
    chunks: Iterable[RequestChunk], *, limit: int | None = None, until_s: float | None = None
) -> Iterator[TracedRequest]:
    """Single requests: at most `limit`, and those that arrive before `until_s`."""
    taken = 0
    if limit is not None and limit <= 0:
        return
    for chunk in chunks:
        for request in chunk.requests():
            if until_s is not None and request.arrival_s >= until_s:
                return
            yield request
            taken += 1
            if taken == limit:
                return


_AT_ONCE = 1 << 16
# A continuous distribution is drawn from so many bins, evenly within each.
_BINS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class LengthSampler:
    """Draws random lengths, thousands at once; arrays have one entry per bin."""

    cumulative: FloatArray
    """The probability of a bin and all before it."""
    lower: FloatArray
    """The shortest length of a bin in tokens, excluded."""
    upper: FloatArray
    """The longest length of a bin in tokens."""

    @classmethod
    def of(cls, lengths: LengthDistribution) -> "LengthSampler":
        """Exact for distributions with atoms; otherwise exact up to what happens within one of 4,096 bins."""
        bins = lengths.fine_bins() if lengths.atoms() is not None else lengths.bins(_BINS)
        cumulative = np.cumsum(bins.weights)
        lower = bins.lengths if lengths.atoms() is not None else np.maximum(bins.lower, lengths.low)
        upper = bins.lengths if lengths.atoms() is not None else bins.upper
        return cls(cumulative / cumulative[-1], lower, upper)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """`count` independent lengths in whole tokens, at least 1."""
        bins = np.searchsorted(self.cumulative, rng.random(count), side="right")
        lower = self.lower[bins]
        lengths = lower + rng.random(count) * (self.upper[bins] - lower)
        whole: IntArray = np.maximum(np.rint(lengths), 1).astype(np.int64)
        return whole


class Traffic(ABC):
    """A source of requests."""

    __slots__ = ()

    @property
    @abstractmethod
    def mean_per_s(self) -> float:
        """Requests per second in the long run."""

    @abstractmethod
    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """The requests in the order of arrival, within and across chunks. No chunk is empty."""


@dataclass(frozen=True, slots=True)
class IndependentTraffic(Traffic):
    """Arrivals of a process, each with a prompt and an answer of random length; no two prompts begin alike."""

    arrivals: Arrivals
    inputs: LengthDistribution
    outputs: LengthDistribution
    block_tokens: int = BLOCK_TOKENS

    @property
    def mean_per_s(self) -> float:
        return self.arrivals.mean_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """The requests in the order of arrival; without end."""
        of_times, of_inputs, of_outputs = rng.spawn(3)
        inputs, outputs = LengthSampler.of(self.inputs), LengthSampler.of(self.outputs)
        next_id = 0
        for arrival_s in self.arrivals.chunks(of_times):
            prompts = inputs.draw(of_inputs, len(arrival_s))
            starts = starts_of(-(-prompts // self.block_tokens))
            ids = np.arange(next_id, next_id + starts[-1])
            next_id += int(starts[-1])
            answers = outputs.draw(of_outputs, len(arrival_s))
            yield RequestChunk(arrival_s, prompts, answers, ids, starts, block_tokens=self.block_tokens)


@dataclass(frozen=True, slots=True)
class ReplayedTraffic(Traffic):
    """A trace again, once or several times, each round with prefixes of its own.

    Lengths are multiplied and stay at least 1. With prompts their blocks grow or shrink, so that prompts still begin
    alike where they did.

    Raises:
        WorkloadError: a factor or speed that is not above 0, a jitter below 0, no rounds, or several rounds of
            a trace without duration.
    """

    trace: RequestTrace
    speed: float = 1.0
    """Divides the trace's times."""
    jitter_s: float = 0.0
    """Each arrival is moved by an even 0 to `jitter_s` of the trace's time: for coarse clocks, see
    `RequestTrace.quantum_s`."""
    rounds: int | None = 1
    """How many times the whole trace comes; None: without end."""
    input_factor: float = 1.0
    """Of prompts; rounded so that a block has a whole number of tokens, `block_tokens`."""
    output_factor: float = 1.0
    """Of answers."""

    @classmethod
    def at_rate(cls, trace: RequestTrace, rate_rps: float) -> "ReplayedTraffic":
        """Without end, at a mean rate; arrivals are spread over the step of a coarse clock.

        Raises:
            WorkloadError: the trace has no duration and so no rate.
        """
        recorded_rps = cls(trace, jitter_s=trace.quantum_s, rounds=None).mean_per_s
        return cls(trace, speed=rate_rps / recorded_rps, jitter_s=trace.quantum_s, rounds=None)

    def __post_init__(self) -> None:
        check_positive(self.speed, "the speed of a replay")
        check_positive(self.input_factor, "a factor of lengths")
        check_positive(self.output_factor, "a factor of lengths")
        if not 0 <= self.jitter_s < float("inf"):
            raise WorkloadError(f"a jitter must be 0 s or more, not {self.jitter_s!r}")
        if self.rounds is not None and self.rounds < 1:
            raise WorkloadError(f"a trace can be replayed 1 time or more, not {self.rounds}")
        if self.rounds != 1 and self.round_s == 0:
            raise WorkloadError(f"{self.trace.name}: all requests come at once, so it can't be repeated")

    @property
    def round_s(self) -> float:
        """Time of the replay from one round to the next: one mean gap (or the jitter) after the last arrival."""
        gaps = max(len(self.trace) - 1, 1)
        return (self.trace.span_s + max(self.trace.span_s / gaps, self.jitter_s)) / self.speed

    @property
    def block_tokens(self) -> int:
        """Tokens per block of what comes out."""
        return max(1, round(self.trace.block_tokens * self.input_factor))

    @property
    def mean_per_s(self) -> float:
        """Requests per second in the long run; infinite for a trace without duration."""
        return len(self.trace) / self.round_s if self.round_s > 0 else float("inf")

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """The requests in the order of arrival, some thousand at once; no chunk has those of two rounds."""
        trace = self.trace
        starts, counts = starts_of(trace.block_counts), trace.block_counts
        ids, known = None, int(starts[-1])
        if trace.block_ids is not None:
            # Ids from 0 on without gaps, so that those of the next round can follow.
            values, ids = np.unique(trace.block_ids, return_inverse=True)
            known = len(values)
        words = {f"trace_{name}": np.array(each.words, dtype=object) for name, each in trace.own.items()}
        for number in count() if self.rounds is None else range(self.rounds):
            jitter_s = rng.random(len(trace)) * self.jitter_s if self.jitter_s else 0.0
            arrival_s = (trace.arrival_s + jitter_s) / self.speed + number * self.round_s
            order = np.argsort(arrival_s, kind="stable") if self.jitter_s else np.arange(len(trace))
            for first in range(0, len(trace), _AT_ONCE):
                rows = order[first : first + _AT_ONCE]
                picked = np.repeat(starts[rows], counts[rows]) + places_in(counts[rows])
                answers = np.rint(trace.output_tokens[rows] * self.output_factor)
                yield RequestChunk(
                    arrival_s[rows],
                    self._inputs(trace.input_tokens[rows].astype(np.int64)),
                    np.maximum(answers, np.minimum(trace.output_tokens[rows], 1)).astype(np.int64),
                    (picked if ids is None else ids[picked]) + number * known,
                    starts_of(counts[rows]),
                    block_tokens=self.block_tokens,
                    own={name: each[trace.own[name[6:]].codes[rows]] for name, each in words.items()},
                )

    def _inputs(self, prompts: IntArray) -> IntArray:
        recorded, scaled = self.trace.block_tokens, self.block_tokens
        whole = (prompts - 1) // recorded
        rest = np.rint((prompts - whole * recorded) * (scaled / recorded)).astype(np.int64)
        inputs: IntArray = whole * scaled + np.clip(rest, 1, scaled)
        return inputs


# SplitMix64's constants: consecutive seeds give unrelated numbers.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LARGEST_VOCABULARY = 1 << 31


def prompt_ids(
    block_ids: "Sequence[int] | NDArray[np.int64]",
    block_tokens: int,
    num_tokens: int,
    vocabulary_size: int,
    first_id: int = 0,
) -> NDArray[np.int32]:
    """The first `num_tokens` tokens of these blocks of `block_tokens` tokens, as ids from `first_id` on.

    Each token is a function of its block's id and of its place in the block alone, and about evenly spread over
    the `vocabulary_size` ids: the same in every process and version of numpy. 128K tokens take about a millisecond.

    Raises:
        WorkloadError: the blocks don't have so many tokens, or the vocabulary has fewer than 2 ids or too many.
    """
    if not 0 <= num_tokens <= len(block_ids) * block_tokens:
        raise WorkloadError(f"{len(block_ids)} blocks of {block_tokens} tokens have no {num_tokens} tokens")
    if not (vocabulary_size >= 2 and 0 <= first_id <= _LARGEST_VOCABULARY - vocabulary_size):
        raise WorkloadError(
            f"a vocabulary has 2 to 2^31 ids from 0 on, not {vocabulary_size} from {first_id} on"
        )
    seeds = _mixed(np.asarray(block_ids, dtype=np.int64).astype(np.uint64) * _STEP + _STEP)
    words = seeds[:, None] + np.arange(block_tokens, dtype=np.uint64) * _STEP
    # One round suffices after a seed that is well mixed itself.
    words ^= words >> _HALF
    words *= _FIRST
    words >>= _HALF
    words *= np.uint64(vocabulary_size)
    words >>= _HALF
    return words.reshape(-1)[:num_tokens].astype(np.int32) + np.int32(first_id)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
