"""The request to a decode engine, from its body to the last byte of its answer at the client."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from prfaas.serving.gateway.answer import (
    EVENT_STREAM,
    DecodeFailedError,
    EventStream,
    ResponseWriter,
    note_answer_tokens,
    read_whole,
)
from prfaas.serving.gateway.bodies import JSON_BYTES_PER_TOKEN, decode_body
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import dialect_of
from prfaas.serving.gateway.engine_client import Blame, EngineCallError
from prfaas.serving.gateway.http_exchange import EngineResponse
from prfaas.serving.gateway.prefill import PrefillOrchestrator
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest
from prfaas.serving.gateway.request_trace import Attributes, engine_call

logger = logging.getLogger(__name__)

# Engines that may answer one request with an error: the request itself may be the cause.
MAX_ANSWERING_ATTEMPTS = 2

# What another engine may answer where this one failed.
_ENGINE_FAILURES = (500, 502, 503, 504)


class Decoder:
    """Brings prepared requests to their decode engines, and the answers to the clients."""

    def __init__(self, prefill: PrefillOrchestrator, context: GatewayContext) -> None:
        self._prefill = prefill
        self._plane = context.plane
        self._client = context.client
        self._metrics = context.metrics
        self._json_threads = context.json_threads

    async def relay(
        self, request: ServingRequest, prepared: PreparedRequest, writer: ResponseWriter
    ) -> web.StreamResponse:
        """Pass one decode engine's whole answer on.

        Raises:
            DecodeFailedError: perhaps after a part of the answer.
        """
        async with self.open(request, prepared) as answer:
            kind = answer.content_type
            if kind.startswith(EVENT_STREAM):
                stream = EventStream(answer, prepared.decode, dialect_of(request.endpoint))
                note_answer_tokens(request.record, await writer.relay(stream, kind))
                if stream.refused_status is not None:
                    self._note_refusal(request, prepared, stream.refused_status)
                    self._prefill.abandon(prepared, "the decode engine refused the request in its stream")
                return await writer.end()
            whole = await read_whole(answer, prepared.decode, request.record)
            if whole.status in _ENGINE_FAILURES:
                reason, detail = f"http-{whole.status}", f"{prepared.decode} answered {whole.status}"
                raise DecodeFailedError(reason, detail, lost=False, answer=whole)
            if whole.status >= 400:
                self._note_refusal(request, prepared, whole.status)
            return writer.send(whole)

    @asynccontextmanager
    async def open(self, request: ServingRequest, prepared: PreparedRequest) -> AsyncIterator[EngineResponse]:
        """The decode engine's answer, its headers read.

        What is still staged at the engine is freed unless the answer has status 200 and the body ends without an
        exception.

        Raises:
            DecodeFailedError: the engine does not answer.
        """
        prompt = prepared.prompt
        reuse_ids = prompt.token_ids if prompt is not None and prompt.takes_ids else None
        ended_well = False
        try:
            body = await self._json_threads.run(
                request.size_bytes + JSON_BYTES_PER_TOKEN * len(reuse_ids or ()),
                decode_body,
                request.body,
                prepared.transfer.sealed if prepared.transfer is not None else None,
                reuse_ids,
                request.salt,
                prepared.cached_tokens,
            )
            with (
                self._plane.decoding(prepared.decode, prepared.own_prefill_tokens),
                engine_call(request.record.trace, "decode", request.headers, self._told(prepared)) as call,
            ):
                answer = await self._ask(request, prepared, body, call.headers)
                try:
                    call.tell({"http.response.status_code": answer.status})
                    if answer.status == 200:
                        self._prefill.delivered(prepared)
                    if answer.status == 200 and prepared.arriving is not None:
                        # The engine cannot have a token before; how the KV came goes into the client's headers.
                        request.record.sent((await self._prefill.arrived(request, prepared)).header())
                    yield answer
                    ended_well = answer.status == 200
                finally:
                    # Closing an unfinished answer is what makes vLLM abort the request.
                    answer.close()
        finally:
            # The engine frees what it has taken; anything else would wait for its time to live.
            if not ended_well:
                self._prefill.abandon(prepared, "the decode request did not end well")

    def report(self, request: ServingRequest, prepared: PreparedRequest, failure: DecodeFailedError) -> None:
        """Tell log, metrics and control plane what a failure says about the decode engine."""
        logger.warning("decode instance failed: %s", failure)
        self._metrics.decode_failures.labels(failure.reason).inc()
        request.record.note(f"{prepared.decode} failed: {failure.reason}")
        # The request itself may be what makes an engine answer with an error. That must not take engines out.
        if failure.blame is not Blame.NONE:
            self._plane.suspect(prepared.decode, str(failure), lost_cache=failure.blame is Blame.DEAD)

    def _note_refusal(self, request: ServingRequest, prepared: PreparedRequest, status: int) -> None:
        """The decode engine has refused the request: before KV was moved for it, or after."""
        request.record.refused_status = status
        self._metrics.refused.labels("engine" if prepared.transfer is None else "engine-late").inc()

    def _told(self, prepared: PreparedRequest) -> Attributes:
        """What the span of a decode tells."""
        return {
            "prfaas.instance": prepared.decode,
            "prfaas.cluster": self._plane.instance(prepared.decode).cluster,
            "prfaas.prefill_tokens": prepared.own_prefill_tokens,
        }

    async def _ask(
        self, request: ServingRequest, prepared: PreparedRequest, body: bytes, headers: Mapping[str, str]
    ) -> EngineResponse:
        instance = self._plane.instance(prepared.decode)
        try:
            return await self._client.open(instance, request.endpoint.path, body, headers)
        except EngineCallError as error:
            raise DecodeFailedError.of_call(error) from error
