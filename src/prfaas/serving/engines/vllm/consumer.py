"""The connector inside a decode worker: staged KV goes into the blocks that vLLM gave the request."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from prfaas.core.deployment import TransferLimits
from prfaas.serving.engines.page_digests import PageDigestError
from prfaas.serving.engines.vllm.block_load import BlockLoad
from prfaas.serving.engines.vllm.load_part import BorrowedPart, GivenUpError, LoadPart
from prfaas.serving.engines.vllm.metadata import LoadOrder, NixlRead
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import WireLayout
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sibling_staging import SiblingStaging
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.ticket import part_id
from prfaas.serving.transport.protocol.wire import TransferPhase, TransferStatus, load_obstacle

logger = logging.getLogger(__name__)

# Deadlines, and transfers that have no staging yet, are looked after that often while a load waits.
_LOOK_S = 0.05
_LACKS_A_PART = "another part of the KV did not arrive"
_NOTHING = ResumePoints()


@dataclass(slots=True)
class _HeldTransfer:
    """A transfer taken out of the receiver; freed when its last use is over, or its time to live."""

    transfer: StagedTransfer
    uses_left: int
    """Requests that have not loaded it yet."""
    expires_at_s: float
    loading: int = 0
    """Loads that read it at this moment."""


@dataclass(slots=True, eq=False)
class _OrderedLoad:
    """A load that has not ended; the loading thread's own."""

    order: LoadOrder
    ordered_at_s: float
    parts: list[LoadPart]
    """Those to this rank come first; only one is known of until it has begun."""
    lenders: set[tuple[int, bytes]] = field(default_factory=set)
    """Of the parts that are read out of siblings' staging: the rank and the transfer's id."""
    is_joined: bool = False
    """All parts are known of."""


@dataclass(frozen=True, slots=True)
class _LoadResult:
    """What has become of a load."""

    request_id: str
    loaded_bytes: int | None
    """None: it failed."""
    digests_differ: bool = False
    """It failed since a page was not the one that the prefill engine computed."""
    is_part: bool = False
    """It loaded what had come of a transfer that broke."""
    usable: ResumePoints = _NOTHING
    """It failed, but another order can load what has come."""
    unwanted: bool = False
    """It failed since nobody waits for its request any more."""


