"""What one request sends over a link."""

from collections.abc import Callable
from typing import Any

# Where it is.
ABREAST = 0  # all that is produced has been sent, more is to come
BEHIND = 1  # more has been produced than sent, and more is to come
PRODUCED = 2  # all is there, not all has been sent
ARRIVING = 3  # all has been sent, the last byte is on its way
OVER = 4


class Transfer:
    """`FluidLink` alone looks inside: who asked for it may cancel it there.

    `bits_per_s`: production, up to `total_bits` less `last_bits`, which come at its end. `offset_bits`, once it is
    behind: what somebody always behind had sent when this one would have had sent nothing.
    """

    __slots__ = (
        "argument",
        "bits_per_s",
        "done",
        "last_bits",
        "offset_bits",
        "start_s",
        "state",
        "total_bits",
    )

    def __init__(
        self,
        bits_per_s: float,
        last_bits: float,
        total_bits: float,
        start_s: float,
        done: Callable[[Any], None],
        argument: Any,
    ) -> None:
        self.bits_per_s = bits_per_s
        self.last_bits = last_bits
        self.total_bits = total_bits
        self.start_s = start_s
        self.done = done
        self.argument = argument
        self.state = ABREAST
        self.offset_bits = 0.0
