"""What one request sends over a link, and how many bytes of KV that is."""

from collections.abc import Callable
from typing import Any

from prfaas.core.kv import FullAttention, KvModel, LinearState
from prfaas.core.scheduling import KvFacts


class KvMoves:
    """`KvModel.bytes_to_move`, divided by when the bytes are there.

    Full-attention blocks leave while the prefill makes them; linear states and sliding windows belong to a length,
    so they can only leave at its end.
    """

    __slots__ = ("_fixed_bytes", "_model", "_token_bytes", "facts")

    facts: KvFacts
    """What policies are told, the same as in the live system."""

    def __init__(self, model: KvModel) -> None:
        self._model = model
        self._token_bytes = sum(
            group.token_bytes for group in model.groups if isinstance(group, FullAttention)
        )
        self._fixed_bytes = (
            model.fixed_bytes
            if all(isinstance(group, FullAttention | LinearState) for group in model.groups)
            else None
        )
        self.facts = KvFacts(model.is_hybrid, not model.has_window, self.total_bytes, self.total_bytes)

    def total_bytes(self, num_tokens: int, skip_tokens: int) -> int:
        """As `KvModel.bytes_to_move`; a skip beyond the end counts as the end."""
        if self._fixed_bytes is None:
            return self._model.bytes_to_move(num_tokens, min(skip_tokens, num_tokens))
        if num_tokens <= 0:
            return 0
        if skip_tokens >= num_tokens:
            return self._fixed_bytes
        return self._token_bytes * (num_tokens - skip_tokens) + self._fixed_bytes

    def streamed_bytes(self, num_tokens: int, skip_tokens: int) -> int:
        """Of the total, what leaves while the prefill runs."""
        return self._token_bytes * (num_tokens - skip_tokens) if skip_tokens < num_tokens else 0


# The states of a transfer.
ABREAST = 0  # all that is produced has been sent, more is to come
BEHIND = 1  # more has been produced than sent, and more is to come
PRODUCED = 2  # all is there, not all has been sent
ARRIVING = 3  # all has been sent, the last byte is on its way
OVER = 4


class FluidTransfer:
    """One transfer of a `FluidLink`, which alone changes it; its caller can cancel it there."""

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

    bits_per_s: float
    """Production while the prefill runs, up to `total_bits` less `last_bits`."""
    last_bits: float
    """What comes at the end of production."""
    total_bits: float
    start_s: float
    offset_bits: float
    """Once it is behind: what a transfer that was always behind had sent when this one had sent nothing."""

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

    @property
    def is_sent(self) -> bool:
        """Whether nothing of it is still to be sent."""
        return self.state >= ARRIVING

    def withhold(self, done: Callable[[Any], None]) -> float:
        """Bits that would come at the end of its production, and don't come."""
        last_bits, self.last_bits, self.done = self.last_bits, 0.0, done
        self.total_bits -= last_bits
        return last_bits

    def backlog_bits(self, sent_each_bits: float, now_s: float) -> float:
        """Produced and not sent, while it is behind; `sent_each_bits`: by one that was always behind."""
        produced_bits = self.bits_per_s * (now_s - self.start_s)
        return produced_bits - (sent_each_bits - self.offset_bits)
