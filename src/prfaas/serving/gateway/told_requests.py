"""What operators are told of a request: its record as JSON, in full and in short, and as a row of a ledger."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

from prfaas.core.deployment import Deployment
from prfaas.core.kv.model import KvModel
from prfaas.core.ledger import LedgerEntry
from prfaas.core.scheduling.decision import HELD_OUT, Decision, Route
from prfaas.core.scheduling.view import View
from prfaas.serving.console.served import Served
from prfaas.serving.control.experiment import Experiment
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.request_log import Attempt, RequestRecord, TransferredBytes
from prfaas.serving.running_deployment import RunningDeployment


def explain(record: RequestRecord, deployment: Deployment, model: KvModel | None) -> Json:
    """One request's record with the numbers that decided, ready for JSON: `GET /prfaas/requests/{id}`.

    `saved_bytes` in it is what was not sent because the decode instance held it. It is None where the size of the
    model's KV is unknown.
    """
    # What moved the KV; None where nothing moved.
    by = next((attempt.by for attempt in reversed(record.attempts) if attempt.moved is not None), None)
    return {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "at": datetime.fromtimestamp(record.at_s, UTC).isoformat(timespec="milliseconds"),
        "endpoint": record.endpoint,
        "model": record.model,
        "streamed": record.streamed,
        "prompt_tokens": record.prompt_tokens,
        "answer_tokens": record.answer_tokens,
        "route": record.route_header,
        "direct_reason": record.direct_reason,
        "first_token": record.first_token,
        "attempts": [_attempt(attempt, deployment) for attempt in record.attempts],
        "transfer": _moved(_sum(record.attempts))
        | {"saved_bytes": _saved_bytes(record.attempts, model), "by": by},
        "cache_transfer": None
        if record.prefix_outcome is None
        else {"outcome": record.prefix_outcome} | _moved(record.prefix_moved),
        "steps_s": {step: round(taken_s, 6) for step, taken_s in record.steps_s.items()},
        "notes": [{"after_s": round(after_s, 6), "what": what} for after_s, what in record.notes],
        "status": record.status,
        "outcome": record.outcome,
    }


def summary(record: RequestRecord) -> Json:
    """One line of the list of requests, ready for JSON: `GET /prfaas/requests`."""
    decision = record.attempts[-1].decision if record.attempts else None
    return {
        "request_id": record.request_id,
        "at_s": round(record.at_s, 3),
        "endpoint": record.endpoint,
        "model": record.model,
        "streamed": record.streamed,
        "prompt_tokens": record.prompt_tokens,
        "answer_tokens": record.generated_tokens,
        "route": None if decision is None else str(decision.route),
        "reason": record.direct_reason if decision is None else decision.reason,
        "prefill": None if decision is None else decision.prefill,
        "decode": None if decision is None else decision.decode,
        "uncached_tokens": None if decision is None else decision.uncached_tokens,
        "threshold_tokens": None if decision is None else _finite(decision.threshold_tokens),
        "attempts": len(record.attempts),
        "steps": {
            step: {"after_s": round(record.starts_s.get(step, 0.0), 6), "took_s": round(taken_s, 6)}
            for step, taken_s in record.steps_s.items()
        },
        "waits_for": None
        if record.outcome != "under way" or record.waits_for is None
        else str(record.waits_for),
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
        "kv_wait_s": decision.kv_wait_s,
        "decode_wait_s": decision.decode_wait_s,
        "cache_stays": decision.cache_stays,
        "cache_transfer": None
        if transfer is None
        else {
            "source": transfer.source,
            "from_pool": transfer.from_pool,
            "num_tokens": transfer.num_tokens,
            "skip_tokens": transfer.skip_tokens,
        },
        "pools": {
            name: {
                "tokens": hit.every_tier.reusable_tokens,
                "attention_tokens": hit.every_tier.attention_tokens,
                "memory_tokens": hit.in_memory.attention_tokens,
            }
            for name, hit in (decision.pools or {}).items()
        },
        "hit_tokens": None if decision.hit is None else decision.hit._asdict(),
        "cached_tokens": attempt.cached_tokens,
        "load_s": round(decision.load_s, 6),
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
    return {
        "bytes": moved.total_bytes,
        "hidden_bytes": moved.overlapped_bytes,
        "hidden": moved.overlapped_fraction,
    }


def _sum(attempts: Sequence[Attempt]) -> TransferredBytes | None:
    """All transfers to decode instances together: one, unless an engine has failed."""
    moved = [attempt.moved for attempt in attempts if attempt.moved is not None]
    if not moved:
        return None
    return TransferredBytes(sum(m.total_bytes for m in moved), sum(m.overlapped_bytes for m in moved))


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


def count_served(served: Served, record: RequestRecord) -> None:
    """Count a request that has ended for the console."""
    decision = record.attempts[0].decision if record.attempts else None
    other = None if decision is None else decision.other
    served.add(
        record.status,
        failed=record.outcome == "engine_error",
        offloaded=decision is not None and decision.route is Route.OFFLOAD,
        first_token_s=_first_token_s(record),
        at_home_s=None if other is None else other.first_token_s,
        egress_cost=record.egress_cost,
    )


def _first_token_s(record: RequestRecord) -> float | None:
    """From the decision on; None: its answer was no stream, or none came."""
    if not record.streamed or "first_byte" not in record.steps_s:
        return None
    return max(record.steps_s["first_byte"] - record.starts_s.get("decide", 0.0), 0.0)


class LedgerEntries:
    """Makes a ledger's rows of records, with the GPUs of the deployment that runs."""

    def __init__(self, running: RunningDeployment, view: View, experiment: Experiment) -> None:
        """`view` has the times of prefills, as the control plane knows them now; `experiment` knows how a moment's
        requests were routed."""
        self._running = running
        self._view = view
        self._experiment = experiment
        self._read(running.current)

    def _read(self, deployment: Deployment) -> None:
        self._of = deployment
        self._places = {
            each.name: (cluster.name, cluster.gpus_per_instance or each.gpus)
            for cluster in deployment.clusters
            for each in cluster.instances
        }

    def of(self, record: RequestRecord, total_s: float) -> LedgerEntry | None:
        """The row of a request that has ended; None: it was never routed."""
        if not record.attempts or record.prompt_tokens is None:
            return None
        if self._of is not self._running.current:
            self._read(self._running.current)
        steps, decision = record.steps_s, record.attempts[0].decision
        other, prompt_tokens = decision.other, record.prompt_tokens
        source, target = (self._places.get(name, ("", 0))[0] for name in (decision.prefill, decision.decode))
        moved = _sum(record.attempts) or TransferredBytes(0, 0)
        at = self._experiment.at(record.at_s + record.starts_s.get("decide", 0.0))
        gpu_s, gpu_cost = self._gpu(decision.prefill, decision.prefill_tokens, prompt_tokens)
        other_gpu_s = other_gpu_cost = None
        if other is not None:
            other_gpu_s, other_gpu_cost = self._gpu(other.prefill, other.prefill_tokens, prompt_tokens)
        return LedgerEntry(
            at_s=record.at_s,
            request_id=record.request_id,
            slice=None if at is None else at.number,
            arm=self._experiment.arm(at),
            washout=at is not None and not at.counts,
            tenant=record.tenant,
            streamed=record.streamed,
            outcome=record.outcome,
            attempts=len(record.attempts),
            route=str(decision.route),
            reason=decision.reason,
            held_out=decision.reason == HELD_OUT,
            prefill_cluster=source,
            decode_cluster=target,
            prompt_tokens=prompt_tokens,
            uncached_tokens=decision.uncached_tokens,
            prefill_tokens=decision.prefill_tokens,
            answer_tokens=record.generated_tokens,
            predicted_s=decision.first_token_s,
            other_s=None if other is None else other.first_token_s,
            first_token_s=_first_token_s(record),
            ttft_s=steps.get("first_byte") if record.streamed else None,
            total_s=total_s,
            turn_s=steps.get("turn", 0.0),
            prefill_s=steps.get("prefill", 0.0),
            transfer_s=steps.get("transfer", 0.0),
            kv_bytes=moved.total_bytes,
            hidden_bytes=moved.overlapped_bytes,
            egress_bytes=record.egress_bytes,
            egress_cost=record.egress_cost,
            gpu_s=gpu_s,
            other_gpu_s=other_gpu_s,
            gpu_cost=gpu_cost,
            other_gpu_cost=other_gpu_cost,
        )

    def _gpu(self, instance: str, prefill_tokens: int, prompt_tokens: int) -> tuple[float, float]:
        """GPU-seconds of such a prefill there, and their price."""
        name, gpus = self._places.get(instance, ("", 0))
        cluster = self._view.clusters.get(name)
        if cluster is None:
            return 0.0, 0.0
        seconds = cluster.after_prefix_s(prefill_tokens, max(prompt_tokens - prefill_tokens, 0))
        return seconds * gpus, seconds * cluster.instance_price_per_s


