"""What became of each of the latest requests, for `prfaas explain`. It holds no prompt, no answer and no secret."""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from aiohttp import web

from prfaas.core.deployment import LocalTransfer
from prfaas.core.route_header import REQUEST_ID_HEADER, ROUTE_HEADER, RouteHeader
from prfaas.core.scheduling.decision import Decision
from prfaas.serving.gateway.bodies import ApiError, reason_of
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.logs import REQUEST_ID
from prfaas.serving.tracing import NO_TRACE, Attributes, AttributeValue, RequestSpans

if TYPE_CHECKING:
    from prfaas.serving.tracing.otel import OtelTracing


# Steps that are spans too.
_SPANS = {
    "read": "read",
    "tokenize": "tokenize",
    "decide": "decide",
    "turn": "wait_for_turn",
    "cache_transfer": "kv_copy",
}


class WaitsFor(StrEnum):
    """What a request without an answer waits for, as a metric's label."""

    BODY = "body"
    TOKENS = "tokens"
    PREFILL_INSTANCE = "prefill_instance"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class TransferredBytes:
    """What a completed transfer moved, summed over ranks."""

    total_bytes: int
    overlapped_bytes: int
    """Bytes that had arrived when the prefill ended."""
    spared_bytes: int = 0
    """By how many bytes compression made them less on the link."""
    cached_tokens: int | None = None
    """Tokens that the producer reused, by its own word; None: it did not say."""
    checkpoint_bytes: int = 0
    """What checkpoints moved beside it."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that went over the network for it."""
        return self.total_bytes - self.spared_bytes + self.checkpoint_bytes

    @property
    def overlapped_fraction(self) -> float:
        """Share of the bytes that cost no time of their own; 1 when there was nothing to move."""
        return self.overlapped_bytes / self.total_bytes if self.total_bytes else 1.0


@dataclass(slots=True)
class Attempt:
    """One way that the request was sent."""

    decision: Decision
    prompt_tokens: int
    """Tokens of the prompt that was sent. For the rest of an answer, the answer's beginning is part of it."""
    outcome: str = "under way"
    """"under way", "done", or why it failed, in one word."""
    moved: TransferredBytes | None = None
    """What arrived at the decode instance."""
    cached_tokens: int | None = None
    """Tokens that the prefill engine reused, by its own word; None: it did not say."""
    by: LocalTransfer = "prfaas"
    """What moved it."""


