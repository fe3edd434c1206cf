"""Answers whose first token the prefill engine has sampled: the client has it at once, and what it relays.

Then the decode engine goes on.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web

from prfaas.core.deployment import Deployment
from prfaas.core.kv import KvModel
from prfaas.core.scheduling import NoDecodeInstanceError
from prfaas.serving.gateway.answer import ResponseWriter, WholeAnswer
from prfaas.serving.gateway.bodies import ApiError, Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT
from prfaas.serving.gateway.first_token import SampledTokens
from prfaas.serving.gateway.first_token_rules import reuses_any_prefix
from prfaas.serving.gateway.held_events import HeldEvents
from prfaas.serving.gateway.hop_failure import HopFailedError
from prfaas.serving.gateway.prefill import PrefillOrchestrator
from prfaas.serving.gateway.prompts import Endpoint
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.stream_resume import (
    AnswerRest,
    BegunAnswer,
    CannotResumeError,
    KnownTokens,
    StreamResume,
    tokens_left,
    wants_usage,
)
from prfaas.serving.gateway.token_relay import TokenRelay
from prfaas.serving.gateway.transcript import StreamTranscript, usage_of
from prfaas.serving.tasks import end_all

# Fewer tokens are computed in little more than a step.
_CATCH_UP_TOKENS = 8
# With each there are fewer left: so many as the prefill engine makes while the decode engine computes those before.
_MOST_CATCH_UPS = 4

# How long the end of a character, or of a stop string that may have begun, is waited for once the KV is there.
_SEAM_PATIENCE_S = 1.0

# The pause until a decode engine's first token, before one was seen. Longer ones are not hidden as a whole: that much
# later is what a client reads meanwhile.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 0.5
# Of the pause before: one short pause does not tell that the next is as short.
_PAUSE_DECAY = 0.8


class _Unsent:
    """Where an answer in one piece grows: what is known of it is in its transcript."""

    async def write(self, event: bytes) -> None:
        """Nothing is sent."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is known of one answer, and the way to its client."""

    begun: BegunAnswer
    known: KnownTokens
    """The same as the one of `begun`."""
    sink: HeldEvents
    """The same as the one of `begun`."""
    prompt: TokenizedPrompt
    prepared: PreparedRequest


