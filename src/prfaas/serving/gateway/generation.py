"""The way of one generating request through the gateway, from its body to its record."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from aiohttp import web

from prfaas.core.scheduling import Decision, NoDecodeInstanceError
from prfaas.serving.gateway.admission import Admission, AdmittedRequest, DeadlinePassedError
from prfaas.serving.gateway.answer import DecodeFailedError, KeepBudget, ResponseWriter, answer_of, writing
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.decode import MAX_ANSWERING_ATTEMPTS, Decoder
from prfaas.serving.gateway.dialects import dialect_of
from prfaas.serving.gateway.engine_client import OWN_RESOURCES
from prfaas.serving.gateway.first_token_answer import FirstTokenAnswers
from prfaas.serving.gateway.first_token_rules import FirstTokenRules
from prfaas.serving.gateway.prefill import PrefillOrchestrator
from prfaas.serving.gateway.prompts import DirectPrompt, Endpoint, answer_limit
from prfaas.serving.gateway.request import (
    PreparedRequest,
    RequestParser,
    ServingRequest,
    Tenants,
    TokenizedPrompt,
)
from prfaas.serving.gateway.request_log import RequestLog, RequestRecord
from prfaas.serving.gateway.request_trace import decision_attributes
from prfaas.serving.gateway.shadow import Shadow
from prfaas.serving.gateway.stream_resume import StreamResume, can_resume
from prfaas.serving.gateway.tokenization import Tokenization
from prfaas.serving.gateway.validation import Validation

_DESCRIPTORS_RETRY_S = 1.0

RECORD = web.RequestKey("prfaas_record", RequestRecord)


class Generation:
    """Serves whatever an engine answers (`Endpoint`). `handle` is the whole way of a request."""

    def __init__(
        self,
        context: GatewayContext,
        *,
        tenants: Tenants,
        admission: Admission,
        parser: RequestParser,
        tokenization: Tokenization,
        validation: Validation,
        first_tokens: FirstTokenRules,
        prefill: PrefillOrchestrator,
        decoder: Decoder,
        resume: StreamResume,
        first_answers: FirstTokenAnswers,
        shadow: Shadow,
        log: RequestLog,
    ) -> None:
        self._context = context
        self._tenants = tenants
        self._admission = admission
        self._parser = parser
        self._tokenization = tokenization
        self._validation = validation
        self._prefill = prefill
        self._decoder = decoder
        self._resume = resume
        self._first_tokens = first_tokens
        self._first_answers = first_answers
        self._shadow = shadow
        self._log = log
        self._budget = KeepBudget(context.options.kept_answers_bytes)

    async def handle(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Serve one request.

        Returns:
            The response, sent to its end if it is a stream.

        Raises:
            ApiError: what the client is to read in place of an answer.
        """
        with self._log.recording(str(endpoint), http.headers) as record, self._taken(http, record) as taken:
            async with taken.in_time():
                # 1. Parse and check: what the client wants, less what could steer an engine.
                request = await self._parser.parse(http, endpoint, record, taken.tenant, taken.hold)
                # 2. The prompt's token ids, as the engine makes them, and the hashes of its blocks.
                prompt = await self._tokenization.tokenize(request)
                # 3. Decide who prefills and who decodes, and whether the wait there is bearable.
                decision = self._decide(record, request, prompt)
                taken.check(decision, answer_limit(endpoint, request.body))
                # 4. Before KV moves: would the decode engine take the request at all?
                prompt = await self._validation.checked(request, prompt, decision)
                # 5. Prefill there and move the KV. If that fails, the decode engine prefills. Where the prefill samples
                #    the first token, this does not wait for the KV.
                ask = self._first_tokens.ask(request, prompt) if decision.transfers else None
                prepared = await self._prefill.prepare(request, prompt, decision, ask=ask)
                self._count_uncached(prepared)
            # 6. Decode and relay. If an engine fails, another one decodes.
            is_compared = self._shadow.wants(request, prepared)
            keep_bytes = self._keep_bytes(request, prepared)
            with writing(http, record, self._context.metrics, self._budget, keep_bytes) as writer:
                try:
                    async with taken.in_time():
                        response = await self._decode(request, prompt, prepared, writer)
                except DeadlinePassedError as late:
                    if not writer.begun:
                        raise
                    self._context.metrics.refused.labels("deadline-passed").inc()
                    response = await writer.fail(late, dialect_of(endpoint))
                # 7. Some of what was transferred is computed again elsewhere, later.
                if is_compared:
                    self._shadow.compare(request, prepared, answer_of(response, writer))
            # 8. Record. `recording` adds the times, and the outcome where an exception ended the request.
            record.answered(response.status)
            return response

    @contextmanager
    def _taken(self, http: web.Request, record: RequestRecord) -> Iterator[AdmittedRequest]:
        """While a request is open, if the gateway can take it: refused before its body is read. Raises ApiError."""
        http[RECORD] = record
        tenant = self._tenants.salt(http.headers)
        # A named tenant's numbers are about prefixes under its own salt: they tell nothing of others' prompts.
        tells_all = self._context.running.current.gateway.route_header == "full"
        record.tells_details = tells_all or self._tenants.names(http.headers)
        draining, descriptors = self._context.draining, self._context.descriptors
        with draining.request(), descriptors.serving(http.protocol):
            if not descriptors.has_room(draining.open_requests):
                raise ApiError(
                    503,
                    f"The gateway has no file descriptors left for another request (limit {descriptors.limit}).",
                    retry_after_s=_DESCRIPTORS_RETRY_S,
                )
            with self._admission.admitted(tenant, http.headers, http.content_length) as admitted:
                yield admitted

    def _decide(
        self, record: RequestRecord, request: ServingRequest, prompt: TokenizedPrompt | DirectPrompt
    ) -> Decision:
        """Where the request goes. Raises NoDecodeInstanceError.

        The prompt's length enters the statistics from which thresholds and roles are worked out.
        """
        plane = self._context.plane
        if isinstance(prompt, DirectPrompt):
            return plane.router.route(0, None)
        begun_s = time.perf_counter()
        num_tokens = len(prompt.token_ids)
        record.prompt_tokens = num_tokens
        first_from_prefill = self._first_tokens.shows_first(request, prompt)
        decision = plane.router.route(num_tokens, prompt.chains, first_from_prefill=first_from_prefill)
        plane.observe(num_tokens, decision.uncached_tokens)
        decided_s = record.since("decide", begun_s)
        if record.trace is not None:
            policy = self._context.running.current.routing.policy
            record.trace.step("decide", begun_s, decided_s, decision_attributes(decision, policy))
        return decision

    def _count_uncached(self, prepared: PreparedRequest) -> None:
        if prepared.decision is not None:
            uncached = self._context.metrics.uncached_tokens.labels(str(prepared.route))
            uncached.inc(prepared.decision.uncached_tokens)

    def _keep_bytes(self, request: ServingRequest, prepared: PreparedRequest) -> int:
        """What to keep of the answer's stream, in case another engine must continue it or it is compared."""
        is_exact = prepared.prompt is not None and prepared.prompt.exact
        resumes = is_exact and can_resume(request.endpoint, request.body)
        return self._context.options.kept_answer_bytes if resumes else 0

    async def _decode(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt | DirectPrompt,
        prepared: PreparedRequest,
        writer: ResponseWriter,
    ) -> web.StreamResponse:
        """Relay what the decode engine says.

        While the client has seen nothing, another engine may answer in place of one that failed. After the first
        byte, another engine continues the text if the request allows it. Raises ApiError.
        """
        if prepared.first is not None and prepared.prompt is not None:
            request.record.sent(prepared.header())
            return await self._first_answers.answer(
                request, prepared.prompt, prepared, prepared.first, writer
            )
        failed: list[str] = []
        while True:
            if request.endpoint.generates:
                request.record.sent(prepared.header())
            try:
                return await self._decoder.relay(request, prepared, writer)
            except DecodeFailedError as failure:
                self._decoder.report(request, prepared, failure)
                failed.append(prepared.decode)
                if writer.begun:
                    return await self._resume.finish(request, prepared, writer, failure, failed)
                another = await self._reroute(request, prompt, failure, failed)
                if another is None and failure.answer is not None:
                    return writer.send(failure.answer)
                if another is None:
                    raise _unanswered(failure, failed[-1]) from None
                prepared = another

    async def _reroute(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt | DirectPrompt,
        failure: DecodeFailedError,
        failed: Collection[str],
    ) -> PreparedRequest | None:
        """The same request made ready for another decode engine; None when there is none or enough have failed."""
        if failure.reason == OWN_RESOURCES:
            return None
        attempts = self._context.options.decode_attempts if failure.lost else MAX_ANSWERING_ATTEMPTS
        if len(failed) >= attempts:
            return None
        try:
            return await self._prefill.prepare_again(request, prompt, avoid=failed)
        except NoDecodeInstanceError:
            return None


def _unanswered(failure: DecodeFailedError, decode: str) -> ApiError:
    if failure.reason == OWN_RESOURCES:
        return ApiError(503, "The gateway has no file descriptor left; try again.", retry_after_s=1)
    return ApiError(503, f"The decode instance {decode} does not answer.", retry_after_s=1)