TRACE_NAME = "scenario.jsonl"
_BLOCK_TOKENS = 256
# A link that is measured to within this share of what the file says is as the file says.
_SAME_BANDWIDTH = 0.05


def scenario_of(
    records: Iterable[RequestRecord], state: Mapping[str, Any], deployment: Deployment
) -> Json | None:
    """The scenario, ready for JSON; None where no request has told its length yet.

    `trace` is text in our own format. The cached beginning of every prompt stands in it as one text that all share:
    what a request found is right, whose text it was is not known. `workload` is a line for deployment files that say
    nothing of their traffic, as `prfaas simulate` needs it; the trace's lengths count.
    """
    seen = sorted((record for record in records if record.prompt_tokens), key=lambda record: record.at_s)
    if not seen:
        return None
    span_s = seen[-1].at_s - seen[0].at_s
    options = ["--trace", TRACE_NAME, "--requests", str(len(seen))]
    if span_s > 0:
        options += ["--rate", f"{(len(seen) - 1) / span_s:.4g}"]
    changes, notes = _changes(state, deployment)
    for change in changes:
        options += ["--set", change]
    return {
        "trace_name": TRACE_NAME,
        "trace": _trace(seen),
        "requests": len(seen),
        "span_s": round(span_s, 3),
        "command": shlex.join(["prfaas", "simulate", deployment.path.name, *options]),
        "workload": _workload(seen),
        "changes": changes,
        "notes": notes,
    }