@dataclass(slots=True)
class RequestRecord:
    """One request. Every stage writes here what it did."""

    request_id: str
    endpoint: str
    at_s: float
    """Unix time of the arrival."""
    began_s: float
    """The same by `time.perf_counter`."""
    model: str = ""
    tenant: str = ""
    """A client's name, or a digest of what a header says; empty: nobody said."""
    streamed: bool = False
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    direct_reason: str | None = None
    """Why its decode engine got it without a look at the prompt."""
    first_token: str | None = None
    """`prefill`: who prefilled has sampled the answer's first token; None: who decoded."""
    attempts: list[Attempt] = field(default_factory=list)
    route_header: str | None = None
    """The numbers that decided, for operators."""
    client_header: str | None = None
    """What the client is told of them."""
    tells_details: bool = False
    """Whether the client is told all of them, and how much of its prompt was cached."""
    shares_unnamed: bool = False
    """Whether its prefixes are those of all clients that don't say whose they are, while others do."""
    route: str = "none"
    waits_for: WaitsFor | None = WaitsFor.BODY
    answer_events: int = 0
    """Events of its stream, known at its end where its tokens are not."""
    prefix_moved: TransferredBytes | None = None
    """What the cache transfer before the prefill moved."""
    prefix_outcome: str | None = None
    """What became of the cache transfer before the prefill."""
    egress_bytes: int = 0
    """What its transfers put on links between clusters, that of a cached prefix too."""
    egress_cost: float = 0.0
    """Price of these bytes, by the links' prices then."""
    steps_s: dict[str, float] = field(default_factory=dict)
    """Step's name to its duration."""
    starts_s: dict[str, float] = field(default_factory=dict)
    """Step's name to the seconds from the arrival until it first began."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What went wrong, with the seconds since the arrival."""
    broken: bool = False
    """Whether its stream ended with an error."""
    refused_status: int | None = None
    """The decode engine's status where it refused the request; a stream that says so has status 200 itself."""
    status: int | None = None
    outcome: str = "under way"
    trace: RequestSpans = NO_TRACE
    """Where the stages write their spans."""
    trace_id: str | None = None
    """Of its trace; None: it is not traced."""
    trace_headers: Mapping[str, str] | None = None
    """What engines get of the trace; None: nothing is traced here, so they get what the client sent."""
    finish_reasons: Sequence[str] = ()
    """Why its answers ended; known of traced requests."""

    @property
    def generated_tokens(self) -> int | None:
        """The length of its answer, told or counted; None: not known (yet)."""
        if self.answer_tokens is None and self.answer_events:
            # Not the mark at the end; a conversation begins with an event of its own.
            return max(self.answer_events - 1 - (self.endpoint == "chat"), 0)
        return self.answer_tokens

    def start(self, decision: Decision, prompt_tokens: int) -> Attempt:
        """The request is sent the way of `decision` now."""
        attempt = Attempt(decision, prompt_tokens)
        self.attempts.append(attempt)
        return attempt

    def note(self, sentence: str) -> None:
        """Something has happened that explains the request's way."""
        self.notes.append((time.perf_counter() - self.began_s, sentence))
        self.trace.event("prfaas.note", {"prfaas.note": sentence})

    def fell_back(self, attempt: Attempt, reason: str) -> None:
        """An attempt has failed, and another way is taken."""
        attempt.outcome = reason
        prefill = attempt.decision.prefill
        self.trace.event("prfaas.fallback", {"prfaas.reason": reason, "prfaas.prefill.instance": prefill})

    def took(self, step: str, taken_s: float, begun_s: float | None = None) -> None:
        """A step is over. Steps of the same name add up. `begun_s`: None: it ends now."""
        begun_s = time.perf_counter() - taken_s if begun_s is None else begun_s
        self.starts_s.setdefault(step, max(begun_s - self.began_s, 0.0))
        self.steps_s[step] = self.steps_s.get(step, 0.0) + taken_s

    def since(self, step: str, begun_s: float, attributes: Attributes | None = None) -> float:
        """A step that began at `begun_s` is over. Returns the time, at which the next one begins.

        `attributes`: of its span, where it has one.
        """
        now_s = time.perf_counter()
        self.took(step, now_s - begun_s, begun_s)
        if step in _SPANS:
            self.trace.step(_SPANS[step], begun_s, now_s, attributes)
        return now_s

    def sent(self, header: RouteHeader) -> None:
        """Its decode instance is asked now, by the way that `header` tells."""
        self.route, self.route_header = header.route, header.encode()
        self.first_token = header.first_token
        if self.tells_details:
            self.client_header = self.route_header
        elif not self.shares_unnamed:
            self.client_header = header.without_details()
        self.waits_for = WaitsFor.DECODE

    def answered(self, status: int) -> None:
        """The client has an answer with this HTTP status."""
        outcome = _outcome(self.refused_status or status)
        self.status, self.outcome = status, "engine_error" if self.broken else outcome

    def headers(self) -> dict[str, str]:
        """What every answer tells the client about its way, as far as it is known."""
        headers = {REQUEST_ID_HEADER: self.request_id}
        if self.client_header is not None:
            headers[ROUTE_HEADER] = self.client_header
        return headers


RECORD = web.RequestKey("prfaas_record", RequestRecord)
"""Where an HTTP request has its record, once it is taken on."""


