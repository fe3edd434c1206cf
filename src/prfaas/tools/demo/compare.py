"""Comparison of greedy answers: equal, different within the rounding of bf16, or different.

How many bytes should have moved: `kvmodel` to the token, then rounded up to the engine's pages.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prfaas.core.kv.layers import FullAttention, LinearState
from prfaas.core.kv.model import Group, KvModel

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


_SIGNIFICAND_BITS = 8
# At most one answer in six may end in a tie, and none may differ for another reason.
_EXACT_OF = (5, 6)


class Equality(StrEnum):
    """How an answer compares with the reference."""

    EXACT = "exact"
    TIE = "tie"
    NO = "no"

    def styled(self, text: str) -> str:
        """A text for rich in the colour of this comparison."""
        style = {"exact": "green", "tie": "yellow", "no": "bold red"}[self]
        return f"[{style}]{text}[/]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`position`: index of the first different token, None if there is none.

    `margin_nats`: how much more likely the reference's own token is there, by its logits; None if ours is not among
    those reported. `bound_nats`: up to what margin rounding explains the difference.
    """

    equality: Equality
    position: int | None = None
    margin_nats: float | None = None
    bound_nats: float | None = None


def tie_bound_nats(magnitude: float) -> float:
    """How far apart two logits of at most `magnitude` can lie if bf16 rounding alone makes them change places.

    bf16 has 8 bits of significand, so from 2**e to 2**(e + 1) its numbers are 2**(e - 7) apart: a step is 1/16 for
    logits from 8 to 16, 1/8 from 16 to 32. Two computations of one logit whose results agree to much less than a step
    round to the same number or to neighbours, so each logit is off by at most one step. If the reference prefers A to
    B by a margin m, and another computation prefers B, then A lost at most one step and B won at most one: m is at
    most two steps. A difference of logits is that of the logprobs, hence nats.

    This holds for computations that only differ in the order of additions of the last matrices. It does not hold if
    they differ earlier: with the prompt split at another token, the logits of the tiny Qwen3-Next were measured to
    move by 5 steps in the median and by 150 at worst, where a router picks another expert. So what is compared
    must be split alike.

    Raises:
        ValueError: `magnitude` is negative or no finite number.
    """
    if not 0 <= magnitude < math.inf:
        raise ValueError(f"a logit's magnitude must be a finite number from 0 on, not {magnitude}")
    _, exponent = math.frexp(magnitude)  # magnitude < 2**exponent
    return 2 * math.ldexp(1.0, exponent - _SIGNIFICAND_BITS)


def compare(
    ours: Sequence[int],
    reference: Sequence[int],
    reference_logits: Sequence[Mapping[int, float]],
) -> Comparison:
    """Compares two answers of the same length.

    `reference_logits[i]` maps token ids to their logits at position i, for the likeliest tokens at least: not
    logprobs, which no longer tell how coarse the rounding was. What comes after the first difference says nothing:
    the two have different pasts then.

    Raises:
        ValueError: lengths differ, or there are not as many logits as tokens.
    """
    if not len(ours) == len(reference) == len(reference_logits):
        raise ValueError(
            f"{len(ours)} tokens can't be compared with {len(reference)} and {len(reference_logits)} logits"
        )
    for position, (own, expected) in enumerate(zip(ours, reference, strict=True)):
        if own == expected:
            continue
        logits = reference_logits[position]
        if own not in logits or expected not in logits:
            return Comparison(Equality.NO, position)
        margin_nats = abs(logits[expected] - logits[own])
        bound_nats = tie_bound_nats(max(abs(logits[expected]), abs(logits[own])))
        equality = Equality.TIE if margin_nats <= bound_nats else Equality.NO
        return Comparison(equality, position, margin_nats, bound_nats)
    return Comparison(Equality.EXACT)


def are_equal(comparisons: Sequence[Comparison]) -> bool:
    """True if no answer differs by more than a tie, and at least five of six are exact."""
    found = Counter(each.equality for each in comparisons)
    exact, of = _EXACT_OF
    return found[Equality.NO] == 0 and found[Equality.EXACT] * of >= len(comparisons) * exact
