"""Answers of ready requests, from the decode engine to the client, whichever engines fail meanwhile.

Before its first byte another engine may answer in place of one that failed. After it, and after a first token of the
prefill, an engine continues the stream from the tokens so far, or the stream ends with an error.
"""

import time
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import orjson
from aiohttp import web

from prfaas.core.scheduling.view import NoDecodeInstanceError
from prfaas.serving.gateway.admission import AdmittedRequest
from prfaas.serving.gateway.answers.answer_bytes import TakenIds, note_answer_tokens, taken_of_whole
from prfaas.serving.gateway.answers.calls import CalledAnswers
from prfaas.serving.gateway.answers.decode import MAX_ANSWERING_ATTEMPTS, Decoder
from prfaas.serving.gateway.answers.shadow import Shadow
from prfaas.serving.gateway.answers.streams import EngineAnswerError, ResponseWriter
from prfaas.serving.gateway.answers.transcript import (
    AnswerRest,
    AnswerText,
    BegunAnswer,
    CannotResumeError,
    NotPlainError,
    StopAccount,
    StreamTranscript,
    events,
    last_said,
    plain,
)
from prfaas.serving.gateway.bodies import JSON_BYTES_PER_TOKEN, ApiError, Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.serving.gateway.engine_client import OWN_RESOURCES, TOO_LONG, EngineCallError
from prfaas.serving.gateway.prompts.prompt import (
    Endpoint,
    RenderedPrompt,
    TokenPrompt,
    rest_body,
    stop_strings,
    tokens_left,
    wants_usage,
)
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.prompts.tokenization import Tokenization
from prfaas.serving.gateway.ways.first_token import SampledTokens
from prfaas.serving.gateway.ways.kv_transfer import HopFailedError
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import DecidedRequest, EarlyRequest, ReadyRequest


