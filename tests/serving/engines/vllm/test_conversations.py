"""The gateway makes the same chat of responses and messages as vLLM itself does."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.prompts.conversations import NoConversationError, messages_chat, responses_chat

pytestmark = pytest.mark.slow("imports vLLM or torch")

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["x-anthropic-billing-header: 1", "x-anthropic\nb", "é\u2028\n"]
)
IDS = st.sampled_from(["t1", "t2"])


def blocks(*kinds: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Any]:
    return TEXTS | st.lists(st.one_of(*kinds), max_size=4)


TEXT_BLOCK = st.builds(
    lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}, TEXTS
)
VALUES = st.recursive(
    st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
CALL = st.builds(
    lambda number, arguments: {"type": "tool_use", "id": number, "name": "f", "input": arguments},
    IDS,
    st.dictionaries(TEXTS, VALUES, max_size=3),
)
THOUGHT = st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, TEXTS)
RESULT = st.builds(
    lambda number, content: {"type": "tool_result", "tool_use_id": number, "content": content},
    IDS,
    TEXTS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), max_size=3),
)
MESSAGE = st.one_of(
    st.builds(lambda content: {"role": "user", "content": content}, blocks(TEXT_BLOCK, RESULT)),
    st.builds(
        lambda content: {"role": "assistant", "content": content},
        blocks(TEXT_BLOCK, CALL, THOUGHT, st.just({"type": "redacted_thinking", "data": "x"})),
    ),
)
TOOL = st.builds(
    lambda schema, description: {"name": "f", "description": description, "input_schema": schema},
    st.sampled_from([{}, {"type": "object"}, {"properties": {"a": {"type": "string"}}}]),
    st.none() | TEXTS,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "system": TEXTS | st.lists(TEXT_BLOCK, max_size=3),
        "tools": st.lists(TOOL, max_size=2),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "none"}, {"type": "any"}]),
        "thinking": st.sampled_from([{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]),
        "output_config": st.sampled_from([{"effort": "low"}, {"effort": "high"}]),
        "chat_template_kwargs": st.just({"a": 1}),
    },
)


@settings(deadline=None, max_examples=300)
@given(st.lists(MESSAGE, min_size=1, max_size=4), OPTIONS)
def test_messages_become_the_chat_that_vllm_makes_of_them(said: list[Any], options: dict[str, Any]) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    body = {"model": "m", "max_tokens": 2048, "messages": said, **options}
    chat = messages_chat(body)
    asked = AnthropicMessagesRequest(**copy.deepcopy(body))
    theirs = AnthropicServingMessages.to_chat_completion_request(asked)
    assert plain(chat["messages"]) == plain(theirs.messages)
    assert (chat.get("tools") is None) == (theirs.tools is None)
    if theirs.tools is not None:
        assert chat["tools"] == [tool.model_dump() for tool in theirs.tools]
    assert chat.get("reasoning_effort") == theirs.reasoning_effort
    assert chat.get("chat_template_kwargs") == theirs.chat_template_kwargs


PART = st.builds(lambda text: {"type": "input_text", "text": text}, TEXTS)
FUNCTION = st.builds(
    lambda strict, more: (
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": strict} | more
    ),
    st.sampled_from([None, True]),
    st.sampled_from([{}, {"description": "d"}]),
)
ITEM = st.one_of(
    st.builds(
        lambda role, content, kind: {"role": role, "content": content, **kind},
        st.sampled_from(["user", "system", "developer"]),
        TEXTS | st.lists(PART, min_size=1, max_size=3),
        st.sampled_from([{}, {"type": "message"}]),
    ),
    st.builds(lambda text: {"role": "assistant", "content": text}, TEXTS),
    st.builds(
        lambda number: {"type": "function_call", "call_id": number, "name": "f", "arguments": "{}"}, IDS
    ),
    st.builds(
        lambda number, text: {"type": "function_call_output", "call_id": number, "output": text}, IDS, TEXTS
    ),
    st.builds(
        lambda texts, summary: {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in texts],
        },
        st.lists(TEXTS, max_size=2),
        st.lists(TEXTS, max_size=2),
    ),
    st.builds(
        lambda text, more: {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text, **more}],
        },
        TEXTS,
        st.sampled_from([{}, {"annotations": []}]),
    ),
)


@settings(deadline=None, max_examples=300)
@given(TEXTS | st.lists(ITEM, min_size=1, max_size=5), st.none() | TEXTS, st.lists(FUNCTION, max_size=2))
def test_responses_become_the_chat_that_vllm_makes_of_them(
    said: Any, instructions: str | None, tools: list[Any]
) -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import (
        construct_input_messages,
        construct_tool_dicts,
        should_continue_final_message,
    )

    body = {"model": "m", "input": said, "instructions": instructions, "tools": tools}
    try:
        chat = responses_chat(body)
    except NoConversationError:
        assert not said
        return
    theirs = ResponsesRequest(**copy.deepcopy(body))
    assert chat.get("tools") == construct_tool_dicts(theirs.tools, theirs.tool_choice)
    made = construct_input_messages(request_instructions=theirs.instructions, request_input=theirs.input)
    assert plain(chat["messages"]) == plain(made)
    assert not should_continue_final_message(theirs.input)


def plain(messages: Any) -> list[Any]:
    """What of messages reaches a template: roles, texts, calls."""
    found = []
    for message in messages:
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            content = [part["text"] for part in content]
        calls = [dict(call) for call in message.get("tool_calls") or ()]
        found.append((message["role"], content, calls, message.get("reasoning"), message.get("tool_call_id")))
    return found
