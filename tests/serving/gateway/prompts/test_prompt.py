"""What is taken for which kind of prompt."""

from array import array
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.prompts.prompt import (
    BatchPrompt,
    DirectPrompt,
    EmbedsPrompt,
    Endpoint,
    RenderedPrompt,
    TextPrompt,
    TokenPrompt,
    answers_of,
    media_parts,
    prompt_of,
    why_whole,
)
from prfaas.serving.gateway.prompts.request import is_usual


def completion(prompt: Any, **fields: Any) -> Any:
    return prompt_of(Endpoint.COMPLETIONS, {"prompt": prompt, **fields})


def chat(*messages: Any, **fields: Any) -> Any:
    return prompt_of(Endpoint.CHAT, {"messages": list(messages), **fields})


USER = {"role": "user", "content": "hello"}


def test_prompts_that_can_move() -> None:
    assert completion("x") == TextPrompt("x", True)
    assert completion(["x"], add_special_tokens=False) == TextPrompt("x", False)
    assert completion([1, 2]) == TokenPrompt(array("I", [1, 2]))
    assert completion([[1, 2]]) == TokenPrompt(array("I", [1, 2]))
    assert completion("x", echo=True, n=1) == TextPrompt("x", True)


@pytest.mark.parametrize("prompt", [[], [[]], [1, -1], [1, 2**32], [[1, -1]], ["x", 5], 5, {}])
def test_malformed_prompts_are_left_to_the_engine(prompt: Any) -> None:
    assert completion(prompt) == DirectPrompt("malformed")


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        *(
            (Endpoint.COMPLETIONS, {"prompt": prompt}, "prompt")
            for prompt in ([1.0, 2.0], [True, 1], [1, "2"], [[1.0]], [[1], [True]], [1.5], [None])
        ),
        *(
            (endpoint, {"prompt": "x", "messages": [], name: value}, name)
            for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES)
            for name in ("n", "max_tokens", "min_tokens", "max_completion_tokens", "max_output_tokens")
            for value in ("3", 3.0, True)
        ),
        (Endpoint.GENERATE, {"token_ids": [1.0]}, "token_ids"),
        (Endpoint.GENERATE, {"token_ids": [1], "sampling_params": {"n": "16384"}}, "n"),
        (Endpoint.COMPLETIONS, {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        (Endpoint.COMPLETIONS, {"prompt": "x", "prompt_embeds": "abcd"}, "prompt_embeds"),
    ],
)
def test_what_vllm_would_take_and_nobody_count_is_refused(
    endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    """It went to a decode engine as "malformed": no tokens, one answer, whatever vLLM read out of it."""
    with pytest.raises(ApiError) as refused:
        prompt_of(endpoint, body)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_no_embeddings_are_no_prompt() -> None:
    assert completion("x", prompt_embeds=[]) == TextPrompt("x", True)
    assert completion("", prompt_embeds=["abcd"]) == EmbedsPrompt(4)


def test_a_chat_without_messages_has_a_prompt() -> None:
    """Of tools and documents, and what the template adds."""
    assert chat(tools=[{}]) == RenderedPrompt(None, takes_ids=True)


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(), st.booleans(), st.text(max_size=1), st.none()), max_size=4))
def test_token_ids_are_recognised_exactly(ids: list[Any]) -> None:
    body = {"prompt_embeds": None, "token_ids": ids}
    if not all(type(each) is int for each in ids):
        with pytest.raises(ApiError, match="whole numbers"):
            prompt_of(Endpoint.GENERATE, body)
        return
    found = prompt_of(Endpoint.GENERATE, body)
    assert isinstance(found, TokenPrompt) == (bool(ids) and all(0 <= each < 2**32 for each in ids))
    assert (
        found.token_ids.tolist() == ids
        if isinstance(found, TokenPrompt)
        else found == DirectPrompt("malformed")
    )


def test_a_plain_chat_is_rendered_here() -> None:
    prompt = chat({"role": "system", "content": "s"}, USER | {"content": [{"type": "text", "text": "a"}]})
    assert isinstance(prompt, RenderedPrompt) and prompt.takes_ids
    assert prompt.plain == (("system", "s"), ("user", ("a",)))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{}]},
        {"documents": [{}]},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"x": 1}},
        {"reasoning_effort": "low"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ],
)
def test_an_unusual_chat_is_rendered_by_the_engine(fields: dict[str, Any]) -> None:
    assert not is_usual(fields)
    prompt = chat(USER, add_special_tokens=True)
    assert isinstance(prompt, RenderedPrompt) and prompt.plain is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "x", "name": "n"},
        {"role": "developer", "content": "x"},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nx"},
        {"role": "user", "content": [{"type": "text", "text": "x", "extra": 1}]},
    ],
)
def test_an_unusual_message_is_rendered_by_the_engine(message: dict[str, Any]) -> None:
    prompt = chat(USER, message)
    assert isinstance(prompt, RenderedPrompt) and prompt.plain is None


