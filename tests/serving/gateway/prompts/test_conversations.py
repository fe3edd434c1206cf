"""Which bodies of other APIs become a chat, and which are left to the engine. What chat: tests/serving/engines/vllm."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.prompts.conversations import NoConversationError, messages_chat, responses_chat
from prfaas.serving.gateway.prompts.prompt import ChatPrompt, DirectPrompt, Endpoint, prompt_of

USER = {"role": "user", "content": "hello"}
ANSWER: dict[str, Any] = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "hi", "annotations": []}],
}


def response(said: Any, **fields: Any) -> Any:
    return prompt_of(Endpoint.RESPONSES, {"input": said, **fields})


def message(*said: Any, **fields: Any) -> Any:
    return prompt_of(Endpoint.MESSAGES, {"model": "m", "messages": list(said), "max_tokens": 5, **fields})


def test_plain_text_is_rendered_here() -> None:
    told = (("system", "s"), ("user", "hello"), ("assistant", "hi"), ("user", ("a", "b")))
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    prompt = response([USER, ANSWER, {"type": "message", "role": "user", "content": parts}], instructions="s")
    assert isinstance(prompt, ChatPrompt) and prompt.plain == told and prompt.takes_ids
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    prompt = message(
        USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": blocks}, system="s"
    )
    assert isinstance(prompt, ChatPrompt) and prompt.plain == told and not prompt.takes_ids
    assert response("x").plain == message({"role": "user", "content": "x"}).plain == (("user", "x"),)


def test_what_changes_with_every_request_is_left_out_of_a_system_prompt() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "s"}]
    assert message(USER, system=system).plain == (("system", "s"), ("user", "hello"))


def test_an_answer_in_several_items_is_one_message() -> None:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    prompt = response([USER, thought, ANSWER, call, call, output], tools=[tool])
    assert isinstance(prompt, ChatPrompt) and prompt.plain is None
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert prompt.request["messages"] == [
        USER,
        {"role": "assistant", "reasoning": "t", "content": "hi", "tool_calls": [made, made]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    assert prompt.request["tools"][0]["function"]["strict"] is True


def test_tools_are_the_engines_to_render_from_the_same_chat() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}]}
    tool = {"name": "f", "input_schema": {"properties": {}}, "cache_control": {"type": "ephemeral"}}
    said = (USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
    prompt = message(*said, tools=[tool])
    assert isinstance(prompt, ChatPrompt) and prompt.plain is None and not prompt.takes_ids
    assert prompt.request["messages"][1:] == [
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": "\\u00e9"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "ok"},
    ]
    (made,) = prompt.request["tools"]
    assert made["function"]["parameters"] == {"properties": {}, "type": "object"}


@pytest.mark.parametrize(
    ("reason", "said", "fields"),
    [
        ("unconverted", "x", {"tools": [{"type": "web_search"}]}),
        ("truncation", "x", {"truncation": "auto"}),
        ("unconverted", "x", {"previous_input_messages": [{}]}),
        ("unconverted", "x", {"prompt": {"id": "p"}}),
        ("unconverted", [USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}], {}),
        ("unconverted", [USER, {"type": "file_search_call", "id": "x"}], {}),
        ("malformed", [USER, {"type": "function_call_output", "call_id": "c", "output": [1]}], {}),
        ("unconverted", [USER, ANSWER | {"status": "incomplete"}], {}),
        ("unconverted", [ANSWER | {"content": ANSWER["content"] * 2}], {}),
        ("unconverted", [USER | {"name": "x"}], {}),
        ("media", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}], {}),
        ("malformed", "", {}),
        ("malformed", [], {}),
        ("malformed", ["x"], {}),
        ("malformed", "x", {"instructions": 5}),
        ("malformed", 5, {}),
        ("malformed", [{"role": "user", "content": [{"type": "input_text", "text": 5}]}], {}),
    ],
)
def test_responses_that_are_more_than_text_are_forwarded(reason: str, said: Any, fields: Any) -> None:
    assert response(said, **fields) == DirectPrompt(reason)


@pytest.mark.parametrize(
    ("reason", "said", "fields"),
    [
        ("unconverted", USER, {"thinking": {"type": "disabled"}}),
        ("unconverted", {"role": "system", "content": "x"}, {}),
        ("unconverted", {"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}, {}),
        ("media", {"role": "user", "content": [{"type": "image", "source": {}}]}, {}),
        ("media", {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}, {}),
        ("malformed", {"role": "user"}, {}),
        ("malformed", USER, {"max_tokens": None}),
        ("malformed", USER, {"max_tokens": 0}),
        ("malformed", USER, {"model": ""}),
        ("malformed", USER, {"thinking": {"type": "enabled", "budget_tokens": 5000}}),
        ("malformed", {"role": "user", "content": [{"type": "text"}]}, {}),
        ("malformed", "x", {}),
        ("malformed", USER, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ],
)
def test_messages_that_only_the_engine_understands_are_forwarded(reason: str, said: Any, fields: Any) -> None:
    assert message(said, **fields) == DirectPrompt(reason)


def test_what_only_one_engine_would_know_is_refused() -> None:
    for field, value in (("previous_response_id", "resp_1"), ("background", True)):
        with pytest.raises(ApiError, match=field) as refused:
            response("x", **{field: value})
        assert refused.value.status == 400 and refused.value.param == field
    assert isinstance(response("x", previous_response_id=None, background=False), ChatPrompt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "input",
                    "messages",
                    "system",
                    "tools",
                    "thinking",
                    "id",
                    "name",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "input",
                "instructions",
                "messages",
                "system",
                "tools",
                "reasoning",
                "thinking",
                "output_config",
                "tool_choice",
                "chat_template_kwargs",
            ]
        ),
        JSON,
    )
)
def test_no_body_is_too_odd(body: dict[str, Any]) -> None:
    for converted in (responses_chat, messages_chat):
        try:
            chat = converted(body)
        except NoConversationError:
            continue
        assert all(isinstance(said, dict) for said in chat["messages"])
    for endpoint in (Endpoint.RESPONSES, Endpoint.MESSAGES):
        assert isinstance(prompt_of(endpoint, body), ChatPrompt | DirectPrompt)
