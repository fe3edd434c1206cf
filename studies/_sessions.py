"""Conversations: each turn's prompt is all that was said before, and something new."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from prfaas.core.arrays import FloatArray, IntArray
from prfaas.core.workload.arrivals import Arrivals, check_positive
from prfaas.core.workload.lengths import LengthDistribution, WorkloadError
from prfaas.core.workload.requests import places_in, starts_of
from prfaas.core.workload.trace_columns import BLOCK_TOKENS
from prfaas.core.workload.traffic import LengthSampler, RequestChunk, Traffic

_Number = TypeVar("_Number", np.float64, np.int64)


@dataclass(frozen=True, slots=True)
class SessionTraffic(Traffic):
    """Sessions of several turns each. A turn's prompt holds all questions and answers before it.

    The next turn does not wait for the answer: it comes at its time. In a replay an answer's place in later prompts is
    taken by made-up tokens of the same number, not by what the engine said.

    Raises:
        WorkloadError: fewer than 1 turn, a think time that is not above 0, a shared part that is not whole blocks, or
            a pace or spread below 0.
    """

    arrivals: Arrivals
    """When sessions begin."""
    mean_turns: float
    """Geometrically distributed."""
    think_s: float
    """From one turn to the next on average, or from the end of the answer where `answer_token_s` says when that is;
    exponentially distributed unless `think_sigma` says otherwise."""
    questions: LengthDistribution
    """Tokens that each turn adds."""
    outputs: LengthDistribution
    """Tokens of each answer."""
    shared_tokens: int = 0
    """Tokens that every session begins with (a system prompt); whole blocks."""
    block_tokens: int = BLOCK_TOKENS
    think_sigma: float | None = None
    """Of the logarithm of pauses, which then have a log-normal distribution: tools mostly answer at once, and some take
    minutes. None: exponential."""
    answer_token_s: float = 0.0
    """Seconds per token of an answer, after which the pause begins."""
    longest_tokens: float = math.inf
    """The first turn whose prompt would be longer does not come, nor does any after it."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean_turns < float("inf"):
            raise WorkloadError(f"sessions have 1 turn or more on average, not {self.mean_turns!r}")
        check_positive(self.think_s, "a think time")
        for value, what in (
            (self.think_sigma, "spread of think times"),
            (self.answer_token_s, "pace of answers"),
        ):
            if value is not None and not 0 <= value < math.inf:
                raise WorkloadError(f"the {what} must be 0 or more, not {value!r}")
        if self.shared_tokens < 0 or self.shared_tokens % self.block_tokens:
            raise WorkloadError(
                f"the shared beginning must be whole blocks of {self.block_tokens} tokens, "
                f"not {self.shared_tokens} tokens"
            )

    @property
    def mean_per_s(self) -> float:
        """Turns per second, once sessions end as often as they begin; without those that `longest_tokens` leaves out,
        fewer."""
        return self.arrivals.mean_per_s * self.mean_turns

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """The requests of all sessions in the order of arrival; without end."""
        of_sessions, of_turns = rng.spawn(2)
        sampler = _TurnSampler(self, of_turns)
        none = np.empty(0, dtype=int)
        waiting = _Turns(np.empty(0), none, none, none)
        for begun_s in self.arrivals.chunks(of_sessions):
            turns = sampler.turns(begun_s)
            if self.longest_tokens < math.inf:
                turns = turns.where(turns.input_tokens <= self.longest_tokens)
            waiting = waiting.joined(turns)
            # Whatever comes from later sessions comes after the last one that has begun.
            due = waiting.arrival_s <= begun_s[-1]
            yield waiting.where(due).in_order().requests(self.shared_tokens, self.block_tokens)
            waiting = waiting.where(~due)


class _Turns(NamedTuple):
    arrival_s: NDArray[Any]
    input_tokens: NDArray[Any]
    output_tokens: NDArray[Any]
    first_block: NDArray[Any]
    """The first id of the session's own blocks, after the shared ones."""

    def joined(self, other: "_Turns") -> "_Turns":
        return _Turns._make(map(np.concatenate, zip(self, other, strict=True)))

    def where(self, picked: NDArray[np.bool_] | IntArray) -> "_Turns":
        return _Turns._make(column[picked] for column in self)

    def in_order(self) -> "_Turns":
        return self.where(np.argsort(self.arrival_s, kind="stable"))

    def requests(self, shared_tokens: int, block_tokens: int) -> RequestChunk:
        counts = -(-self.input_tokens // block_tokens)
        places, shared = places_in(counts), shared_tokens // block_tokens
        own = np.repeat(self.first_block - shared, counts) + places
        ids = np.where(places < shared, places, own)
        return RequestChunk(
            self.arrival_s,
            self.input_tokens,
            self.output_tokens,
            ids,
            starts_of(counts),
            block_tokens=block_tokens,
        )


class _TurnSampler:
    def __init__(self, traffic: SessionTraffic, rng: np.random.Generator) -> None:
        self._traffic = traffic
        self._rng = rng
        self._questions = LengthSampler.of(traffic.questions)
        self._outputs = LengthSampler.of(traffic.outputs)
        self._next_id = traffic.shared_tokens // traffic.block_tokens

    def turns(self, begun_s: FloatArray) -> _Turns:
        """All turns of the sessions that begin at these times."""
        traffic, rng = self._traffic, self._rng
        counts = rng.geometric(1 / traffic.mean_turns, len(begun_s)).astype(np.int64)
        starts = starts_of(counts)
        total, first = int(starts[-1]), starts[:-1]
        gaps_s = self._pauses_s(total)
        questions, answers = self._questions.draw(rng, total), self._outputs.draw(rng, total)
        gaps_s[1:] += traffic.answer_token_s * answers[:-1]
        gaps_s[first] = 0.0
        # A prompt holds its own question, and of every turn before the question and the answer.
        said = _running_sums(questions + answers, first, counts) - answers
        blocks = -(-said[starts[1:] - 1] // traffic.block_tokens)
        first_block = self._next_id + starts_of(blocks)
        self._next_id = int(first_block[-1])
        return _Turns(
            np.repeat(begun_s, counts) + _running_sums(gaps_s, first, counts),
            traffic.shared_tokens + said,
            answers,
            np.repeat(first_block[:-1], counts),
        )

    def _pauses_s(self, count: int) -> FloatArray:
        mean_s, sigma = self._traffic.think_s, self._traffic.think_sigma
        if sigma is None:
            return self._rng.exponential(mean_s, count)
        return self._rng.lognormal(math.log(mean_s) - sigma**2 / 2, sigma, count)


def _running_sums(values: NDArray[_Number], first: IntArray, counts: IntArray) -> NDArray[_Number]:
    """Sums from the beginning of each run, of which `first` are the indices and `counts` the lengths."""
    sums: NDArray[_Number] = np.cumsum(values)
    before = sums[first] - values[first]
    shifted: NDArray[_Number] = sums - np.repeat(before, counts)
    return shifted
