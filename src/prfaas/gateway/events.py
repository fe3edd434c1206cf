"""A stream of server-sent events on its way to the client: whole events pass, and they are remembered."""

import orjson

END_OF_EVENT = b"\n\n"
LAST_EVENT = b"data: [DONE]\n\n"
DATA = b"data: "
# vLLM ends a stream like this when its engine has died and its HTTP server lives. Quotes inside of generated text
# are escaped, so these bytes can only begin such an event.
_ERROR = b'data: {"error":'
# Events that are longer are passed on in pieces.
_LONGEST_EVENT_BYTES = 1 << 20


class Budget:
    """Bytes that all streams of one gateway together may keep."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes


class EventStream:
    """What has come of one engine's stream.

    `ended`: the mark at its end has come. `torn`: what was passed on ends within an event. `failure`: the event,
    not passed on, in which the engine says that it failed (a status of 500 or more).
    """

    __slots__ = ("_budget", "_kept", "_kept_bytes", "_limit_bytes", "_partial", "ended", "failure", "torn")

    def __init__(self, budget: Budget, limit_bytes: int, *, remember: bool) -> None:
        """`limit_bytes`: what this stream may keep of `budget`; nothing is kept unless `remember`."""
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._kept: list[bytes] | None = [] if remember else None
        self._kept_bytes = 0
        self._partial = b""
        self.ended = False
        self.torn = False
        self.failure: bytes | None = None

    def take(self, chunk: bytes) -> bytes:
        """What may be passed on now that `chunk` has come: events as far as they are whole."""
        if self._partial or self.torn or not chunk.endswith(END_OF_EVENT):
            chunk = self._cut(chunk)
        if _ERROR in chunk:
            chunk = self._before_failure(chunk)
        if chunk:
            self.ended = chunk.endswith(LAST_EVENT)
            if self._kept is not None:
                self._keep(chunk)
        return chunk

    def passed(self) -> bytes | None:
        """All that was passed on; None if it was not kept."""
        return b"".join(self._kept) if self._kept is not None else None

    def forget(self) -> None:
        """Give the room back; nothing is kept any more. Call it at the end, too."""
        self._budget.left_bytes += self._kept_bytes
        self._kept_bytes = 0
        self._kept = None

    def _keep(self, chunk: bytes) -> None:
        assert self._kept is not None
        if self._kept_bytes + len(chunk) > self._limit_bytes or len(chunk) > self._budget.left_bytes:
            self.forget()
            return
        self._kept.append(chunk)
        self._kept_bytes += len(chunk)
        self._budget.left_bytes -= len(chunk)

    def _cut(self, chunk: bytes) -> bytes:
        chunk = self._partial + chunk
        found = chunk.rfind(END_OF_EVENT)
        end = 0 if found < 0 else found + len(END_OF_EVENT)
        if len(chunk) - end > _LONGEST_EVENT_BYTES:
            self.forget()
            end = len(chunk)
        self._partial = chunk[end:]
        if end:
            self.torn = not chunk.endswith(END_OF_EVENT, 0, end)
        return chunk[:end]

    def _before_failure(self, chunk: bytes) -> bytes:
        begin = chunk.find(_ERROR)
        event = chunk[begin : chunk.find(END_OF_EVENT, begin) + len(END_OF_EVENT)]
        try:
            code = orjson.loads(event[len(DATA) :])["error"]["code"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return chunk
        if not isinstance(code, int) or code < 500:
            return chunk
        self.failure = event
        return chunk[:begin]
