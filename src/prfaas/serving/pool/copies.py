"""The target's half of a copy: a prefix is pulled out of another pool, page by page, and committed here."""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from prfaas.core.pool.prefix_pages import PrefixPage, PrefixPages, batches
from prfaas.serving.pool.protocol import PageRef
from prfaas.serving.pool.store import PageStore
from prfaas.serving.tasks import BackgroundTasks
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.received_transfers import ReceivedTransfers
from prfaas.serving.transport.protocol.region_layout import AskedTransfers
from prfaas.serving.transport.protocol.requests import (
    MAX_PULLED_PAGES,
    CopyOrder,
    CopyResult,
    PeerRequest,
    PullAnswer,
    PullOrder,
)
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.ticket import (
    TRANSFER_ID_BYTES,
    Ticket,
    TicketError,
    prompt_digest,
)
from prfaas.serving.transport.protocol.wire import TransferPhase, WireError, read_body

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_ANSWER_S = 15.0
"""Timeout of a source's answer; longer than it waits for its SSD."""
_ANNOUNCE_S = 15.0
"""Timeout of the transfer's OPEN after the answer: the source may have to connect first."""
# Two transfers of a copy at once: one is moved into pages while the next is requested and begins to arrive.
_TRANSFERS_AT_ONCE = 2
_COPIES_AT_ONCE = 8
_BACKGROUND_AT_ONCE = 2
_MOST_WAITING = 64
_MOST_USED_TICKETS = 4096


class CopyFailedError(Exception):
    """A copy ends here; what has landed stays. The text begins with one word for metrics and a colon."""


@dataclass(slots=True)
class CopyCounters:
    """Counters of copies to this pool since its start."""

    copies: int = 0
    failed_copies: int = 0
    copied_pages: int = 0
    copied_bytes: int = 0
    wrong_pages: int = 0
    """Their bytes did not have the source's checksums."""


@dataclass(slots=True)
class _Batch:
    """Pages that have come in one transfer, in order."""

    pages: list[PrefixPage]
    checksums: list[tuple[int, ...]]
    missing: list[PrefixPage]
    """Those that the source does not have."""
    staged: StagedTransfer | None

    def lack(self, source: str) -> str:
        """The reason to end the copy, empty if nothing is missing."""
        return f"gone: {source} no longer has {len(self.missing)} of the pages" if self.missing else ""


