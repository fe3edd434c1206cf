"""Which regions a consumer lets in: those that its own layout has, or those that it has asked for."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from prfaas.serving.transport.ticket import Ticket
from prfaas.serving.transport.wire import WireError


class RegionLayout(Protocol):
    """The consumer's own idea of what a transfer consists of."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        """Sizes in bytes of the regions of a transfer of tokens [skip_tokens, num_tokens).

        Raises:
            ValueError: there can be no such transfer.
        """


@runtime_checkable
class DivisibleLayout(Protocol):
    """A `RegionLayout` of which a part may be enough to go on from."""

    def usable_tokens(self, num_tokens: int, skip_tokens: int, covered_end: Callable[[int, int], int]) -> int:
        """How many tokens' KV a transfer has brought that broke, from the first token on.

        Args:
            num_tokens: of the transfer.
            skip_tokens: of the transfer.
            covered_end: (region, start) → where the bytes that have come from there on end.

        Returns:
            More than `skip_tokens`, or 0: nothing that an engine could go on from.
        """


class AskedTransfers:
    """Transfers of one region that this side has asked for; thread-safe.

    The producer sends what it has of what was asked, so only the most that may come is known before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._most_bytes: dict[bytes, int] = {}

    def ask(self, transfer_id: bytes, most_bytes: int) -> None:
        """Let this transfer in, of so many bytes at most, until `forget`."""
        with self._lock:
            self._most_bytes[transfer_id] = most_bytes

    def forget(self, transfer_id: bytes) -> None:
        """Let it in no more; idempotent."""
        with self._lock:
            self._most_bytes.pop(transfer_id, None)

    def check(self, transfer_id: bytes, announced: Sequence[int]) -> None:
        """Whether a transfer with such regions may come.

        Raises:
            ValueError: nobody asked for it, or it is another one than was asked for.
        """
        with self._lock:
            most_bytes = self._most_bytes.get(transfer_id)
        if most_bytes is None:
            raise WireError("this side asked for no such transfer")
        if len(announced) != 1 or not 0 < announced[0] <= most_bytes:
            raise WireError(
                f"regions of {list(announced)[:4]} bytes, where one of up to {most_bytes} was asked for"
            )


TransferLayout = RegionLayout | AskedTransfers


def expected_regions(layout: TransferLayout, ticket: Ticket, announced: Sequence[int]) -> tuple[int, ...]:
    """What a consumer expects of the transfer that a ticket allows, in bytes.

    Raises:
        ValueError: there can be no such transfer.
    """
    if isinstance(layout, AskedTransfers):
        layout.check(ticket.transfer_id, announced)
        return tuple(announced)
    return tuple(layout.region_bytes(ticket.num_tokens, ticket.skip_tokens))


def usable_tokens(
    layout: TransferLayout, num_tokens: int, skip_tokens: int, covered_end: Callable[[int, int], int]
) -> int:
    """See `DivisibleLayout`; 0 for every other layout."""
    if not isinstance(layout, DivisibleLayout):
        return 0
    return layout.usable_tokens(num_tokens, skip_tokens, covered_end)
