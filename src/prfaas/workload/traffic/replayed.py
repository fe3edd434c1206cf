"""A recorded trace again: faster or slower, over and over, with longer or shorter prompts and answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from prfaas.workload.errors import WorkloadError
from prfaas.workload.requests import RequestTrace
from prfaas.workload.traffic.arrivals import IntArray, check_positive
from prfaas.workload.traffic.chunk import RequestChunk, places_in, starts_of
from prfaas.workload.traffic.traffic import Traffic


@dataclass(frozen=True, slots=True)
class ReplayedTraffic(Traffic):
    """`rounds` times the whole trace (None: without end), each round with prefixes of its own.

    `speed` divides its times. `jitter_s`, in the trace's time, is added to each arrival evenly from 0 up: for
    traces whose clock is coarse (`RequestTrace.quantum_s`). Lengths are multiplied by `input_factor` and
    `output_factor` and stay at least 1; with prompts their blocks grow or shrink, so that prompts still begin
    alike where they did. The factor of prompts is rounded so that a block has a whole number of tokens:
    `block_tokens` tells.

    Raises:
        WorkloadError: a factor or speed that is not above 0, a jitter below 0, no rounds, or several rounds of
            a trace without duration.
    """

    trace: RequestTrace
    speed: float = 1.0
    jitter_s: float = 0.0
    rounds: int | None = 1
    input_factor: float = 1.0
    output_factor: float = 1.0

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
        gaps = max(len(self.trace.requests) - 1, 1)
        return (self.trace.span_s + max(self.trace.span_s / gaps, self.jitter_s)) / self.speed

    @property
    def block_tokens(self) -> int:
        """Tokens per block of what comes out."""
        return max(1, round(self.trace.block_tokens * self.input_factor))

    @property
    def mean_per_s(self) -> float:
        """See `Traffic`; infinite for a trace without duration."""
        return len(self.trace.requests) / self.round_s if self.round_s > 0 else float("inf")

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; one chunk per round."""
        requests = self.trace.requests
        recorded_s = np.array([each.arrival_s for each in requests])
        prompts = self._inputs(np.array([each.input_tokens for each in requests]))
        answers = np.array([each.output_tokens for each in requests])
        answers = np.maximum(np.rint(answers * self.output_factor), np.minimum(answers, 1)).astype(np.int64)
        counts = np.array([len(each.block_ids) for each in requests])
        # Ids from 0 on without gaps, so that those of the next round can follow.
        known, ids = np.unique(
            np.array([block for each in requests for block in each.block_ids]), return_inverse=True
        )
        for number in count() if self.rounds is None else range(self.rounds):
            jitter_s = rng.random(len(recorded_s)) * self.jitter_s if self.jitter_s else 0.0
            arrival_s = (recorded_s + jitter_s) / self.speed + number * self.round_s
            order = np.argsort(arrival_s, kind="stable")
            starts = starts_of(counts)
            picked = np.repeat(starts[order], counts[order]) + places_in(counts[order])
            yield RequestChunk(
                arrival_s[order],
                prompts[order],
                answers[order],
                ids[picked] + number * len(known),
                starts_of(counts[order]),
                self.block_tokens,
            )

    def _inputs(self, prompts: IntArray) -> IntArray:
        recorded, scaled = self.trace.block_tokens, self.block_tokens
        whole = (prompts - 1) // recorded
        rest = np.rint((prompts - whole * recorded) * (scaled / recorded)).astype(np.int64)
        inputs: IntArray = whole * scaled + np.clip(rest, 1, scaled)
        return inputs
