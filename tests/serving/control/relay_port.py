"""A KV port without a network, that has FOLLOW requests answered by a relay or a pool's publisher in this process."""

import asyncio
from collections.abc import Callable
from typing import Any

from prfaas.serving.transport.protocol.requests import FollowOrder, PeerRequest
from prfaas.serving.transport.protocol.wire import HEADER_BYTES, parse_control, unpack_header


class RelayPort:
    """`take`: as of `EventRelay`; None: nobody is there."""

    def __init__(self, take: Callable[[PeerRequest], None] | None) -> None:
        self.take = take
        self.frames: list[bytes] = []
        self._asking: set[asyncio.Future[dict[str, Any]]] = set()

    async def request(self, transfer_id: bytes, order: FollowOrder, timeout_s: float) -> dict[str, Any]:
        if self.take is None:
            raise ConnectionError("nobody there")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, Any]] = loop.create_future()

        def post(frame: bytes) -> None:
            self.frames.append(frame)
            header = unpack_header(frame[:HEADER_BYTES])
            body = parse_control(header, frame[HEADER_BYTES:])
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result(body))

        self._asking.add(future)
        self.take(PeerRequest("control", transfer_id, order, post))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._asking.discard(future)

    def lose(self) -> None:
        """The connection is lost; nobody answers until there is another one."""
        self.take = None
        for future in self._asking:
            future.set_exception(ConnectionError("lost"))
