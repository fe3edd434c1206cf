"""Reads an answer of the completions API as it comes: when its tokens came, and how many the server counted."""

from typing import Any

import orjson

_DATA = b"data:"
_END = b"[DONE]"


class BadAnswerError(Exception):
    """An answer that breaks off, that is an error, or that can't be read."""


class Answer:
    """Fed with a stream's bytes (`feed`) or a whole body (`whole`)."""

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.answered_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._ended = False
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """The next bytes of a stream of events. Raises BadAnswerError."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(_DATA):
                continue
            event = line[len(_DATA) :].strip()
            if event == _END:
                self._ended = True
            else:
                self._hear(_object(event), now_s)

    def whole(self, body: bytes) -> None:
        """A whole answer in one. Raises BadAnswerError."""
        document = _object(body)
        self._count(document)
        self._ended = bool(document.get("choices"))

    def check(self, wanted_tokens: int | None) -> None:
        """Raise BadAnswerError unless this was all; `wanted_tokens` is checked if the server has counted."""
        if not self._ended:
            raise BadAnswerError("the answer breaks off")
        if wanted_tokens is not None and self.answered_tokens not in (None, wanted_tokens):
            raise BadAnswerError(f"the answer has {self.answered_tokens} of {wanted_tokens} tokens")

    def _hear(self, event: dict[str, Any], now_s: float) -> None:
        if event.get("choices"):
            if self.first_token_s is None:
                self.first_token_s = now_s
            self.last_token_s = now_s
        self._count(event)

    def _count(self, document: dict[str, Any]) -> None:
        if "error" in document:
            error = document["error"]
            raise BadAnswerError(str(error.get("message", error) if isinstance(error, dict) else error)[:200])
        usage = document.get("usage")
        if not isinstance(usage, dict):
            return
        self.answered_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = details.get("cached_tokens")


def _object(data: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise BadAnswerError(f"the answer can't be read: {data[:80]!r}")
    return document
