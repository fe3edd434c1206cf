"""Which regions a consumer lets in: those of its own layout, or agreed with a peer, or that it has asked for."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from prfaas.serving.transport.offer import Offer
from prfaas.serving.transport.resume_points import ResumePoints
from prfaas.serving.transport.ticket import Ticket, part_id
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

    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Collection[int] = (),
    ) -> int:
        """How many tokens' KV a transfer has brought that broke, from the first token on.

        Args:
            num_tokens: of the transfer.
            skip_tokens: of the transfer.
            covered_end: (region, start) → where the bytes that have come from there on end.
            checkpoints: after how many tokens a checkpoint has come.

        Returns:
            More than `skip_tokens`, or 0: nothing that an engine could go on from.
        """


@runtime_checkable
class CheckpointedLayout(Protocol):
    """A `RegionLayout` with layers of which an engine can go on from a checkpoint only."""

    def checkpoint_bytes(self, num_tokens: int) -> Sequence[int]:
        """Sizes in bytes of the regions of a checkpoint after so many tokens.

        Raises:
            ValueError: there can be none.
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
    part: int
    """Number of the transfer among those that bring the consumer's rank its KV."""
    parts: int
    """How many do."""


AgreedT = TypeVar("AgreedT", bound=AgreedLayout)


class PeerLayouts(Generic[AgreedT]):
    """The layouts that follow from what this side and each of its peers have told of their KV; thread-safe."""

    # Of which it is remembered in which form they came; more are not staged at once.
    MOST_TRANSFERS = 1 << 14

    def __init__(
        self,
        told: object,
        agree: Callable[[object, str, bool], AgreedT],
        alike: AgreedT,
        *,
        shares_copies: bool = False,
    ) -> None:
        """
        Args:
            told: what peers are told, as JSON.
            agree: gives the layout for what a peer has told, its name, and whether this side sends to it; raises
                ValueError if there is none.
            alike: the layout between equal sides, which is taken for granted until a peer has told.
            shares_copies: between equal sides some is left to other ranks, so these agree too.
        """
        self._takes_turns = shares_copies
        self.told = told
        self._agree = agree
        self.alike = alike
        """What travels where pages go as this side keeps them."""
        self.on_begin: Callable[[bytes, AgreedT], None] = lambda _transfer_id, _agreed: None
        """Called with the id and the layout of a transfer that is being opened; must not block."""
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._heard: set[tuple[str, bool]] = set()
        self._agreed: dict[tuple[str, bool], AgreedT] = {}
        self._of_tickets: OrderedDict[bytes, dict[int, AgreedT]] = OrderedDict()
        self._of_transfers: OrderedDict[bytes, AgreedT] = OrderedDict()

    def hear(self, peer: str, told: object, *, sends: bool) -> str | None:
        """Take note of what an authenticated peer tells; a sentence if no KV can travel between the two.

        `sends`: this side sends to the peer, else the peer sends to this side.
        """
        agreed, trouble = self.alike, None
        if told != self.told or self._takes_turns:
            try:
                agreed = self._agree(told, peer, sends)
            except ValueError as error:
                trouble = str(error)
        with self._lock:
            if trouble is None:
                self._agreed[peer, sends] = agreed
            self._heard.add((peer, sends))
            self._told.notify_all()
        return trouble

    def await_told(self, peers: Collection[str], timeout_s: float) -> bool:
        """Wait until each of these, to which this side sends, has told of its KV; False on timeout."""
        with self._lock:
            return self._told.wait_for(lambda: all((peer, True) in self._heard for peer in peers), timeout_s)

    def towards(self, peer: str) -> AgreedT:
        """What this side sends to a peer."""
        with self._lock:
            return self._agreed.get((peer, True), self.alike)

    def coming_from(self, peer: str) -> AgreedT:
        """What a peer sends to this side."""
        with self._lock:
            return self._agreed.get((peer, False), self.alike)

    def begin(self, peer: str, transfer_id: bytes, mark: object, part: int = 0) -> AgreedT:
        """The layout of a transfer that a peer opens in a form.

        Args:
            peer: who opens it.
            transfer_id: the ticket's.
            mark: names the form.
            part: which of the ticket's transfers it is.

        Raises:
            WireError: it is another form or part than was agreed.
        """
        with self._lock:
            agreed = self._agreed.get((peer, False), self.alike)
            if mark != agreed.mark:
                raise WireError(
                    f"{peer} sends KV in form {str(mark)[:32]!r}, where {agreed.mark!r} was agreed when it connected"
                )
            if part != agreed.part:
                raise WireError(
                    f"{peer} sends part {part} of a transfer, where part {agreed.part} was agreed"
                )
            self._of_tickets.setdefault(transfer_id, {})[part] = agreed
            self._of_transfers[part_id(transfer_id, part)] = agreed
            self.on_begin(part_id(transfer_id, part), agreed)
            for begun in (self._of_tickets, self._of_transfers):
                while len(begun) > self.MOST_TRANSFERS:
                    begun.popitem(last=False)
            return agreed

    def of_ticket(self, ticket_id: bytes) -> Mapping[int, AgreedT]:
        """The layouts with which a ticket's transfers began, by part; those that have not, or long ago, are missing."""
        with self._lock:
            return dict(self._of_tickets.get(ticket_id, {}))

    def of_transfer(self, transfer_id: bytes) -> AgreedT | None:
        """The layout with which one of them began, by its own id; None: it has not, or long ago."""
        with self._lock:
            return self._of_transfers.get(transfer_id)


