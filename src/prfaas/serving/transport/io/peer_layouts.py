"""Layouts that the threads of one side agree on with each of its peers."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

from prfaas.serving.transport.protocol.region_layout import AgreedLayout
from prfaas.serving.transport.protocol.ticket import part_id
from prfaas.serving.transport.protocol.wire import WireError

AgreedT = TypeVar("AgreedT", bound=AgreedLayout)


class PeerLayouts(Generic[AgreedT]):
    """Layouts agreed between this side and each of its peers, from both sides' reports of their KV; thread-safe."""

    # Transfers whose form is remembered; more are not staged at once.
    MOST_TRANSFERS = 1 << 14

    def __init__(
        self,
        reported: object,
        agree: Callable[[object, str, bool], AgreedT],
        alike: AgreedT,
        *,
        shares_copies: bool = False,
    ) -> None:
        """
        Args:
            reported: this side's report of its KV, as JSON.
            agree: gives the layout for a peer's report, its name, and whether this side sends to it; raises
                ValueError if there is none.
            alike: the layout between equal sides, assumed until a peer has reported.
            shares_copies: equal sides leave copies to other ranks, so they must agree too.
        """
        self._shares_copies = shares_copies
        self.reported = reported
        self._agree = agree
        self.alike = alike
        """The layout between equal sides."""
        self.on_begin: Callable[[bytes, AgreedT], None] = lambda _transfer_id, _agreed: None
        """Called with the id and the layout of a transfer that is being opened; must not block."""
        self._lock = threading.Lock()
        self._reports = threading.Condition(self._lock)
        self._noted: set[tuple[str, bool]] = set()
        self._agreed: dict[tuple[str, bool], AgreedT] = {}
        self._of_tickets: OrderedDict[bytes, dict[int, AgreedT]] = OrderedDict()
        self._of_transfers: OrderedDict[bytes, AgreedT] = OrderedDict()

    def note(self, peer: str, reported: object, *, sends: bool) -> str | None:
        """Note an authenticated peer's report; returns a sentence if no KV can travel between the two.

        `sends`: this side sends to the peer, else the peer sends to this side.
        """
        agreed, trouble = self.alike, None
        if reported != self.reported or self._shares_copies:
            try:
                agreed = self._agree(reported, peer, sends)
            except ValueError as error:
                trouble = str(error)
        with self._lock:
            if trouble is None:
                self._agreed[peer, sends] = agreed
            self._noted.add((peer, sends))
            self._reports.notify_all()
        return trouble

    def await_reports(self, peers: Collection[str], timeout_s: float) -> bool:
        """Wait until each of these consumers has reported its KV; False on timeout."""
        with self._lock:
            return self._reports.wait_for(
                lambda: all((peer, True) in self._noted for peer in peers), timeout_s
            )

    def agreed(self, peer: str, *, is_sent: bool) -> AgreedT:
        """The layout of transfers to a peer (`is_sent`), or from it."""
        with self._lock:
            return self._agreed.get((peer, is_sent), self.alike)

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
