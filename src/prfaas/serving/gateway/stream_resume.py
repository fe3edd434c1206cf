"""The rest of a streamed answer whose decode engine failed: told by another engine, or ended with an error.

Which streamed answers another engine may go on with, and the request that it gets for that.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from prfaas.core.scheduling import NoDecodeInstanceError
from prfaas.serving.gateway.bodies import Json, error_body
from prfaas.serving.gateway.decode_hop import DecodeHop
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import GatewayOptions
from prfaas.serving.gateway.orchestrator import PrefillOrchestrator
from prfaas.serving.gateway.prefill_hop import JSON_BYTES_PER_TOKEN
from prfaas.serving.gateway.prompts import Endpoint, TokenPrompt
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest
from prfaas.serving.gateway.stream import (
    DATA,
    END_OF_EVENT,
    EVENT_STREAM,
    LAST_EVENT,
    Budget,
    DecodeFailedError,
    EventStream,
    ResponseWriter,
    note_answer_tokens,
    read_stream,
)
from prfaas.serving.gateway.transcript import AnswerText, NotPlainError, StreamTranscript, events

# What vLLM generates when a text completion does not say.
_DEFAULT_COMPLETION_TOKENS = 16


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _whole_number(value: Any) -> bool:
    return type(value) is int


def _flag(value: Any) -> bool:
    return type(value) is bool


def _anything(_value: Any) -> bool:
    return True


def _stops(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(s, str) for s in value))


# Sampling depends on the text so far alone: these go into the second request as they are.
_KEPT: dict[str, Callable[[Any], bool]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole_number,
    "min_p": _number,
    "stop": _stops,
    "ignore_eos": _flag,
    "user": lambda value: isinstance(value, str),
}
# These are worked into the second request, or say what would be the case without them.
_SETTLED: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "prompt": _anything,
    "messages": _anything,
    "add_special_tokens": _flag,
    "add_generation_prompt": lambda value: value is True,
    "stream": lambda value: value is True,
    "stream_options": lambda value: (
        isinstance(value, dict) and value.keys() <= {"include_usage"} and all(map(_flag, value.values()))
    ),
    "max_tokens": _whole_number,
    "max_completion_tokens": _whole_number,
    "min_tokens": _whole_number,
    "n": lambda value: value == 1,
    "seed": _whole_number,
    "echo": lambda value: value is False,
    "logprobs": lambda value: value is False,
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "response_format": lambda value: value == {"type": "text"},
}


def can_continue(body: Json) -> bool:
    """Whether the rest of the answer to `body` depends on nothing but its prompt and its text so far.

    A list of what is known to be harmless: any other field that has a value, and the answer can't be continued.
    """
    if body.get("stream") is not True:
        return False
    for name, value in body.items():
        if value is None:
            continue
        harmless = _KEPT.get(name) or _SETTLED.get(name)
        if harmless is None or not harmless(value):
            return False
    # A seeded generator would have to be wound forward.
    return body.get("seed") is None or body.get("temperature") == 0


def wants_usage(body: Json) -> bool:
    """Whether the client asked for the usage at the stream's end."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def tokens_left(
    endpoint: Endpoint, body: Json, prompt_tokens: int, told_tokens: int, max_model_len: int
) -> int:
    """How many tokens may follow `told_tokens` of an answer; 0 or less: none."""
    room = max_model_len - prompt_tokens - told_tokens
    limit = body.get("max_tokens")
    if endpoint is Endpoint.CHAT:
        limit = body.get("max_completion_tokens") or limit
    elif limit is None:
        limit = _DEFAULT_COMPLETION_TOKENS
    return room if limit is None else min(room, limit - told_tokens)


def continuation_body(
    body: Json, model: str, token_ids: Sequence[int], told_tokens: int, max_tokens: int
) -> Json:
    """A text completion that goes on after `token_ids`: the prompt and `told_tokens` tokens of the answer."""
    kept = {name: body[name] for name in _KEPT if body.get(name) is not None}
    if body.get("min_tokens") is not None:
        kept["min_tokens"] = max(body["min_tokens"] - told_tokens, 0)
    if wants_usage(body):
        kept["stream_options"] = {"include_usage": True}
    return {"model": model, "prompt": token_ids, "max_tokens": max_tokens, "stream": True, **kept}