class RequestLog:
    """The latest requests by id; the oldest are dropped. Counts them when they end."""

    def __init__(
        self,
        capacity: int,
        metrics: Metrics,
        tracing: "OtelTracing | None" = None,
        keep: Callable[[RequestRecord, float], None] | None = None,
    ) -> None:
        """`keep` is called with each record at its end, and with the seconds that the request took."""
        self.capacity = capacity
        self._metrics = metrics
        self._tracing = tracing
        self._keep = keep
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._open: dict[str, RequestRecord] = {}
        metrics.in_flight_requests.set_function(lambda: len(self._open))
        for step in WaitsFor:
            metrics.waiting_requests.labels(str(step)).set_function(partial(self._waiting, step))

    @contextmanager
    def recording(self, endpoint: str, headers: Mapping[str, str] | None = None) -> Iterator[RequestRecord]:
        """One request from its arrival to its end, with the outcome that its exception tells.

        `headers`: the client's, whose trace is continued.

        """
        record = RequestRecord(uuid.uuid4().hex, endpoint, time.time(), time.perf_counter())
        self.add(record)
        self._open[record.request_id] = record
        request_id = REQUEST_ID.set(record.request_id)
        if self._tracing is not None:
            begun = self._tracing.begin(endpoint, headers or {}, record.at_s, record.began_s)
            record.trace, record.trace_headers = begun.trace, begun.headers
            record.trace_id = begun.trace_id
        try:
            yield record
        except (ApiError, web.HTTPException) as error:
            # aiohttp's own: the body is too large, or came in a way that it refuses.
            record.status, record.outcome = error.status, _outcome(error.status)
            reason = error.reason if isinstance(error, ApiError) else reason_of(error.status)
            self._metrics.refused.labels(reason).inc()
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            record.outcome = "cancelled"
            raise
        except Exception:
            record.status, record.outcome = 500, "engine_error"
            raise
        finally:
            REQUEST_ID.reset(request_id)
            del self._open[record.request_id]
            total_s = record.since("total", record.began_s) - record.began_s
            self._metrics.requests.labels(record.endpoint, record.route, record.outcome).inc()
            self._count(record, total_s)
            if self._keep is not None:
                self._keep(record, total_s)
            _end_trace(record, record.began_s + total_s)

    def _count(self, record: RequestRecord, total_s: float) -> None:
        """What the answer took, and how long it was."""
        metrics = self._metrics
        metrics.request_seconds.labels(record.route).observe(total_s)
        tokens = record.generated_tokens
        if not tokens:
            return
        metrics.answer_tokens.labels(record.route).inc(tokens)
        if record.outcome == "ok" and record.streamed and tokens > 1:
            decode_s = total_s - record.steps_s["first_byte"]
            metrics.tpot_seconds.labels(record.route).observe(decode_s / (tokens - 1))

    def _waiting(self, step: WaitsFor) -> int:
        """Open requests that wait for something."""
        return sum(record.waits_for is step for record in self._open.values())

    def add(self, record: RequestRecord) -> None:
        self._records[record.request_id] = record
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)

    def find(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def latest(self, limit: int) -> list[RequestRecord]:
        """The newest records, newest first; `limit` at most."""
        return list(islice(reversed(self._records.values()), limit))


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "engine_error"


_OPERATIONS = {
    "completions": "text_completion",
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
}
"""Endpoint to what the GenAI semantic conventions call it."""


def _end_trace(record: RequestRecord, ended_s: float) -> None:
    if not record.trace.is_kept:
        return
    error = None if record.outcome == "ok" else record.outcome
    operation = _OPERATIONS.get(record.endpoint)
    name = record.endpoint if operation is None else f"{operation} {record.model}".rstrip()
    record.trace.end(name, ended_s, _span_attributes(record), error, failed=error == "engine_error")
    # The record is kept for longer than its spans.
    record.trace = NO_TRACE


def _span_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    """What a request's own span tells: numbers and words from fixed sets, and names of the deployment file."""
    first_byte_s = record.steps_s.get("first_byte")
    told: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _OPERATIONS.get(record.endpoint),
        "gen_ai.provider.name": "prfaas",
        "gen_ai.request.model": record.model or None,
        "gen_ai.request.stream": record.streamed,
        "gen_ai.request.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.answer_tokens,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.response.time_to_first_chunk": first_byte_s,
        # As vLLM calls the same in its own spans.
        "gen_ai.latency.time_to_first_token": first_byte_s,
        "gen_ai.latency.e2e": record.steps_s.get("total"),
        "http.request.method": "POST",
        "http.response.status_code": record.status,
        "prfaas.route": record.route,
        "prfaas.outcome": record.outcome,
        "prfaas.direct_reason": record.direct_reason,
        "prfaas.attempts": len(record.attempts),
    }
    return {name: value for name, value in told.items() if value is not None}
