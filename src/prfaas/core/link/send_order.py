"""Order in which one sender's transfers to one consumer leave, live and in simulations."""

import math

from prfaas.core.units import BITS_PER_BYTE

SendOrder = tuple[int, float, int]
"""A transfer's place; the least leaves first."""


def order_of_open(opened_s: float, number: int) -> SendOrder:
    """Place of a transfer whose prefill goes on: behind all whose prefill has ended, in the order of opening.

    Args:
        opened_s: when it was opened.
        number: counts the sender's transfers.
    """
    return (1, opened_s, number)


def order_of_ended(now_s: float, left_bytes: float, pace_bits_per_s: float, number: int) -> SendOrder:
    """Place of a transfer whose prefill has ended, so that its request waits only for these bytes.

    It is due when its bytes would be there if it had the sender's pace for itself from now on. So short ones overtake
    long ones, but none for ever: one that was overtaken long enough is due before all that end after it.

    Args:
        now_s: now.
        left_bytes: what of it is still to be sent.
        pace_bits_per_s: what the sender may send; infinite: those that end first are first.
        number: counts the sender's transfers.
    """
    return (0, now_s + BITS_PER_BYTE * left_bytes / pace_bits_per_s, number)


def order_of_checkpoint(of: SendOrder, own: SendOrder) -> SendOrder:
    """Place of a checkpoint: just before its transfer, whose bytes up to there it needs to be of use.

    Args:
        of: the transfer's place.
        own: the place that the checkpoint would have as a transfer by itself.
    """
    return (of[0], math.nextafter(of[1], -math.inf), own[2])
