"""Sends to an engine that has not told yet how it keeps KV: they are laid out once it has."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prfaas.serving.engines.vllm.metadata import SendOrder
from prfaas.serving.transport.sender import Sender

# Enough to connect over a long path, encrypted. After that a transfer is opened as if the engine were alike: the
# transport says what is wrong with the path.
PATIENCE_S = 2.0


@dataclass(slots=True)
class _Postponed:
    """The orders of one request, in the order in which they came."""

    consumer: str
    until_s: float
    orders: list[SendOrder]


class PostponedSends:
    """Orders of requests whose consumer is being connected to for the first time.

    Nothing is copied: a request's blocks stay as they are while vLLM leaves them to it.
    """

    def __init__(self, sender: Sender, now_s: Callable[[], float] = time.monotonic) -> None:
        """`sender`: connects. `now_s`: the clock."""
        self._sender = sender
        self._now_s = now_s
        self._waiting: dict[str, _Postponed] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def is_needed(self, send: SendOrder) -> bool:
        """Whether the consumer of an order is not met; from then on its request's orders are kept."""
        if send.request_id not in self._waiting:
            consumer = send.ticket.consumer
            if self._sender.meet(consumer):
                return False
            self._waiting[send.request_id] = _Postponed(consumer, self._now_s() + PATIENCE_S, [])
        return True

    def add(self, send: SendOrder) -> None:
        """Keep for later what is to be done of a step, at its end."""
        if send.checkpoint_tokens:
            # By then the states are those of another chunk. Where it was ordered is still told.
            send = replace(send, checkpoint=())
        self._waiting[send.request_id].orders.append(send)

    def due(self) -> Iterator[str]:
        """Requests whose orders can be taken, since their consumer is met, or late."""
        return (request_id for request_id in tuple(self._waiting) if self.is_due(request_id))

    def is_due(self, request_id: str) -> bool:
        """The same of one request; False if nothing of it is kept."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and (
            self._sender.meet(waiting.consumer) or self._now_s() >= waiting.until_s
        )

    def take(self, request_id: str, *, wait: bool = False) -> list[SendOrder]:
        """The orders that are kept of a request. They are kept no more.

        `wait`: first wait for the consumer, as long as it may take.
        """
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return []
        if wait:
            self._sender.meet(waiting.consumer, max(0.0, waiting.until_s - self._now_s()))
        return waiting.orders
