"""What became of each of the latest requests, for `prfaas explain`. No prompt, no answer, no secret.

One request's record with the numbers that decided, ready for JSON.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from prfaas.core.deployment import Deployment
from prfaas.core.kv import KvModel
from prfaas.core.scheduling import Decision
from prfaas.serving.gateway.kv_transfers import TransferredBytes


@dataclass(slots=True)
class Attempt:
    """One way that the request was sent. `outcome`: "under way", "done", or why it failed, in one word.

    `prompt_tokens`: of the prompt that was sent, which for the rest of an answer has its beginning at the end.
    `moved`: what came to the decode instance.
    """

    decision: Decision
    prompt_tokens: int
    outcome: str = "under way"
    moved: TransferredBytes | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request. `began_s` is `time.perf_counter`, `at_s` Unix time; `steps_s` are durations by the step's name.

    `direct_reason`: why its decode engine got it without a look at the prompt. `prefix_*`: the cache transfer
    before the prefill. `notes`: what went wrong, with the seconds since the request's arrival. `broken`: its
    stream ended with an error.
    """

    request_id: str
    endpoint: str
    at_s: float
    began_s: float
    model: str = ""
    streamed: bool = False
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    direct_reason: str | None = None
    attempts: list[Attempt] = field(default_factory=list)
    route_header: str | None = None
    route: str = "none"
    prefix_moved: TransferredBytes | None = None
    prefix_outcome: str | None = None
    steps_s: dict[str, float] = field(default_factory=dict)
    notes: list[tuple[float, str]] = field(default_factory=list)
    broken: bool = False
    status: int | None = None
    outcome: str = "under way"

    def went(self, decision: Decision, prompt_tokens: int) -> Attempt:
        """The request goes the way of `decision` now."""
        attempt = Attempt(decision, prompt_tokens)
        self.attempts.append(attempt)
        return attempt

    def note(self, sentence: str) -> None:
        """Something that explains the request's way has happened."""
        self.notes.append((time.perf_counter() - self.began_s, sentence))

    def took(self, step: str, taken_s: float) -> None:
        """A step is over; more than one of a kind add up."""
        self.steps_s[step] = self.steps_s.get(step, 0.0) + taken_s

    def since(self, step: str, begun_s: float) -> float:
        """A step that began at `begun_s` is over. Gives the time, at which the next one begins."""
        now_s = time.perf_counter()
        self.took(step, now_s - begun_s)
        return now_s


class RequestLog:
    """The latest requests by id; the oldest make room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        self._records[record.request_id] = record
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)

    def find(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def __len__(self) -> int:
        return len(self._records)


Json = dict[str, Any]


def explained(record: RequestRecord, deployment: Deployment, model: KvModel | None) -> Json:
    """What `GET /prfaas/requests/{id}` answers; seconds, bytes and tokens as the names say.

    `saved_bytes`: what was not sent because the decode instance held it; None where the model's KV is unknown.
    """
    return {
        "request_id": record.request_id,
        "at": datetime.fromtimestamp(record.at_s, UTC).isoformat(timespec="milliseconds"),
        "endpoint": record.endpoint,
        "model": record.model,
        "streamed": record.streamed,
        "prompt_tokens": record.prompt_tokens,
        "answer_tokens": record.answer_tokens,
        "route": record.route_header,
        "direct_reason": record.direct_reason,
        "attempts": [_attempt(attempt, deployment) for attempt in record.attempts],
        "transfer": _moved(_sum(record.attempts)) | {"saved_bytes": _saved_bytes(record.attempts, model)},
        "cache_transfer": None
        if record.prefix_outcome is None
        else {"outcome": record.prefix_outcome} | _moved(record.prefix_moved),
        "steps_s": {step: round(taken_s, 6) for step, taken_s in record.steps_s.items()},
        "notes": [{"after_s": round(after_s, 6), "what": what} for after_s, what in record.notes],
        "status": record.status,
        "outcome": record.outcome,
    }


def _attempt(attempt: Attempt, deployment: Deployment) -> Json:
    decision = attempt.decision
    transfer = decision.cache_transfer
    return {
        "route": str(decision.route),
        "prefill": decision.prefill,
        "decode": decision.decode,
        "reason": decision.reason,
        "outcome": attempt.outcome,
        "prompt_tokens": attempt.prompt_tokens,
        "uncached_tokens": decision.uncached_tokens,
        "threshold_tokens": _finite(decision.threshold_tokens),
        "prefill_tokens": decision.prefill_tokens,
        "skip_tokens": decision.skip_tokens,
        "held_tokens": _held_tokens(decision, attempt.prompt_tokens, deployment),
        "predicted_ttft_s": _finite(decision.predicted_ttft_s),
        "cache_transfer": None
        if transfer is None
        else {
            "source": transfer.source,
            "num_tokens": transfer.num_tokens,
            "skip_tokens": transfer.skip_tokens,
        },
    }


def _held_tokens(decision: Decision, prompt_tokens: int, deployment: Deployment) -> Json:
    """Cluster → tokens of the prompt that it could reuse, as the decision's numbers say."""
    held = {deployment.instance(decision.decode).cluster: prompt_tokens - decision.uncached_tokens}
    sender = deployment.instance(decision.prefill).cluster
    held.setdefault(sender, max(prompt_tokens - decision.prefill_tokens, 0))
    return held


def _moved(moved: TransferredBytes | None) -> Json:
    if moved is None:
        return {"bytes": 0, "hidden_bytes": 0, "hidden": None}
    return {"bytes": moved.total_bytes, "hidden_bytes": moved.hidden_bytes, "hidden": moved.hidden_fraction}


def _sum(attempts: Sequence[Attempt]) -> TransferredBytes | None:
    """All transfers to decode instances together: one, unless an engine has failed."""
    moved = [attempt.moved for attempt in attempts if attempt.moved is not None]
    if not moved:
        return None
    return TransferredBytes(sum(m.total_bytes for m in moved), sum(m.hidden_bytes for m in moved))


def _saved_bytes(attempts: Sequence[Attempt], model: KvModel | None) -> int | None:
    if model is None:
        return None
    saved_bytes = 0
    for attempt in attempts:
        if attempt.moved is not None:
            sent_tokens = attempt.prompt_tokens - 1
            saved_bytes += model.bytes_to_move(sent_tokens)
            saved_bytes -= model.bytes_to_move(sent_tokens, attempt.decision.skip_tokens)
    return saved_bytes


def _finite(value: float) -> float | None:
    """JSON knows no infinity: null stands for it."""
    return value if math.isfinite(value) else None
