"""A prefill whose KV the decode engine reads by itself, by vLLM's NIXL connector: inside a PD cluster that says so."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import orjson

from prfaas.serving.gateway.bodies import cached_tokens_of
from prfaas.serving.gateway.request_log import TransferredBytes
from prfaas.serving.gateway.ways.kv_transfer import StartedTransfer, TransferFailedError
from prfaas.serving.gateway.ways.push import PushHop, tell
from prfaas.serving.transport.protocol.handover import by_nixl, is_by_nixl, ticket_of
from prfaas.serving.transport.protocol.ticket import TICKET_PARAMETER

# While the decode engine has not begun to read, that often it is looked whether it has.
_LOOK_S = 0.25


class PullHop(PushHop):
    """`PushHop`, for KV that is pulled.

    A transfer of ours leaves while the prefill runs, and the decode request follows. Here the decode request comes
    first: the producer hands over where its blocks lie, and the decode engine reads them when it takes the request.
    How far it is, it tells as it does of our transfers.
    """

    def _as_told(self, sealed_ticket: str) -> str:
        return by_nixl(sealed_ticket)

    def _wait(self, timeout_s: float) -> Coroutine[Any, Any, TransferredBytes]:
        return self._transfers.wait(self._ticket, timeout_s, pulled=True)

    def _started(self, answer: bytes) -> StartedTransfer:
        """What the producer's answer hands over to the consumer. Raises TransferFailedError."""
        try:
            text = orjson.loads(answer)["kv_transfer_params"][TICKET_PARAMETER]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or not is_by_nixl(text) or ticket_of(text) != ticket_of(self._sealed):
            raise TransferFailedError(
                "not-announced",
                f"{self.spec.producer} prefilled but handed nothing over; it may run without NIXL",
            )
        started = StartedTransfer(self._ticket, text, cached_tokens_of(answer))
        tell(self._soon, started)
        return started

    async def _wait_for_rest(self, late_s: float) -> None:
        """The decode request is on its way: see that the read ends in time, once it has begun.

        Before that, the request waits for its turn at the decode engine as any other does. Raises TransferFailedError.
        """
        spec, arrival = self.spec, self._arrival
        while not arrival.done() and not self._transfers.announced(self._ticket, pulled=True):
            await asyncio.wait((arrival,), timeout=_LOOK_S)
        sentence = f"{spec.consumer} has read from {spec.producer} for {late_s:.0f} s"
        await self._wait_until_late(late_s, "transfer-deadline", sentence)
