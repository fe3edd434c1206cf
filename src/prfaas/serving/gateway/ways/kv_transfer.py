"""KV transfers as the gateway sees them: what is to move, what has moved, and how to wait for it."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prfaas.core.deployment import Instance, LocalTransfer
from prfaas.core.kv.rank_shares import transfers_per_rank
from prfaas.core.scheduling.decision import Decision
from prfaas.core.units import GB
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.engine_client import FROZEN
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request_log import RequestRecord, TransferredBytes
from prfaas.serving.own_process import on_time_timeout
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import BackgroundTasks, run_together
from prfaas.serving.transport.io.observer import Observer, OnSoon
from prfaas.serving.transport.protocol.handover import is_by_nixl
from prfaas.serving.transport.protocol.resume_points import common
from prfaas.serving.transport.protocol.sentences import legible
from prfaas.serving.transport.protocol.ticket import (
    CACHED_TOKENS_PARAMETER,
    KEPT_PARAMETER,
    REMOTE_PREFILL_PARAMETER,
    TICKET_PARAMETER,
    Ticket,
    part_id,
)
from prfaas.serving.transport.protocol.wire import TransferPhase, TransferStatus

logger = logging.getLogger(__name__)

DROPPED = "transfer-dropped"
"""The reason of a transfer that its consumer had no use for, such as one that lacks tokens it has lost."""


TRANSFER_FAILED = "transfer-failed"
"""The reason of a transfer of which its consumer says that it failed."""


class TransferFailedError(Exception):
    """A transfer will not complete. `reason`: one word for metrics; the text says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StartedTransfer:
    """A transfer that a request at the consumer may name: it is complete, or will be soon."""

    ticket: Ticket
    sealed: str
    """The ticket as engines take it."""
    cached_tokens: int | None
    """Tokens that the producer reused, by its own count; None: it did not say."""

    @property
    def by(self) -> LocalTransfer:
        """What moves it."""
        return "nixl" if is_by_nixl(self.sealed) else "prfaas"

    def params(self) -> Json:
        """What a decode engine is told of it, for `kv_transfer_params`.

        What it loads from staging counts as cached only where the producer had it cached, or it holds it itself.
        """
        params: Json = {TICKET_PARAMETER: self.sealed}
        if self.cached_tokens is not None:
            # vLLM's own names: v1/engine/output_processor.py, `RequestState.from_new_request`.
            params[REMOTE_PREFILL_PARAMETER] = True
            params[CACHED_TOKENS_PARAMETER] = max(self.cached_tokens, self.ticket.skip_tokens)
        return params


@dataclass(frozen=True, slots=True)
class TransferDone(StartedTransfer):
    """A transfer that is complete: its KV waits in the consumer's staging, or is loaded already."""

    moved: TransferredBytes
    prefill_s: float
    """From the transfer's start to the producer's answer."""
    transfer_s: float
    """From the transfer's start to its last byte."""


@dataclass(frozen=True, slots=True)
class MovedPrefix:
    """What became of a decision's cache transfer."""

    decision: Decision
    """As it stands now: without the transfer, and with what is left to compute."""
    source: str | None = None
    """Who sent; None: nothing has come, or nothing was wanted."""
    moved_bytes: int = 0
    transfer: TransferDone | None = None
    """What waits in the staging of the prefill instance. What went from pool to pool needs no ticket."""


