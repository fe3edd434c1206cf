"""Usage as clients see it that may not know what was cached: the numbers go, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.gateway.answers.answer_bytes import without_cached_tokens

CHAT = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}
DETAILS = {"cached_tokens": 7, "created_cache_tokens": 2, "multimodal_tokens": {"image": 4}}
RESPONSE = {"cached_tokens": 7, "cache_write_tokens": 2, "cached_tokens_per_turn": [7, 3]}
MESSAGE = {
    "input_tokens": 2,
    "cache_read_input_tokens": 7,
    "cache_creation_input_tokens": 1,
    "output_tokens": 3,
}


def hidden(answer: Any, **options: Any) -> Any:
    return json.loads(without_cached_tokens(json.dumps(answer, **options).encode()))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_each_api_tells_the_usage_of_an_engine_that_counts_nothing_cached(
    separators: tuple[str, str],
) -> None:
    chat = {"usage": {**CHAT, "prompt_tokens_details": DETAILS}, "choices": []}
    assert hidden(chat, separators=separators) == {
        "usage": {**CHAT, "prompt_tokens_details": None},
        "choices": [],
    }
    response = {
        "response": {"usage": {"input_tokens": 9, "input_tokens_details": RESPONSE, "output_tokens": 3}}
    }
    nothing = {"cached_tokens": 0, "cache_write_tokens": 0, "cached_tokens_per_turn": [0, 0]}
    told = hidden(response, separators=separators)["response"]["usage"]
    assert told == {"input_tokens": 9, "input_tokens_details": nothing, "output_tokens": 3}
    message = {"message": {"usage": MESSAGE, "id": "x"}}
    assert hidden(message, separators=separators) == {
        "message": {"usage": {"input_tokens": 10, "output_tokens": 3}, "id": "x"}
    }


@given(
    st.text()
    | st.sampled_from(
        ['"usage":{"cache_read_input_tokens":5}', '"prompt_tokens_details":{"cached_tokens":5}']
    )
)
def test_generated_text_stays(text: str) -> None:
    answer = {"choices": [{"text": text}], "usage": {**CHAT, "prompt_tokens_details": DETAILS}}
    assert hidden(answer)["choices"] == answer["choices"]


def test_what_is_no_usage_stays() -> None:
    odd = b'{"usage":{"a":"}","cache_b":1}}'
    assert without_cached_tokens(odd) == odd