def test_an_echoing_chat_keeps_its_messages() -> None:
    prompt = chat(USER, echo=True)
    assert isinstance(prompt, RenderedPrompt) and not prompt.takes_ids


def test_media_and_what_vllm_computes_by_itself_stay() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    shown = {"messages": [USER | {"content": [image]}]}
    assert prompt_of(Endpoint.CHAT, shown, has_media=True) == RenderedPrompt(None, takes_ids=False)
    assert chat(USER, n=0) == DirectPrompt("malformed")
    assert why_whole(Endpoint.CHAT, {"prompt_logprobs": 1}) == "prompt-logprobs"
    assert why_whole(Endpoint.COMPLETIONS, {"n": 1024, "truncate_prompt_tokens": 5, "suffix": "x"}) is None


def test_batches_and_what_engines_cut_have_prompts_too() -> None:
    assert completion(["x", "y"]) == BatchPrompt((TextPrompt("x", True), TextPrompt("y", True)))
    assert completion([[1], [2, 3]]) == BatchPrompt(
        (TokenPrompt(array("I", [1])), TokenPrompt(array("I", [2, 3])))
    )
    for rule in ({"truncate_prompt_tokens": 5}, {"suffix": "z"}):
        # An engine renders it by rules of its own, and is given no ids in its place.
        assert not is_usual(rule)
    cut = chat(USER, truncate_prompt_tokens=5)
    assert isinstance(cut, RenderedPrompt) and not cut.takes_ids
    assert completion(None, prompt_embeds=["abcd", "ef"]) == EmbedsPrompt(6)


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": [1, 2, 3], "n": 4}, 4),
        ({"prompt": ["x", "y"], "n": 3}, 6),
        ({"prompt_embeds": ["abcd", "ef"]}, 2),
        ({"prompt": [], "n": "3"}, 1),
    ],
)
def test_each_prompt_and_sample_is_an_answer(body: dict[str, Any], answers: int) -> None:
    assert answers_of(Endpoint.COMPLETIONS, body) == answers


@pytest.mark.parametrize(
    ("endpoint", "field", "takes_ids"),
    [(Endpoint.RESPONSES, "input", True), (Endpoint.MESSAGES, "messages", False)],
)
def test_conversations_of_other_apis_are_rendered_by_the_engine(
    endpoint: Endpoint, field: str, takes_ids: bool
) -> None:
    def said(*content: Any) -> Any:
        asked = {field: [USER | {"content": list(content)}]}
        return prompt_of(endpoint, asked, has_media=any(media_parts(endpoint, asked)))

    text, result = {"type": "text", "text": "x"}, {"type": "tool_result", "content": [{"type": "image"}]}
    assert (
        prompt_of(endpoint, {field: "x"})
        == said(text, {"type": "tool_use"})
        == RenderedPrompt(None, takes_ids)
    )
    for media in ({"type": "input_image"}, {"type": "document"}, result):
        assert said(text, media) == RenderedPrompt(None, takes_ids=False)
    assert prompt_of(endpoint, {field: 5}) == RenderedPrompt(None, takes_ids), "the engine says what is wrong"


def test_what_only_one_engine_would_know_is_refused() -> None:
    for field, value in (("previous_response_id", "resp_1"), ("background", True)):
        with pytest.raises(ApiError, match=field) as refused:
            prompt_of(Endpoint.RESPONSES, {"input": "x", field: value})
        assert refused.value.status == 400 and refused.value.param == field
    known = {"input": "x", "previous_response_id": None, "background": False}
    assert isinstance(prompt_of(Endpoint.RESPONSES, known), RenderedPrompt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "input", "messages"]), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["input", "messages", "prompt", "tools", "n"]), JSON))
def test_no_body_is_too_odd(body: dict[str, Any]) -> None:
    for endpoint in Endpoint:
        with suppress(ApiError):
            prompt_of(endpoint, body, has_media=any(media_parts(endpoint, body)))
