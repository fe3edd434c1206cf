"""A prefill whose KV the decode engine reads by itself, by vLLM's NIXL connector: inside a PD cluster that says so."""

import asyncio
import time
from collections.abc import Callable

import orjson

from prfaas.serving.gateway.answer import cached_tokens_of
from prfaas.serving.gateway.hop_trace import HopTrace
from prfaas.serving.gateway.kv_transfer import (
    StartedTransfer,
    TransferDone,
    TransferFailedError,
    TransferredBytes,
    TransferSpec,
)
from prfaas.serving.gateway.prefill_hop import OnFirst, PrefillHop
from prfaas.serving.gateway.request import ServingRequest
from prfaas.serving.tasks import end_all
from prfaas.serving.transport.handover import is_by_nixl, ticket_of
from prfaas.serving.transport.ticket import TICKET_PARAMETER, Ticket

# While the decode engine has not begun to read, that often it is looked whether it has.
_LOOK_S = 0.25


class PulledHop(PrefillHop):
    """`PrefillHop`, which also has KV pulled.

    A transfer of ours leaves while the prefill runs, and the decode request follows. Here the decode request comes
    first: the producer hands over where its blocks lie, and the decode engine reads them when it takes the request.
    How far it is, it tells as it does of our transfers.
    """

    async def _prefill_and_transfer(
        self,
        spec: TransferSpec,
        ticket: Ticket,
        sealed: str,
        body: bytes,
        request: ServingRequest,
        on_soon: Callable[[StartedTransfer], None] | None,
        on_first: OnFirst | None,
        spans: HopTrace | None,
    ) -> TransferDone:
        if not spec.pulled:
            return await super()._prefill_and_transfer(
                spec, ticket, sealed, body, request, on_soon, on_first, spans
            )
        clock = time.perf_counter
        start_s = clock()
        late_s = self._deadline_s(spec)
        self._check_frozen(spec)
        loop = asyncio.get_running_loop()
        prefilling = loop.create_task(self._prefill(spec, body, request, spans))
        longest_s = self._options.prefill_timeout_s + late_s
        arrival = loop.create_task(self._transfers.wait(ticket, longest_s, pulled=True))
        self._arriving[arrival] = spec
        if spans is not None:
            arrival.add_done_callback(spans.arrived)
        try:
            await asyncio.wait((prefilling, arrival), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                self._arrived(spec, arrival)
            answer = await prefilling
            prefill_s = clock() - start_s
            started = StartedTransfer(ticket, _handed_over(spec, sealed, answer), cached_tokens_of(answer))
            if on_soon is not None:
                on_soon(started)
            await self._wait_for_read(spec, ticket, arrival, late_s)
            moved = self._arrived(spec, arrival)
            return TransferDone(
                ticket, started.sealed, started.cached_tokens, moved, prefill_s, clock() - start_s
            )
        finally:
            del self._arriving[arrival]
            self._given_up.pop(arrival, None)
            await end_all(prefilling, arrival)

    async def _wait_for_read(
        self, spec: TransferSpec, ticket: Ticket, arrival: "asyncio.Task[TransferredBytes]", late_s: float
    ) -> None:
        """The decode request is on its way: see that the read ends in time, once it has begun.

        Before that, the request waits for its turn at the decode engine as any other does.

        Raises:
            TransferFailedError: it has not ended in time.
        """
        while not arrival.done() and not self._transfers.announced(ticket, pulled=True):
            await asyncio.wait((arrival,), timeout=_LOOK_S)
        if not arrival.done():
            await asyncio.wait((arrival,), timeout=late_s)
        if not arrival.done():
            await self._ask_consumer(spec)
            raise TransferFailedError(
                "transfer-deadline", f"{spec.consumer} has read from {spec.producer} for {late_s:.0f} s"
            )


def _handed_over(spec: TransferSpec, asking: str, answer: bytes) -> str:
    """What the producer's answer hands over to the consumer. Raises TransferFailedError."""
    try:
        text = orjson.loads(answer)["kv_transfer_params"][TICKET_PARAMETER]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = None
    if not isinstance(text, str) or not is_by_nixl(text) or ticket_of(text) != ticket_of(asking):
        raise TransferFailedError(
            "not-announced", f"{spec.producer} prefilled but handed nothing over; it may run without NIXL"
        )
    return text
