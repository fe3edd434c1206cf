"""Some thousand requests as arrays, and as single ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from prfaas.workload.requests import TracedRequest
from prfaas.workload.traffic.arrivals import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RequestChunk:
    """n requests in the order of arrival; `TracedRequest` says what the fields mean.

    `arrival_s`, `input_tokens`, `output_tokens`: one entry per request. The blocks of request i are
    `block_ids[block_starts[i] : block_starts[i + 1]]`, so `block_starts` has n + 1 entries.
    """

    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    block_ids: IntArray
    block_starts: IntArray
    block_tokens: int

    def __len__(self) -> int:
        return len(self.arrival_s)

    def requests(self) -> Iterator[TracedRequest]:
        """The same, one by one."""
        columns = zip(
            self.arrival_s.tolist(),
            self.input_tokens.tolist(),
            self.output_tokens.tolist(),
            self.block_starts[:-1].tolist(),
            self.block_starts[1:].tolist(),
            strict=True,
        )
        for arrival_s, prompt, answer, start, end in columns:
            blocks = tuple(self.block_ids[start:end].tolist())
            yield TracedRequest(arrival_s, prompt, answer, blocks, self.block_tokens)


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


def starts_of(counts: IntArray) -> IntArray:
    """Where each of consecutive runs of these lengths begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def places_in(counts: IntArray) -> IntArray:
    """0, 1, … for each of consecutive runs of these lengths."""
    starts = starts_of(counts)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
