"""Whether two greedy answers are the same, and if not, whether bf16 rounding can be the reason.

How many bytes should have moved: `kvmodel` to the token, then rounded up to the engine's pages.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prfaas.core.kv import FullAttention, Group, KvModel, LinearState

# Block sizes that vLLM uses or may be told to use, in tokens.
_PAGE_TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class MovedPages:
    """One transfer: the KV of tokens [skip_tokens, num_tokens), and the bytes that it took."""

    num_tokens: int
    skip_tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Tokens per page of full-attention and of sliding-window layers (equal where a model has only one kind)."""

    full_tokens: int
    window_tokens: int

    def bytes_to_move(self, model: KvModel, num_tokens: int, skip_tokens: int) -> int:
        """Bytes of the whole pages that must move."""
        return sum(group.bytes_to_move(num_tokens, skip_tokens, self._of(group)) for group in model.groups)

    def _of(self, group: Group) -> int:
        if isinstance(group, LinearState):
            return 1
        return self.full_tokens if isinstance(group, FullAttention) else self.window_tokens


def find_pages(model: KvModel, transfers: Sequence[MovedPages]) -> Pages | None:
    """The page sizes with which `kvmodel` gives the moved bytes of every transfer exactly; None if none do.

    Engines choose page sizes themselves and tell nobody; one choice must explain all transfers of a run.
    """
    sizes = (
        itertools.product(_PAGE_TOKENS, repeat=2)
        if model.is_hybrid
        else ((size, size) for size in _PAGE_TOKENS)
    )
    # Equal sizes first: they are the simpler explanation where several fit.
    for full_tokens, window_tokens in sorted(sizes, key=lambda pair: pair[0] != pair[1]):
        pages = Pages(full_tokens, window_tokens)
        if all(pages.bytes_to_move(model, t.num_tokens, t.skip_tokens) == t.kv_bytes for t in transfers):
            return pages
    return None


# Logits of the tiny models lie below 16, where neighbouring bf16 numbers are 1/16 apart: two logits that should be
# equal may come out one step apart. More than that is not rounding.
TIE_BOUND_NATS = 0.1


class Equality(StrEnum):
    """How an answer compares with the reference."""

    EXACT = "exact"
    TIE = "tie"
    NO = "no"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`position`: index of the first different token, None if there is none.

    `margin_nats`: how much more likely the reference's own token is there, by its logprobs; None if ours is not among
    those reported.
    """

    equality: Equality
    position: int | None = None
    margin_nats: float | None = None


def compare(
    ours: Sequence[int],
    reference: Sequence[int],
    reference_logprobs: Sequence[Mapping[int, float]],
    tie_bound_nats: float = TIE_BOUND_NATS,
) -> Comparison:
    """Compares two answers of the same length.

    `reference_logprobs[i]` maps token ids to their logprobs at position i, for the likeliest tokens at least. What
    comes after the first difference says nothing: the two have different pasts then.

    Raises:
        ValueError: lengths differ, or there are not as many logprobs as tokens.
    """
    if not len(ours) == len(reference) == len(reference_logprobs):
        raise ValueError(
            f"{len(ours)} tokens can't be compared with {len(reference)} and {len(reference_logprobs)} logprobs"
        )
    for position, (own, expected) in enumerate(zip(ours, reference, strict=True)):
        if own == expected:
            continue
        logprobs = reference_logprobs[position]
        if own not in logprobs or expected not in logprobs:
            return Comparison(Equality.NO, position)
        margin_nats = abs(logprobs[expected] - logprobs[own])
        equality = Equality.TIE if margin_nats < tie_bound_nats else Equality.NO
        return Comparison(equality, position, margin_nats)
    return Comparison(Equality.EXACT)
