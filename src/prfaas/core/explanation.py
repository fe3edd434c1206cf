"""Why one request went the way it did, in sentences: for `prfaas explain` and the console."""

from collections.abc import Iterator
from typing import Any

from prfaas.core.units import format_bytes, format_s

Json = dict[str, Any]

# In the order in which they happen; what a step is called in the text.
_STEPS = {
    "read": "reading the request",
    "tokenize": "token ids and hashes",
    "decide": "deciding",
    "cache_transfer": "moving the cached prefix",
    "turn": "waiting for a prefill instance",
    "prefill": "prefill",
    "transfer": "prefill until the last byte of KVCache",
    "first_byte": "first byte of the answer",
    "total": "all of it",
}
_OUTCOMES = {
    "ok": "was answered",
    "client_error": "was refused",
    "engine_error": "failed",
    "cancelled": "was left by its client",
}


def sentences(told: Json) -> Iterator[str]:
    """What `GET /prfaas/requests/{id}` tells, line by line."""
    yield _headline(told)
    if told["direct_reason"] is not None:
        yield (
            f"It could not be split ({told['direct_reason']}): the decode instance got it as it came and prefilled it."
        )
    for number, attempt in enumerate(told["attempts"], start=1):
        yield from _attempt(number, attempt)
    if told.get("first_token") is not None:
        yield "The prefill instance sampled the answer's first token, and the client had it at once."
    yield from _bytes(told)
    yield from _steps(told)
    for note in told["notes"]:
        yield f"After {format_s(note['after_s'])}: {note['what']}."
    if told.get("trace_id") is not None:
        yield f"Its trace: {told['trace_id']}"
    if told["route"] is not None:
        yield f"x-prfaas-route: {told['route']}"


def _headline(told: Json) -> str:
    outcome = _OUTCOMES.get(told["outcome"], told["outcome"])
    text = f"Request {told['request_id']} ({told['endpoint']}, {told['model'] or 'no model'}) of {told['at']} {outcome}"
    if told["status"] is not None:
        text += f" with status {told['status']}"
    if "total" in told["steps_s"]:
        text += f" after {format_s(told['steps_s']['total'])}"
    if told["prompt_tokens"] is not None:
        text += f"; its prompt has {told['prompt_tokens']:,} tokens"
    if told["answer_tokens"] is not None:
        text += f", its answer {told['answer_tokens']:,}"
    return text + "."


def _attempt(number: int, attempt: Json) -> Iterator[str]:
    prefill, decode = attempt["prefill"], attempt["decode"]
    own, apart = f"{decode} prefills by itself and decodes", f"{prefill} prefills, {decode} decodes"
    outcome = "" if attempt["outcome"] == "done" else f"; this failed: {attempt['outcome']}"
    yield f"{number}. {attempt['route']}: {own if prefill == decode else apart} (reason: {attempt['reason']}){outcome}."
    yield f"   {_comparison(attempt)}"
    held = [f"{cluster} held {tokens:,}" for cluster, tokens in attempt["held_tokens"].items()]
    yield f"   Of the prompt's {attempt['prompt_tokens']:,} tokens {' and '.join(held)} that a prefill could reuse;"
    yield f"   {prefill} had to prefill {attempt['prefill_tokens']:,}."
    if attempt.get("cache_stays"):
        yield f"   A longer prefix of another cluster did not move there first: {_CACHE_STAYS[attempt['cache_stays']]}."
    yield from _pools(attempt)
    if attempt["predicted_ttft_s"] is not None:
        kv_s, wait_s = attempt.get("kv_wait_s", 0.0), attempt["decode_wait_s"]
        kv = f", from the prefill; {format_s(kv_s)} more until {decode} has the KVCache" if kv_s else ""
        slot = f", and then {format_s(wait_s)} until {decode} has a decode slot" if wait_s else ""
        yield f"   Predicted time to first token: {format_s(attempt['predicted_ttft_s'])}{kv}{slot}."


