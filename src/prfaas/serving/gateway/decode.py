"""The request to a decode engine, from its body to the last byte of its answer at the client."""

import asyncio
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
from prfaas.serving.gateway.hop_failure import KeptPart
from prfaas.serving.gateway.http_exchange import EngineResponse
from prfaas.serving.gateway.kv_transfer import TRANSFER_FAILED
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
        async with self.open(request, prepared) as (answer, _):
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
    async def stream(
        self, request: ServingRequest, prepared: PreparedRequest
    ) -> AsyncIterator[tuple[EventStream, PreparedRequest]]:
        """As `open`, for an answer that must be a stream. Raises DecodeFailedError where it is none."""
        async with self.open(request, prepared) as (answer, ready):
            if answer.status != 200 or not answer.content_type.startswith(EVENT_STREAM):
                detail = f"{prepared.decode} answered {answer.status}"
                raise DecodeFailedError(f"http-{answer.status}", detail, lost=False)
            yield EventStream(answer, prepared.decode), ready

    @asynccontextmanager
    async def open(
        self, request: ServingRequest, prepared: PreparedRequest
    ) -> AsyncIterator[tuple[EngineResponse, PreparedRequest]]:
        """The decode engine's answer, its headers read, and the request as it is prepared by then.

        What is still staged at the engine is freed unless the answer has status 200 and the body ends without an
        exception.

        Raises:
            DecodeFailedError: the engine does not answer.
        """
        ended_well = False
        try:
            body = await self._body(request, prepared)
            with (
                self._plane.waits.decoding(
                    prepared.decode, prepared.own_prefill_tokens, prepared.own_reused_tokens
                ),
                engine_call(request.record.trace, "decode", request.headers, self._told(prepared)) as call,
            ):
                arrived: PreparedRequest | None = None
                if _reads(prepared):
                    answer, arrived = await self._ask_reading(request, prepared, body, call.headers)
                else:
                    answer = await self._ask(request, prepared, body, call.headers)
                try:
                    call.tell({"http.response.status_code": answer.status})
                    if answer.status == 200:
                        self._prefill.delivered(prepared)
                    if answer.status == 200 and prepared.arriving is not None:
                        # The engine cannot have a token before; how the KV came goes into the client's headers.
                        arrived = arrived or await self._prefill.arrived(request, prepared)
                        request.record.sent(arrived.header())
                    yield answer, arrived or prepared
                    ended_well = answer.status == 200
                finally:
                    # Closing an unfinished answer is what makes vLLM abort the request.
                    answer.close()
        finally:
            # The engine frees what it has taken; anything else would wait for its time to live.
            if not ended_well:
                self._prefill.abandon(prepared, "the decode request did not end well")

    async def _body(self, request: ServingRequest, prepared: PreparedRequest) -> bytes:
        prompt = prepared.prompt
        reuse_ids = prompt.token_ids if prompt is not None and prompt.takes_ids else None
        transfer = prepared.transfer
        return await self._json_threads.run(
            request.size_bytes + JSON_BYTES_PER_TOKEN * len(reuse_ids or ()),
            decode_body,
            request.body,
            transfer.sealed if transfer is not None else None,
            reuse_ids,
            request.salt,
            prepared.cached_tokens,
            transfer.usable_tokens if isinstance(transfer, KeptPart) else 0,
        )

    def report(self, request: ServingRequest, prepared: PreparedRequest, failure: DecodeFailedError) -> None:
        """Tell log, metrics and control plane what a failure says about the decode engine."""
        logger.warning("decode instance failed: %s", failure)
        self._metrics.decode_failures.labels(failure.reason).inc()
        request.record.note(f"{prepared.decode} failed: {failure.reason}")
        # The request itself may be what makes an engine answer with an error. That must not take engines out.
        if failure.blame is not Blame.NONE:
            self._plane.health.suspect(prepared.decode, str(failure), lost_cache=failure.blame is Blame.DEAD)

    def _note_refusal(self, request: ServingRequest, prepared: PreparedRequest, status: int) -> None:
        """The decode engine has refused the request: before KV was moved for it, or after."""
        request.record.refused_status = status
        self._metrics.refused.labels("engine" if prepared.transfer is None else "engine-late").inc()

    def _told(self, prepared: PreparedRequest) -> Attributes:
        """What the span of a decode tells."""
        return {
            "prfaas.instance": prepared.decode,
            "prfaas.cluster": self._plane.members.instance(prepared.decode).cluster,
            "prfaas.prefill_tokens": prepared.own_prefill_tokens,
        }

    async def _ask(
        self, request: ServingRequest, prepared: PreparedRequest, body: bytes, headers: Mapping[str, str]
    ) -> EngineResponse:
        instance = self._plane.members.instance(prepared.decode)
        try:
            return await self._client.open(instance, request.endpoint.path, body, headers)
        except EngineCallError as error:
            raise DecodeFailedError.of_call(error) from error

    async def _ask_reading(
        self, request: ServingRequest, prepared: PreparedRequest, body: bytes, headers: Mapping[str, str]
    ) -> tuple[EngineResponse, PreparedRequest | None]:
        """The answer of an engine that reads the KV by NIXL first, and what became of that; None: nothing is known.

        A read can't be taken back: vLLM keeps the request's blocks until NIXL writes into them no more. So where it has
        been given up, the same engine is asked again, for other blocks, and the first request is aborted. Raises
        DecodeFailedError.
        """
        assert prepared.arriving is not None
        asking = asyncio.get_running_loop().create_task(self._ask(request, prepared, body, headers))
        answer: EngineResponse | None = None
        try:
            # A whole answer comes long after the read, a stream's head before it.
            await asyncio.wait((asking, prepared.arriving), return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and (asking.exception() is not None or asking.result().status != 200):
                answer = asking.result()
                return answer, None
            arrived = await self._prefill.arrived(request, prepared)
            # Of a read that failed by its own word the engine computes the prompt already.
            if arrived.transfer is not None or arrived.fallback == TRANSFER_FAILED:
                answer = await asking
                return answer, arrived
        finally:
            if answer is None:
                await _put_an_end_to(asking)
        body = await self._body(request, arrived)
        return await self._ask(request, arrived, body, headers), arrived


def _reads(prepared: PreparedRequest) -> bool:
    """Whether the decode engine reads the request's KV by NIXL."""
    return prepared.arriving is not None and prepared.transfer is not None and prepared.transfer.by == "nixl"


async def _put_an_end_to(asking: "asyncio.Task[EngineResponse]") -> None:
    """Close what a request's answer came over, or would: vLLM aborts the request."""
    asking.cancel()
    await asyncio.wait((asking,))
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()
