"""The source's half of a copy: pages that another pool requests are pinned, and sent from the arena itself."""

import asyncio
import itertools
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.serving.pool.page_table import PageState, row_of
from prfaas.serving.pool.protocol import PageRef
from prfaas.serving.pool.store import PageStore
from prfaas.serving.tasks import BackgroundTasks
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.protocol.requests import PeerRequest, PullAnswer, PullOrder
from prfaas.serving.transport.protocol.ticket import Ticket, TicketError

logger = logging.getLogger(__name__)

_POLL_S = 0.002
# Time for pages to come from SSD; those that have not come by then count as missing.
_PROMOTION_S = 8.0
# Chunks in smaller pieces are copied: each piece costs more than its bytes.
_MIN_PIECE_BYTES = 4096


class PinnedPages:
    """Pinned pages one after the other, as a `ChunkSource`."""

    def __init__(self, pages: Sequence[memoryview]) -> None:
        self._pages = pages
        self._ends = list(itertools.accumulate(page.nbytes for page in pages))
        self.nbytes = self._ends[-1]

    def views(self, start: int, nbytes: int) -> list[memoryview] | None:
        """The pages' memory, as `ChunkSource.views`."""
        pieces = self._pieces(start, nbytes)
        return pieces if nbytes >= len(pieces) * _MIN_PIECE_BYTES else None

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes, as `ChunkSource.read_into`."""
        at = 0
        for piece in self._pieces(start, out.nbytes):
            out[at : at + piece.nbytes] = piece
            at += piece.nbytes

    def _pieces(self, start: int, nbytes: int) -> list[memoryview]:
        pieces = []
        index = bisect_right(self._ends, start)
        while nbytes > 0:
            page = self._pages[index]
            inside = start - (self._ends[index] - page.nbytes)
            piece = page[inside : inside + nbytes]
            pieces.append(piece)
            start, nbytes, index = start + piece.nbytes, nbytes - piece.nbytes, index + 1
        return pieces


@dataclass(slots=True)
class LendingCounters:
    """Counters of lending since the start."""

    pulls: int = 0
    refused_pulls: int = 0
    failed_pulls: int = 0
    lent_pages: int = 0
    lent_bytes: int = 0
    """Of transfers that were completed."""


class PageLender:
    """Answers PULL frames, in the daemon's event loop."""

    def __init__(
        self,
        name: str,
        key: bytes,
        store_of: Callable[[], PageStore | None],
        sender: Sender,
        *,
        most_bytes: int,
    ) -> None:
        """
        Args:
            name: of this pool.
            key: of the deployment, 32 bytes.
            store_of: the pages; None until the first engine has connected.
            sender: has the pools that may be sent to as its peers.
            most_bytes: most bytes of pages that are pinned at once for other pools.
        """
        self._name = name
        self._key = key
        self._store_of = store_of
        self._sender = sender
        self._most_bytes = most_bytes
        self._tasks = BackgroundTasks()
        self.pinned_bytes = 0
        """Of pages that other pools get at the moment."""
        self.counters = LendingCounters()

    def take(self, request: PeerRequest) -> None:
        """Serve a PULL in the background."""
        self._tasks.start(self._serve(request))

    async def close(self) -> None:
        """Wait until no page is read any more; the sender must have been closed."""
        await self._tasks.finish()

    async def _serve(self, request: PeerRequest) -> None:
        assert isinstance(request.order, PullOrder)
        self.counters.pulls += 1
        try:
            ticket, store, most_bytes = self._admitted(request, request.order)
        except ValueError as error:
            self.counters.refused_pulls += 1
            request.refuse(f"refused: {error}")
            return
        self.pinned_bytes += most_bytes
        pins = store.pin(request.order.page_ids)
        try:
            await self._lend(request, request.order, ticket, store, pins)
        except Exception:
            self.counters.failed_pulls += 1
            logger.exception("pages for %s could not be sent", ticket.consumer)
            request.refuse("failed: the source could not send")
        finally:
            store.unpin([ref for ref in pins if ref is not None])
            self.pinned_bytes -= most_bytes

    def _admitted(self, request: PeerRequest, order: PullOrder) -> tuple[Ticket, PageStore, int]:
        """The ticket, the pages, and the bytes of all that is asked for. Raises ValueError."""
        ticket = Ticket.unseal(order.ticket, self._key, time.time())
        if ticket.transfer_id != request.transfer_id:
            raise TicketError("the ticket belongs to another transfer")
        if (ticket.producer, ticket.consumer) != (self._name, request.peer):
            raise TicketError(
                f"the ticket is for {ticket.consumer} from {ticket.producer}, "
                f"and {request.peer} asks {self._name}"
            )
        store = self._store_of()
        if store is None:
            raise ValueError(f"no engine has connected to {self._name} yet")
        geometry = store.geometry
        if geometry.digest().hex() != order.geometry:
            raise ValueError(
                f"the pages of {self._name} and {request.peer} are of different models or layouts"
            )
        try:
            nbytes = (
                sum(geometry.group(page_id[-1]).rank_bytes for page_id in order.page_ids) * geometry.ranks
            )
        except KeyError as error:
            raise ValueError(f"{self._name} has no KV group {error}") from None
        if self.pinned_bytes and self.pinned_bytes + nbytes > self._most_bytes:
            raise ValueError(f"{self._name} lends {self.pinned_bytes} bytes already")
        return ticket, store, nbytes

    async def _lend(
        self,
        request: PeerRequest,
        order: PullOrder,
        ticket: Ticket,
        store: PageStore,
        pins: Sequence[PageRef | None],
    ) -> None:
        # 1. Pages on SSD come into memory.
        await _promoted(store, pins)
        table, view, ranks = store.memory.table, store.memory.arena.view, store.geometry.ranks
        pages: list[memoryview] = []
        checksums: list[tuple[int, ...] | None] = []
        for page_id, ref in zip(order.page_ids, pins, strict=True):
            if ref is None or not table.state(ref.slot).is_readable:
                checksums.append(None)
                continue
            pages.append(view[ref.offset : ref.offset + store.geometry.group(page_id[-1]).rank_bytes * ranks])
            checksums.append(table.read(row_of(ref.slot)).checksums)
        # 2. The other side learns which pages will come, with their checksums.
        request.answer(PullAnswer.of(checksums))
        if not pages:
            return
        # 3. They are sent from the arena, and stay pinned until all is acknowledged or the sender has ended.
        source = PinnedPages(pages)
        transfer = self._sender.open(ticket, order.ticket, [source.nbytes])
        transfer.put(0, 0, source)
        transfer.end()
        while not (transfer.idle() and transfer.phase.terminal):
            await asyncio.sleep(_POLL_S)
        if transfer.reason:
            self.counters.failed_pulls += 1
            logger.info("pages for %s were not all sent: %s", ticket.consumer, transfer.reason)
            return
        self.counters.lent_pages += len(pages)
        self.counters.lent_bytes += source.nbytes


async def _promoted(store: PageStore, pins: Sequence[PageRef | None]) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _PROMOTION_S
    coming = [ref for ref in pins if ref is not None]
    while loop.time() < until_s:
        coming = [ref for ref in coming if store.memory.table.state(ref.slot) is PageState.PROMOTING]
        if not coming:
            return
        await asyncio.sleep(_POLL_S)
