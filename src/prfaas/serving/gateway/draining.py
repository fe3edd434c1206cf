"""The gateway's end: nothing new is taken, and what is open may end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.serving.gateway.bodies import ApiError

# Whoever answers in place of this gateway is there by then, or this one again.
_RETRY_AFTER_S = 5.0


class Draining:
    """Whether new requests are refused, and how many are still open. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.active = False
        """Whether the gateway is about to end: it serves what it has and takes nothing new."""
        self.open_requests = 0
        """Requests to generate that have begun and not ended."""
        self._settled = asyncio.Event()

    def begin(self) -> None:
        """Take nothing new from now on. Idempotent."""
        self.active = True
        if not self.open_requests:
            self._settled.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """While one request is open.

        Raises:
            ApiError: 503, it comes too late.
        """
        if self.active:
            raise ApiError(
                503,
                "The gateway is about to end and takes no new requests; send this one again in a moment.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1
            if self.active and not self.open_requests:
                self._settled.set()

    async def settled(self, within_s: float) -> bool:
        """True once nothing is open; False if that takes longer than `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True
