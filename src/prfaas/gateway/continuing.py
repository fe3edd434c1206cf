"""The rest of a streamed answer whose decode engine failed: told by another engine, or ended with an error."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aiohttp import web

from prfaas.gateway.answer_text import AnswerText
from prfaas.gateway.continuation import can_continue, continuation_body, tokens_left, wants_usage
from prfaas.gateway.decode_hop import DecodeHop
from prfaas.gateway.driver import Driver
from prfaas.gateway.errors import error_body
from prfaas.gateway.events import DATA, END_OF_EVENT, LAST_EVENT, Budget, EventStream
from prfaas.gateway.hops import JSON_BYTES_PER_TOKEN
from prfaas.gateway.journey import Journey
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.options import GatewayOptions
from prfaas.gateway.order import Order
from prfaas.gateway.prompts import Endpoint, TokenPrompt
from prfaas.gateway.relay import (
    EVENT_STREAM,
    DecodeFailedError,
    Outlet,
    note_answer_tokens,
    read_stream,
)
from prfaas.gateway.story import NotPlainError, Story, events
from prfaas.scheduling import NoDecodeInstanceError


class _CannotContinueError(Exception):
    """`outcome`: why not, in one word."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class _Broken:
    """A stream that has begun and whose engine failed. `failed`: all decode engines that have failed this request."""

    order: Order
    prompt_ids: Sequence[int]
    story: Story
    outlet: Outlet
    failed: list[str]


class Continuing:
    """Goes on with streams after the failure of their decode engine."""

    def __init__(
        self,
        max_model_len: int,
        *,
        driver: Driver,
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
        order: Order,
        journey: Journey,
        outlet: Outlet,
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

    async def _way(self, broken: _Broken, told_ids: Sequence[int], max_tokens: int) -> tuple[Journey, Order]:
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

    async def _gone_on(self, broken: _Broken, rest: Order, journey: Journey, told_tokens: int) -> None:
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
    order: Order, journey: Journey, outlet: Outlet, stream: EventStream, failed: list[str]
) -> _Broken:
    """What is known of a broken stream. Raises _CannotContinueError if it can't be continued at all."""
    if journey.look is None or not can_continue(order.body):
        raise _CannotContinueError("parameters")
    passed = stream.passed()
    if passed is None:
        raise _CannotContinueError("not-kept")
    try:
        story = Story.of(order.endpoint, passed)
    except NotPlainError:
        raise _CannotContinueError("not-plain") from None
    return _Broken(order, journey.look.token_ids, story, outlet, failed)
