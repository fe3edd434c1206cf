"""The rest of a streamed answer whose decode engine failed: another engine continues it, or it ends with an error."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aiohttp import web

from prfaas.core.scheduling import NoDecodeInstanceError
from prfaas.serving.gateway.answers.decode import Decoder
from prfaas.serving.gateway.answers.streams import (
    DecodeFailedError,
    ResponseWriter,
    note_answer_tokens,
)
from prfaas.serving.gateway.answers.transcript import AnswerText, NotPlainError, StreamTranscript, events
from prfaas.serving.gateway.bodies import JSON_BYTES_PER_TOKEN, Json, WrittenIds, ids_json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import END_OF_EVENT, LAST_EVENT, dialect_of
from prfaas.serving.gateway.prompts.continuing import can_resume, resume_body, tokens_left, wants_usage
from prfaas.serving.gateway.prompts.prompt import Endpoint, TokenPrompt
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.prompts.tokenization import Tokenization
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import DecidedRequest, ReadyRequest


class CannotResumeError(Exception):
    """The stream can't be resumed."""

    def __init__(self, outcome: str) -> None:
        """`outcome`: why, in one word."""
        super().__init__(outcome)
        self.outcome = outcome


class EventSink(Protocol):
    """Takes the events of an answer, one by one."""

    async def write(self, event: bytes, /) -> None: ...


@dataclass(slots=True)
class KnownTokens:
    """The tokens that an answer's text begins with, where their ids are known; text and tokens end together."""

    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """An answer of which the client has the beginning, and which an engine is to continue."""

    request: ServingRequest
    body: Json
    """The client's request, in the form of a stream."""
    prompt_ids: Sequence[int]
    transcript: StreamTranscript
    sink: EventSink
    failed: list[str]
    """All decode engines that have failed this request."""
    known: KnownTokens | None = None
    """Of the transcript's text; None: no token's id is known."""


@dataclass(frozen=True, slots=True)
class AnswerRest:
    """What an engine is asked for to continue an answer."""

    request: ServingRequest
    token_ids: "array[int]"
    """The prompt and the answer so far."""
    sent_tokens: int
    """Tokens of the answer so far."""


