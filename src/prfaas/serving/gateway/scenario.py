"""What has come lately and what is up now, as a trace and a command for `prfaas simulate`."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from prfaas.core.deployment import Deployment
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.request_log import RequestRecord

TRACE_NAME = "scenario.jsonl"
_BLOCK_TOKENS = 256
# A link that is measured to within this share of what the file says is as the file says.
_SAME_BANDWIDTH = 0.05


def scenario_of(
    records: Iterable[RequestRecord], state: Mapping[str, Any], deployment: Deployment
) -> Json | None:
    """The scenario, ready for JSON; None where no request has told its length yet.

    `trace` is text in our own format. The cached beginning of every prompt stands in it as one text that all share:
    what a request found is right, whose text it was is not known. `prediction` is what the control plane itself
    expects of the roles as they are, where it has evaluated them.
    """
    seen = sorted((record for record in records if record.prompt_tokens), key=lambda record: record.at_s)
    if not seen:
        return None
    span_s = seen[-1].at_s - seen[0].at_s
    options = ["--trace", TRACE_NAME, "--requests", str(len(seen))]
    if span_s > 0:
        options += ["--rate", f"{(len(seen) - 1) / span_s:.4g}"]
    changes, notes = _changes(state)
    for change in changes:
        options += ["--set", change]
    return {
        "trace_name": TRACE_NAME,
        "trace": _trace(seen),
        "requests": len(seen),
        "span_s": round(span_s, 3),
        "command": shlex.join(["prfaas", "simulate", deployment.path.name, *options]),
        "changes": changes,
        "notes": notes,
        "prediction": _prediction(state),
    }


def _trace(seen: list[RequestRecord]) -> str:
    fresh = count(1 << 32)
    lines = []
    for record in seen:
        prompt_tokens = record.prompt_tokens or 0
        shared = (prompt_tokens - _uncached_tokens(record, prompt_tokens)) // _BLOCK_TOKENS
        blocks = math.ceil(prompt_tokens / _BLOCK_TOKENS)
        row = {
            "arrival_s": round(record.at_s - seen[0].at_s, 6),
            "input_tokens": prompt_tokens,
            "output_tokens": max(record.generated_tokens or 0, 1),
            "block_tokens": _BLOCK_TOKENS,
            "block_ids": [*range(shared), *(next(fresh) for _ in range(blocks - shared))],
        }
        lines.append(json.dumps(row, separators=(",", ":")) + "\n")
    return "".join(lines)


def _uncached_tokens(record: RequestRecord, prompt_tokens: int) -> int:
    """By the first decision; without one nothing is known to be cached."""
    uncached = record.attempts[0].decision.uncached_tokens if record.attempts else prompt_tokens
    return min(max(uncached, 0), prompt_tokens)


def _changes(state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Fields of the deployment file as they are now, and what can't be said that way."""
    changes, notes = [], []
    for name, link in state.get("links", {}).items():
        configured, capacity = link["configured_bits_per_s"], link["capacity_bits_per_s"]
        if not link["up"]:
            notes.append(f"The link {name} is down; the simulation has it at its configured bandwidth.")
        elif abs(capacity - configured) > _SAME_BANDWIDTH * configured:
            changes.append(f"links[{link['source']}->{link['target']}].bandwidth={capacity:.0f}")
    thresholds = {
        name: cluster["threshold_tokens"]
        for name, cluster in state["clusters"].items()
        if cluster.get("threshold_tokens") is not None
    }
    if thresholds:
        changes.append(f"routing.threshold_tokens={min(thresholds.values()):.0f}")
    if len(set(thresholds.values())) > 1:
        notes.append(
            "The PD clusters have different thresholds; the simulation begins with the lowest for all."
        )
    if state.get("roles", {}).get("conversions"):
        notes.append("Roles were converted; the simulation begins with those of the deployment file.")
    out = [
        name
        for cluster in state["clusters"].values()
        for name, instance in cluster["instances"].items()
        if not instance["healthy"] or instance["drain"] is not None
    ]
    if out:
        notes.append(f"Out of routing now, but not in the simulation: {', '.join(out)}.")
    return changes, notes


def _prediction(state: Mapping[str, Any]) -> Json | None:
    predicted = state.get("roles", {}).get("last_evaluation", {}).get("predicted")
    return None if predicted is None else predicted["now"]