class FirstTokenAnswers:
    """Writes answers that begin with a token of the engine that prefilled, and perhaps with some that it relays."""

    def __init__(
        self,
        deployment: Deployment,
        kv_model: KvModel | None,
        *,
        prefill: PrefillOrchestrator,
        resume: StreamResume,
        context: GatewayContext,
    ) -> None:
        self._catches_up = reuses_any_prefix(deployment, kv_model)
        self._prefill = prefill
        self._resume = resume
        self._waits = context.plane.waits
        self._metrics = context.metrics
        self._max_model_len = context.max_model_len
        self._pauses_s: dict[str, float] = {}

    async def answer(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt,
        prepared: PreparedRequest,
        first: SampledTokens,
        writer: ResponseWriter,
    ) -> web.StreamResponse:
        """Give the client its first token, then what the prefill engine relays, then the decode engine's rest of it.

        Raises:
            ApiError: no engine could end an answer of which nothing was sent.
        """
        streams = request.body.get("stream") is True
        told = list(_opening_events(request, first))
        sink = HeldEvents(writer if streams else _Unsent())
        known = KnownTokens(list(first.token_ids), first.text)
        begun = BegunAnswer(
            request=request,
            body=_streamed(request.body),
            prompt_ids=prompt.token_ids,
            transcript=StreamTranscript.of(request.endpoint, b"".join(told)),
            sink=sink,
            failed=[],
            known=known,
        )
        self._metrics.first_tokens.labels("prefill" if first.finish_reason is None else "whole").inc()
        try:
            for event in told:
                await sink.add(event)
            ended = first.finish_reason is not None
            answer = _Answer(begun, known, sink, prompt, prepared)
            last = first if ended else await self._after_first(answer)
            if last is not None:
                self._prefill.abandon(prepared, "the answer ended before the KV had come")
                await self._end(begun, known, last)
        except CannotResumeError as error:
            await sink.release()
            return await self._fail(begun, error, writer if streams else None)
        except BaseException:
            self._prefill.abandon(prepared, "the request ended before its decode")
            raise
        finally:
            await sink.close()
            if prepared.relay is not None:
                prepared.relay.close()
        return await writer.end() if streams else writer.send(_whole(begun))

    async def _after_first(self, answer: _Answer) -> SampledTokens | None:
        """Give the client what follows its first token.

        Returns:
            The relayed tokens that ended the answer; None: the decode engine has ended it.
        """
        handing = asyncio.get_running_loop().create_task(self._hand_over(answer))
        try:
            last = await self._relay(answer, handing)
            if last is None:
                is_handed_over = answer.prepared.relay is not None and handing.done()
                if await self._go_on(answer, handing) and is_handed_over:
                    self._note_pause(answer.prepared.decode, answer.sink.pause_s)
        finally:
            await end_all(handing)
        return last

    def _note_pause(self, decode: str, pause_s: float | None) -> None:
        """Remember how long a decode engine took to go on after relayed tokens."""
        if pause_s is not None:
            before_s = _PAUSE_DECAY * self._pauses_s.get(decode, 0.0)
            self._pauses_s[decode] = min(max(pause_s, before_s), _LONGEST_PAUSE_S)

    async def _hand_over(self, answer: _Answer) -> PreparedRequest | None:
        """Wait for the KV, and while tokens are relayed have the decode engine compute those that were.

        Meanwhile so many of them are held back as the client reads until the decode engine's own first token.

        Returns:
            What the rest of the answer is prepared as; None: no engine has computed anything.

        Raises:
            HopFailedError: the KV does not come.
        """
        prepared, known, sink = answer.prepared, answer.known, answer.sink
        arriving, soon, relay = prepared.arriving, prepared.soon, prepared.relay
        assert arriving is not None and soon is not None
        await asyncio.wait((arriving, soon), return_when=asyncio.FIRST_COMPLETED)
        if relay is None or (arriving.done() and (arriving.cancelled() or arriving.exception() is not None)):
            return None
        sink.hold(self._pauses_s.get(prepared.decode, _FIRST_PAUSE_S))
        ready, computed_tokens = None, 0
        # Asked once: from then on this request is one that waits there.
        catches_up = self._catches_up and self._waits.keeps(prepared.decode)
        for _ in range(_MOST_CATCH_UPS if catches_up else 0):
            known_tokens = len(known.ids)
            if relay.closed or known_tokens < computed_tokens + _CATCH_UP_TOKENS:
                break
            rest = self._resume.rest_of(answer.begun, known.ids, 1)
            rest_prompt = _continued(rest, answer.prompt)
            if ready is None:
                ready = await self._prefill.loadable(prepared, rest.request, rest_prompt)
            ready = await self._resume.compute(answer.begun, rest, replace(ready, prompt=rest_prompt))
            if ready is None:
                return None
            computed_tokens = known_tokens
            await sink.filled()
        await sink.filled()
        return ready

    async def _relay(
        self, answer: _Answer, handing: "asyncio.Task[PreparedRequest | None]"
    ) -> SampledTokens | None:
        """Pass on what the prefill engine decodes until `handing` is over.

        Returns:
            The tokens that ended the answer; None: the decode engine is to go on after what is known.
        """
        begun, known, relay = answer.begun, answer.known, answer.prepared.relay
        if relay is None:
            return None
        record = begun.request.record
        outcome, last = "handed-over", None
        async for tokens in _relayed(relay, handing):
            if tokens is None:
                outcome = "failed" if relay.failed else "limit"
                break
            piece = begun.transcript.rewrite(_choice_event(tokens), len(begun.prompt_ids), len(known.ids))
            known.ids += tokens.token_ids
            known.text += tokens.text
            await answer.sink.add(piece)
            record.relayed_tokens += len(tokens.token_ids)
            self._metrics.relayed_tokens.inc(len(tokens.token_ids))
            if tokens.finish_reason is not None:
                outcome, last = "ended", tokens
                break
        # What the engine has computed beyond is dropped.
        relay.close()
        answer.sink.end_filling()
        self._metrics.relays.labels(outcome).inc()
        return last

    async def _go_on(self, answer: _Answer, handing: "asyncio.Task[PreparedRequest | None]") -> bool:
        """Have the decode engine continue after what the client has.

        Returns:
            Whether the KV has come, so that the prompt was not prefilled again.

        Raises:
            CannotResumeError: no engine can.
        """
        begun, known, prompt, prepared = answer.begun, answer.known, answer.prompt, answer.prepared
        request, num_tokens, has_come = begun.request, len(prompt.token_ids), True
        max_tokens = tokens_left(
            request.endpoint, begun.body, num_tokens, len(known.ids), self._max_model_len
        )
        rest = self._resume.rest_of(begun, known.ids, max_tokens)
        rest_prompt = _continued(rest, prompt)
        try:
            computed = await handing
            if computed is None:
                ready = await self._prefill.loadable(prepared, rest.request, rest_prompt)
            else:
                ready = replace(computed, prompt=rest_prompt)
        except HopFailedError as failure:
            has_come = False
            try:
                ready = await self._prefill.prepare_near(
                    rest.request,
                    await self._resume.hashed(rest),
                    () if failure.hopeless else (prepared.prefill,),
                    failure.reason,
                )
            except NoDecodeInstanceError:
                raise CannotResumeError("no-instance") from None
        await self._resume.go_on(begun, rest, ready)
        return has_come

    async def _end(self, begun: BegunAnswer, known: KnownTokens, last: SampledTokens) -> None:
        """Write what follows the last token of a complete answer."""
        usage, sent_tokens = wants_usage(begun.body), len(known.ids)
        for event in begun.transcript.closing_events(
            len(begun.prompt_ids), sent_tokens, usage=usage, details=last.prompt_details
        ):
            await begun.sink.write(event)
        record = begun.request.record
        record.answer_tokens, record.attempts[-1].outcome = sent_tokens, "done"

    async def _fail(
        self, begun: BegunAnswer, error: CannotResumeError, writer: ResponseWriter | None
    ) -> web.StreamResponse:
        """No engine can end the answer: say so in the stream, or in place of an answer (ApiError)."""
        request = begun.request
        request.record.note(f"continuation: {error.outcome}")
        name = begun.failed[-1] if begun.failed else None
        sentence = (
            "No decode instance can continue."
            if name is None
            else f"The decode instance {name} does not answer."
        )
        if writer is None:
            raise ApiError(503, sentence, retry_after_s=1)
        await self._resume.break_off(request, writer, sentence)
        return await writer.end()