class PrefixCopies:
    """Carries out COPY orders, in the daemon's event loop.

    1. `take` starts `_serve` for a request: it checks the ticket, and joins a running copy of the same prefix.
    2. `_copy` pulls the missing pages in batches: `_fetch` requests one and waits until it is staged, `_land` moves it
       into reserved pages and commits those whose checksums fit.
    3. The answer has the copied bytes, the tokens that are usable now, and the reason if some are missing.
    """

    def __init__(
        self,
        name: str,
        key: bytes,
        store_of: Callable[[], PageStore | None],
        arrivals: ReceivedTransfers,
        asked: AskedTransfers,
        sources: Mapping[str, Observer],
    ) -> None:
        """
        Args:
            name: of this pool.
            key: of the deployment, 32 bytes.
            store_of: the pages; None until the first engine has connected.
            arrivals: stages the transfers in `asked`.
            asked: the transfers that may come.
            sources: the pools that pages may be pulled from, by name.
        """
        self._name = name
        self._key = key
        self._store_of = store_of
        self._arrivals = arrivals
        self._asked = asked
        self._sources = sources
        self._staging_bytes = arrivals.table.staging_bytes
        self._slots = {
            False: asyncio.Semaphore(_COPIES_AT_ONCE),
            True: asyncio.Semaphore(_BACKGROUND_AT_ONCE),
        }
        self._used_tickets: OrderedDict[bytes, None] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[CopyResult]] = {}
        self._tasks = BackgroundTasks()
        # Bytes are moved and checked in a thread, since engines wait for the loop.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="prfaas-pool-copies")
        self.counters = CopyCounters()

    def take(self, request: PeerRequest) -> None:
        """Carry out a COPY in the background, and answer it."""
        self._tasks.start(self._serve(request))

    async def close(self) -> None:
        """Give up running copies, and wait until no page is written any more."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(self._tasks.cancel(), *self._running.values(), return_exceptions=True)
        self._threads.shutdown()

    @property
    def running(self) -> int:
        """Number of copies that run or wait for a slot."""
        return len(self._tasks)

    async def _serve(self, request: PeerRequest) -> None:
        assert isinstance(request.order, CopyOrder)
        self.counters.copies += 1
        try:
            ticket, store = self._admitted(request, request.order)
            result = await self._joined(ticket, store, request.order)
        except ValueError as error:
            result = CopyResult(0, 0, f"refused: {error}")
        except Exception:
            logger.exception("a copy from another pool failed")
            result = CopyResult(0, 0, "failed: the target has a fault")
        if result.reason:
            self.counters.failed_copies += 1
            logger.info("a copy for %s was not carried out wholly: %s", request.peer, result.reason)
        request.answer(result)

    def _admitted(self, request: PeerRequest, order: CopyOrder) -> tuple[Ticket, PageStore]:
        """The ticket and the pages. Raises ValueError."""
        ticket = Ticket.unseal(order.ticket, self._key, time.time())
        if ticket.transfer_id != request.transfer_id:
            raise TicketError("the ticket belongs to another transfer")
        if ticket.consumer != self._name:
            raise TicketError(f"the ticket is for {ticket.consumer}, this is {self._name}")
        if ticket.producer not in self._sources:
            raise TicketError(f"{self._name} may get nothing from {ticket.producer}")
        if ticket.transfer_id in self._used_tickets:
            raise TicketError("the ticket was used already")
        digest = prompt_digest(order.token_ids, order.salt, order.adapter)
        if len(order.tokens) != 4 * ticket.num_tokens or ticket.prompt_digest != digest:
            raise TicketError("the ticket is for another prefix")
        store = self._store_of()
        if store is None:
            raise ValueError(f"no engine has connected to {self._name} yet")
        if len(self._tasks) > _MOST_WAITING:
            raise ValueError(f"{len(self._tasks) - 1} copies are under way already")
        self._used_tickets[ticket.transfer_id] = None
        if len(self._used_tickets) > _MOST_USED_TICKETS:
            self._used_tickets.popitem(last=False)
        return ticket, store

    async def _joined(self, ticket: Ticket, store: PageStore, order: CopyOrder) -> CopyResult:
        """Copy the prefix, or wait for the copy of it that is under way."""
        prefix = PrefixPages(store.geometry, order.token_ids, order.salt, order.adapter)
        if not prefix.end_tokens:
            return CopyResult(0, 0, "short: the prefix has no whole block")
        running = self._running.get(prefix.key)
        if running is not None:
            result = await asyncio.shield(running)
            return CopyResult(0, result.usable_tokens, result.reason)
        task = asyncio.get_running_loop().create_task(self._copy(ticket, store, prefix))
        self._running[prefix.key] = task
        try:
            return await task
        finally:
            del self._running[prefix.key]

    async def _copy(self, ticket: Ticket, store: PageStore, prefix: PrefixPages) -> CopyResult:
        copied_bytes, reason = 0, ""
        async with self._slots[ticket.attributes.service.background]:
            missing = [page for page in prefix.pages if not _holds(store, page.page_id)]
            largest = max((page.nbytes for page in missing), default=0)
            if largest > self._staging_bytes:
                reason = f"staging: a page of {largest} bytes does not fit"
                missing = []
            # Several transfers fit into staging, of this copy and of others.
            most_bytes = max(self._staging_bytes // (4 * _TRANSFERS_AT_ONCE), largest)
            left = deque(batches(missing, most_bytes, MAX_PULLED_PAGES))
            coming: deque[asyncio.Task[_Batch]] = deque()
            try:
                while left or coming:
                    while left and len(coming) < _TRANSFERS_AT_ONCE:
                        fetching = self._fetch(ticket, store, left.popleft())
                        coming.append(asyncio.get_running_loop().create_task(fetching))
                    batch = await coming[0]
                    coming.popleft()
                    landed_bytes, reason = await self._landed(store, ticket, prefix.tenant, batch)
                    copied_bytes += landed_bytes
                    if reason:
                        break
            except CopyFailedError as failure:
                reason = str(failure)
            finally:
                await self._give_up(coming)
        held = {page.page_id for page in prefix.pages if _holds(store, page.page_id)}
        return CopyResult(copied_bytes, prefix.depth(held).usable_tokens, reason)

    async def _fetch(self, copy: Ticket, store: PageStore, pages: Sequence[PrefixPage]) -> _Batch:
        """Ask for pages and wait until those that the source has are in staging. Raises CopyFailedError."""
        ticket = replace(copy, transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES))
        order = PullOrder.of(
            ticket.seal(self._key), store.geometry.digest(), tuple(page.page_id for page in pages)
        )
        self._asked.ask(ticket.transfer_id, sum(page.nbytes for page in pages))
        done = False
        try:
            answer = await self._ask(copy.producer, ticket, order)
            if len(answer.have) != len(pages):
                raise CopyFailedError(f"source: {copy.producer} answered for other pages")
            pairs = list(zip(pages, answer.checksums, strict=True))
            batch = _Batch(
                [page for page, sums in pairs if sums is not None],
                [sums for _, sums in pairs if sums is not None],
                [page for page, sums in pairs if sums is None],
                None,
            )
            if batch.pages:
                batch.staged = await self._arrived(copy, ticket, sum(page.nbytes for page in batch.pages))
            done = True
            return batch
        finally:
            self._asked.forget(ticket.transfer_id)
            if not done:
                self._arrivals.drop(ticket.transfer_id, f"{self._name} gave the copy up")

    async def _ask(self, source: str, ticket: Ticket, order: PullOrder) -> PullAnswer:
        try:
            body = await self._sources[source].request(ticket.transfer_id, order, _ANSWER_S)
            answer = read_body(PullAnswer, body)
        except TimeoutError:
            raise CopyFailedError(f"source: {source} did not answer within {_ANSWER_S:g} s") from None
        except (OSError, WireError) as error:
            raise CopyFailedError(f"source: {error}") from None
        if answer.reason:
            raise CopyFailedError(answer.reason)
        return answer

    async def _arrived(self, copy: Ticket, ticket: Ticket, nbytes: int) -> StagedTransfer:
        """Wait for a transfer; the receiver's deadlines end one that goes nowhere."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _ANNOUNCE_S
        while True:
            ordered, status = self._arrivals.state(copy.transfer_id), self._arrivals.state(ticket.transfer_id)
            if ordered is not None:
                raise CopyFailedError(f"abandoned: {ordered.reason}")
            if time.time() > copy.expires_at_s:
                raise CopyFailedError("deadline: the ticket has expired")
            if status is None and loop.time() > until_s:
                raise CopyFailedError(f"source: {copy.producer} sent nothing within {_ANNOUNCE_S:g} s")
            if status is not None and status.phase is TransferPhase.FAILED:
                raise CopyFailedError(f"transfer: {status.reason}")
            if status is not None and status.phase is TransferPhase.COMPLETE:
                break
            await asyncio.sleep(_POLL_S)
        staged = self._arrivals.take(ticket.transfer_id)
        if staged is None:
            raise CopyFailedError("transfer: it was dropped")
        if staged.region_bytes != (nbytes,):
            staged.free()
            raise CopyFailedError(f"source: {copy.producer} sent other bytes than it said")
        return staged

    async def _landed(
        self, store: PageStore, ticket: Ticket, tenant: bytes, batch: _Batch
    ) -> tuple[int, str]:
        """Move a batch into pages. Returns the bytes that are READY now, and the reason to end the copy, if any."""
        if batch.staged is None:
            return 0, batch.lack(ticket.producer)
        landing = asyncio.get_running_loop().create_task(
            self._land(store, ticket, tenant, batch, batch.staged)
        )
        try:
            return await asyncio.shield(landing)
        except asyncio.CancelledError:
            # A thread writes into reserved pages: it must end before they are given back.
            await asyncio.wait((landing,))
            raise

    async def _land(
        self, store: PageStore, ticket: Ticket, tenant: bytes, batch: _Batch, staged: StagedTransfer
    ) -> tuple[int, str]:
        try:
            if any(page.is_tail for page in batch.missing):
                # Without its last page the prefix is of no use.
                return 0, batch.lack(ticket.producer)
            refs = store.reserve(tenant, [(page.page_id, page.identity) for page in batch.pages])
            try:
                right = await asyncio.get_running_loop().run_in_executor(
                    self._threads, _move, store, batch, refs, staged
                )
            except BaseException:
                store.abort([ref for ref in refs if ref is not None])
                raise
        finally:
            staged.free()
        landed_bytes = 0
        for page, sums, ref, is_right in zip(batch.pages, batch.checksums, refs, right, strict=True):
            if ref is None:
                continue
            if not is_right:
                store.abort([ref])
                self.counters.wrong_pages += 1
                continue
            store.commit_all(ref, sums)
            self.counters.copied_pages += 1
            self.counters.copied_bytes += page.nbytes
            landed_bytes += page.nbytes
        if not all(right):
            return landed_bytes, f"damaged: pages of {ticket.producer} are not what they were"
        if not landed_bytes and not any(_holds(store, page.page_id) for page in batch.pages):
            return landed_bytes, "full: all of the pool is in use"
        return landed_bytes, batch.lack(ticket.producer)

    async def _give_up(self, coming: Sequence[asyncio.Task[_Batch]]) -> None:
        for task in coming:
            task.cancel()
        for outcome in await asyncio.gather(*coming, return_exceptions=True):
            if isinstance(outcome, _Batch) and outcome.staged is not None:
                outcome.staged.free()


def _holds(store: PageStore, page_id: bytes) -> bool:
    return page_id[:-1] in store.held[page_id[-1]]


def _move(
    store: PageStore, batch: _Batch, refs: Sequence[PageRef | None], staged: StagedTransfer
) -> list[bool]:
    """Copy pages out of staging into reserved ones. Returns, for each, whether its checksums fit."""
    view, ranks = store.memory.arena.view, store.geometry.ranks
    right, at = [], 0
    for page, sums, ref in zip(batch.pages, batch.checksums, refs, strict=True):
        if ref is not None:
            target = np.frombuffer(view[ref.offset : ref.offset + page.nbytes], np.uint8)
            filled = 0
            for piece in staged.region_views(0, at, page.nbytes):
                target[filled : filled + piece.nbytes] = np.frombuffer(piece, np.uint8)
                filled += piece.nbytes
            shares = target.reshape(ranks, -1)
            right.append(tuple(xxhash.xxh3_64_intdigest(share.data) for share in shares) == sums)
        else:
            right.append(True)
        at += page.nbytes
    return right
