"""One engine computes KV and sends it to another: the request and the transfer, side by side.

How long a transfer may take once its prefill has ended.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.core.deployment import Deployment
from prfaas.core.kv import KvModel
from prfaas.serving.gateway.bodies import prefill_body
from prfaas.serving.gateway.control_plane import ControlPlane
from prfaas.serving.gateway.engine_client import EngineCallError, EngineClient
from prfaas.serving.gateway.kv_transfers import KvTransfers, TransferFailedError, TransferredBytes
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import GatewayOptions, ThreadOffload
from prfaas.serving.gateway.request import ServingRequest
from prfaas.serving.transport.ticket import Ticket, prompt_digest

# Links are shared, and headers, retransmission and a link slower than stated all come on top.
_SLACK = 4.0

# Engines move whole blocks; vLLM's largest so far, so that the answer errs to the safe side.
_LARGEST_BLOCK_TOKENS = 256


class TransferBound:
    """Grace plus what the link's bandwidth explains. A stalled transfer ends earlier, by the receiver's own
    deadlines."""

    def __init__(self, deployment: Deployment, model: KvModel | None, options: GatewayOptions) -> None:
        self._deployment = deployment
        self._model = model
        self._options = options
        self._instances = {instance.name: instance for instance in deployment.instances}

    def fits(self, consumer: str, num_tokens: int, skip_tokens: int) -> bool:
        """Whether the KV of `num_tokens` tokens has room in the staging of `consumer` at all."""
        if self._model is None:
            return True
        nbytes = self._model.bytes_to_move(num_tokens, skip_tokens, block_tokens=_LARGEST_BLOCK_TOKENS)
        return nbytes <= self._deployment.engine.staging_bytes * self._instances[consumer].tensor_parallel

    def seconds(self, producer: str, consumer: str, num_tokens: int, skip_tokens: int) -> float:
        """Seconds after the prefill's end at which a transfer is given up."""
        grace_s = self._options.transfer_grace_s
        link = self._deployment.link(self._instances[producer].cluster, self._instances[consumer].cluster)
        if link is None or self._model is None:
            return grace_s
        bits = 8 * self._model.bytes_to_move(num_tokens, skip_tokens)
        return grace_s + _SLACK * bits / link.bandwidth_bits_per_s


logger = logging.getLogger(__name__)

# What a token id takes in JSON, about.
JSON_BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """`producer` sends the KV of `token_ids` less the first `skip_tokens` to `consumer`.

    `uses`: how many requests load it there. `sealed_from`: the ticket of a prefix that the producer loads first.
    """

    producer: str
    consumer: str
    token_ids: Sequence[int]
    skip_tokens: int
    uses: int = 1
    sealed_from: str | None = None


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A hop that went well: the KV waits at the consumer. Seconds run from the hop's start."""

    ticket: Ticket
    sealed: str
    moved: TransferredBytes
    prefill_s: float
    transfer_s: float