class _CannotContinueError(Exception):
    """`outcome`: why not, in one word."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class _Broken:
    """A stream that has begun and whose engine failed. `failed`: all decode engines that have failed this request."""

    order: ServingRequest
    prompt_ids: Sequence[int]
    story: StreamTranscript
    outlet: ResponseWriter
    failed: list[str]


class StreamResume:
    """Goes on with streams after the failure of their decode engine."""

    def __init__(
        self,
        max_model_len: int,
        *,
        driver: PrefillOrchestrator,
        hop: DecodeHop,
        answer_text: AnswerText,
        metrics: Metrics,
        options: GatewayOptions,
    ) -> None:
        self._max_model_len = max_model_len
        self._driver = driver
        self._hop = hop
        self._answer_text = answer_text
        self._metrics = metrics
        self._options = options

    async def rest(
        self,
        order: ServingRequest,
        journey: PreparedRequest,
        outlet: ResponseWriter,
        stream: EventStream,
        failure: DecodeFailedError,
        failed: list[str],
    ) -> web.StreamResponse:
        """End a stream that has begun: with the rest of the answer where that can be had, else with an error event.

        `stream`: what was passed on. `failed`: decode engines that have failed this request.
        """
        try:
            outcome = await self._told(_broken(order, journey, outlet, stream, failed))
        except _CannotContinueError as error:
            outcome = error.outcome
            sentence = f"The decode instance {failed[-1]} died while answering."
            event = failure.event or DATA + error_body(502, sentence) + END_OF_EVENT
            await outlet.write(END_OF_EVENT + event if stream.torn else event)
            order.record.broken = True
        self._metrics.continuations.labels(outcome).inc()
        order.record.note(f"continuation: {outcome}")
        return await outlet.end()

    async def _told(self, broken: _Broken) -> str:
        """Tell the rest. Raises _CannotContinueError, perhaps after a part of it."""
        order, story, prompt_ids = broken.order, broken.story, broken.prompt_ids
        while True:
            told_ids = await self._answer_text.ids_after(prompt_ids, story.text)
            if told_ids is None:
                raise _CannotContinueError("not-exact")
            max_tokens = tokens_left(
                order.endpoint, order.body, len(prompt_ids), len(told_ids), self._max_model_len
            )
            if story.finished or story.ended or max_tokens < 1:
                for event in story.rest(len(prompt_ids), len(told_ids), usage=wants_usage(order.body)):
                    await broken.outlet.write(event)
                order.record.answer_tokens = len(told_ids)
                return "finished"
            if len(broken.failed) >= self._options.decode_attempts:
                raise _CannotContinueError("attempts")
            try:
                journey, rest = await self._way(broken, told_ids, max_tokens)
            except NoDecodeInstanceError:
                raise _CannotContinueError("no-instance") from None
            try:
                await self._gone_on(broken, rest, journey, len(told_ids))
            except DecodeFailedError as failure:
                self._hop.judge(order, journey, failure)
                broken.failed.append(journey.decode)
            except NotPlainError:
                raise _CannotContinueError("not-plain") from None
            else:
                return "continued"

    async def _way(
        self, broken: _Broken, told_ids: Sequence[int], max_tokens: int
    ) -> tuple[PreparedRequest, ServingRequest]:
        """The order for the rest of the answer, and its way to another decode engine."""
        order, ids = broken.order, array("I", (*broken.prompt_ids, *told_ids))
        rest = replace(
            order,
            endpoint=Endpoint.COMPLETIONS,
            body=continuation_body(order.body, order.model, ids.tolist(), len(told_ids), max_tokens),
            size_bytes=len(ids) * JSON_BYTES_PER_TOKEN,
            prompt=TokenPrompt(ids),
            samples=1,
        )
        return await self._driver.resume(rest, ids, broken.failed), rest

    async def _gone_on(
        self, broken: _Broken, rest: ServingRequest, journey: PreparedRequest, told_tokens: int
    ) -> None:
        """Tell what the journey's decode engine says. Raises DecodeFailedError and NotPlainError."""
        # What it tells is remembered by the story.
        stream = EventStream(Budget(0), 0, remember=False)
        async with self._hop.open(rest, journey) as answer:
            if answer.status != 200 or not answer.content_type.startswith(EVENT_STREAM):
                detail = f"{journey.decode} answered {answer.status}"
                raise DecodeFailedError(f"http-{answer.status}", detail, lost=False)
            while passed := await read_stream(answer, journey, stream):
                for event in events(passed):
                    if event is None:
                        broken.story.ended = True
                        await broken.outlet.write(LAST_EVENT)
                    else:
                        retold = broken.story.retell(event, len(broken.prompt_ids), told_tokens)
                        note_answer_tokens(broken.order.record, retold)
                        await broken.outlet.write(retold)


def _broken(
    order: ServingRequest,
    journey: PreparedRequest,
    outlet: ResponseWriter,
    stream: EventStream,
    failed: list[str],
) -> _Broken:
    """What is known of a broken stream. Raises _CannotContinueError if it can't be continued at all."""
    if journey.look is None or not can_continue(order.body):
        raise _CannotContinueError("parameters")
    passed = stream.passed()
    if passed is None:
        raise _CannotContinueError("not-kept")
    try:
        story = StreamTranscript.of(order.endpoint, passed)
    except NotPlainError:
        raise _CannotContinueError("not-plain") from None
    return _Broken(order, journey.look.token_ids, story, outlet, failed)