class KvTransfers:
    """Waits for and abandons transfers at any decode engine of the deployment."""

    def __init__(
        self,
        watchers: Mapping[str, tuple[Observer, ...]],
        clock: Callable[[], float] = time.monotonic,
        end_within_s: float = 5.0,
    ) -> None:
        """`watchers`: instance name → one watcher per rank. `clock`: see `answers`.

        `end_within_s`: how long a consumer may take to end a transfer.
        """
        self._stages: dict[str, int] = {}
        self._watchers = dict(watchers)
        self._clock = clock
        self._end_within_s = end_within_s
        self.abandoning = BackgroundTasks()
        self._closing = BackgroundTasks()

    def follow(
        self, instances: Sequence[Instance], ranks_of: Callable[[Instance], tuple[Observer, ...]]
    ) -> None:
        """Transfers are waited for at these instances from now on, and at no others."""
        for instance in instances:
            if instance.name not in self._watchers:
                self._watchers[instance.name] = ranks_of(instance)
                self._stages[instance.name] = instance.rank_grid.stages
        for name in self._watchers.keys() - {instance.name for instance in instances}:
            self._stages.pop(name, None)
            for watcher in self._watchers.pop(name):
                self._closing.start(watcher.close())

    async def wait(
        self,
        ticket: Ticket,
        timeout_s: float,
        lead_s: float = 0.0,
        on_soon: Callable[[int], None] | None = None,
        *,
        pulled: bool = False,
    ) -> TransferredBytes:
        """Wait until every rank of the ticket's consumer has all bytes.

        `on_soon` is called with the tokens that the producer had cached, once every rank expects all bytes within
        `lead_s`; not at all where the producer does not tell them. `pulled`: the consumer's ranks read it with NIXL.
        Raises TransferFailedError as soon as one rank will not get them.
        """
        watched = self._watched(ticket, pulled=pulled)
        left = len(watched)

        def soon(status: TransferStatus) -> None:
            nonlocal left
            left -= 1
            if not left and on_soon is not None and status.cached_tokens is not None:
                on_soon(status.cached_tokens)

        if left == 1:
            # No task of its own for one rank.
            return _moved(await self._wait(*watched[0], timeout_s, lead_s, soon))
        statuses = await run_together(*(self._wait(*each, timeout_s, lead_s, soon) for each in watched))
        return _moved(*statuses)

    def _watched(self, ticket: Ticket, *, pulled: bool = False) -> list[tuple[Observer, bytes]]:
        """Every rank of the consumer with the ids under which it gets the transfer: several ranks may send to one."""
        watchers = self._watchers[ticket.consumer]
        senders = () if pulled else self._watchers.get(ticket.producer, ())
        stages = self._stages.get(ticket.producer, 1) if senders else 1
        parts = range(transfers_per_rank(len(senders) // stages, len(watchers), stages))
        return [(watcher, part_id(ticket.transfer_id, part)) for watcher in watchers for part in parts]

    def announced(self, ticket: Ticket, *, pulled: bool = False) -> bool:
        """Whether the producer has opened the transfer at every rank of the consumer; see `wait`."""
        return all(each.announced(known) for each, known in self._watched(ticket, pulled=pulled))

    def abandon(self, ticket: Ticket, reason: str) -> None:
        """Free the staging of a transfer that no request will load, unless the engine has already taken it.

        In the background, since it must also happen when a request's own task is being cancelled.
        """
        self.abandoning.start(self._abandon(ticket, reason))

    async def _abandon(self, ticket: Ticket, reason: str) -> None:
        watched = self._watched(ticket) if ticket.consumer in self._watchers else ()
        for watcher, known in watched:
            try:
                async with asyncio.timeout(self._end_within_s):
                    await watcher.abandon(known, reason)
            except (OSError, TimeoutError) as error:
                # The consumer's own time to live frees the staging then.
                logger.info("could not abandon a transfer at %s: %s", ticket.consumer, error)

    async def keep(self, ticket: Ticket, reason: str) -> int:
        """End a transfer that will not complete, and have kept what has come of it. Never raises.

        Returns after how many tokens the engine can go on; 0: after none.
        """
        statuses = []
        try:
            async with asyncio.timeout(self._end_within_s):
                for watcher, known in self._watched(ticket):
                    await watcher.abandon(known, reason, keep=True)
                    statuses.append(await watcher.wait(known, self._end_within_s))
        except (OSError, TimeoutError) as error:
            logger.info("could not have a broken transfer kept at %s: %s", ticket.consumer, error)
            return 0
        whole = [status for status in statuses if status.phase is TransferPhase.COMPLETE]
        if len(whole) == len(statuses):
            return ticket.num_tokens
        if any(status.taken for status in whole):
            # A rank that has loaded all of it can't go back to what others have.
            return 0
        return common(status.resume_points for status in statuses).tokens

    async def answers(self, consumer: str, timeout_s: float) -> bool:
        """Whether every rank of `consumer` answers now, by the clock. What it has told before is known then."""
        try:
            async with on_time_timeout(timeout_s, self._clock):
                for watcher in self._watchers[consumer]:
                    await watcher.stats()
        except (OSError, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Wait for the abandonments under way, each of which is bounded, and end the watchers."""
        await self.abandoning.finish()
        await self._closing.finish()
        for ranks in self._watchers.values():
            for watcher in ranks:
                await watcher.close()

    @staticmethod
    async def _wait(
        watcher: Observer, transfer_id: bytes, timeout_s: float, lead_s: float, on_soon: OnSoon
    ) -> TransferStatus:
        try:
            status = await watcher.wait(transfer_id, timeout_s, lead_s, on_soon)
        except TimeoutError:
            raise TransferFailedError("transfer-deadline", f"not complete within {timeout_s:g} s") from None
        except OSError as error:
            raise TransferFailedError("consumer-unreachable", str(error)) from error
        if status.phase is not TransferPhase.COMPLETE:
            raise TransferFailedError(DROPPED if status.dropped else TRANSFER_FAILED, legible(status.reason))
        return status


def _moved(*statuses: TransferStatus) -> TransferredBytes:
    """What the ranks of one transfer have got together."""
    return TransferredBytes(
        total_bytes=sum(status.total_bytes for status in statuses),
        overlapped_bytes=sum(status.overlapped_bytes for status in statuses),
        spared_bytes=sum(status.spared_bytes for status in statuses),
        cached_tokens=statuses[0].cached_tokens,
        checkpoint_bytes=sum(status.checkpoint_bytes for status in statuses),
    )


PREEMPTED = "preempted"
"""The reason of a prefill that its instance could not have ended before it is taken away."""
INCOMPATIBLE = "incompatible"
LINK_SILENT = "link-silent"
LINK_SLOW = "link-slow"
CONSUMER_FROZEN = "consumer-frozen"
CONSUMER_SILENT = "consumer-silent"
# The control plane knows of a frozen engine, and finds out by itself whether an unreachable one lives. Two that are
# incompatible are well, each of them. So are the two of a transfer whose prefix the consumer has evicted meanwhile.
# A transfer between clusters that is late has moved all the time: one that stands still is ended by its receiver, and
# that blames the producer.
BLAMES_NOBODY = (
    *(FROZEN, INCOMPATIBLE, PREEMPTED, DROPPED, LINK_SILENT, LINK_SLOW),
    *(CONSUMER_FROZEN, "consumer-unreachable"),
)
HOPELESS = (CONSUMER_FROZEN, CONSUMER_SILENT, "consumer-unreachable")
# Of the producer or its path to the consumer: what has arrived there is as good as ever.
LEAVES_PART = ("transfer-failed", "transfer-deadline", "not-announced", PREEMPTED, LINK_SILENT, LINK_SLOW)


@dataclass(frozen=True, slots=True)
class KeptPart(StartedTransfer):
    """What has come of a transfer that broke: its staging is kept for the decode request."""

    usable_tokens: int
    """The decode engine can go on after so many tokens of the prompt, more than the ticket leaves out."""

    def params(self) -> Json:
        return {**StartedTransfer.params(self), KEPT_PARAMETER: self.usable_tokens}


class HopFailedError(Exception):
    """A prefill elsewhere, or its transfer, failed. Nothing of it is left in any staging but what was kept."""

    def __init__(self, reason: str, *, hopeless: bool, kept: KeptPart | None = None) -> None:
        """`reason`: one word. `hopeless`: another producer would fail as well. `kept`: must be used or freed."""
        super().__init__(reason)
        self.reason = reason
        self.hopeless = hopeless
        self.kept = kept


class EgressBill:
    """Counts what transfers put on links between clusters, and what that costs. Those that fail are not on it."""

    def __init__(self, running: RunningDeployment, metrics: Metrics) -> None:
        self._cost = metrics.egress_cost
        self._running = running

    def add(self, record: RequestRecord, source: str, target: str, num_bytes: int) -> None:
        """Bytes of a request have gone from one cluster to another, or stayed in it."""
        link = self._running.current.link(source, target)
        if link is None:
            return
        record.egress_bytes += num_bytes
        if link.egress_per_gb > 0:
            cost = num_bytes * (link.egress_per_gb / GB)
            record.egress_cost += cost
            self._cost.labels(link.name).inc(cost)
