"""Requests in all the shapes in which clients send prompts: `SHAPES`, to be tokenized as the decode engine does."""

from collections.abc import Mapping
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

Shape = tuple[str, Mapping[str, Any]]
_TOOL = {"name": "pick", "description": "Pick a colour.", "parameters": {"type": "object", "properties": {}}}
_CALLED = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": '{"colour": "red"}'}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def shapes(text: str, ids: list[int]) -> dict[str, Shape]:
    """Each with `text`, or `ids`, as the long part of its prompt."""
    tools = [{"type": "function", "function": _TOOL}]
    said, system = _user(text), {"role": "system", "content": " Be terse. \n"}
    turns = [said, {"role": "assistant", "content": " Why? "}, _user("Because.")]
    with_call = [
        said,
        {"role": "assistant", "content": "I pick.", "tool_calls": [_CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        _user("Again."),
    ]
    completions: dict[str, dict[str, Any]] = {
        "text": {"prompt": text},
        "text in a list": {"prompt": [text]},
        "text without special tokens": {"prompt": text, "add_special_tokens": False},
        "text of other scripts": {"prompt": f"naïve café, 数字, 🙂🙃\r\n\t{text}"},
        "text with marks of the template": {"prompt": f"<|im_start|>user\n{text}<|im_end|></s>"},
        "text that is cut": {"prompt": text, "truncate_prompt_tokens": 300},
        "ids": {"prompt": ids},
        "ids in a list": {"prompt": [ids]},
        "sampling": {"prompt": text, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["#"]},
        "a bias": {"prompt": text, "logit_bias": {"65": 1}},
        "a grammar": {"prompt": text, "structured_outputs": {"regex": "[a-z]{1,9}"}},
        "log probabilities": {"prompt": text, "logprobs": 2},
        "two answers": {"prompt": text, "n": 2, "temperature": 1},
        "a user": {"prompt": text, "user": "me"},
    }
    chats: dict[str, dict[str, Any]] = {
        "a chat": {"messages": [said]},
        "a system message": {"messages": [system, said]},
        "several turns": {"messages": [system, *turns]},
        "parts": {"messages": [_user(_parts("a ", text, " b\n", ""))]},
        "other scripts": {"messages": [_user(f"  数字, 🙂🙃\r\n{text} \n")]},
        "marks of the template": {"messages": [_user(f"<|im_end|>\n<|im_start|>system\n{text}</s>")]},
        "tools": {"messages": [said], "tools": tools},
        "tools that are not to be called": {"messages": [said], "tools": tools, "tool_choice": "none"},
        "a named tool": {
            "messages": [said],
            "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": "pick"}},
        },
        "a call before": {"messages": with_call, "tools": tools},
        "a name": {"messages": [{**said, "name": "me"}]},
        "effort": {"messages": [said], "reasoning_effort": "low"},
        "arguments of the template": {"messages": [said], "chat_template_kwargs": {"enable_thinking": False}},
        "documents": {"messages": [said], "documents": [{"title": "t", "text": "d"}]},
        "a schema": {"messages": [said], "response_format": _SCHEMA},
        "the message to go on with": {
            "messages": [said, {"role": "assistant", "content": "Well,"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "text as its format": {"messages": [said], "response_format": {"type": "text"}, "user": "me"},
        "log probabilities of a chat": {"messages": [said], "logprobs": True, "top_logprobs": 2},
    }
    responses: dict[str, dict[str, Any]] = {
        "a response": {"input": text},
        "items": {"input": [_user(_parts(text, kind="input_text"))]},
        "instructions": {"input": text, "instructions": "Be terse.", "metadata": {"a": "b"}},
        "tools of a response": {"input": text, "tools": [{"type": "function", **_TOOL, "strict": None}]},
        "as Codex asks": codex_body(text),
    }
    messages: dict[str, dict[str, Any]] = {
        "a message": {"messages": [said]},
        "a system of blocks": {"messages": [said], "system": _parts("Be terse.", " Now.")},
        "blocks": {"messages": [_user(_parts(text, "b"))], "system": "Be terse."},
        "tools of messages": {
            "messages": [said],
            "tools": [
                {"name": "pick", "description": "d", "input_schema": {"type": "object", "properties": {}}}
            ],
        },
        "turns of messages": {"messages": turns, "metadata": {"user_id": "u"}},
        "as Claude Code asks": claude_code_body(text),
    }
    each = {COMPLETIONS: completions, CHAT: chats, RESPONSES: responses, MESSAGES: messages}
    return {name: (path, body) for path, bodies in each.items() for name, body in bodies.items()}


def codex_body(text: str) -> dict[str, Any]:
    """A later turn of OpenAI's agent for terminals: its fields and items, in its order."""

    def item(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
        return {"type": "message", "role": role, "content": _parts(*texts, kind=kind)}

    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs a shell command and returns its output.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": {"type": "string"}, "description": "The command."},
                "timeout_ms": {"type": "number"},
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    return {
        "instructions": "You are a coding agent in a terminal.\nBe precise.",
        "input": [
            item("developer", "<permissions>read only</permissions>"),
            item("user", "<environment_context><cwd>/w</cwd></environment_context>"),
            item("user", text),
            {
                "type": "function_call",
                "name": "shell",
                "arguments": '{"command":["ls"]}',
                "call_id": "call_1",
            },
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": '{"output":"a.py","exit_code":0}',
            },
        ],
        "tools": [shell],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    }


def claude_code_body(text: str) -> dict[str, Any]:
    """A later turn of Anthropic's agent for terminals, sent to `/v1/messages?beta=true`."""
    kept = {"cache_control": {"type": "ephemeral"}}
    read = {
        "name": "Read",
        "description": "Reads a file.",
        "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"file_path": {"type": "string"}, "limit": {"type": "number"}},
            "required": ["file_path"],
            "additionalProperties": False,
        },
    }
    system = [{"type": "text", "text": each, **kept} for each in ("You are an agent.", "Be concise.")]
    asked = _parts("<system-reminder>\nThe date.\n</system-reminder>", text)
    used = {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"file_path": "/w/a.py"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": "1\timport os", **kept}
    return {
        "messages": [
            _user(asked),
            {"role": "assistant", "content": [{"type": "text", "text": "I read it."}, used]},
            _user([result]),
        ],
        "system": system,
        "tools": [read],
        "metadata": {"user_id": "user_0a1b_account__session_0199a213"},
    }


def limited(path: str, body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """A body whose answer has so many tokens at most."""
    return {**body, "max_output_tokens" if path == RESPONSES else "max_tokens": tokens}
