"""Bodies of clients of any content: taken or refused with a sentence, and nothing in what goes on that steers."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mutations import mutated

from prfaas.serving.gateway.bodies import OWNED_FIELDS, ApiError, decode_body, error_body
from prfaas.serving.gateway.intake import parsed_body
from prfaas.serving.gateway.prompts.prompt import (
    Endpoint,
    answer_limit,
    answers_of,
    can_resume,
    stop_strings,
    tokens_left,
    wants_usage,
    why_whole,
)
from prfaas.serving.gateway.prompts.request import is_usual

FUZZ = settings(max_examples=300, deadline=None)

BODIES = [
    json.dumps(body).encode()
    for body in (
        {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "stream": True, "n": 2},
        {"prompt": ["a", "b"], "stop": ["x", "y"], "logprobs": 1, "echo": True, "priority": 1},
        {"prompt": list(range(4000)), "cache_salt": "x", "stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [{"a": {}}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}
            ],
            "vllm_xargs": {"a": 1},
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        },
        {
            "input": [{"role": "user", "content": "a"}],
            "instructions": "b",
            "metadata": {"a": "b"},
            "store": True,
        },
        {"system": "a", "messages": [{"role": "user", "content": "b"}], "thinking": {"type": "enabled"}},
        {"token_ids": [1, 2], "sampling_params": {"n": 3, "seed": 4}},
        {
            "prompt_embeds": ["YWJj"],
            "min_tokens": 1,
            "max_completion_tokens": 2,
            "kv_transfer_params": {"a": 1},
        },
    )
]
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a" * 5000, "http://x/y", "data:,", "\x00"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for body in BODIES for name in json.loads(body)})
bodies = mutated(BODIES) | st.dictionaries(st.sampled_from(FIELDS), values, max_size=6).map(
    lambda body: json.dumps(body).encode()
)


DEPLOYMENT: Any = SimpleNamespace(
    model=SimpleNamespace(served_name="m", adapters=()),
    gateway=SimpleNamespace(limits=SimpleNamespace(body_values=5000), media_domains=("a",)),
    pd_clusters=(SimpleNamespace(hardware="cpu"),),
)


@FUZZ
@pytest.mark.slow("hundreds of requests through a whole gateway")
@pytest.mark.parametrize("endpoint", sorted(Endpoint), ids=str)
@given(raw=bodies)
def test_a_client_may_send_anything(endpoint: Endpoint, raw: bytes) -> None:
    try:
        body, _prompt, _ = parsed_body(raw, endpoint, DEPLOYMENT)
    except ApiError as error:
        assert 400 <= error.status < 500 and "\n" not in error.message
        json.loads(error_body(error.status, error.message, error.param))
        return
    sent = json.loads(decode_body(body, {"prfaas": "t"}))
    assert sent.pop("kv_transfer_params") == {"prfaas": "t"}
    assert not sent.keys() & (OWNED_FIELDS - {"kv_transfer_params"})
    is_usual(body)
    assert answers_of(endpoint, body) >= 1
    why_whole(endpoint, body), can_resume(endpoint, body), wants_usage(body)
    limit = answer_limit(endpoint, body)
    assert limit is None or isinstance(limit, int)
    if can_resume(endpoint, body):
        stop_strings(body)
        tokens_left(endpoint, body, 3, 1, 4000)