class HopFailedError(Exception):
    """A hop came to nothing, and nothing of it is left. `hopeless`: another producer would fare no better."""

    def __init__(self, reason: str, *, hopeless: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hopeless = hopeless


class PrefillHops:
    """Carries hops out, judges those that fail, and frees what they leave in staging."""

    def __init__(
        self,
        key: bytes,
        *,
        plane: ControlPlane,
        client: EngineClient,
        transfers: KvTransfers,
        bound: TransferBound,
        metrics: Metrics,
        thread_offload: ThreadOffload,
        options: GatewayOptions,
    ) -> None:
        """`key` seals tickets."""
        self._key = key
        self._plane = plane
        self._client = client
        self._transfers = transfers
        self._bound = bound
        self._metrics = metrics
        self._offloop = thread_offload
        self._options = options
        self._background: set[asyncio.Task[None]] = set()

    async def run(self, hop: TransferSpec, order: ServingRequest) -> TransferDone:
        """Until all bytes are there. Raises HopFailedError; then they are freed."""
        ticket, sealed, body = await self._offloop.run(
            len(hop.token_ids) * JSON_BYTES_PER_TOKEN, self._prepared, hop, order
        )
        arrived: TransferDone | None = None
        failure: EngineCallError | TransferFailedError | None = None
        try:
            with self._metrics.in_flight_transfers.track_inprogress():
                try:
                    arrived = await self._both(hop, ticket, sealed, body, order.headers)
                except (EngineCallError, TransferFailedError) as error:
                    failure = error
        finally:
            # Also when the client has left: nobody will come for what has arrived.
            if arrived is None:
                self.abandon(ticket, str(failure) if failure is not None else "the request was cancelled")
        if arrived is None:
            assert failure is not None
            raise self._judged(hop, failure)
        return arrived

    def abandon(self, ticket: Ticket, reason: str) -> None:
        """Have the staging of a transfer freed that its consumer may never take, in the background."""

        async def abandon() -> None:
            with self._metrics.background_tasks.track_inprogress():
                await self._transfers.abandon(
                    ticket.consumer, ticket.transfer_id, reason, self._options.abandon_timeout_s
                )

        # In the background, since it must also happen when this request's own task is being cancelled.
        task = asyncio.get_running_loop().create_task(abandon())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Wait for the abandonments under way (each is bounded)."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def _prepared(self, hop: TransferSpec, order: ServingRequest) -> tuple[Ticket, str, bytes]:
        ticket = Ticket.issue(
            producer=hop.producer,
            consumer=hop.consumer,
            num_tokens=len(hop.token_ids),
            skip_tokens=hop.skip_tokens,
            prompt_digest=prompt_digest(hop.token_ids, order.salt, order.adapter),
            lifetime_s=self._options.ticket_lifetime_s,
            now_s=time.time(),
            uses=hop.uses,
        )
        sealed = ticket.seal(self._key)
        body = prefill_body(order.model, hop.token_ids, sealed, salt=order.salt, sealed_from=hop.sealed_from)
        return ticket, sealed, body

    async def _both(
        self, hop: TransferSpec, ticket: Ticket, sealed: str, body: bytes, headers: Mapping[str, str]
    ) -> TransferDone:
        """The request and the transfer; the first to fail ends the other."""
        clock = time.perf_counter
        start_s = clock()
        late_s = self._bound.seconds(hop.producer, hop.consumer, ticket.num_tokens, ticket.skip_tokens)
        prefill_timeout_s = self._options.prefill_timeout_s

        async def prefill() -> float:
            producer = self._plane.instance(hop.producer)
            await self._client.call(producer, "/v1/completions", body, headers, prefill_timeout_s)
            return clock() - start_s

        loop = asyncio.get_running_loop()
        # Two tasks and no group: each more costs every request some percent of the gateway's CPU time.
        request = loop.create_task(prefill())
        arrival = loop.create_task(
            self._transfers.wait(hop.consumer, ticket.transfer_id, prefill_timeout_s + late_s)
        )
        try:
            await asyncio.wait((request, arrival), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                # Raises at once what has gone wrong with it; then the prefill's answer is all that is missing.
                arrival.result()
            prefill_s = await request
            await self._arrived(hop, ticket, arrival, late_s)
            return TransferDone(ticket, sealed, arrival.result(), prefill_s, clock() - start_s)
        finally:
            await _ended(request, arrival)

    async def _arrived(
        self, hop: TransferSpec, ticket: Ticket, arrival: "asyncio.Task[TransferredBytes]", late_s: float
    ) -> None:
        """The prefill has answered: see that the transfer ends in time. Raises TransferFailedError."""
        if arrival.done():
            return
        await asyncio.wait((arrival,), timeout=self._options.announce_grace_s)
        if not arrival.done() and not self._transfers.announced(hop.consumer, ticket.transfer_id):
            raise TransferFailedError(
                "not-announced", f"{hop.producer} prefilled but opened no transfer to {hop.consumer}"
            )
        if not arrival.done():
            await asyncio.wait((arrival,), timeout=late_s)
        if not arrival.done():
            raise TransferFailedError("transfer-deadline", f"not complete {late_s:.0f} s after the prefill")

    def _judged(self, hop: TransferSpec, failure: EngineCallError | TransferFailedError) -> HopFailedError:
        """What a failure says about the producer, and about trying another one."""
        logger.warning("prefill at %s for %s failed: %s", hop.producer, hop.consumer, failure)
        if isinstance(failure, EngineCallError):
            if failure.is_clients_fault:
                return HopFailedError(failure.reason, hopeless=True)
            lost_cache = failure.reason in ("unreachable", "died")
            self._plane.suspect(hop.producer, str(failure), lost_cache=lost_cache)
            return HopFailedError(failure.reason, hopeless=False)
        if failure.reason == "consumer-unreachable":
            # No other producer could reach it either; the consumer prefills, if it lives.
            return HopFailedError(failure.reason, hopeless=True)
        self._plane.suspect(hop.producer, str(failure))
        return HopFailedError(failure.reason, hopeless=False)


async def _ended(*tasks: "asyncio.Task[Any]") -> None:
    """No task is left behind: what is still under way is cancelled and waited for."""
    open_tasks = [task for task in tasks if not task.done()]
    for task in open_tasks:
        task.cancel()
    if open_tasks:
        await asyncio.gather(*open_tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            # Of two failures the second one is nobody's news.
            task.exception()