class KvConsumer:
    """Loads are asynchronous: one thread copies, the step loop only looks at what has become of them.

    Blocks are filled as their bytes arrive, and the rest once the transfer is complete. Every ordered load is
    reported exactly once, as done or as failed; a failed one makes vLLM prefill the request locally
    (`kv_load_failure_policy=recompute`). A transfer can serve several requests (`n` > 1). Of a failed one whose
    transfer broke, `take_usable` says what can still be loaded.
    """

    def __init__(
        self,
        wires: PeerLayouts[WireLayout],
        receiver: Receiver,
        limits: TransferLimits,
        stats: ConnectorStats,
        now_s: Callable[[], float] = time.monotonic,
        *,
        siblings: SiblingStaging | None = None,
    ) -> None:
        """
        Args:
            wires: what travels from each producer.
            receiver: has it.
            limits: how long a load waits for its transfer, and a transfer for several requests for the last of them.
            stats: counts what was loaded.
            now_s: the clock.
            siblings: ranks of this engine whose staging is read for what they keep as well; None: no rank's.
        """
        self._siblings = siblings
        if siblings is not None:
            siblings.on_change = lambda: self._wake.set()
        self._wires = wires
        self._transfers = receiver.transfers
        self._limits = limits
        self.stats = stats
        self.on_end: Callable[[], None] = lambda: None
        """Called in the loading thread when a load has ended; must not raise."""
        self._now_s = now_s
        self._lock = threading.Lock()
        self._waiting: list[_OrderedLoad] = []
        self._held: dict[bytes, _HeldTransfer] = {}
        self._wake = threading.Event()
        self._closing = False
        self._results: queue.SimpleQueue[_LoadResult] = queue.SimpleQueue()
        self._usable: dict[str, ResumePoints] = {}
        self._thread = threading.Thread(target=self._run, name="prfaas-load", daemon=True)
        self._thread.start()

    def order(self, loads: Sequence[LoadOrder], drops: Sequence[tuple[bytes, str]]) -> None:
        """Accept this step's loads, and the transfers (id, reason) that a request here will not take."""
        for ticket_id, _ in drops:
            for lender, transfer_id, _ in _lent_transfers(ticket_id, self._wires.of_ticket(ticket_id)):
                assert self._siblings is not None
                self._siblings.refuse(lender, transfer_id)
        with self._lock:
            for ticket_id, reason in drops:
                for transfer_id in _own_transfers(ticket_id, self._wires.of_ticket(ticket_id)):
                    held = self._held.get(transfer_id)
                    if held is None:
                        self._transfers.drop(transfer_id, reason)
                    else:
                        held.uses_left -= 1
                        self._release(transfer_id, held)
            self._waiting += [
                _OrderedLoad(load, self._now_s(), [LoadPart(load.ticket.transfer_id)]) for load in loads
            ]
        if loads:
            self._wake.set()

    def tell_pulled(self, pull: NixlRead, phase: TransferPhase) -> None:
        """Tell the gateway how far the KV is that NIXL loads in our place."""
        total_bytes = (
            sum(self._wires.alike.kv_region_bytes(pull.num_tokens, pull.local_tokens)) if pull.loads else 0
        )
        is_complete, has_failed = phase is TransferPhase.COMPLETE, phase is TransferPhase.FAILED
        status = TransferStatus(
            phase=phase,
            reason="NIXL did not load it; the decode engine computes the prompt" if has_failed else "",
            received_bytes=total_bytes if is_complete else 0,
            total_bytes=total_bytes,
            overlapped_bytes=0,
            num_tokens=pull.num_tokens,
            skip_tokens=pull.local_tokens,
            taken=is_complete,
        )
        self._transfers.report(pull.transfer_id, status)

    def results(self) -> tuple[set[str], set[str]]:
        """What has become of the ordered loads.

        Returns:
            Requests whose load has ended, and those of them that failed; each request is named once.
        """
        ended: set[str] = set()
        failed: set[str] = set()
        unwanted = 0
        while not self._results.empty():
            result = self._results.get()
            ended.add(result.request_id)
            self.stats.add("digest_mismatches", result.digests_differ)
            if result.loaded_bytes is None:
                failed.add(result.request_id)
                unwanted += result.unwanted
                if result.usable.tokens:
                    self._usable[result.request_id] = result.usable
            else:
                self.stats.add("loads_resumed" if result.is_part else "loads_completed")
                self.stats.add("bytes_loaded", result.loaded_bytes)
        self.stats.add("loads_failed", len(failed) - unwanted)
        self._expire()
        return ended, failed

    def take_usable(self) -> dict[str, ResumePoints]:
        """Of the failed loads that `results` has named since the last call: what can still be loaded."""
        usable, self._usable = self._usable, {}
        return usable

    def close(self) -> None:
        """Stop the loading thread and free what is still staged."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=10)
        for load in self._waiting:
            for part in load.parts:
                if part.arrival is not None:
                    part.arrival.give_back()
        for held in self._held.values():
            held.transfer.free()
        self._held.clear()

    # The loading thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_LOOK_S if self._waiting else None)
            self._wake.clear()
            for load in tuple(self._waiting):
                result = self._advanced(load)
                if result is not None:
                    with self._lock:
                        self._waiting.remove(load)
                    self._results.put(result)
                    self.on_end()

    def _advanced(self, load: _OrderedLoad) -> _LoadResult | None:
        """Load what can be loaded now; the result once that is all of it, or it has failed. Never raises."""
        order, digests_differ, usable, unwanted = load.order, False, _NOTHING, False
        try:
            loaded_bytes = self._load(load)
            if loaded_bytes is None:
                return None
            return _LoadResult(order.request_id, loaded_bytes, is_part=order.usable_tokens > 0)
        except GivenUpError as error:
            usable, unwanted = error.usable, error.unwanted
            if unwanted:
                logger.info("the KV of request %s is not loaded: %s", order.request_id, error)
            elif usable.tokens:
                logger.warning(
                    "request %s goes on from %d tokens: %s", order.request_id, usable.tokens, error
                )
            else:
                logger.warning("request %s prefills locally: %s", order.request_id, error)
        except PageDigestError as error:
            digests_differ = True
            logger.error(
                "request %s prefills locally: in its KV from %s, %s",
                *(order.request_id, order.ticket.producer, error),
            )
        except Exception:
            logger.exception("loading the KV of request %s failed", order.request_id)
        for part in load.parts:
            self._stop_reading(part)
            if part.borrowed is not None:
                part.borrowed.end(used=not usable.tokens)
            # Of the parts that are in time nobody will have a use.
            elif len(load.parts) > 1 and not usable.tokens:
                self._transfers.drop(part.transfer_id, _LACKS_A_PART)
        return _LoadResult(order.request_id, None, digests_differ, usable=usable, unwanted=unwanted)

    def _load(self, load: _OrderedLoad) -> int | None:
        """KV of one request from staging into the engine's blocks; the bytes copied, or None: more is to come."""
        self._join_parts(load)
        # A part is taken once all are there: if another one breaks, the request goes on from what has come of both.
        takes = load.is_joined and (
            len(load.parts) == 1 or all(self._is_there(part, load.order) for part in load.parts)
        )
        for number, part in enumerate(load.parts):
            if part.loaded_bytes is None:
                try:
                    part.loaded_bytes = self._load_part(load, part, number, takes=takes)
                except GivenUpError as error:
                    if len(load.parts) == 1 or error.unwanted:
                        raise
                    raise GivenUpError(str(error), self._usable_of(load)) from None
        loaded = [part.loaded_bytes for part in load.parts if part.loaded_bytes is not None]
        return sum(loaded) if len(loaded) == len(load.parts) else None

    def _join_parts(self, load: _OrderedLoad) -> None:
        """Have a load's parts as far as they are known: each stage of the producer tells what its own are."""
        if load.is_joined:
            return
        ticket_id = load.order.ticket.transfer_id
        begun = self._wires.of_ticket(ticket_id)
        own = _own_transfers(ticket_id, begun)
        known = sum(part.borrowed is None for part in load.parts)
        load.parts += [LoadPart(transfer_id) for transfer_id in own[known:]]
        for lender, transfer_id, wire in _lent_transfers(ticket_id, begun):
            if (lender, transfer_id) not in load.lenders:
                assert self._siblings is not None
                load.lenders.add((lender, transfer_id))
                borrowed = BorrowedPart(self._siblings, lender, transfer_id, wire, load.order)
                load.parts.append(LoadPart(transfer_id, borrowed=borrowed))
        load.is_joined = len(begun) == len(own)

    def _is_there(self, part: LoadPart, order: LoadOrder) -> bool:
        """Whether all that an order loads of a part can be taken, or is."""
        if part.borrowed is not None:
            return part.borrowed.is_there
        if part.loaded_bytes is not None or self._is_complete(part):
            return True
        status = self._transfers.state(part.transfer_id)
        return status is not None and status.resume_points.allows(order.usable_tokens)

    def _is_complete(self, part: LoadPart) -> bool:
        with self._lock:
            held = self._held.get(part.transfer_id)
            if held is not None and held.uses_left > 0:
                return True
        status = self._transfers.state(part.transfer_id)
        return status is not None and status.phase is TransferPhase.COMPLETE and not status.taken

    def _usable_of(self, load: _OrderedLoad) -> ResumePoints:
        """A part will not be: from where the request can go on with what has come of every part.

        What still arrives is ended, since it is of no use behind what has come of that one.
        """
        ticket = load.order.ticket
        wires, points = self._wires.of_ticket(ticket.transfer_id), ResumePoints(ticket.num_tokens)
        for part in load.parts:
            if part.borrowed is not None:
                points &= part.borrowed.resume_points
                continue
            self._transfers.drop(part.transfer_id, _LACKS_A_PART, keep=True)
            status = self._transfers.state(part.transfer_id)
            points &= _NOTHING if status is None else status.resume_points
        # Parts may have layers of other blocks.
        return points.in_blocks(lcm(*(wire.step_tokens for wire in wires.values())), ticket.skip_tokens)

    def _load_part(self, load: _OrderedLoad, part: LoadPart, number: int, *, takes: bool) -> int | None:
        """What one transfer brings; the bytes copied, or None: more is to come. `takes`: it is taken if complete.

        The way from the wire to here: `ReceiverConnection._receive_chunk`.
        """
        order, transfer_id = load.order, part.transfer_id
        if part.borrowed is not None:
            if part.borrowed.load(takes=takes):
                return 0
            if self._now_s() - load.ordered_at_s > self._limits.load_wait_s:
                raise GivenUpError(
                    f"KV of another rank still incomplete after {self._limits.load_wait_s:g} s"
                )
            return None
        # 1. The form in which it travels is known once it has begun.
        wire = self._wires.of_ticket(order.ticket.transfer_id).get(number)
        if part.blocks is None and wire is not None:
            part.blocks = BlockLoad(wire, order)
        blocks = part.blocks
        # 2. A complete transfer: its last bytes go into the blocks, all of them are checked.
        held = self._hold(transfer_id, order) if blocks is not None and takes else None
        if blocks is not None and held is not None:
            try:
                return blocks.finish(held.transfer)
            finally:
                self._stop_reading(part)
                with self._lock:
                    held.loading -= 1
                    self._release(transfer_id, held)
        # 3. One that will never be, or is late, makes the engine prefill.
        status = self._transfers.state(transfer_id)
        # What is kept of a broken one can be taken as soon as nobody writes or reads it any more.
        is_kept = status is not None and status.resume_points.allows(order.usable_tokens)
        obstacle = "" if is_kept else load_obstacle(status, order.usable_tokens)
        is_late = self._now_s() - load.ordered_at_s > self._limits.load_wait_s
        if not obstacle and is_late:
            obstacle = f"KV still incomplete after {self._limits.load_wait_s:g} s"
            # What has come is as good as that of a transfer that broke.
            self._transfers.drop(transfer_id, obstacle, keep=True)
            status = self._transfers.state(transfer_id)
        if obstacle:
            if status is None:
                raise GivenUpError(obstacle)
            # What a load in time finds dropped, the gateway has dropped: the client has left, or has its whole answer.
            # What an order of a part lacks, another one would lack too.
            usable = _NOTHING if order.usable_tokens else status.resume_points
            raise GivenUpError(obstacle, usable, unwanted=status.dropped and not is_late)
        # 4. One that arrives: what is there of it goes into the blocks meanwhile.
        if part.arrival is None and blocks is not None and not is_kept:
            part.arrival = self._transfers.lend(transfer_id, self._wake.set)
            # Nobody tells of what came to pass before this: look once more.
            self._wake.set()
        if part.arrival is not None and blocks is not None:
            blocks.fill_arrived(part.arrival)
        return None

    @staticmethod
    def _stop_reading(part: LoadPart) -> None:
        """No copy for this part is under way after this."""
        if part.blocks is not None:
            part.blocks.flush()
        if part.arrival is not None:
            part.arrival.give_back()
            part.arrival = None

    def _hold(self, transfer_id: bytes, order: LoadOrder) -> _HeldTransfer | None:
        """A use of a complete transfer, which the caller must end; None while it is not complete."""
        if self._siblings is not None and self._siblings.is_begun(transfer_id):
            return None
        with self._lock:
            held = self._held.get(transfer_id)
            if held is None or held.uses_left < 1:
                transfer = self._transfers.take(transfer_id, broken_tokens=order.usable_tokens)
                if transfer is None:
                    return None
                held = _HeldTransfer(
                    transfer, order.ticket.attributes.uses, self._now_s() + self._limits.staging_ttl_s
                )
                self._held[transfer_id] = held
            held.uses_left -= 1
            held.loading += 1
            return held

    def _expire(self) -> None:
        with self._lock:
            for transfer_id, held in list(self._held.items()):
                if self._now_s() > held.expires_at_s:
                    held.uses_left = 0
                    self._release(transfer_id, held)

    def _release(self, transfer_id: bytes, held: _HeldTransfer) -> None:
        """Free what nobody will read; under the lock."""
        if held.uses_left <= 0 and held.loading == 0 and self._held.pop(transfer_id, None) is not None:
            held.transfer.free()


def _own_transfers(ticket_id: bytes, begun: Mapping[int, WireLayout]) -> list[bytes]:
    """The ids of a ticket's transfers to this rank, as far as those that have begun tell that there are several."""
    return [
        part_id(ticket_id, part) for part in range(max((wire.parts for wire in begun.values()), default=1))
    ]


def _lent_transfers(ticket_id: bytes, begun: Mapping[int, WireLayout]) -> list[tuple[int, bytes, WireLayout]]:
    """What is read of transfers to siblings, as far as it is known: (rank, id, layout)."""
    found: dict[tuple[int, int], WireLayout] = {}
    for wire in begun.values():
        found |= wire.borrowed
    return [(rank, part_id(ticket_id, part), wire) for (rank, part), wire in found.items()]