def told_of(layouts: PeerLayouts[Any] | None) -> object:
    """What a side tells of its KV in a handshake."""
    return None if layouts is None else layouts.told


def heard(layouts: PeerLayouts[Any] | None, peer: str, told: object, *, sends: bool) -> str | None:
    """See `PeerLayouts.hear`; a side without such layouts needs to know nothing of its peers'."""
    return None if layouts is None else layouts.hear(peer, told, sends=sends)


TransferLayout = RegionLayout | AskedTransfers | PeerLayouts[Any]


def expected_regions(layout: TransferLayout, ticket: Ticket, offer: Offer, producer: str) -> tuple[int, ...]:
    """What a consumer expects of the transfer that a ticket allows, in bytes.

    Args:
        layout: of this side.
        ticket: of the transfer.
        offer: what the producer says of it.
        producer: its name, with its rank.

    Raises:
        ValueError: there can be no such transfer.
    """
    if offer.part and not isinstance(layout, PeerLayouts):
        raise WireError(f"{producer} sends part {offer.part} of a transfer that has one part")
    if isinstance(layout, AskedTransfers) and not offer.checkpoint:
        layout.check(ticket.transfer_id, offer.regions)
        return offer.regions
    regions: RegionLayout | AskedTransfers = (
        layout.begin(producer, ticket.transfer_id, offer.form, offer.part)
        if isinstance(layout, PeerLayouts)
        else layout
    )
    if offer.checkpoint:
        if not isinstance(regions, CheckpointedLayout) or not offer.checkpoint < ticket.num_tokens:
            raise WireError(f"there is no checkpoint of this transfer after {offer.checkpoint} tokens")
        return tuple(regions.checkpoint_bytes(offer.checkpoint))
    assert not isinstance(regions, AskedTransfers)
    return tuple(regions.region_bytes(ticket.num_tokens, ticket.skip_tokens))


def usable_tokens(
    layout: TransferLayout,
    ticket: Ticket,
    covered_end: Callable[[int, int], int],
    checkpoints: Collection[int] = (),
) -> int:
    """See `DivisibleLayout`, of the transfer that a ticket allows; 0 for every other layout.

    Of several parts each may have broken elsewhere: the engine goes on from what it has of all of them.
    """
    regions = layout.of_transfer(ticket.transfer_id) if isinstance(layout, PeerLayouts) else layout
    if not isinstance(regions, DivisibleLayout):
        return 0
    return regions.usable_tokens(ticket.num_tokens, ticket.skip_tokens, covered_end, checkpoints)


def resume_points(
    layout: TransferLayout,
    ticket: Ticket,
    covered_end: Callable[[int, int], int],
    checkpoints: Collection[int] = (),
) -> ResumePoints:
    """From where an engine can go on, by `usable_tokens` with all checkpoints and with each alone."""
    tokens = usable_tokens(layout, ticket, covered_end, checkpoints)
    ends = (end for end in sorted(checkpoints) if usable_tokens(layout, ticket, covered_end, [end]) == end)
    return ResumePoints(tokens, tuple(ends))
