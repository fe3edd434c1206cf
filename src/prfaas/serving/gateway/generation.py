"""The way of one generating request through the gateway, from its body to its record."""

import logging
import math
import time

from aiohttp import web

from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.view import NoDecodeInstanceError
from prfaas.serving.gateway.admission import AdmittedRequest
from prfaas.serving.gateway.answers.answering import Answering
from prfaas.serving.gateway.answers.streams import ResponseWriter
from prfaas.serving.gateway.bodies import FAILED, ApiError
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import dialect_of
from prfaas.serving.gateway.intake import Intake
from prfaas.serving.gateway.prompts.prompt import DirectPrompt, Endpoint, answer_limit
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.prompts.tokenization import Tokenization
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import DecidedRequest
from prfaas.serving.tracing import AttributeValue

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
            keep_alive_s = self._context.running.current.gateway.keep_alive_s if waits else None
            with writer.keeping_alive(keep_alive_s):
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
            decision = self._decide(request, prompt)
            admitted.check(decision, answer_limit(request.endpoint, request.body))
            # 4. Prefill there and move the KV. If that fails, the decode engine prefills. Where the prefill samples
            #    the first token, this does not wait for the KV.
            ready = await self._prefill.prepare_first(request, prompt, decision)
            if isinstance(ready, DecidedRequest):
                uncached = self._context.metrics.uncached_tokens.labels(str(ready.decision.route))
                uncached.inc(ready.decision.uncached_tokens)
        # 5. Decode and relay. If an engine fails, another one decodes. Some answers are compared, later.
        return await self._answers.answer(ready, admitted, writer)

    def _decide(self, request: ServingRequest, prompt: TokenizedPrompt | DirectPrompt) -> Decision:
        """Where the request goes. Raises NoDecodeInstanceError.

        The length of each prompt enters the statistics from which thresholds and roles are worked out.
        """
        plane, record = self._context.plane, request.record
        if isinstance(prompt, DirectPrompt):
            record.prompt_tokens = prompt.num_tokens or None
            decision = self._prefill.whole(prompt)
            for length in prompt.lengths:
                plane.observe(length, math.ceil(length * decision.uncached_tokens / prompt.num_tokens))
            return decision
        begun_s = time.perf_counter()
        num_tokens = len(prompt.token_ids)
        record.prompt_tokens = num_tokens
        first_from_prefill = self._prefill.shows_first(request)
        decision = plane.router.route(num_tokens, prompt.chains, first_from_prefill=first_from_prefill)
        plane.observe(num_tokens, decision.uncached_tokens)
        policy = self._context.running.current.routing.policy
        record.since("decide", begun_s, decision_attributes(decision, policy))
        return decision


def decision_attributes(decision: Decision, policy: str) -> dict[str, AttributeValue]:
    """What a decision's span tells."""
    told: dict[str, AttributeValue] = {
        "prfaas.policy": policy,
        "prfaas.route": str(decision.route),
        "prfaas.reason": decision.reason,
        "prfaas.uncached_tokens": decision.uncached_tokens,
        "prfaas.prefill_tokens": decision.prefill_tokens,
        "prfaas.skip_tokens": decision.skip_tokens,
        "prfaas.prefill.instance": decision.prefill,
        "prfaas.decode.instance": decision.decode,
    }
    for name, value in (
        ("prfaas.threshold_tokens", decision.threshold_tokens),
        ("prfaas.predicted_ttft_s", decision.predicted_ttft_s),
    ):
        # No attribute in place of "never" and "unknown".
        if math.isfinite(value):
            told[name] = float(value)
    return told
