"""An answer for the client: ask a decode engine and relay, or another one if it fails before the first byte."""

from collections.abc import Sequence

from aiohttp import web

from prfaas.core.scheduling import NoDecodeInstanceError
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.decode_hop import DecodeHop
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import GatewayOptions
from prfaas.serving.gateway.orchestrator import PrefillOrchestrator
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest
from prfaas.serving.gateway.stream import (
    EVENT_STREAM,
    Budget,
    DecodeFailedError,
    EventStream,
    ResponseWriter,
    note_answer_tokens,
    read_stream,
    read_whole,
)
from prfaas.serving.gateway.stream_resume import StreamResume, can_continue

# What another engine may answer where this one failed.
_ENGINE_FAILURES = (500, 502, 503, 504)
# Engines that may answer with an error: the request itself may be what makes them.
_ATTEMPTS_THAT_ANSWER = 2


class Decoding:
    """Brings requests that are ready for it to decode engines, and the answers to clients."""

    def __init__(
        self,
        *,
        driver: PrefillOrchestrator,
        hop: DecodeHop,
        continuing: StreamResume,
        metrics: Metrics,
        options: GatewayOptions,
    ) -> None:
        self._driver = driver
        self._hop = hop
        self._continuing = continuing
        self._metrics = metrics
        self._options = options
        self._budget = Budget(options.kept_answers_bytes)

    async def answer(
        self, request: web.Request, order: ServingRequest, journey: PreparedRequest
    ) -> web.StreamResponse:
        """Relay what the journey's decode engine says, or another one as long as the client has seen nothing.

        After the first byte, another one goes on with the text if the request allows it. Raises ApiError.
        """
        outlet = ResponseWriter(request, order.record, self._metrics)
        failed: list[str] = []
        while True:
            order.record.route, order.record.route_header = str(journey.route), journey.header()
            remember = journey.look is not None and journey.look.exact and can_continue(order.body)
            stream = EventStream(self._budget, self._options.kept_answer_bytes, remember=remember)
            try:
                return await self._relayed(order, journey, outlet, stream)
            except DecodeFailedError as failure:
                self._hop.judge(order, journey, failure)
                failed.append(journey.decode)
                if outlet.begun:
                    return await self._continuing.rest(order, journey, outlet, stream, failure, failed)
                another = await self._another(order, journey, failure, failed)
                if another is None and failure.answer is not None:
                    return outlet.whole(failure.answer)
                if another is None:
                    raise ApiError(503, f"The decode instance {journey.decode} does not answer.") from None
                journey = another
            finally:
                stream.forget()

    async def _relayed(
        self, order: ServingRequest, journey: PreparedRequest, outlet: ResponseWriter, stream: EventStream
    ) -> web.StreamResponse:
        """One decode engine's whole answer. Raises DecodeFailedError, perhaps after a part of it."""
        async with self._hop.open(order, journey) as answer:
            kind = answer.content_type
            if kind.startswith(EVENT_STREAM):
                before, last = b"", b""
                while passed := await read_stream(answer, journey, stream):
                    await outlet.write(passed, kind)
                    before, last = last, passed
                # The usage comes before the mark at the end.
                note_answer_tokens(order.record, before[-len(last) - 1024 :] + last)
                return await outlet.end()
            whole = await read_whole(answer, journey, order.record)
            if whole.status in _ENGINE_FAILURES:
                reason, detail = f"http-{whole.status}", f"{journey.decode} answered {whole.status}"
                raise DecodeFailedError(reason, detail, lost=False, answer=whole)
            return outlet.whole(whole)

    async def _another(
        self,
        order: ServingRequest,
        journey: PreparedRequest,
        failure: DecodeFailedError,
        failed: Sequence[str],
    ) -> PreparedRequest | None:
        """The same request's way to another decode engine; None when there is none or enough have failed."""
        if len(failed) >= (self._options.decode_attempts if failure.lost else _ATTEMPTS_THAT_ANSWER):
            return None
        try:
            return await self._driver.again(order, journey, failed)
        except NoDecodeInstanceError:
            return None
