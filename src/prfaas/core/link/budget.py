"""Division of a link's bandwidth among its senders: live senders, and transfers in simulations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

STANDING_PART = 0.1
"""Share of a busy link that senders with nothing to send may use together until they get another pace."""

HEADROOM = 1.25
"""Factor by which a sender whose claim is met may exceed it, until its next claim."""

TRICKLE_PART = 0.01
"""Share of a busy link for all senders with background transfers alone: it keeps their connections alive."""


def max_min(bandwidth: float, demands: Sequence[float]) -> list[float]:
    """Max-min fair parts: nobody gets more than its demand, and what it leaves is for the others, who share alike.

    D. Bertsekas and R. Gallager, "Data Networks", 6.5.2.

    Args:
        bandwidth: to divide.
        demands: of each, 0 or more; infinite: all of the bandwidth.

    Returns:
        The part of each, in the order of `demands`. Their sum is the lesser of bandwidth and demands.
    """
    parts = [0.0] * len(demands)
    left = bandwidth
    by_demand = sorted(range(len(demands)), key=demands.__getitem__)
    for done, index in enumerate(by_demand):
        parts[index] = min(demands[index], left / (len(demands) - done))
        left -= parts[index]
    return parts


@dataclass(frozen=True, slots=True)
class Claim:
    """The demand of one sender on a link."""

    bits_per_s: float = 0.0
    """The rate that it could send; infinite: more waits than it can send soon."""
    background_bits_per_s: float = 0.0
    """The same for its background transfers, which get the bandwidth that others leave."""
    is_working: bool = False
    """It has open transfers, so it may have more to send at any moment."""


def paces(bandwidth_bits_per_s: float, claims: Sequence[Claim]) -> list[float]:
    """The pace of each sender, in bits per second.

    1. Max-min fair parts of all that is not in the background, less `TRICKLE_PART` for those who have nothing else.
    2. What is left, max-min fair to what is in the background.
    3. What is left then, in equal parts to those who work: they are never held back for a claim that was too low.

    Two allowances overbook the link for a moment, until the next claims. A sender whose claim is met may send
    `HEADROOM` times that. And every sender has a standing share, so that a new transfer starts at once: an equal part
    while nobody works, else an equal part of `STANDING_PART`.
    """
    if not claims:
        return []
    background = [not claim.bits_per_s and claim.background_bits_per_s > 0 for claim in claims]
    trickle = bandwidth_bits_per_s * TRICKLE_PART / sum(background) if any(background) else 0.0
    left = bandwidth_bits_per_s - trickle * sum(background)
    shares = max_min(left, [claim.bits_per_s for claim in claims])
    left -= sum(shares)
    behind = max_min(left, [claim.background_bits_per_s for claim in claims])
    left = max(left - sum(behind), 0.0)
    more = max_min(left, [math.inf if claim.is_working else 0.0 for claim in claims])
    standing = bandwidth_bits_per_s / len(claims)
    if any(claim.is_working for claim in claims):
        standing *= STANDING_PART
    return [
        trickle + late + extra
        if is_behind
        else max(share * (HEADROOM if share == claim.bits_per_s else 1.0), share + late + extra, standing)
        for claim, share, late, extra, is_behind in zip(claims, shares, behind, more, background, strict=True)
    ]
