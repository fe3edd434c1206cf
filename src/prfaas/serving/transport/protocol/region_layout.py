"""Regions that a consumer expects of a transfer: by its own layout, by agreement with a peer, or as it asked for."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import Ticket
from prfaas.serving.transport.protocol.wire import WireError


class RegionLayout(Protocol):
    """The regions of a transfer, as the consumer computes them."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        """Sizes in bytes of the regions of a transfer of tokens [skip_tokens, num_tokens).

        Raises:
            ValueError: there can be no such transfer.
        """


@runtime_checkable
class DivisibleLayout(Protocol):
    """A `RegionLayout` whose partial transfers an engine can resume from."""

    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Collection[int] = (),
    ) -> int:
        """Number of leading tokens whose KV a partial transfer has brought.

        Args:
            num_tokens: of the transfer.
            skip_tokens: of the transfer.
            covered_end: (region, start) → end of the bytes that have come from there on.
            checkpoints: numbers of tokens after which a checkpoint has come.

        Returns:
            More than `skip_tokens`, or 0: an engine cannot resume from it.
        """


@runtime_checkable
class CheckpointedLayout(Protocol):
    """A `RegionLayout` with layers that an engine can resume only from a checkpoint."""

    def checkpoint_bytes(self, num_tokens: int) -> Sequence[int]:
        """Sizes in bytes of the regions of a checkpoint after `num_tokens`.

        Raises:
            ValueError: there can be none.
        """


class AskedTransfers:
    """Transfers of one region that this side has asked for; thread-safe, since each call is one step of a dictionary.

    The producer may lack some of it, so only the most that may come is known in advance.
    """

    def __init__(self) -> None:
        self._most_bytes: dict[bytes, int] = {}

    def ask(self, transfer_id: bytes, most_bytes: int) -> None:
        """Expect this transfer, of at most `most_bytes`, until `forget`."""
        self._most_bytes[transfer_id] = most_bytes

    def forget(self, transfer_id: bytes) -> None:
        """Stop expecting it; idempotent."""
        self._most_bytes.pop(transfer_id, None)

    def check(self, transfer_id: bytes, announced: Sequence[int]) -> None:
        """Check that a transfer was asked for with such regions.

        Raises:
            ValueError: nobody asked for it, or it is another one than was asked for.
        """
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
    part: int
    """Number of the transfer among those that bring the consumer's rank its KV."""
    parts: int
    """How many transfers those are."""


@runtime_checkable
class LayoutsByPeer(Protocol):
    """Layouts agreed with each peer, in place of one of this side's."""

    def begin(self, peer: str, transfer_id: bytes, mark: object, part: int = 0) -> AgreedLayout:
        """The layout of a transfer that a peer opens in a form. Raises WireError."""

    def of_transfer(self, transfer_id: bytes) -> RegionLayout | None:
        """The layout with which one of them began, by its own id; None: it has not, or long ago."""


TransferLayout = RegionLayout | AskedTransfers | LayoutsByPeer


def expected_regions(layout: TransferLayout, ticket: Ticket, offer: Offer, producer: str) -> tuple[int, ...]:
    """Sizes of the regions that a consumer expects of a ticket's transfer, in bytes.

    Args:
        layout: of this side.
        ticket: of the transfer.
        offer: what the producer says of it.
        producer: its name, with its rank.

    Raises:
        ValueError: there can be no such transfer.
    """
    if offer.part and not isinstance(layout, LayoutsByPeer):
        raise WireError(f"{producer} sends part {offer.part} of a transfer that has one part")
    if isinstance(layout, AskedTransfers) and not offer.checkpoint:
        layout.check(ticket.transfer_id, offer.regions)
        return offer.regions
    regions: RegionLayout | AskedTransfers = (
        layout.begin(producer, ticket.transfer_id, offer.form, offer.part)
        if isinstance(layout, LayoutsByPeer)
        else layout
    )
    if offer.checkpoint:
        if not isinstance(regions, CheckpointedLayout) or not offer.checkpoint < ticket.num_tokens:
            raise WireError(f"there is no checkpoint of this transfer after {offer.checkpoint} tokens")
        return tuple(regions.checkpoint_bytes(offer.checkpoint))
    assert not isinstance(regions, AskedTransfers)
    return tuple(regions.region_bytes(ticket.num_tokens, ticket.skip_tokens))


def resume_points(
    layout: TransferLayout,
    ticket: Ticket,
    covered_end: Callable[[int, int], int],
    checkpoints: Collection[int] = (),
) -> ResumePoints:
    """Resume points of a ticket's partial transfer: with all `checkpoints`, and with each alone.

    Each transfer of a ticket may have broken elsewhere: the engine resumes from points that all of them have.
    """
    regions = layout.of_transfer(ticket.transfer_id) if isinstance(layout, LayoutsByPeer) else layout
    if not isinstance(regions, DivisibleLayout):
        return ResumePoints()

    def usable(there: Collection[int]) -> int:
        return regions.usable_tokens(ticket.num_tokens, ticket.skip_tokens, covered_end, there)

    return ResumePoints(
        usable(checkpoints), tuple(end for end in sorted(checkpoints) if usable([end]) == end)
    )
