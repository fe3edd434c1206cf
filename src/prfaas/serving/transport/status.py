"""What is known about one transfer at the consumer, as the engine and observers see it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from prfaas.serving.transport.wire import MAX_REGION_BYTES, MAX_REGIONS, WireError, count_field, text_field

_MAX_BYTES = MAX_REGION_BYTES * MAX_REGIONS


class TransferPhase(enum.StrEnum):
    """WAITING for staging → RECEIVING → COMPLETE, or FAILED from any of them; the last two are final."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (TransferPhase.COMPLETE, TransferPhase.FAILED)


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """A snapshot."""

    phase: TransferPhase
    reason: str
    """Why it FAILED, else empty."""
    received_bytes: int
    """Verified bytes in staging."""
    total_bytes: int
    overlapped_bytes: int
    """Bytes that were acknowledged when the prefill ended; 0 until END has come."""
    num_tokens: int
    """The transfer is of the KV of tokens [skip_tokens, num_tokens)."""
    skip_tokens: int
    taken: bool = False
    """The engine owns the staged bytes already."""

    @classmethod
    def refused(cls, reason: str) -> Self:
        """Of a transfer that was never let in."""
        return cls(TransferPhase.FAILED, reason, 0, 0, 0, 0, 0)

    def to_body(self) -> dict[str, Any]:
        """The fields of a STATUS frame."""
        return {
            "phase": self.phase.value,
            "reason": self.reason[:4096],
            "received_bytes": self.received_bytes,
            "total_bytes": self.total_bytes,
            "hidden_bytes": self.overlapped_bytes,
            "num_tokens": self.num_tokens,
            "skip_tokens": self.skip_tokens,
            "taken": self.taken,
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a STATUS frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        try:
            phase = TransferPhase(text_field(body, "phase", 16))
        except ValueError:
            raise WireError(f"field 'phase' is {body.get('phase')!r}, which is no phase") from None
        return cls(
            phase=phase,
            reason=text_field(body, "reason"),
            received_bytes=count_field(body, "received_bytes", _MAX_BYTES),
            total_bytes=count_field(body, "total_bytes", _MAX_BYTES),
            overlapped_bytes=count_field(body, "hidden_bytes", _MAX_BYTES),
            num_tokens=count_field(body, "num_tokens", 1 << 30),
            skip_tokens=count_field(body, "skip_tokens", 1 << 30),
            taken=body.get("taken") is True,
        )