class StreamResume:
    """Continues streams after the failure of their decode engine."""

    def __init__(
        self,
        answer_text: AnswerText,
        *,
        tokenization: Tokenization,
        prefill: PrefillOrchestrator,
        decoder: Decoder,
        context: GatewayContext,
    ) -> None:
        self._answer_text = answer_text
        self._tokenization = tokenization
        self._prefill = prefill
        self._decoder = decoder
        self._plane = context.plane
        self._metrics = context.metrics
        self._max_model_len = context.max_model_len
        self._decode_attempts = context.options.decode_attempts

    async def finish(
        self,
        request: ServingRequest,
        ready: ReadyRequest,
        writer: ResponseWriter,
        failure: DecodeFailedError,
        failed: list[str],
    ) -> web.StreamResponse:
        """End a stream that has begun: with the rest of the answer if another engine can give it, else with an error.

        Args:
            failed: decode engines that have failed this request; more are added.
        """
        try:
            outcome = await self._resume(_broken_stream(request, ready, writer, failed))
        except CannotResumeError as error:
            outcome = error.outcome
            sentence = f"The decode instance {failed[-1]} died while answering."
            await self.break_off(request, writer, sentence, failure.event)
        self._count(request, outcome)
        return await writer.end()

    @staticmethod
    async def break_off(
        request: ServingRequest, writer: ResponseWriter, sentence: str, event: bytes | None = None
    ) -> None:
        """Write the last event of a stream that no engine can continue: `event`, or an error that says `sentence`."""
        event = event or dialect_of(request.endpoint).error_event(502, sentence, writer.latest)
        await writer.write(END_OF_EVENT + event if writer.kept.torn else event)
        request.record.broken = True

    def rest_of(self, begun: BegunAnswer, sent_ids: Sequence[int], max_tokens: int) -> AnswerRest:
        """A request for what follows `sent_ids`, the tokens of the answer so far: `max_tokens` at most."""
        request, ids = begun.request, array("I", (*begun.prompt_ids, *sent_ids))
        written = WrittenIds(ids, ids_json(ids))
        rest = replace(
            request,
            endpoint=Endpoint.COMPLETIONS,
            body=resume_body(begun.body, request.model, written, len(sent_ids), max_tokens),
            size_bytes=len(ids) * JSON_BYTES_PER_TOKEN,
            prompt=TokenPrompt(ids),
            samples=1,
        )
        return AnswerRest(rest, ids, len(sent_ids))

    async def close(self, begun: BegunAnswer, sent_tokens: int, details: Json | None = None) -> None:
        """Write what follows the last token of a complete answer. `details`: the usage's, where they are known."""
        for event in begun.transcript.closing_events(
            len(begun.prompt_ids), sent_tokens, usage=wants_usage(begun.body), details=details
        ):
            await begun.sink.write(event)
        begun.request.record.answer_tokens = sent_tokens

    async def hashed(self, rest: AnswerRest) -> TokenizedPrompt:
        """The prompt of `rest` with the hashes of its blocks."""
        return await self._tokenization.hash_blocks(rest.request, rest.token_ids)

    async def go_on(self, begun: BegunAnswer, rest: AnswerRest, ready: ReadyRequest) -> None:
        """Write the rest of an answer by the decode engine of `ready`; if it fails, by others.

        Raises:
            CannotResumeError: perhaps after a part of it.
        """
        begun.request.record.sent(ready.header())
        if not await self._relayed(begun, rest, ready):
            try:
                outcome = await self._resume(begun)
            except CannotResumeError as error:
                self._count(begun.request, error.outcome)
                raise
            self._count(begun.request, outcome)

    def _count(self, request: ServingRequest, outcome: str) -> None:
        self._metrics.continuations.labels(outcome).inc()
        request.record.note(f"continuation: {outcome}")

    async def _resume(self, begun: BegunAnswer) -> str:
        """Write the rest. Raises CannotResumeError, perhaps after a part of it."""
        request, transcript, prompt_ids = begun.request, begun.transcript, begun.prompt_ids
        while True:
            sent_ids = await self._sent_ids(begun)
            if sent_ids is None:
                raise CannotResumeError("not-exact")
            max_tokens = tokens_left(
                request.endpoint, begun.body, len(prompt_ids), len(sent_ids), self._max_model_len
            )
            if transcript.finish_reason is not None or transcript.ended or max_tokens < 1:
                await self.close(begun, len(sent_ids))
                return "finished"
            if len(begun.failed) >= self._decode_attempts:
                raise CannotResumeError("attempts")
            rest = self.rest_of(begun, sent_ids, max_tokens)
            try:
                ready = await self._prefill.prepare_again(rest.request, await self.hashed(rest), begun.failed)
            except NoDecodeInstanceError:
                raise CannotResumeError("no-instance") from None
            if await self._relayed(begun, rest, ready):
                return "continued"

    async def _sent_ids(self, begun: BegunAnswer) -> list[int] | None:
        """The tokens of the answer so far; None if they can't be had with certainty."""
        known, text = begun.known, begun.transcript.text
        if known is None:
            return await self._answer_text.ids_after(begun.prompt_ids, text)
        # They never end within a character.
        before = (*begun.prompt_ids, *known.ids)
        ids = await self._answer_text.ids_after(before, text[len(known.text) :])
        return None if ids is None else [*known.ids, *ids]

    async def _relayed(self, begun: BegunAnswer, rest: AnswerRest, ready: ReadyRequest) -> bool:
        """Whether the decode engine has ended the answer. Raises CannotResumeError."""
        try:
            await self._relay_rest(begun, rest, ready)
        except DecodeFailedError as failure:
            self._decoder.report(begun.request, ready, failure)
            begun.failed.append(ready.decode)
            return False
        except NotPlainError:
            raise CannotResumeError("not-plain") from None
        return True

    async def _relay_rest(self, begun: BegunAnswer, rest: AnswerRest, ready: ReadyRequest) -> None:
        """Pass the decode engine's stream on in the first one's form. Raises DecodeFailedError and NotPlainError."""
        async with self._decoder.stream(rest.request, ready) as stream:
            while chunk := await stream.read():
                for event in events(chunk):
                    if event is None:
                        begun.transcript.ended = True
                        await begun.sink.write(LAST_EVENT)
                    else:
                        piece = begun.transcript.rewrite(event, len(begun.prompt_ids), rest.sent_tokens)
                        note_answer_tokens(begun.request.record, piece)
                        await begun.sink.write(piece)


def _broken_stream(
    request: ServingRequest, ready: ReadyRequest, writer: ResponseWriter, failed: list[str]
) -> BegunAnswer:
    """What is known of a broken stream. Raises CannotResumeError."""
    if not isinstance(ready, DecidedRequest) or not can_resume(request.endpoint, request.body):
        raise CannotResumeError("parameters")
    written = writer.kept.written()
    if written is None:
        raise CannotResumeError("not-kept")
    try:
        transcript = StreamTranscript.of(request.endpoint, written)
    except NotPlainError:
        raise CannotResumeError("not-plain") from None
    return BegunAnswer(
        request=request,
        body=request.body,
        prompt_ids=ready.prompt.token_ids,
        transcript=transcript,
        sink=writer,
        failed=failed,
    )
