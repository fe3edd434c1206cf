"""The way of one generating request through the gateway, from its body to its record."""

import logging
from contextlib import nullcontext

from aiohttp import web

from prfaas.core.scheduling.view import NoDecodeInstanceError
from prfaas.serving.gateway.admission import AdmittedRequest
from prfaas.serving.gateway.answers.answering import Answering
from prfaas.serving.gateway.answers.streams import ResponseWriter
from prfaas.serving.gateway.bodies import FAILED, ApiError
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import dialect_of
from prfaas.serving.gateway.intake import Intake
from prfaas.serving.gateway.prompts.prompt import Endpoint, answer_limit
from prfaas.serving.gateway.prompts.request import ServingRequest
from prfaas.serving.gateway.prompts.tokenization import Tokenization
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import DecidedRequest

logger = logging.getLogger(__name__)


class Generation:
    """Serves whatever an engine answers (`Endpoint`). `handle` is the whole way of a request."""

    def __init__(
        self,
        context: GatewayContext,
        *,
        intake: Intake,
        tokenization: Tokenization,
        prefill: PrefillOrchestrator,
        answers: Answering,
    ) -> None:
        self._context = context
        self._intake = intake
        self._tokenization = tokenization
        self._prefill = prefill
        self._answers = answers

    async def handle(self, endpoint: Endpoint, http: web.Request) -> web.StreamResponse:
        """The response to one request, sent to its end if it is a stream. Raises ApiError."""
        # 1. Read, parse and check: what the client wants, less what could steer an engine.
        async with self._intake.taking(http, endpoint) as (request, admitted):
            writer = ResponseWriter(http, request.record, self._context.metrics, dialect_of(endpoint.path))
            waits = request.record.streamed and endpoint.generates
            keep_alive_s = self._context.running.current.gateway.keep_alive_s
            with writer.keeping_alive(keep_alive_s) if waits else nullcontext():
                response = await self._told(request, admitted, writer)
            # 6. Record. `taking` adds the times, and the outcome where an exception ended the request.
            request.record.answered(response.status)
            return response

    async def _told(
        self, request: ServingRequest, admitted: AdmittedRequest, writer: ResponseWriter
    ) -> web.StreamResponse:
        """The response. Once the client has a status, whatever fails is an event of its stream. Raises ApiError."""
        try:
            return await self._served(request, admitted, writer)
        except NoDecodeInstanceError:
            error = ApiError(503, "No decode instance is available.", retry_after_s=1)
        except ApiError as refused:
            error = refused
        except ConnectionResetError:
            raise
        except Exception:
            if not writer.head_sent:
                raise
            logger.exception("a request for %s failed", request.endpoint.path)
            return await writer.fail(ApiError(500, FAILED))
        if not writer.head_sent:
            raise error
        self._context.metrics.refused.labels(error.reason).inc()
        return await writer.fail(error)

    async def _served(
        self, request: ServingRequest, admitted: AdmittedRequest, writer: ResponseWriter
    ) -> web.StreamResponse:
        """The response, sent to its end if it is a stream. Raises ApiError and NoDecodeInstanceError."""
        async with admitted.in_time():
            # 2. The prompt's token ids, as the engine makes them, and the hashes of its blocks.
            prompt = await self._tokenization.tokenize(request)
            # 3. Decide who prefills and who decodes, and whether the wait there is bearable.
            decision = self._prefill.decide(request, prompt)
            admitted.check(decision, answer_limit(request.endpoint, request.body))
            # 4. Prefill there and move the KV. If that fails, the decode engine prefills. Where the prefill samples
            #    the first token, this does not wait for the KV.
            ready = await self._prefill.prepare_first(request, prompt, decision)
            if isinstance(ready, DecidedRequest):
                uncached = self._context.metrics.uncached_tokens.labels(str(ready.decision.route))
                uncached.inc(ready.decision.uncached_tokens)
        # 5. Decode and relay. If an engine fails, another one decodes. Some answers are compared, later.
        return await self._answers.answer(ready, admitted, writer)