class Answering:
    """Has requests answered, by another decode engine where one fails.

    `answer` is the whole way. `_decode` asks one engine after the other until the client has something of the answer.
    A stream that has begun is a `BegunAnswer`: `_after_first` makes one of a first token of the prefill, `_finish` of
    what a failed engine has left. `_resume` has the rest written: it forgets what the client has not read (`_cut`),
    asks for what follows (`_rest_of`), and rewrites it in the first stream's form (`_relayed`). Where tools have been
    called, an engine is asked for tokens (`CalledAnswers`).
    """

    def __init__(
        self,
        context: GatewayContext,
        *,
        tokenization: Tokenization,
        prefill: PrefillOrchestrator,
        shadow: Shadow,
    ) -> None:
        self._tokenization = tokenization
        self._prefill = prefill
        self._shadow = shadow
        self._context = context
        self._decoder = Decoder(prefill, context)
        self._answer_text = AnswerText(context.running.current.model.path)
        self._called = CalledAnswers(tokenization, context)

    async def answer(
        self, ready: ReadyRequest, admitted: AdmittedRequest, writer: ResponseWriter
    ) -> web.StreamResponse:
        """Pass the answer on to the client, within the time that it gave. Raises ApiError."""
        is_compared = self._shadow.wants(ready)
        # Its engine tells the ids of what might be resumed.
        asked = ready
        if is_compared and isinstance(ready, DecidedRequest):
            asked = replace(ready, prompt=replace(ready.prompt, request=replace(ready.request, resumes=True)))
        try:
            async with admitted.in_time():
                response = await self._decode(asked, writer)
        finally:
            writer.note_tokens()
        if is_compared:
            ids = writer.ids.ids if writer.ids is not None else ()
            if isinstance(response, web.Response) and isinstance(response.body, bytes) and not ids:
                answer, ids = taken_of_whole(response.body)
                response.body = response.body if ready.request.body.get("return_token_ids") else answer
            # Some of what was transferred is computed again elsewhere, later.
            self._shadow.compare(ready, ids if response.status == 200 else ())
        return response

    async def _decode(self, ready: ReadyRequest, writer: ResponseWriter) -> web.StreamResponse:
        """Relay what the decode engine says.

        While the client has seen nothing, another engine may answer in place of one that failed. After the first
        byte, another engine continues the text if the request allows it. Raises ApiError.
        """
        request = ready.request
        if isinstance(ready, EarlyRequest):
            request.record.sent(ready.header())
            return await self._after_first(ready, writer)
        failed: list[str] = []
        while True:
            if request.endpoint.generates:
                request.record.sent(ready.header())
            try:
                return await self._decoder.relay(ready, writer)
            except EngineCallError as failure:
                self._decoder.report(ready, failure)
                failed.append(ready.decode)
                if writer.begun:
                    return await self._finish(ready, writer, failure, failed)
                another = await self._reroute(ready, failure, failed)
                if another is None and isinstance(failure, EngineAnswerError) and failure.answer is not None:
                    return await writer.send(failure.answer)
                if another is None:
                    raise _unanswered(failure, failed[-1]) from None
                ready = another

    async def _reroute(
        self, ready: ReadyRequest, failure: EngineCallError, failed: Collection[str]
    ) -> ReadyRequest | None:
        """The same request made ready for another decode engine; None when there is none or enough have failed."""
        if failure.reason in (OWN_RESOURCES, TOO_LONG):
            return None
        answered = isinstance(failure, EngineAnswerError)
        if len(failed) >= (MAX_ANSWERING_ATTEMPTS if answered else self._context.options.decode_attempts):
            return None
        try:
            return await self._prefill.prepare_again(ready.request, ready.prompt, avoid=failed)
        except NoDecodeInstanceError:
            return None

    async def _finish(
        self, ready: ReadyRequest, writer: ResponseWriter, failure: EngineCallError, failed: list[str]
    ) -> web.StreamResponse:
        """End a stream that has begun: with the rest of the answer if another engine can give it, else with an error.

        Args:
            failed: decode engines that have failed this request; more are added.
        """
        try:
            await self._resume(_broken_stream(ready, writer, failed))
        except CannotResumeError as error:
            sentence = f"The decode instance {failed[-1]} died while answering."
            event = failure.event if isinstance(failure, EngineAnswerError) else None
            await writer.break_off(sentence, event)
            self._count(ready.request, error.outcome)
        return await writer.end()

    async def _after_first(self, early: EarlyRequest, writer: ResponseWriter) -> web.StreamResponse:
        """Give the client its first token, and the decode engine's rest of the answer once its KV is there."""
        request, first = early.request, early.first
        told = list(_opening_events(request, first))
        writer.ids = ids = TakenIds(request.endpoint, is_asked=False)
        ids.keep(first.token_ids)
        ids.shown = len(first.token_ids)
        begun = BegunAnswer(
            request=request,
            prompt=early.prompt,
            transcript=StreamTranscript.of(request.endpoint, b"".join(told)),
            ids=ids,
            writer=writer,
            failed=[],
        )
        _look_for_stops(begun, first.text, held_chars=0)
        self._context.metrics.first_tokens.labels("prefill" if first.finish_reason is None else "whole").inc()
        try:
            for event in told:
                await writer.write(event)
            if first.finish_reason is None:
                await self._go_on(begun, early)
            else:
                self._prefill.abandon(early, "the answer ended before the KV had come")
                await self._close(begun, first.prompt_details)
                request.record.attempts[-1].outcome = "done"
        except CannotResumeError as error:
            request.record.note(f"continuation: {error.outcome}")
            sentence = "No decode instance can continue."
            if begun.failed:
                sentence = f"The decode instance {begun.failed[-1]} does not answer."
            await writer.break_off(sentence)
        except BaseException:
            self._prefill.abandon(early, "the request ended before its decode")
            raise
        return await writer.end()

    async def _go_on(self, begun: BegunAnswer, early: EarlyRequest) -> None:
        """Write what follows the first token. Raises CannotResumeError, perhaps after a part of it."""
        rest = self._rest_of(begun)
        assert rest is not None, "an answer of one token has none of the prefill"
        # Its hashes are those of the prompt: no other request has sent what follows.
        is_chat = begun.request.endpoint is Endpoint.CHAT
        prompt = TokenizedPrompt(rest.request, rest.token_ids, early.prompt.chains, is_chat)
        try:
            ready: ReadyRequest = await self._prefill.loadable(early, prompt)
        except HopFailedError as failure:
            avoid = () if failure.hopeless else (early.decision.prefill,)
            prompt = await self._tokenization.hash_blocks(rest.request, rest.token_ids)
            try:
                ready = await self._prefill.prepare_again(rest.request, prompt, avoid, failure.reason)
            except NoDecodeInstanceError:
                raise CannotResumeError("no-instance") from None
        begun.request.record.sent(ready.header())
        if not await self._relayed(begun, rest, ready):
            try:
                await self._resume(begun)
            except CannotResumeError as error:
                self._count(begun.request, error.outcome)
                raise

    def _rest_of(self, begun: BegunAnswer) -> AnswerRest | None:
        """A request for what follows the tokens so far; None: nothing may follow."""
        request, sent = begun.request, begun.ids.ids
        max_tokens = tokens_left(
            request.endpoint,
            begun.request.body,
            len(begun.prompt.token_ids),
            len(sent),
            self._context.max_model_len,
        )
        if begun.transcript.finish_reason is not None or begun.transcript.ended or max_tokens < 1:
            return None
        ids = array("I", begun.prompt.token_ids) + sent
        is_chat = request.endpoint is Endpoint.CHAT
        takes_ids = is_chat and not begun.ids.calls
        rest = replace(
            request,
            body=rest_body(request.endpoint, begun.request.body, ids, len(sent), max_tokens),
            size_bytes=request.size_bytes * is_chat + len(ids) * JSON_BYTES_PER_TOKEN,
            prompt=RenderedPrompt(plain=None, takes_ids=True) if takes_ids else TokenPrompt(ids),
        )
        return AnswerRest(rest, ids, len(sent))

    async def _close(self, begun: BegunAnswer, details: Json | None = None) -> None:
        """Write what follows the last token of a complete answer. `details`: the usage's, where they are known."""
        sent_tokens = len(begun.ids.ids)
        for event in begun.transcript.closing_events(
            len(begun.prompt.token_ids), sent_tokens, usage=wants_usage(begun.request.body), details=details
        ):
            await begun.writer.write(event)
        begun.request.record.answer_tokens = sent_tokens

    def _count(self, request: ServingRequest, outcome: str) -> None:
        self._context.metrics.continuations.labels(outcome).inc()
        request.record.note(f"continuation: {outcome}")

    async def _resume(self, begun: BegunAnswer) -> None:
        """Write the rest. Raises CannotResumeError, perhaps after a part of it."""
        while True:
            if begun.transcript.finish_reason is None and not begun.ids.calls:
                await self._cut(begun)
            rest = self._rest_of(begun)
            if rest is None:
                await self._close(begun)
                return self._count(begun.request, "finished")
            if len(begun.failed) >= self._context.options.decode_attempts:
                raise CannotResumeError("attempts")
            try:
                if begun.ids.calls:
                    rest = await self._called.in_tokens(begun, rest)
                prompt = await self._tokenization.hash_blocks(rest.request, rest.token_ids)
                ready = await self._prefill.prepare_again(rest.request, prompt, begun.failed)
            except NoDecodeInstanceError:
                raise CannotResumeError("no-instance") from None
            if await self._relayed(begun, rest, ready):
                return self._count(begun.request, "continued")

    async def _cut(self, begun: BegunAnswer) -> None:
        """Forget the last tokens as far as the client has read nothing of them. Raises CannotResumeError.

        They are sampled again: those of half a character, and those of which a parser has not made anything yet.
        """
        taken, stops, held_chars = begun.ids, stop_strings(begun.request.body), 0
        if stops and not begun.includes_stop and begun.transcript.stops is None:
            held_chars = max(map(len, stops)) - 1
        sent, text = taken.shown, ""
        if taken.latest:
            try:
                with plain():
                    said = last_said(taken.latest)
            except NotPlainError:
                raise CannotResumeError("not-plain") from None
            if said is None:
                raise CannotResumeError("in-call")
            seam = await self._answer_text.seam(
                begun.prompt.token_ids, taken.ids[:sent], said, taken.shown_before, held_chars
            )
            if seam is None:
                raise CannotResumeError("not-exact")
            sent, text = seam
        taken.cut(sent)
        if begun.transcript.stops is None:
            _look_for_stops(begun, text, held_chars)

    async def _relayed(self, begun: BegunAnswer, rest: AnswerRest, ready: ReadyRequest) -> bool:
        """Whether the decode engine has ended the answer. Raises CannotResumeError."""
        try:
            await self._relay_rest(begun, rest, ready)
        except EngineCallError as failure:
            self._decoder.report(ready, failure)
            begun.failed.append(ready.decode)
            return False
        except NotPlainError:
            raise CannotResumeError("not-plain") from None
        return True

    async def _relay_rest(self, begun: BegunAnswer, rest: AnswerRest, ready: ReadyRequest) -> None:
        """Pass the decode engine's stream on in the first one's form. Raises EngineCallError and NotPlainError."""
        transcript, stops, taken = begun.transcript, begun.transcript.stops, begun.ids
        least_tokens = begun.request.body.get("min_tokens") or 0
        async with self._decoder.stream(ready) as stream:
            while chunk := await stream.read():
                told: Iterable[Json | None] = _one_by_one(chunk, taken)
                if rest.request.endpoint is Endpoint.GENERATE:
                    told = await self._called.told(chunk, begun, ready.decode)
                for event in told:
                    if event is None:
                        transcript.ended = True
                        await begun.writer.write(LAST_EVENT)
                        continue
                    may_stop = len(taken.ids) > least_tokens
                    with plain():
                        piece = transcript.rewrite(
                            event, len(begun.prompt.token_ids), rest.sent_tokens, may_stop=may_stop
                        )
                    if piece:
                        note_answer_tokens(begun.request.record, piece)
                        await begun.writer.write(piece)
                    if stops is not None and stops.stop is not None:
                        await self._close(begun)
                        return


