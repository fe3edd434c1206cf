"""Whether two greedy answers are the same, and if not, whether bf16 rounding can be the reason."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

_SIGNIFICAND_BITS = 8


class Equality(StrEnum):
    """How an answer compares with the reference."""

    EXACT = "exact"
    TIE = "tie"
    NO = "no"


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
