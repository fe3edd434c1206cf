"""Whose turn it is among the transfers of one sender to one consumer, live and in simulations."""

import math

from prfaas.core.units import BITS_PER_BYTE

Turn = tuple[int, float, int]
"""The least is first."""


def turn_of_open(opened_s: float, number: int) -> Turn:
    """Its prefill goes on: behind all whose prefill has ended, in the order in which transfers were opened.

    Args:
        opened_s: when it was opened.
        number: counts the sender's transfers.
    """
    return (1, opened_s, number)


def turn_of_ended(now_s: float, left_bytes: float, pace_bits_per_s: float, number: int) -> Turn:
    """Its prefill ends now, so its request waits for nothing but these bytes.

    It is due when its bytes would be there, had it the sender's pace for itself from now on. So short ones overtake
    long ones, but none for ever: one that was overtaken long enough is due before all that end after it.

    Args:
        now_s: now.
        left_bytes: what of it is still to be sent.
        pace_bits_per_s: what the sender may send; infinite: those that end first are first.
        number: counts the sender's transfers.
    """
    return (0, now_s + BITS_PER_BYTE * left_bytes / pace_bits_per_s, number)


def turn_of_checkpoint(of: Turn, own: Turn) -> Turn:
    """Just before the transfer that it is a checkpoint of: without that one's bytes until there it is of no use.

    Args:
        of: the turn of the transfer.
        own: what the checkpoint would have as a transfer by itself.
    """
    return (of[0], math.nextafter(of[1], -math.inf), own[2])
