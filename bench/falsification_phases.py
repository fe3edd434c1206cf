"""What `falsification.py` sends and what the line does meanwhile, and what the planner says of each phase.

Nothing here runs an engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prfaas.core.planner import PlanProblem, best_operation
from prfaas.core.planner.two_clusters import evaluate
from prfaas.core.units import BITS_PER_BYTE
from prfaas.core.workload.requests import RequestTrace, TracedRequest
from prfaas.lab.simulator.capacity import Fluctuating, Piece

LEAST_SHARE = 0.5
"""A wandering bandwidth never falls below this share of what the plan needs."""
CORRELATION_S = 10.0
STEP_S = 1.0

SHORTEST_TOKENS, LONGEST_TOKENS = 512, 12_000
_QUIET_S = 5.0
FEWEST_ANSWER, MOST_ANSWER = 2, 8
STATIC = "static_threshold"


@dataclass(frozen=True, slots=True)
class LinkPhase:
    """One stretch of the run."""

    name: str
    share: float
    """The link's mean bandwidth, of what the plan needs."""
    relative_sd: float = 0.0
    """Above 0 the bandwidth wanders around its mean (Ornstein-Uhlenbeck)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.share) and self.share > 0):
            raise ValueError(f"phase {self.name}: a share of the need is above 0, not {self.share:g}")
        if not (math.isfinite(self.relative_sd) and self.relative_sd >= 0):
            raise ValueError(f"phase {self.name}: a deviation is 0 or more, not {self.relative_sd:g}")
        if self.relative_sd and self.share <= LEAST_SHARE:
            raise ValueError(f"phase {self.name}: a wandering bandwidth has a mean above {LEAST_SHARE:g}")

    @classmethod
    def parse(cls, text: str) -> "LinkPhase":
        """From `name=share` or `name=share:deviation`, such as `wandering=0.75:0.3`.

        Raises:
            ValueError: it is written otherwise, or a number can't be.
        """
        name, _, numbers = text.partition("=")
        share, _, deviation = numbers.partition(":")
        try:
            values = float(share), float(deviation or 0)
        except ValueError:
            values = None
        if not name or values is None:
            raise ValueError(f"a phase is written name=share or name=share:deviation, not {text!r}")
        return cls(name, *values)


PHASES = (
    LinkPhase("ample", 4.0),
    LinkPhase("needed", 1.0),
    LinkPhase("half", 0.5),
    LinkPhase("wandering", 0.75, 0.3),
)


def pieces_of(
    phases: Sequence[LinkPhase],
    needed_bits_per_s: float,
    most_bits_per_s: float,
    phase_s: float,
    seed: int,
) -> tuple[Piece, ...]:
    """The link's payload bandwidth over time, in pieces (from this second on, bits per second).

    Never more than `most_bits_per_s`, which the deployment file says. After the last phase it is that, so that
    everything ends.
    """
    rng = np.random.default_rng(seed)
    pieces: list[Piece] = []
    for number, phase in enumerate(phases):
        start_s = number * phase_s
        mean = phase.share * needed_bits_per_s
        if phase.relative_sd == 0:
            pieces.append((start_s, mean))
            continue
        process = Fluctuating(
            mean, phase.relative_sd, CORRELATION_S, step_s=STEP_S, least_share=LEAST_SHARE / phase.share
        )
        for at_s, bits_per_s in process.changes(rng):
            if start_s + at_s >= (number + 1) * phase_s:
                break
            pieces.append((start_s + at_s, bits_per_s))
    pieces.append((len(phases) * phase_s, most_bits_per_s))
    return tuple((at_s, min(bits_per_s, most_bits_per_s)) for at_s, bits_per_s in pieces)


def mean_bits_per_s(pieces: Sequence[Piece], start_s: float, end_s: float) -> float:
    """The mean bandwidth of a stretch of time."""
    ends = [*(at_s for at_s, _ in pieces[1:]), math.inf]
    bits = sum(
        max(min(until_s, end_s) - max(at_s, start_s), 0.0) * bits_per_s
        for (at_s, bits_per_s), until_s in zip(pieces, ends, strict=True)
    )
    return bits / (end_s - start_s)


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """A stretch of a trace at its own pace, its lengths scaled; one entry per request, in the order of arrival.

    Prompts are as long as what no earlier prompt of the trace began with: what an endless prefix cache would leave to
    compute. So they share nothing, and no cache decides where they go.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    @classmethod
    def of(
        cls, trace: RequestTrace, *, start_s: float, lasts_s: float, mean_tokens: float, seed: int
    ) -> "TraceSlice":
        """The requests of `lasts_s` seconds from `start_s` on.

        Args:
            trace: Recorded requests. Arrivals are spread over the step of a coarse clock.
            start_s: Of the slice, in the trace's time.
            lasts_s: How long the slice is.
            mean_tokens: What the slice's mean uncached length becomes, before lengths are cut at both ends.
            seed: Of the spreading.

        Raises:
            ValueError: the trace has no request then.
        """
        rng = np.random.default_rng(seed)
        arrival_s = trace.arrival_s + rng.random(len(trace)) * trace.quantum_s - start_s
        kept = np.flatnonzero((arrival_s >= 0) & (arrival_s < lasts_s))
        if not len(kept):
            raise ValueError(f"{trace.name} has no request from {start_s:g} s to {start_s + lasts_s:g} s")
        kept = kept[np.argsort(arrival_s[kept], kind="stable")]
        uncached = trace.uncached_tokens().astype(np.float64)[kept]
        answers = trace.output_tokens.astype(np.float64)[kept]
        prompts = np.rint(uncached * (mean_tokens / uncached.mean()))
        middle = (FEWEST_ANSWER + MOST_ANSWER) / 2
        answers = np.rint(answers * (middle / max(answers.mean(), 1.0)))
        return cls(
            arrival_s[kept],
            np.clip(prompts, SHORTEST_TOKENS, LONGEST_TOKENS).astype(np.int64),
            np.clip(answers, FEWEST_ANSWER, MOST_ANSWER).astype(np.int64),
        )

    def thinned(self, count: int, *, first_block: int = 0, block_tokens: int = 512) -> list[TracedRequest]:
        """`count` requests, evenly spread over the slice's own order, so that its bursts stay where they are.

        Args:
            count: How many.
            first_block: The prompts' blocks are numbered from here on: other blocks are other tokens.
            block_tokens: Of a block.

        Raises:
            ValueError: the slice has fewer.
        """
        if not 0 < count <= len(self.arrival_s):
            raise ValueError(f"the slice has {len(self.arrival_s)} requests, and {count} are wanted")
        chosen = (np.arange(count) * len(self.arrival_s) / count).astype(np.int64)
        found: list[TracedRequest] = []
        next_id = first_block
        for place in chosen.tolist():
            tokens = int(self.input_tokens[place])
            blocks = tuple(range(next_id, next_id + -(-tokens // block_tokens)))
            next_id += len(blocks)
            found.append(
                TracedRequest(
                    float(self.arrival_s[place]), tokens, int(self.output_tokens[place]), blocks, block_tokens
                )
            )
        return found


def capacity_per_s(problem: PlanProblem, bits_per_s: float, threshold_tokens: float | None) -> float:
    """Λ_max by the planner with so much bandwidth; with a threshold that stays, or with the best one (None)."""
    limited = replace(
        problem, links=tuple(replace(link, bandwidth_bits_per_s=bits_per_s) for link in problem.links)
    )
    if threshold_tokens is None:
        return best_operation(limited).lambda_max
    return evaluate(limited, threshold_tokens, 1).lambda_max


def phase_of(arrival_s: NDArray[np.float64], phases: int, phase_s: float) -> NDArray[np.int64]:
    """The number of the phase in which each request came; what comes later belongs to the last one."""
    found: NDArray[np.int64] = np.minimum((arrival_s // phase_s).astype(np.int64), phases - 1)
    return found


def telemetry_bits_per_s(carried: Sequence[tuple[float, int]]) -> float:
    """What the line carries while nobody sends KVCache: in the quietest five seconds, from readings (second, bytes)."""
    at_s, so_far = (np.array(column, dtype=np.float64) for column in zip(*carried, strict=True))
    starts_s = at_s[at_s <= at_s[-1] - _QUIET_S]
    grown = np.interp(starts_s + _QUIET_S, at_s, so_far) - so_far[: len(starts_s)]
    return float(grown.min(initial=math.inf)) * BITS_PER_BYTE / _QUIET_S if len(starts_s) else 0.0


def bytes_between(carried: Sequence[tuple[float, int]], start_s: float, end_s: float) -> float:
    """Bytes that the line carried in a stretch of time, from readings (second, bytes so far)."""
    if not carried:
        return 0.0
    at_s, so_far = zip(*carried, strict=True)
    first, last = np.interp([start_s, end_s], at_s, so_far)
    return float(last - first)
