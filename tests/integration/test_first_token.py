"""The first token from the prefill on real vLLM: the answers are those of a plain engine, whatever ends them."""

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from .stack import MODEL, Stack, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("a link so slow that first tokens come before the KVCache"),
    pytest.mark.timeout(1800),
]

TOKENS = 3000
ANSWER_TOKENS = 24
# A greedy answer may part from a plain engine's where two logits are rounded to the same: most of them don't.
EQUAL_SHARE = 0.75


@pytest.fixture(scope="module")
def first_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As `stack`, with first tokens as by default, and a link on which the KV takes a while."""
    path = write_deployment(tmp_path_factory.mktemp("prfaas-first-token"), bandwidth="20 Mbit/s")
    deployment = json.loads(path.read_text())
    del deployment["gateway"]["first_token"]
    path.write_text(json.dumps(deployment))
    yield from running(path)


def asked(ids: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": ids, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return body | fields


def streamed(stack: Stack, body: dict[str, Any]) -> tuple[str, list[Any], list[float]]:
    """The route header, the events, and the seconds until each came."""
    request = urllib.request.Request(
        stack.url("gateway", "/v1/completions"),
        json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode(),
        {"Content-Type": "application/json"},
    )
    begun_s, events, times_s = time.monotonic(), [], []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                times_s.append(time.monotonic() - begun_s)
        route = answer.headers["x-prfaas-route"]
    return route, events, times_s


@pytest.mark.shows(model="qwen3-next", first_token=True)
def test_answers_are_those_of_a_plain_engine(first_stack: Stack) -> None:
    """The prefill engine computes the whole prompt, as a plain engine does: the split is the same."""
    equal, first = [], 0
    for seed in range(8):
        ids = prompt(700 + seed, TOKENS + seed * 37)
        plain = first_stack.plain(ids, ANSWER_TOKENS).body
        route, events, _ = streamed(first_stack, asked(ids))
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        first += "first_token=prefill" in route
        assert route.startswith("offload")
        assert events[-1]["usage"]["completion_tokens"] == ANSWER_TOKENS
        assert events[-1]["usage"]["prompt_tokens"] == len(ids)
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        # Bytes that are no text yet stand in an answer as they do in a plain one, but not at a seam.
        equal.append(text == plain["choices"][0]["text"])
        first_stack.wait_clean()
    assert first >= 1 and sum(equal) >= EQUAL_SHARE * len(equal), (first, equal)
    failed = sum(
        first_stack.metric(each.name, "vllm:prfaas_loads_failed_total")
        for each in first_stack.deployment.instances
    )
    assert failed == 0


def test_a_stop_token_that_comes_first_ends_the_answer(first_stack: Stack) -> None:
    ids = prompt(721, TOKENS)
    (token,) = first_stack.plain(ids, 1).token_ids
    _, events, _ = streamed(first_stack, asked(ids, stop_token_ids=[token]))
    choice = events[-2]["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", token)
    assert events[-1]["usage"]["completion_tokens"] == 1
    first_stack.wait_clean()


def test_a_client_that_leaves_after_it_leaves_nothing(first_stack: Stack) -> None:
    request = urllib.request.Request(
        first_stack.url("gateway", "/v1/completions"),
        json.dumps(asked(prompt(722, 6000), stream=True)).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.readline()
    first_stack.wait_clean()