def _continued(rest: AnswerRest, prompt: TokenizedPrompt) -> TokenizedPrompt:
    """The prompt of `rest`, with the hashes of the one that it continues: no other request has sent what follows."""
    return TokenizedPrompt(rest.token_ids, prompt.chains, exact=True, takes_ids=False)


async def _relayed(
    relay: TokenRelay, handing: "asyncio.Task[PreparedRequest | None]"
) -> AsyncIterator[SampledTokens | None]:
    """What the prefill engine decodes until `handing` is over; None: it has failed, or tells no more.

    Tokens that can't be told yet are waited for then: to have them drawn again would favour others.
    """
    while relay.holds or not handing.done():
        is_there = handing.done()
        reading = asyncio.get_running_loop().create_task(relay.next())
        try:
            await asyncio.wait(
                (reading,) if is_there else (reading, handing),
                timeout=_SEAM_PATIENCE_S if is_there else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            await end_all(reading)
        if not reading.cancelled():
            yield reading.result()
        elif is_there:
            return


def _streamed(body: Json) -> Json:
    """The body as of a stream that tells its usage: the form in which decode engines answer the gateway."""
    if body.get("stream") is True:
        return body
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _choice_event(tokens: SampledTokens) -> Json:
    """Tokens as an engine's event has them."""
    ended = {"finish_reason": tokens.finish_reason, "stop_reason": tokens.stop_reason}
    return {"choices": [{"index": 0, "text": tokens.text, **ended}]}


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
        "usage": transcript.usage or usage_of(len(begun.prompt_ids), 1),
        "kv_transfer_params": None,
    }
    return WholeAnswer(200, orjson.dumps(answer), "application/json")