# `Decision.cache_stays`.
_CACHE_STAYS = {
    "no-bandwidth": "no link from there has bandwidth to spare",
    "spares-little": "it would spare less than a tenth of the prefill",
    "slower": "moving it takes longer than the prefill that it spares",
    "egress-price": "its bytes cost more than the seconds that they spare",
    "decode-prefills": "the decode instance prefills by itself",
}
_SOURCES = {
    "own": "in its own blocks",
    "memory": "in the memory of its machine's pool",
    "ssd": "on the pool's SSD",
    "moved": "after the cached prefix had moved",
}


def _pools(attempt: Json) -> Iterator[str]:
    """What the tiers held, where the prefill was to find it, and what loading costs."""
    held = [
        f"{name} held {pool['attention_tokens']:,} tokens, {_of_them(pool)} in memory"
        for name, pool in attempt["pools"].items()
    ]
    if held:
        yield f"   Of the pools {'; '.join(held)}."
    sources = [
        f"{tokens:,} {_SOURCES[source]}" for source, tokens in (attempt["hit_tokens"] or {}).items() if tokens
    ]
    if sources:
        cost = (
            f"; loading them from the pool was to take {format_s(attempt['load_s'])}"
            if attempt["load_s"]
            else ""
        )
        yield f"   {attempt['prefill']} was to find {', '.join(sources)}{cost}."
    if attempt["cached_tokens"] is not None:
        yield f"   By its own word it reused {attempt['cached_tokens']:,}."


def _of_them(pool: Json) -> str:
    """How much of what a pool holds is in memory."""
    tokens = min(pool["memory_tokens"], pool["attention_tokens"])
    return "all of them" if tokens == pool["attention_tokens"] else f"{tokens:,} of them"


# What the link has to do with a decision, where its reason says so.
_LINK_REASONS = {
    "congested-link": " Without the link's congestion it would have been offloaded.",
    "slow-link": " The link is too slow for it, even without any queue.",
    "egress-price": " The bytes that it would have sent cost more than the seconds that they spare.",
    "no-link": " No link to the decode instance's cluster is up.",
}


def _comparison(attempt: Json) -> str:
    uncached, threshold = attempt["uncached_tokens"], attempt["threshold_tokens"]
    text = f"The PD cluster would have had to prefill {uncached:,} tokens"
    if threshold is None:
        return f"{text}; it offloads nothing."
    than = "more than" if uncached > threshold else "not more than"
    return f"{text}: {than} its threshold of {threshold:,.0f}.{_LINK_REASONS.get(attempt['reason'], '')}"


def _bytes(told: Json) -> Iterator[str]:
    prefix, transfer = told["cache_transfer"], told["transfer"]
    if prefix is not None and prefix["outcome"] == "done":
        source = _from_pool(told)
        yield f"A cached prefix moved first{source}: {format_bytes(prefix['bytes'])}."
    elif prefix is not None:
        yield f"A cached prefix was to move first, but did not ({prefix['outcome']}); all was computed."
    if transfer["hidden"] is None:
        yield "No KVCache moved to the decode instance."
        return
    text = f"{format_bytes(transfer['bytes'])} of KVCache moved, {transfer['hidden']:.0%} of it during the prefill"
    if transfer["saved_bytes"]:
        text += f"; {format_bytes(transfer['saved_bytes'])} more were there already"
    yield f"{text}."
    if transfer.get("by") == "nixl":
        yield "The decode instance read it out of the prefill instance's memory, by NIXL (transfer: nixl)."


def _from_pool(told: Json) -> str:
    moves = [
        attempt["cache_transfer"] for attempt in told["attempts"] if attempt["cache_transfer"] is not None
    ]
    return f" from pool to pool ({moves[-1]['source']})" if moves and moves[-1]["from_pool"] else ""


def _steps(told: Json) -> Iterator[str]:
    taken = [
        f"{name} {format_s(told['steps_s'][step])}"
        for step, name in _STEPS.items()
        if step in told["steps_s"]
    ]
    if taken:
        yield f"It took: {', '.join(taken)}."
