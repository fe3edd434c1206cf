"""Tokens that a prefill engine decodes while the KV travels, as its stream brings them."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from prfaas.core.deployment import Instance
from prfaas.serving.gateway.answer import DecodeFailedError, EventStream
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.engine_client import Blame, EngineCallError, EngineClient
from prfaas.serving.gateway.first_token import (
    FirstTokenAsk,
    SampledTokens,
    begins_stop,
    has_text,
    token_ids_of,
)
from prfaas.serving.gateway.http_exchange import EngineResponse
from prfaas.serving.gateway.prompts import Endpoint
from prfaas.serving.gateway.transcript import events

logger = logging.getLogger(__name__)

_NOTHING = SampledTokens((), "")


class _TextSeams:
    """Cuts a stream where text and tokens end together, and no stop string may have begun.

    Only there another engine can continue: it gets tokens, and writes the text of what follows them.
    """

    def __init__(self, ask: FirstTokenAsk) -> None:
        self._ask = ask
        self._ids: list[int] = []
        self._text = ""

    @property
    def holds(self) -> bool:
        """Whether there are tokens that can't be told yet."""
        return bool(self._ids)

    def take(self, choice: Json) -> SampledTokens | None:
        """What can be told now that `choice` has come. Raises ValueError for one that is no piece of an answer."""
        try:
            ids, text = token_ids_of(choice), choice["text"] or ""
            reason, stop_reason = choice["finish_reason"], choice.get("stop_reason")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no token in an event: {type(error).__name__}") from None
        if reason not in (None, "stop", "length"):
            raise ValueError("the prefill engine gave the answer up")
        if not self._ask.goes_on(reason):
            return self._end(ids, text, reason, stop_reason)
        self._ids += ids
        self._text += text
        # Of several tokens in one event the last ones may have no text yet.
        if len(ids) != 1 or not has_text(text) or begins_stop(self._text, self._ask.stops):
            return None
        return self._told(None, None)

    def _end(
        self, ids: tuple[int, ...], text: str, reason: str, stop_reason: int | str | None
    ) -> SampledTokens | None:
        """The end of the whole answer."""
        if self._ask.shows_stops and reason == "stop":
            # Where a stop token ends a stop string too, only an engine that shows both says that the string was it.
            by_token = not isinstance(stop_reason, str) or ids[-1] in self._ask.stop_token_ids
            if isinstance(stop_reason, str) and not by_token:
                text = (self._text + text).removesuffix(stop_reason)
                self._text = ""
            elif len(ids) == 1:
                # The text of the token that ended it is no part of the answer.
                text, stop_reason = "", ids[0] if isinstance(stop_reason, str) else stop_reason
            else:
                # Which part of the text that token has is not known: the decode engine ends the answer.
                return None
        self._ids += ids
        self._text += text
        return self._told(reason, stop_reason)

    def _told(self, reason: str | None, stop_reason: int | str | None) -> SampledTokens:
        told = SampledTokens(tuple(self._ids), self._text, reason, stop_reason)
        self._ids, self._text = [], ""
        return told


class TokenRelay:
    """The stream of one prefill engine, from the first token on. Read it from one task at a time, and close it."""

    def __init__(self, answer: EngineResponse, instance: str, ask: FirstTokenAsk) -> None:
        self._answer = answer
        self._instance = instance
        self._stream = EventStream(answer, instance)
        self._seams = _TextSeams(ask)
        self._ready: list[SampledTokens] = []
        self._end: SampledTokens | None = None
        self.failed = False
        """Whether it ended by a failure of the engine."""
        self.closed = False

    @classmethod
    async def open(
        cls,
        client: EngineClient,
        producer: Instance,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        ask: FirstTokenAsk,
    ) -> "tuple[TokenRelay, SampledTokens]":
        """Ask for a prefill and what follows.

        Returns:
            The stream, and the first of its tokens; none where they can't be told.

        Raises:
            EngineCallError: the prefill failed.
        """
        path = Endpoint.COMPLETIONS.path
        try:
            async with asyncio.timeout(timeout_s):
                answer = await client.open(producer, path, body, headers)
                relay = cls(answer, producer.name, ask)
                try:
                    if answer.status != 200:
                        detail = f"answered {path} with {answer.status}"
                        raise EngineCallError(producer.name, f"http-{answer.status}", detail, answer.status)
                    first = await relay._next()
                except ValueError as error:
                    relay.close()
                    raise relay._refused(error) from None
                except BaseException:
                    relay.close()
                    raise
        except TimeoutError:
            raise EngineCallError(producer.name, "deadline", f"no answer within {timeout_s:g} s") from None
        except DecodeFailedError as failure:
            raise EngineCallError(producer.name, failure.reason, str(failure), blame=failure.blame) from None
        return relay, first or _NOTHING

    @property
    def holds(self) -> bool:
        """Whether it has tokens that can't be told before what comes next: the next ones, or the answer's usage."""
        return self._seams.holds or self._end is not None

    async def next(self) -> SampledTokens | None:
        """What can be told next; None: the engine has failed, or tells no more.

        A call that is cancelled has taken nothing.
        """
        try:
            return await self._next()
        except (DecodeFailedError, ValueError) as error:
            logger.info("a prefill engine stopped decoding while its KV travelled: %s", error)
            self.failed = True
            return None

    def close(self) -> None:
        """Have the engine stop. The KV that it has not sent goes on its way all the same."""
        self.closed = True
        self._answer.close()

    async def _next(self) -> SampledTokens | None:
        """The same; raises DecodeFailedError, and ValueError for what is no stream of tokens."""
        while not self._ready:
            try:
                chunk = await self._stream.read()
            except DecodeFailedError:
                if self._end is None:
                    raise
                chunk = b""
            if not chunk:
                # Behind the end of the answer stands its usage.
                end, self._end = self._end, None
                return end
            for event in events(chunk):
                if event is not None:
                    self._take(event)
        return self._ready.pop(0)

    def _refused(self, error: ValueError) -> EngineCallError:
        """What a stream says that is no answer."""
        status = self._stream.refused_status
        reason = "garbled" if status is None else f"http-{status}"
        return EngineCallError(self._instance, reason, str(error), status, blame=Blame.NONE)

    def _take(self, event: Json) -> None:
        if event.get("choices"):
            told = self._seams.take(event["choices"][0])
            if told is not None and told.finish_reason is not None:
                self._end = told
            elif told is not None:
                self._ready.append(told)
        elif self._end is not None and event.get("usage"):
            self._end = replace(self._end, prompt_details=event["usage"].get("prompt_tokens_details"))


def only_token(instance: str, ask: FirstTokenAsk, answer: bytes) -> SampledTokens:
    """The token in a prefill engine's answer of one. Raises EngineCallError."""
    try:
        return SampledTokens.of(answer, ask)
    except ValueError as error:
        raise EngineCallError(instance, "garbled", str(error), blame=Blame.NONE) from None
