"""One request's record with the numbers that decided, ready for JSON."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from prfaas.deployment import Deployment
from prfaas.gateway.records import Attempt, Record
from prfaas.gateway.transfers import Moved
from prfaas.kvmodel import KvModel
from prfaas.scheduling import Decision

Json = dict[str, Any]


def explained(record: Record, deployment: Deployment, model: KvModel | None) -> Json:
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


def _moved(moved: Moved | None) -> Json:
    if moved is None:
        return {"bytes": 0, "hidden_bytes": 0, "hidden": None}
    return {"bytes": moved.total_bytes, "hidden_bytes": moved.hidden_bytes, "hidden": moved.hidden_fraction}


def _sum(attempts: Sequence[Attempt]) -> Moved | None:
    """All transfers to decode instances together: one, unless an engine has failed."""
    moved = [attempt.moved for attempt in attempts if attempt.moved is not None]
    if not moved:
        return None
    return Moved(sum(m.total_bytes for m in moved), sum(m.hidden_bytes for m in moved))


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
