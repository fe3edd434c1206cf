"""The main job on real vLLM: right tokens, right bytes, right routes."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from prfaas.core.kv.hf_config import model_from_directory

from ..stack import (
    BLOCK_TOKENS,
    LOGITS,
    MODEL,
    TENANT_HEADER,
    THRESHOLD_TOKENS,
    Stack,
    call,
    completion_body,
    prompt,
    wait_until,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("long prompts over a link on which they take a while"),
    pytest.mark.timeout(1800),
]


@pytest.mark.shows(model="qwen3-next")
@pytest.mark.parametrize("tokens", [2, 3, 255, 256, 257, 258, 1025, 1949, 2051, 3073, 5000])
def test_answers_are_those_of_a_plain_engine_with_the_same_split(stack: Stack, tokens: int) -> None:
    ids = prompt(tokens, tokens)
    answer = stack.complete(ids, **LOGITS)
    assert answer.route["route"] == ("offload" if tokens > THRESHOLD_TOKENS else "local")
    # What a hop would cost more than it spares, the decode engine prefills in one piece.
    tiny = answer.route["reason"] == "tiny"
    stack.check_answer(answer, stack.plain(ids) if tiny else stack.reference(ids))


def test_two_tokens_move_nothing(stack: Stack) -> None:
    """However slow the machine is: a hop spares the decode engine one of them, and the profile is flat there."""
    answer = stack.complete(prompt(5, 2))
    assert (answer.route["reason"], answer.route["bytes"]) == ("tiny", "0")
    assert answer.route["prefill"] == answer.route["decode"]


def test_a_prompt_of_one_token_needs_no_transfer(stack: Stack) -> None:
    answer = stack.complete([77])
    assert answer.status == 200
    assert answer.route["bytes"] == "0"


@pytest.mark.parametrize("tokens", [101, 256, 257, 3000])
def test_bytes_moved_are_what_the_model_says(stack: Stack, tokens: int) -> None:
    model = model_from_directory(stack.deployment.model.path, name=MODEL)
    answer = stack.complete(prompt(50 + tokens, tokens))
    assert int(answer.route["bytes"]) == model.bytes_to_move(tokens - 1, 0, block_tokens=BLOCK_TOKENS)


def test_of_a_known_prefix_only_the_increment_moves(stack: Stack) -> None:
    first = prompt(7, 4000)
    second = first[:3000] + prompt(8, 2500)
    one = stack.complete(first)
    stack.settle()
    two = stack.complete(second)
    skipped = int(two.route["cached"])
    assert skipped == 3000 // BLOCK_TOKENS * BLOCK_TOKENS
    model = model_from_directory(stack.deployment.model.path, name=MODEL)
    assert int(two.route["bytes"]) == model.bytes_to_move(len(second) - 1, skipped, block_tokens=BLOCK_TOKENS)
    stack.check_answer(one, stack.reference(first, salt="increment"))
    stack.check_answer(two, stack.reference(second, salt="increment"))


def test_the_same_prompt_again_moves_little_and_answers_the_same(stack: Stack) -> None:
    ids = prompt(9, 3500)
    one = stack.complete(ids)
    stack.settle()
    two = stack.complete(ids)
    assert int(two.route["bytes"]) < int(one.route["bytes"]) / 3
    stack.check_answer(one, stack.reference(ids, salt="again"))
    # Both repeats start from the prefix that the first left in the cache.
    stack.check_answer(two, stack.reference(ids, salt="again"))


def test_a_prefix_that_the_decode_engine_lost_costs_time_only(stack: Stack) -> None:
    ids = prompt(10, 3500)
    stack.complete(ids)
    stack.settle()
    for engine in ("home-decode-0", "east-prefill-0"):
        call(stack.url(engine, "/reset_prefix_cache"), {})
    answer = stack.complete(ids)
    # What the gateway's record still says. A decode request that comes before the last bytes finds out first.
    assert int(answer.route["cached"]) > 0 or answer.route["fallback"] == "transfer-dropped"
    stack.check_answer(answer, stack.plain(ids))
    stack.wait_clean()


def test_usage_counts_as_cached_what_an_engine_held_before(stack: Stack) -> None:
    """All but the last token is external KV to the decode engine, which vLLM would count as cached."""
    ids = prompt(60, 3500)
    cached = []
    for sent in (ids, ids, ids[:3000] + prompt(61, 2500)):
        answer = stack.complete(sent)
        stack.settle()
        details = answer.body["usage"]["prompt_tokens_details"]
        cached.append((answer.route["route"], details["cached_tokens"]))
    held = 3500 // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached[0] == ("offload", 0)
    assert held - BLOCK_TOKENS <= cached[1][1] <= held
    assert cached[2] == ("offload", 3000 // BLOCK_TOKENS * BLOCK_TOKENS)


def test_several_samples_of_one_prompt_share_its_transfer(stack: Stack) -> None:
    ids = prompt(11, 3000)
    answer = stack.complete(ids, n=3, temperature=0.5, top_k=1)  # vLLM refuses n > 1 at temperature 0
    assert answer.route["route"] == "offload"
    assert int(answer.route["bytes"]) > 0
    assert len(answer.body["choices"]) == 3
    # No plain engine has the same batches: the three decode together from when each was loaded.
    stack.check_likely(*((ids, answer.tokens_of(choice)) for choice in range(3)))
    assert answer.body["usage"]["prompt_tokens"] == 3000


def test_usage_logprobs_and_stop_are_those_of_plain_vllm(stack: Stack) -> None:
    ids = prompt(12, 2500)
    fields = {**LOGITS, "logprobs": 3}
    plain = call(
        stack.url("home-prefill-0", "/v1/completions"), completion_body(ids, 12, cache_salt="x", **fields)
    )
    whole = stack.complete(ids, 12, tenant="whole", **fields)
    stop_at = whole.body["choices"][0]["text"][6:8]
    ours = stack.complete(ids, 12, tenant="stopped", stop=[stop_at], **fields)
    assert ours.route["route"] == "offload"
    assert ours.body["usage"]["prompt_tokens"] == plain.body["usage"]["prompt_tokens"]
    assert ours.body["choices"][0]["finish_reason"] == "stop"
    assert stop_at not in ours.body["choices"][0]["text"]
    assert set(ours.body) == set(plain.body)
    logprobs = ours.body["choices"][0]["logprobs"]
    assert set(logprobs) == set(plain.body["choices"][0]["logprobs"])
    assert len(logprobs["top_logprobs"][0]) == 3


def test_a_seed_is_refused_before_it_ends_a_cpu_engine(stack: Stack) -> None:
    refused = stack.complete(prompt(14, 2600), temperature=0.9, seed=11)
    assert refused.status == 400 and refused.body["error"]["param"] == "seed"
    greedy = stack.complete(prompt(14, 2600), seed=11)
    assert greedy.status == 200 and greedy.route["route"] == "offload"


def test_structured_output_holds_over_an_offloaded_prompt(stack: Stack) -> None:
    answer = stack.complete(
        prompt(15, 2500), structured_outputs={"regex": "(yes|no) [0-9]{4}"}, ignore_eos=False
    )
    assert answer.route["route"] == "offload"
    assert re.fullmatch("(yes|no) [0-9]{4}", answer.body["choices"][0]["text"])


def test_a_named_tool_is_called_over_an_offloaded_chat(stack: Stack) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    }
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "which one? " * 250}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "pick"}},
        "max_tokens": 60,
        "temperature": 0,
    }
    answer = call(stack.url("gateway", "/v1/chat/completions"), body)
    assert answer.status == 200, answer.body
    (called,) = answer.body["choices"][0]["message"]["tool_calls"]
    assert called["function"]["name"] == "pick"
    assert json.loads(called["function"]["arguments"])["colour"] in ("red", "blue")


def _undated(error: dict[str, Any]) -> dict[str, Any]:
    """An engine's error without the time of day that xgrammar writes into its sentences."""
    return error | {"message": re.sub(r"\[\d\d:\d\d:\d\d\]", "[time]", error["message"])}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"top_p": 7},
        {"max_tokens": 10**9},
        {"n": 2},
        {"logit_bias": {"x": 1}},
        {"structured_outputs": {"regex": "(yes|no"}},
        {"structured_outputs": {"grammar": "root ::= nothing"}},
        {"model": 5},
        {"prompt": None},
        {"prompt": prompt(13, 40_000)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_the_engine_refuses_is_refused_in_its_words_and_before_kv_moves_but_for_grammars(
    stack: Stack, fields: dict[str, Any]
) -> None:
    staged = stack.metric("gateway", "prfaas_gateway_transferred_bytes_total")
    late = stack.metric("gateway", "prfaas_gateway_refused_total", 'reason="engine-late"')
    body = completion_body(prompt(13, 2500), 24) | fields
    ours = call(stack.url("gateway", "/v1/completions"), body)
    plain = call(stack.url("home-decode-0", "/v1/completions"), body)
    assert ours.status == plain.status == 400
    # It looks at no grammar: that is refused when the KV has come.
    is_late = "structured_outputs" in fields
    rendered = call(stack.url("home-decode-0", "/v1/completions/render"), body)
    assert rendered.status == (200 if is_late else 400)
    assert _undated(ours.body["error"]) == _undated(plain.body["error"])
    # What is too long the gateway refuses itself, in the same words: nothing is routed.
    is_too_long = len(fields.get("prompt") or ()) > 2500
    if is_too_long:
        assert "x-prfaas-route" not in ours.headers
    elif not is_late:
        assert ours.route["bytes"] == "0"
        assert stack.metric("gateway", "prfaas_gateway_transferred_bytes_total") == staged
    assert stack.metric("gateway", "prfaas_gateway_refused_total", 'reason="engine-late"') == late + is_late


def test_an_unnamed_model_is_the_base_model(stack: Stack) -> None:
    for name in ("", None):
        answer = call(stack.url("gateway", "/v1/completions"), completion_body([77], 2) | {"model": name})
        assert answer.status == 200 and answer.body["model"] == MODEL


def test_a_refused_stream_counts_as_refused(stack: Stack) -> None:
    body = completion_body(prompt(16, 2500), 24, stream=True, structured_outputs={"regex": "(yes|no"})
    answer = call(stack.url("gateway", "/v1/completions"), body)
    assert stack.record(answer)["outcome"] == "client_error"


def counts_of(usage: CompletionUsage) -> tuple[int | None, ...]:
    """What vLLM counts of both kinds of answers; of whole ones it leaves other details out."""
    details = usage.prompt_tokens_details
    return (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        details.cached_tokens if details is not None else None,
    )


def test_the_openai_package_streams_a_chat(stack: Stack) -> None:
    client = openai.OpenAI(base_url=stack.url("gateway", "/v1"), api_key="unused", timeout=300, max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    text = "".join(chr(32 + i % 90) for i in range(3000))
    messages = [{"role": "user", "content": text}]
    with client.chat.completions.with_streaming_response.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=20,
        temperature=0,
        # The repeat of one tenant would start from a cached prefix.
        extra_headers={TENANT_HEADER: "whole"},
    ) as raw:
        assert raw.headers["x-prfaas-route"].startswith("offload")
        whole = raw.parse()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={TENANT_HEADER: "streamed"},
    )
    chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert counts_of(chunks[-1].usage) == counts_of(whole.usage)


