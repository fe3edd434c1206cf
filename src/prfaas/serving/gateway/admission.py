"""What a gateway takes on: so many requests, so much queued work, so many bytes, and of each a part for every tenant.

Beyond that it says 429 at once, mostly before it has read a body. A queue that is bounded in predicted seconds keeps
every engine busy under overload, and keeps what is admitted useful: without a bound all requests would wait longer and
longer, and in the end nobody's answer would come in time.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

from prfaas.core.deployment import GatewayLimits
from prfaas.core.scheduling.decision import Decision
from prfaas.serving.control.waits import PredictedWaits
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.prompts.request import Headers
from prfaas.serving.running_deployment import RunningDeployment

TIMEOUT_HEADER = "x-request-timeout"

# Up to here a limit is nobody's concern; above, no tenant may have more than its equal part of what is in use.
_PRESSURE = 0.5
_LEAST_RETRY_S = 1.0
# Predictions are means: of what a queue would let end in the last fifth of its time, much would end after it.
_PLANNED_PART = 0.8


class DeadlinePassedError(ApiError):
    """The time that the client gave its request is over."""

    def __init__(self, timeout_s: float) -> None:
        sentence = f"The request did not end within its {TIMEOUT_HEADER} of {timeout_s:g} s."
        super().__init__(504, sentence, reason="deadline-passed")


class AdmittedRequest:
    """One request that was taken on: what it holds of the limits, and how long it may take."""

    __slots__ = ("_admission", "_timeout_s", "_until_s", "answers", "held_bytes", "tenant")

    def __init__(self, admission: "Admission", tenant: str, timeout_s: float | None) -> None:
        self._admission = admission
        self.tenant = tenant
        """What tells tenants apart: the salt of its prefixes."""
        self._timeout_s = timeout_s
        self._until_s = math.inf if timeout_s is None else time.perf_counter() + timeout_s
        self.held_bytes = 0
        """Bytes of its body so far."""
        self.answers = 0
        """How many answers of the limit it holds; 0 until its body is complete."""

    def hold(self, nbytes: int) -> None:
        """So many more bytes of its body have come. Raises ApiError 429 where they are too many."""
        self._admission.check_bytes(self.tenant, nbytes)
        self._admission.count(self, nbytes=nbytes)

    def begin(self) -> None:
        """Its body is complete: from now on it is one of the open requests. Raises ApiError 429 where they are too
        many."""
        self._admission.check_open()
        self._admission.count(self, answers=1)

    def widen(self, answers: int) -> None:
        """It wants so many answers, each of which counts as a request. Raises ApiError: 429 where they are too many
        now, 400 where they always are."""
        if answers > 1:
            self._admission.check_width(self.tenant, answers)
            self._admission.count(self, answers=answers - 1)

    def check(self, decision: Decision, max_tokens: int | None) -> None:
        """Raises ApiError 429 when the work would wait too long where `decision` puts it, or an answer of at most
        `max_tokens` tokens would end after the deadline."""
        self._admission.check_wait(decision, max_tokens, self._until_s - time.perf_counter())

    def in_time(self) -> AbstractAsyncContextManager[None]:
        """The body of this is cancelled when the deadline passes. Raises DeadlinePassedError then."""
        return nullcontext() if self._timeout_s is None else _in_time(self._timeout_s, self._until_s)


@asynccontextmanager
async def _in_time(timeout_s: float, until_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(until_s - time.perf_counter()) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlinePassedError(timeout_s) from None


class Admission:
    """Counts what all open requests of one gateway hold. It belongs to the event loop's thread."""

    def __init__(self, running: RunningDeployment, waits: PredictedWaits) -> None:
        self._running = running
        self._waits = waits
        self._open = 0
        self._bytes = 0
        self._complete = 0
        # By tenant: requests that were taken on, answers of those whose body is complete, and bytes of bodies.
        self._taken_of: Counter[str] = Counter()
        self._open_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()

    @property
    def open_requests(self) -> int:
        """Requests whose bodies are complete."""
        return self._complete

    @property
    def _limits(self) -> GatewayLimits:
        return self._running.current.gateway.limits

    @contextmanager
    def admitted(self, tenant: str, headers: Headers, body_bytes: int | None) -> Iterator[AdmittedRequest]:
        """One request, from before its body is read to its end. It counts from `AdmittedRequest.begin` on.

        `body_bytes`: what its Content-Length says; None: unknown. Raises ApiError: 429 when a limit is reached, 413 for
        a body that alone is beyond it, 400 for a timeout that is no positive number.
        """
        timeout_s = timeout_of(headers)
        self._check_room(tenant, body_bytes or 0, math.inf if timeout_s is None else timeout_s)
        request = AdmittedRequest(self, tenant, timeout_s)
        self._taken_of[tenant] += 1
        try:
            yield request
        finally:
            self.count(request, answers=-request.answers, nbytes=-request.held_bytes)
            self._taken_of[tenant] -= 1
            if not self._taken_of[tenant]:
                del self._taken_of[tenant], self._open_of[tenant], self._bytes_of[tenant]

    def check_spare(self) -> None:
        """Raises ApiError 429 where half of a limit is in use: what has low priority waits then."""
        limits = self._limits
        wait_s = self._waits.least() if self._open else 0.0
        used = max(self._open / limits.requests, self._bytes / limits.bodies_bytes, wait_s / limits.queue_s)
        if used >= _PRESSURE:
            sentence = "The gateway is busy, and this client has low priority."
            raise self._refusal("priority", sentence, wait_s - _PRESSURE * limits.queue_s)

    def count(self, request: AdmittedRequest, *, answers: int = 0, nbytes: int = 0) -> None:
        """An open request holds so much more of the limits, or less."""
        self._complete -= request.answers > 0
        request.answers += answers
        request.held_bytes += nbytes
        self._complete += request.answers > 0
        self._open += answers
        self._open_of[request.tenant] += answers
        self._bytes += nbytes
        self._bytes_of[request.tenant] += nbytes

    def check_width(self, tenant: str, answers: int) -> None:
        """Whether an open request of a tenant may want so many answers. Raises ApiError as `AdmittedRequest.widen`."""
        limit, more = self._limits.requests, answers - 1
        if answers > limit:
            raise ApiError(400, f"The request wants {answers} answers; {limit} may be open at a time.")
        self.check_open(more)
        is_tight = self._open + more > _PRESSURE * limit
        if is_tight and self._beyond_share(self._open_of[tenant], more, self._open, others=0):
            raise self._share_refusal("open requests")

    def check_wait(self, decision: Decision, max_tokens: int | None, left_s: float) -> None:
        """Raises ApiError 429 when `decision` would wait too long, or `left_s` seconds can't be enough."""
        wait_s = self._waits.of(decision)
        self._check_queue(wait_s)
        if left_s < math.inf:
            predicted_s = decision.predicted_ttft_s + decision.kv_wait_s
            # It is no number where nothing could be predicted.
            begins_s = max(wait_s, 0.0 if math.isnan(predicted_s) else predicted_s)
            ends_s = begins_s + self._waits.answer_s(decision.decode, max_tokens)
            self._check_deadline(ends_s, left_s, _PLANNED_PART if wait_s else 1.0)

    def _check_room(self, tenant: str, body_bytes: int, timeout_s: float) -> None:
        limits = self._limits
        self.check_open()
        wait_s = self._waits.least() if self._open else 0.0
        self._check_queue(wait_s)
        self._check_deadline(wait_s, timeout_s)
        if body_bytes > limits.bodies_bytes:
            # Sent again it would be too large again.
            sentence = f"The request body has {body_bytes} bytes; all bodies together may have {limits.bodies_bytes}."
            raise ApiError(413, sentence)
        others = 0 if tenant in self._taken_of else 1
        self.check_bytes(tenant, body_bytes, others)
        pressure = max(self._open / limits.requests, wait_s / limits.queue_s)
        if pressure > _PRESSURE and self._beyond_share(self._open_of[tenant], 1, self._open, others):
            raise self._share_refusal("open requests", wait_s - _PRESSURE * limits.queue_s)

    def check_open(self, more: int = 1) -> None:
        """Raises ApiError 429 where so many more answers are too many."""
        if self._open + more > self._limits.requests:
            raise self._refusal("requests", f"The gateway has {self._open} open requests, its limit.")

    def _check_queue(self, wait_s: float) -> None:
        if wait_s > self._limits.queue_s:
            sentence = (
                f"The work that is queued already takes {wait_s:.0f} s, more than {self._limits.queue_s:g} s."
            )
            raise self._refusal("queue", sentence, wait_s - self._limits.queue_s)

    def _check_deadline(self, predicted_s: float, left_s: float, planned_part: float = 1.0) -> None:
        planned_s = planned_part * left_s
        if predicted_s > planned_s:
            left = f"{max(left_s, 0.0):.1f} s"
            sentence = f"An answer would take {predicted_s:.1f} s or more; {TIMEOUT_HEADER} leaves {left}."
            raise self._refusal("deadline", sentence, predicted_s - planned_s)

    def check_bytes(self, tenant: str, nbytes: int, others: int = 0) -> None:
        """Raises ApiError 429 where so many more bytes of bodies are too many."""
        limit = self._limits.bodies_bytes
        if self._bytes + nbytes > limit:
            sentence = f"The bodies of open requests have {self._bytes} bytes; with this one they would pass {limit}."
            raise self._refusal("bodies", sentence)
        is_tight = self._bytes + nbytes > _PRESSURE * limit
        if is_tight and self._beyond_share(self._bytes_of[tenant], nbytes, self._bytes, others):
            raise self._share_refusal("bytes of bodies")

    def _beyond_share(self, held: int, more: int, total: int, others: int) -> bool:
        """Whether `held` + `more` are above an equal part of all; `others`: 1 if this tenant had nothing open yet."""
        tenants = len(self._taken_of) + others
        return tenants > 1 and (held + more) > math.ceil((total + more) / tenants)

    def _share_refusal(self, what: str, retry_after_s: float = 0.0) -> ApiError:
        sentence = f"Others wait, and this tenant holds its part of the {what} already."
        return self._refusal("share", sentence, retry_after_s)

    def _refusal(self, reason: str, sentence: str, retry_after_s: float = 0.0) -> ApiError:
        return ApiError(429, sentence, retry_after_s=max(retry_after_s, _LEAST_RETRY_S), reason=reason)


def timeout_of(headers: Headers) -> float | None:
    """Seconds that the client gives its request; None: any time. Raises ApiError 400."""
    values = headers.getall(TIMEOUT_HEADER, [])
    if not values:
        return None
    try:
        (value,) = values
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0.0 < timeout_s < math.inf:
        raise ApiError(400, f"{TIMEOUT_HEADER} must be one number of seconds above 0.", param=TIMEOUT_HEADER)
    return timeout_s
