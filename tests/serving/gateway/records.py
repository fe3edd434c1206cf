"""Records of requests that never were."""

from typing import Any

from prfaas.core.ledger import COLUMNS, LedgerEntry
from prfaas.core.scheduling.decision import Decision, Route
from prfaas.serving.gateway.request_log import RequestRecord


def record_of(*, prompt_tokens: int, uncached_tokens: int) -> RequestRecord:
    """A request that was decided and answered with 20 tokens."""
    record = RequestRecord("0" * 32, "completion", at_s=1000.0, began_s=0.0)
    record.prompt_tokens, record.answer_tokens, record.outcome = prompt_tokens, 20, "ok"
    record.start(
        Decision(
            route=Route.OFFLOAD,
            prefill="far",
            decode="near",
            uncached_tokens=uncached_tokens,
            prefill_tokens=uncached_tokens,
            skip_tokens=0,
            kv_bytes=1,
            reason="long",
            threshold_tokens=100.0,
            predicted_ttft_s=0.5,
        ),
        prompt_tokens,
    )
    return record


def ledger_row(**values: Any) -> Any:
    """A row of a ledger of which nothing is known but these."""
    blank: dict[str, Any] = dict.fromkeys(COLUMNS, 0) | {
        "outcome": "ok",
        "route": "local",
        "attempts": 1,
        "slice": None,
        **dict.fromkeys(("arm", "tenant", "prefill_cluster", "decode_cluster"), ""),
    }
    return LedgerEntry(**(blank | values))