def test_no_page_of_all_these_had_another_digest(stack: Stack) -> None:
    stack.complete(prompt(14, 2500))
    assert stack.metric("home-decode-0", "vllm:prfaas_loads_completed_total") > 0
    for instance in stack.deployment.instances:
        assert stack.metric(instance.name, "vllm:prfaas_digest_mismatches_total") == 0


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_decode_engine_that_prefills_keeps_no_other_request_out(stack: Stack, prompts: int) -> None:
    """Prompts that are computed where they are decoded leave room in each step for others."""
    decode = "home-decode-0"
    short = prompt(10 + prompts, 300)
    reference = stack.reference(short)
    with ThreadPoolExecutor(prompts) as pool:
        bodies = [completion_body(prompt(20 * prompts + number, 16_000), 1) for number in range(prompts)]
        prefills = [pool.submit(call, stack.url(decode, "/v1/completions"), body) for body in bodies]
        wait_until(
            lambda: stack.metric(decode, "vllm:num_requests_running") == prompts, 60, "the prefills begin"
        )
        answer = stack.complete(short, max_tokens=4)
        assert not any(prefill.done() for prefill in prefills)
    assert all(prefill.result().status == 200 for prefill in prefills)
    assert answer.route["decode"] == decode
    assert answer.token_ids == reference.token_ids[1:5]