def _one_by_one(chunk: bytes, taken: TakenIds) -> Iterator[Json | None]:
    """A stream's events, whose ids are taken with each: tokens behind a stop string are none of the answer's."""
    for raw in chunk.split(END_OF_EVENT):
        with plain():
            told = list(events(taken.take(raw + END_OF_EVENT)))
        yield from told


def _unanswered(failure: EngineCallError, decode: str) -> ApiError:
    if failure.reason == OWN_RESOURCES:
        return ApiError(503, "The gateway has no file descriptor left; try again.", retry_after_s=1)
    if failure.reason == TOO_LONG:
        sentence = "The answer is too long for one piece; ask for a stream, or for fewer answers or log probabilities."
        return ApiError(502, sentence, reason=TOO_LONG)
    return ApiError(503, f"The decode instance {decode} does not answer.", retry_after_s=1)


def _look_for_stops(begun: BegunAnswer, text: str, held_chars: int) -> None:
    """From now on the gateway finds the stop strings, if there are any; see `StopAccount`."""
    if stops := stop_strings(begun.request.body):
        begun.transcript.stops = StopAccount(
            stops, includes=begun.includes_stop, text=text, held_chars=held_chars
        )


def _broken_stream(ready: ReadyRequest, writer: ResponseWriter, failed: list[str]) -> BegunAnswer:
    """What is known of a broken stream. Raises CannotResumeError."""
    if not isinstance(ready, DecidedRequest) or writer.ids is None:
        raise CannotResumeError("parameters")
    try:
        with plain():
            transcript = StreamTranscript.of(ready.request.endpoint, writer.ids.latest + writer.latest)
    except NotPlainError:
        raise CannotResumeError("not-plain") from None
    return BegunAnswer(
        request=ready.request,
        prompt=ready.prompt,
        transcript=transcript,
        ids=writer.ids,
        writer=writer,
        failed=failed,
    )


def _opening_events(request: ServingRequest, first: SampledTokens) -> Iterator[bytes]:
    """The events of a stream as vLLM begins it, with the first token."""
    chat = request.endpoint is Endpoint.CHAT
    head: Json = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.record.request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }
    if chat:
        role = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        yield _event(head, role)
        said: Json = {"delta": {"content": first.text}}
    else:
        said = {"text": first.text}
    choice: Json = {"index": 0, **said, "logprobs": None, "finish_reason": first.finish_reason}
    if not chat or first.finish_reason is not None:
        choice["stop_reason"] = first.stop_reason
    yield _event(head, {**choice, "token_ids": None})


def _event(head: Json, choice: Json) -> bytes:
    return DATA + orjson.dumps({**head, "choices": [choice]}) + END_OF_EVENT
