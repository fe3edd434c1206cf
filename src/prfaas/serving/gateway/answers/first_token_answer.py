"""Answers that begin with a token of the engine that prefilled: the client has it at once, the rest as ever."""

import time
from collections.abc import Iterator
from typing import Any

import orjson
from aiohttp import web

from prfaas.core.scheduling import NoDecodeInstanceError
from prfaas.serving.gateway.answers.stop_account import StopAccount
from prfaas.serving.gateway.answers.stream_resume import (
    AnswerRest,
    BegunAnswer,
    CannotResumeError,
    StreamResume,
)
from prfaas.serving.gateway.answers.streams import ResponseWriter, WholeAnswer
from prfaas.serving.gateway.answers.taken_ids import TakenIds
from prfaas.serving.gateway.answers.transcript import StreamTranscript, usage_of
from prfaas.serving.gateway.bodies import ApiError, Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT
from prfaas.serving.gateway.prompts.continuing import stop_strings
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.ways.first_token import SampledTokens
from prfaas.serving.gateway.ways.kv_transfer import HopFailedError
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import AnsweredRequest, EarlyRequest


class _Unsent:
    """Where an answer in one piece grows: what is known of it is in its transcript."""

    async def write(self, event: bytes) -> None:
        """Nothing is sent."""


class FirstTokenAnswers:
    """Writes answers that begin with a token of the engine that prefilled."""

    def __init__(
        self, *, prefill: PrefillOrchestrator, resume: StreamResume, context: GatewayContext
    ) -> None:
        self._prefill = prefill
        self._resume = resume
        self._metrics = context.metrics

    async def answer(
        self,
        request: ServingRequest,
        ready: EarlyRequest | AnsweredRequest,
        writer: ResponseWriter,
    ) -> web.StreamResponse:
        """Give the client its first token, then the decode engine's rest of the answer.

        Raises:
            ApiError: no engine could end an answer of which nothing was sent.
        """
        streams, first = request.body.get("stream") is True, ready.first
        told = list(_opening_events(request, first))
        ids = TakenIds(request.endpoint, is_asked=False)
        ids.ids.extend(first.token_ids)
        ids.shown = len(first.token_ids)
        writer.ids = ids
        stops, body = stop_strings(request.body), _streamed(request.body)
        includes = body.get("include_stop_str_in_output") is True
        begun = BegunAnswer(
            request=request,
            body=body,
            prompt=ready.prompt,
            ids=ids,
            transcript=StreamTranscript.of(request.endpoint, b"".join(told)),
            sink=writer if streams else _Unsent(),
            failed=[],
            stops=StopAccount(stops, includes=includes, text=first.text, held_chars=0) if stops else None,
        )
        self._metrics.first_tokens.labels("prefill" if first.finish_reason is None else "whole").inc()
        try:
            for event in told:
                await begun.sink.write(event)
            if isinstance(ready, EarlyRequest) and first.finish_reason is None:
                await self._go_on(begun, ready)
            else:
                self._prefill.abandon(ready, "the answer ended before the KV had come")
                await self._resume.close(begun, first.prompt_details)
                request.record.attempts[-1].outcome = "done"
        except CannotResumeError as error:
            return await self._fail(begun, error, writer if streams else None)
        except BaseException:
            self._prefill.abandon(ready, "the request ended before its decode")
            raise
        return await writer.end() if streams else writer.send(_whole(begun))

    async def _go_on(self, begun: BegunAnswer, early: EarlyRequest) -> None:
        """Have the decode engine continue after the first token, once its KV is there, or nearly.

        Raises:
            CannotResumeError: no engine can.
        """
        rest = self._resume.rest_of(begun)
        assert rest is not None, "an answer of one token ends with it"
        try:
            ready = await self._prefill.loadable(early, rest.request, _continued(rest, early.prompt))
        except HopFailedError as failure:
            try:
                ready = await self._prefill.prepare_near(
                    rest.request,
                    await self._resume.hashed(rest),
                    () if failure.hopeless else (early.decision.prefill,),
                    failure.reason,
                )
            except NoDecodeInstanceError:
                raise CannotResumeError("no-instance") from None
        await self._resume.go_on(begun, rest, ready)

    async def _fail(
        self, begun: BegunAnswer, error: CannotResumeError, writer: ResponseWriter | None
    ) -> web.StreamResponse:
        """No engine can end the answer: say so in the stream, or in place of an answer (ApiError)."""
        request = begun.request
        request.record.note(f"continuation: {error.outcome}")
        sentence = "No decode instance can continue."
        if begun.failed:
            sentence = f"The decode instance {begun.failed[-1]} does not answer."
        if writer is None:
            raise ApiError(503, sentence, retry_after_s=1)
        await self._resume.break_off(request, writer, sentence)
        return await writer.end()


def _continued(rest: AnswerRest, prompt: TokenizedPrompt) -> TokenizedPrompt:
    """The prompt of `rest`, with the hashes of the one that it continues: no other request has sent what follows."""
    takes_ids = rest.request.endpoint is Endpoint.CHAT
    return TokenizedPrompt(rest.token_ids, prompt.chains, takes_ids)


def _streamed(body: Json) -> Json:
    """The body as of a stream that tells its usage: the form in which decode engines answer the gateway."""
    if body.get("stream") is True:
        return body
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


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


def _whole(begun: BegunAnswer) -> WholeAnswer:
    """The answer in one piece, in vLLM's form."""
    transcript, chat = begun.transcript, begun.request.endpoint is Endpoint.CHAT
    said: dict[str, Any] = {"text": transcript.text}
    if chat:
        nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        said = {"message": {"role": "assistant", "content": transcript.text, **nothing}}
    answer = {
        "id": transcript.event["id"],
        "object": "chat.completion" if chat else "text_completion",
        "created": transcript.event["created"],
        "model": transcript.event["model"],
        "choices": [
            {
                "index": 0,
                **said,
                "logprobs": None,
                "finish_reason": transcript.finish_reason,
                "stop_reason": transcript.stop_reason,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": transcript.usage or usage_of(len(begun.prompt.token_ids), 1),
        "kv_transfer_params": None,
    }
    return WholeAnswer(200, orjson.dumps(answer), "application/json")