def _trace(seen: list[RequestRecord]) -> str:
    fresh = count(1 << 32)
    lines = []
    for record in seen:
        prompt_tokens = record.prompt_tokens or 0
        # By the first decision; without one nothing is known to be cached.
        uncached = record.attempts[0].decision.uncached_tokens if record.attempts else prompt_tokens
        shared = (prompt_tokens - min(max(uncached, 0), prompt_tokens)) // _BLOCK_TOKENS
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


def _workload(seen: list[RequestRecord]) -> str:
    prompt_tokens = sum(record.prompt_tokens or 0 for record in seen) / len(seen)
    answer_tokens = sum(max(record.generated_tokens or 0, 1) for record in seen) / len(seen)
    lengths = f"{{distribution: fixed, tokens: {prompt_tokens:.0f}}}"
    return f"workload: {{lengths: {lengths}, output_tokens: {answer_tokens:.0f}}}"


def _changes(state: Mapping[str, Any], deployment: Deployment) -> tuple[list[str], list[str]]:
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
    if thresholds and deployment.routing.threshold_tokens is not None:
        changes.append(f"routing.threshold_tokens={min(thresholds.values()):.0f}")
        if len(set(thresholds.values())) > 1:
            notes.append("The thresholds differ; the simulation begins with the lowest for all.")
    elif thresholds:
        told = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in thresholds.items())
        notes.append(f"The simulation begins with the planner's thresholds. Those of now, in tokens: {told}.")
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
