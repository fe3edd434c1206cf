"""The request to a decode engine, from its body to the last byte of its answer at the client."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from prfaas.serving.gateway.answers.answer_bytes import PromptCut, TakenIds, note_answer_tokens
from prfaas.serving.gateway.answers.streams import (
    EVENT_STREAM,
    EngineAnswerError,
    EventStream,
    ResponseWriter,
    WholeAnswer,
)
from prfaas.serving.gateway.bodies import JSON_BYTES_PER_TOKEN, decode_body, without_transfer_params
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.engine_client import EngineCallError, accuse, read_whole
from prfaas.serving.gateway.http_pool import EngineResponse
from prfaas.serving.gateway.prompts.prompt import DirectPrompt
from prfaas.serving.gateway.prompts.request import ServingRequest
from prfaas.serving.gateway.ways.kv_transfer import TRANSFER_FAILED
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import (
    DecidedRequest,
    MovingRequest,
    PullingRequest,
    ReadyRequest,
)
from prfaas.serving.tracing import Attributes

logger = logging.getLogger(__name__)

# Engines that may answer one request with an error: the request itself may be the cause.
MAX_ANSWERING_ATTEMPTS = 2

# What another engine may answer where this one failed.
_ENGINE_FAILURES = (500, 502, 503, 504)


class Decoder:
    """Brings prepared requests to their decode engines, and the answers to the clients."""

    def __init__(self, prefill: PrefillOrchestrator, context: GatewayContext) -> None:
        self._prefill = prefill
        self._context = context
        self._plane = context.plane

    async def relay(self, ready: ReadyRequest, writer: ResponseWriter) -> web.StreamResponse:
        """Pass one decode engine's whole answer on. Raises EngineCallError, perhaps after a part of it."""
        record = ready.request.record
        writer.ids = _taken_of(ready.request)
        async with self.open(ready) as answer:
            kind = answer.content_type
            if kind.startswith(EVENT_STREAM):
                cut = None if writer.ids is None or writer.ids.is_asked else PromptCut()
                stream = EventStream(answer, ready.decode, writer.dialect, cut=cut, ids=writer.ids)
                note_answer_tokens(record, await writer.relay(stream, kind))
                if stream.refused_status is not None:
                    self._note_refusal(ready, stream.refused_status)
                    self._prefill.abandon(ready, "the decode engine refused the request in its stream")
                return await writer.end()
            body = await read_whole(answer, ready.decode)
            note_answer_tokens(record, body)
            whole = WholeAnswer(answer.status, without_transfer_params(body), kind)
            if whole.status in _ENGINE_FAILURES:
                raise EngineAnswerError(ready.decode, whole.status, answer=whole)
            if whole.status >= 400:
                self._note_refusal(ready, whole.status)
            return await writer.send(whole)

    @asynccontextmanager
    async def stream(self, ready: ReadyRequest) -> AsyncIterator[EventStream]:
        """As `open`, for an answer that must be a stream, with its token ids but for the prompt's.

        Raises EngineCallError where it is none.
        """
        async with self.open(ready) as answer:
            if answer.status != 200 or not answer.content_type.startswith(EVENT_STREAM):
                raise EngineAnswerError(ready.decode, answer.status)
            yield EventStream(answer, ready.decode, cut=PromptCut())

    @asynccontextmanager
    async def open(self, ready: ReadyRequest) -> AsyncIterator[EngineResponse]:
        """The decode engine's answer, its headers read. Raises EngineCallError.

        What is still staged at the engine is freed unless the answer has status 200 and the body ends without an
        exception.
        """
        request, ended_well = ready.request, False
        try:
            body = await self._body(ready)
            told: Attributes = {
                "prfaas.instance": ready.decode,
                "prfaas.cluster": self._plane.members.instance(ready.decode).cluster,
                "prfaas.prefill_tokens": ready.own_prefill_tokens,
            }
            with (
                self._plane.waits.decoding(
                    ready.decode, ready.own_prefill_tokens, ready.own_reused_tokens, answers=request.answers
                ),
                request.record.trace.open("decode", told, asks_engine=True) as span,
            ):
                arrived: DecidedRequest | None = None
                headers = span.headers(request.headers)
                if isinstance(ready, PullingRequest):
                    answer, arrived = await self._ask_reading(ready, body, headers)
                else:
                    answer = await self._ask(ready, body, headers)
                try:
                    span.tell({"http.response.status_code": answer.status})
                    if answer.status == 200:
                        self._prefill.delivered(ready)
                    if answer.status == 200 and isinstance(ready, MovingRequest):
                        # The engine cannot have a token before; how the KV came goes into the client's headers.
                        arrived = arrived or await self._prefill.arrived(ready)
                        request.record.sent(arrived.header())
                    yield answer
                    ended_well = answer.status == 200
                finally:
                    # Closing an unfinished answer is what makes vLLM abort the request.
                    answer.close()
        finally:
            # The engine frees what it has taken; anything else would wait for its time to live.
            if not ended_well:
                self._prefill.abandon(ready, "the decode request did not end well")

    async def _body(self, ready: ReadyRequest) -> bytes:
        request = ready.request
        return await self._context.json_threads.run(
            request.size_bytes + JSON_BYTES_PER_TOKEN * len(ready.reuse_ids or ()),
            decode_body,
            {**request.body, "return_token_ids": True} if _tells_ids(request) else request.body,
            ready.kv_params(),
            ready.reuse_ids,
            request.salt,
        )

    def report(self, ready: ReadyRequest, failure: EngineCallError) -> None:
        """Tell log, metrics and control plane what a failure says about the decode engine."""
        logger.warning("decode instance failed: %s", failure)
        self._context.metrics.decode_failures.labels(failure.reason).inc()
        ready.request.record.note(f"{ready.decode} failed: {failure.reason}")
        accuse(self._plane, ready.decode, failure)

    def _note_refusal(self, ready: ReadyRequest, status: int) -> None:
        """The decode engine has refused the request: before KV was moved for it, or after."""
        ready.request.record.refused_status = status
        self._context.metrics.refused.labels("engine-late" if ready.moves_kv else "engine").inc()

    async def _ask(self, ready: ReadyRequest, body: bytes, headers: Mapping[str, str]) -> EngineResponse:
        instance = self._plane.members.instance(ready.decode)
        return await self._context.client.open(instance, ready.request.endpoint.path, body, headers)

    async def _ask_reading(
        self, ready: PullingRequest, body: bytes, headers: Mapping[str, str]
    ) -> tuple[EngineResponse, DecidedRequest | None]:
        """The answer of an engine that reads the KV by NIXL first, and what became of that; None: nothing is known.

        A read can't be taken back: vLLM keeps the request's blocks until NIXL writes into them no more. So where it has
        been given up, the same engine is asked again, for other blocks, and the first request is aborted. Raises
        EngineCallError.
        """
        asking = asyncio.get_running_loop().create_task(self._ask(ready, body, headers))
        answer: EngineResponse | None = None
        try:
            # A whole answer comes long after the read, a stream's head before it.
            await asyncio.wait((asking, ready.arriving), return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and (asking.exception() is not None or asking.result().status != 200):
                answer = asking.result()
                return answer, None
            arrived = await self._prefill.arrived(ready)
            # If the engine itself reported the read as failed, it is already recomputing the prompt.
            if arrived.moves_kv or arrived.fallback == TRANSFER_FAILED:
                answer = await asking
                return answer, arrived
        finally:
            if answer is None:
                await _put_an_end_to(asking)
        return await self._ask(arrived, await self._body(arrived), headers), arrived


def _tells_ids(request: ServingRequest) -> bool:
    """Whether the engine is asked for token ids, by which another one could go on."""
    return request.resumes and not request.has_media and not isinstance(request.prompt, DirectPrompt)


def _taken_of(request: ServingRequest) -> TakenIds | None:
    """Where the token ids of a stream go; None: it has none."""
    if not _tells_ids(request):
        return None
    return TakenIds(request.endpoint, is_asked=request.body.get("return_token_ids") is True)


async def _put_an_end_to(asking: "asyncio.Task[EngineResponse]") -> None:
    """Close what a request's answer came over, or would: vLLM aborts the request."""
    asking.cancel()
    await asyncio.wait((asking,))
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()
