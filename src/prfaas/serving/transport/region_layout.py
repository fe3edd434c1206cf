"""Which regions a consumer lets in: those of its own layout, or agreed with a peer, or that it has asked for."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from prfaas.serving.transport.roster import ranked
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


class AgreedLayout(RegionLayout, Protocol):
    """A layout in a form that both sides of a transfer know."""

    mark: str
    """Names the form, equal at both sides; "" where pages travel as both keep them."""


AgreedT = TypeVar("AgreedT", bound=AgreedLayout)


class PeerLayouts(Generic[AgreedT]):
    """The layouts that follow from what this side and each of its peers have told of their KV; thread-safe."""

    # Of which it is remembered in which form they came; more are not staged at once.
    MOST_TRANSFERS = 1 << 14

    def __init__(
        self, rank: int, told: object, agree: Callable[[object, str], AgreedT], alike: AgreedT
    ) -> None:
        """
        Args:
            rank: this side's; its peers are ranks of the same number.
            told: what peers are told, as JSON.
            agree: gives the layout for what a peer has told, and its name; raises ValueError if there is none.
            alike: the layout between equal sides, which is taken for granted until a peer has told.
        """
        self.told = told
        self._rank = rank
        self._agree = agree
        self.alike = alike
        """What travels where pages go as this side keeps them."""
        self._lock = threading.Lock()
        self._agreed: dict[str, AgreedT] = {}
        self._of_transfers: OrderedDict[bytes, AgreedT] = OrderedDict()

    def hear(self, peer: str, told: object) -> str | None:
        """Take note of what an authenticated peer tells; a sentence if no KV can travel between the two."""
        if told == self.told:
            agreed = self.alike
        else:
            try:
                agreed = self._agree(told, peer)
            except ValueError as error:
                return str(error)
        with self._lock:
            self._agreed[peer] = agreed
        return None

    def of_instance(self, instance: str) -> AgreedT:
        """What travels to this side's rank of an instance."""
        with self._lock:
            return self._agreed.get(ranked(instance, self._rank), self.alike)

    def begin(self, peer: str, transfer_id: bytes, mark: object) -> AgreedT:
        """The layout of a transfer that a peer opens in a form.

        Raises:
            WireError: it is another form than was agreed.
        """
        with self._lock:
            agreed = self._agreed.get(peer, self.alike)
            if mark != agreed.mark:
                raise WireError(
                    f"{peer} sends KV in form {str(mark)[:32]!r}, where {agreed.mark!r} was agreed when it connected"
                )
            self._of_transfers[transfer_id] = agreed
            while len(self._of_transfers) > self.MOST_TRANSFERS:
                self._of_transfers.popitem(last=False)
            return agreed

    def of_transfer(self, transfer_id: bytes) -> AgreedT | None:
        """The layout with which a transfer began; None: it has not begun here, or long ago."""
        with self._lock:
            return self._of_transfers.get(transfer_id)


def told_of(layouts: PeerLayouts[Any] | None) -> object:
    """What a side tells of its KV in a handshake."""
    return None if layouts is None else layouts.told


def heard(layouts: PeerLayouts[Any] | None, peer: str, told: object) -> str | None:
    """See `PeerLayouts.hear`; a side without such layouts needs to know nothing of its peers'."""
    return None if layouts is None else layouts.hear(peer, told)


TransferLayout = RegionLayout | AskedTransfers | PeerLayouts[Any]


def expected_regions(
    layout: TransferLayout, ticket: Ticket, announced: Sequence[int], producer: str, mark: object
) -> tuple[int, ...]:
    """What a consumer expects of the transfer that a ticket allows, in bytes.

    Args:
        layout: of this side.
        ticket: of the transfer.
        announced: the regions that the producer names.
        producer: its name, with its rank.
        mark: names the form in which it sends pages.

    Raises:
        ValueError: there can be no such transfer.
    """
    if isinstance(layout, AskedTransfers):
        layout.check(ticket.transfer_id, announced)
        return tuple(announced)
    regions: RegionLayout = (
        layout.begin(producer, ticket.transfer_id, mark) if isinstance(layout, PeerLayouts) else layout
    )
    return tuple(regions.region_bytes(ticket.num_tokens, ticket.skip_tokens))


def usable_tokens(layout: TransferLayout, ticket: Ticket, covered_end: Callable[[int, int], int]) -> int:
    """See `DivisibleLayout`, of the transfer that a ticket allows; 0 for every other layout."""
    regions = layout.of_transfer(ticket.transfer_id) if isinstance(layout, PeerLayouts) else layout
    if not isinstance(regions, DivisibleLayout):
        return 0
    return regions.usable_tokens(ticket.num_tokens, ticket.skip_tokens, covered_end)
