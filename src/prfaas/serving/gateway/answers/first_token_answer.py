"""Answers that begin with a token of the engine that prefilled: the client has it at once, the rest as ever."""

import time
from collections.abc import Iterator

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
from prfaas.serving.gateway.answers.streams import ResponseWriter
from prfaas.serving.gateway.answers.taken_ids import TakenIds
from prfaas.serving.gateway.answers.transcript import StreamTranscript
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT
from prfaas.serving.gateway.prompts.continuing import stop_strings
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.ways.first_token import SampledTokens
from prfaas.serving.gateway.ways.kv_transfer import HopFailedError
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import EarlyRequest


class FirstTokenAnswers:
    """Writes answers that begin with a token of the engine that prefilled."""

    def __init__(
        self, *, prefill: PrefillOrchestrator, resume: StreamResume, context: GatewayContext
    ) -> None:
        self._prefill = prefill
        self._resume = resume
        self._metrics = context.metrics

    async def answer(
        self, request: ServingRequest, ready: EarlyRequest, writer: ResponseWriter
    ) -> web.StreamResponse:
        """Give the client its first token, then the decode engine's rest of the answer."""
        first, body = ready.first, request.body
        told = list(_opening_events(request, first))
        ids = TakenIds(request.endpoint, is_asked=False)
        ids.ids.extend(first.token_ids)
        ids.shown = len(first.token_ids)
        writer.ids = ids
        stops, includes = stop_strings(body), body.get("include_stop_str_in_output") is True
        begun = BegunAnswer(
            request=request,
            prompt=ready.prompt,
            ids=ids,
            transcript=StreamTranscript.of(request.endpoint, b"".join(told)),
            writer=writer,
            failed=[],
            stops=StopAccount(stops, includes=includes, text=first.text, held_chars=0) if stops else None,
        )
        self._metrics.first_tokens.labels("prefill" if first.finish_reason is None else "whole").inc()
        try:
            for event in told:
                await writer.write(event)
            if first.finish_reason is None:
                await self._go_on(begun, ready)
            else:
                self._prefill.abandon(ready, "the answer ended before the KV had come")
                await self._resume.close(begun, first.prompt_details)
                request.record.attempts[-1].outcome = "done"
        except CannotResumeError as error:
            request.record.note(f"continuation: {error.outcome}")
            sentence = "No decode instance can continue."
            if begun.failed:
                sentence = f"The decode instance {begun.failed[-1]} does not answer."
            await self._resume.break_off(request, writer, sentence)
        except BaseException:
            self._prefill.abandon(ready, "the request ended before its decode")
            raise
        return await writer.end()

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


def _continued(rest: AnswerRest, prompt: TokenizedPrompt) -> TokenizedPrompt:
    """The prompt of `rest`, with the hashes of the one that it continues: no other request has sent what follows."""
    takes_ids = rest.request.endpoint is Endpoint.CHAT
    return TokenizedPrompt(rest.token_ids, prompt.chains, takes_ids)


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
