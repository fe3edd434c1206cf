"""Answers of ready requests, from the decode engine to the client, whichever engines fail meanwhile."""

from collections.abc import Collection
from dataclasses import replace

from aiohttp import web

from prfaas.core.scheduling import NoDecodeInstanceError
from prfaas.serving.gateway.admission import AdmittedRequest
from prfaas.serving.gateway.answers.decode import MAX_ANSWERING_ATTEMPTS, Decoder
from prfaas.serving.gateway.answers.shadow import Shadow
from prfaas.serving.gateway.answers.stream_resume import StreamResume
from prfaas.serving.gateway.answers.streams import (
    DecodeFailedError,
    ResponseWriter,
)
from prfaas.serving.gateway.answers.taken_ids import taken_of_whole
from prfaas.serving.gateway.answers.transcript import AnswerText
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.engine_client import OWN_RESOURCES
from prfaas.serving.gateway.prompts.request import ServingRequest
from prfaas.serving.gateway.prompts.tokenization import Tokenization
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import EarlyRequest, ReadyRequest


class Answering:
    """Has requests answered, by another decode engine where one fails."""

    def __init__(
        self,
        context: GatewayContext,
        *,
        tokenization: Tokenization,
        prefill: PrefillOrchestrator,
        shadow: Shadow,
    ) -> None:
        self._prefill = prefill
        self._shadow = shadow
        self._options = context.options
        self._decoder = Decoder(prefill, context)
        self._resume = StreamResume(
            AnswerText(context.running.current.model.path),
            tokenization=tokenization,
            prefill=prefill,
            decoder=self._decoder,
            context=context,
        )

    async def answer(
        self,
        request: ServingRequest,
        ready: ReadyRequest,
        admitted: AdmittedRequest,
        writer: ResponseWriter,
    ) -> web.StreamResponse:
        """Pass the answer on to the client, within the time that it gave. Raises ApiError."""
        is_compared = self._shadow.wants(request, ready)
        # Streams tell their ids in any case.
        asked = _telling_ids(request) if is_compared and request.body.get("stream") is not True else request
        try:
            async with admitted.in_time():
                response = await self._decode(asked, ready, writer)
        finally:
            writer.note_tokens()
        if is_compared:
            ids = writer.ids.ids if writer.ids is not None else ()
            if isinstance(response, web.Response) and isinstance(response.body, bytes) and not ids:
                answer, ids = taken_of_whole(response.body)
                response.body = response.body if asked is request else answer
            # Some of what was transferred is computed again elsewhere, later.
            self._shadow.compare(request, ready, ids if response.status == 200 else ())
        return response

    async def _decode(
        self,
        request: ServingRequest,
        ready: ReadyRequest,
        writer: ResponseWriter,
    ) -> web.StreamResponse:
        """Relay what the decode engine says.

        While the client has seen nothing, another engine may answer in place of one that failed. After the first
        byte, another engine continues the text if the request allows it. Raises ApiError.
        """
        if isinstance(ready, EarlyRequest):
            request.record.sent(ready.header())
            return await self._resume.after_first(request, ready, writer)
        failed: list[str] = []
        while True:
            if request.endpoint.generates:
                request.record.sent(ready.header())
            try:
                return await self._decoder.relay(request, ready, writer)
            except DecodeFailedError as failure:
                self._decoder.report(request, ready, failure)
                failed.append(ready.decode)
                if writer.begun:
                    return await self._resume.finish(request, ready, writer, failure, failed)
                another = await self._reroute(request, ready, failure, failed)
                if another is None and failure.answer is not None:
                    return await writer.send(failure.answer)
                if another is None:
                    raise _unanswered(failure, failed[-1]) from None
                ready = another

    async def _reroute(
        self,
        request: ServingRequest,
        ready: ReadyRequest,
        failure: DecodeFailedError,
        failed: Collection[str],
    ) -> ReadyRequest | None:
        """The same request made ready for another decode engine; None when there is none or enough have failed."""
        if failure.reason == OWN_RESOURCES:
            return None
        attempts = self._options.decode_attempts if failure.lost else MAX_ANSWERING_ATTEMPTS
        if len(failed) >= attempts:
            return None
        try:
            return await self._prefill.prepare_again(request, ready.prompt, avoid=failed)
        except NoDecodeInstanceError:
            return None


def _telling_ids(request: ServingRequest) -> ServingRequest:
    if request.body.get("return_token_ids"):
        return request
    return replace(request, body={**request.body, "return_token_ids": True})


def _unanswered(failure: DecodeFailedError, decode: str) -> ApiError:
    if failure.reason == OWN_RESOURCES:
        return ApiError(503, "The gateway has no file descriptor left; try again.", retry_after_s=1)
    return ApiError(503, f"The decode instance {decode} does not answer.", retry_after_s=1)
