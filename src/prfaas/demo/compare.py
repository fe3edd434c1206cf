"""Whether two greedy answers are the same, and if not, whether bf16 rounding can be the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
