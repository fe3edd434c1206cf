"""Whole requests with their times, and which prompts begin alike."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from prfaas.workload.errors import WorkloadError

BLOCK_TOKENS = 512
"""Tokens per block where a source doesn't say which prompts begin alike: Mooncake's."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request, `arrival_s` seconds after the beginning of its traffic.

    `block_ids` names the prompt's text in blocks of `block_tokens` tokens, of which the last may be cut short:
    prompts share as many tokens as their ids agree from the first one on. There is one id per block begun.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int

    def to_json(self) -> dict[str, Any]:
        """One line of our own format."""
        return {
            "arrival_s": self.arrival_s,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "block_tokens": self.block_tokens,
            "block_ids": list(self.block_ids),
        }


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Recorded requests in the order of arrival, the first at 0 s; all have blocks of `block_tokens` tokens.

    `units` says how the file's numbers were read. `empty` requests without a prompt were left out.
    """

    name: str
    requests: tuple[TracedRequest, ...]
    block_tokens: int
    units: str
    empty: int = 0

    @classmethod
    def of(cls, name: str, requests: list[TracedRequest], units: str) -> "RequestTrace":
        """From requests in any order and with any beginning of time; at least one must have a prompt.

        Raises:
            WorkloadError: none has, or their blocks differ in size.
        """
        prompts = sorted(
            (each for each in requests if each.input_tokens > 0), key=lambda each: each.arrival_s
        )
        if not prompts:
            raise WorkloadError(f"{name}: has no request with a prompt")
        sizes = {each.block_tokens for each in prompts}
        if len(sizes) > 1:
            raise WorkloadError(
                f"{name}: has blocks of {min(sizes)} and of {max(sizes)} tokens; one size is needed"
            )
        first_s = prompts[0].arrival_s
        moved = tuple(
            TracedRequest(
                each.arrival_s - first_s,
                each.input_tokens,
                each.output_tokens,
                each.block_ids,
                each.block_tokens,
            )
            for each in prompts
        )
        return cls(name, moved, sizes.pop(), units, len(requests) - len(prompts))

    def cut_to(self, most_tokens: int) -> "RequestTrace":
        """The same requests with no prompt above `most_tokens` tokens."""
        return replace(self, requests=tuple(_cut(each, most_tokens) for each in self.requests))

    @property
    def span_s(self) -> float:
        """Time of the last arrival."""
        return self.requests[-1].arrival_s

    @property
    def quantum_s(self) -> float:
        """The step of a coarse clock: the median time between arrivals that differ, if most do not; else 0."""
        times = sorted({each.arrival_s for each in self.requests})
        if len(times) < 2 or 2 * len(times) > len(self.requests):
            return 0.0
        steps = sorted(after - before for before, after in pairwise(times))
        return steps[len(steps) // 2]


def _cut(request: "TracedRequest", most_tokens: int) -> "TracedRequest":
    if request.input_tokens <= most_tokens:
        return request
    blocks = request.block_ids[: blocks_begun(most_tokens, request.block_tokens)]
    return replace(request, input_tokens=most_tokens, block_ids=blocks)


def blocks_begun(input_tokens: int, block_tokens: int) -> int:
    """Blocks of a prompt, the last one perhaps cut short."""
    return math.ceil(input_tokens / block_tokens)
