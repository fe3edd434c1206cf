"""The conversation in a body of `/v1/responses` or `/v1/messages`, as vLLM makes a chat of it before it renders it.

Read from vLLM 0.32: `construct_input_messages` (entrypoints/openai/responses/utils.py) and
`to_chat_completion_request` (entrypoints/anthropic/serving.py). What depends on the engine's settings is left to it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.serving.gateway.bodies import ApiError, Json

_UNCONVERTED = "unconverted"
_LEAST_BUDGET = 1024
# Claude Code begins its system prompt with a block of this, which changes with every request. vLLM leaves it out.
_BILLING_HEADER = "x-anthropic-billing-header"


class NoConversationError(Exception):
    """The body goes to the decode engine as it is."""

    def __init__(self, reason: str) -> None:
        """`reason`: why, in one word."""
        super().__init__(reason)
        self.reason = reason


def responses_chat(body: Mapping[str, Any]) -> Json:
    """The chat completion that renders to the prompt of a `/v1/responses` body.

    Raises:
        ApiError: 400, when the body names what only one engine knows.
        NoConversationError: it is more than text.
    """
    for field in ("previous_response_id", "background"):
        if body.get(field):
            sentence = (
                f"`{field}` is not served here: what an engine stores, the other engines do not know. "
                "Send the whole conversation in `input`, and wait for its answer."
            )
            raise ApiError(400, sentence, param=field)
    if body.get("truncation") not in (None, "disabled"):
        raise NoConversationError("truncation")
    if body.get("prompt") or body.get("previous_input_messages"):
        raise NoConversationError(_UNCONVERTED)
    instructions, said = body.get("instructions"), body.get("input")
    if not isinstance(instructions, str | None) or not said or not isinstance(said, str | list):
        raise NoConversationError("malformed")
    messages: list[Json] = [{"role": "user", "content": said}] if isinstance(said, str) else []
    for item in said if isinstance(said, list) else ():
        _add_item(_fields(item), messages)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    chat: Json = {"messages": messages}
    if body.get("tools"):
        if not isinstance(body["tools"], list):
            raise NoConversationError("malformed")
        chat["tools"] = [_function_tool(_fields(tool)) for tool in body["tools"]]
        chat["tool_choice"] = body.get("tool_choice") or "auto"
    if body.get("reasoning") is not None:
        chat["reasoning_effort"] = _fields(body["reasoning"]).get("effort")
    return chat | _template_kwargs(body)


def _add_item(item: Json, messages: list[Json]) -> None:
    """Make a message of one item of an input, or make it a part of the answer before it."""
    # What is not complete, vLLM continues.
    if item.get("status") not in (None, "completed"):
        raise NoConversationError(_UNCONVERTED)
    match item.get("type", "message"), item.get("role"):
        case "message", "assistant":
            _continue_answer("content", _answer_text(item), messages)
        case "message", role:
            content = item.get("content")
            if item.keys() - {"type", "role", "content"}:
                raise NoConversationError(_UNCONVERTED)
            if not isinstance(content, str):
                content = [{"type": "text", "text": text} for text in _texts(content, "input_text")]
            messages.append({"role": role, "content": content})
        case "reasoning", _:
            _continue_answer("reasoning", _thought(item), messages)
        case "function_call", _ if not item.get("namespace"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(
                _call(_string(item, "call_id"), _string(item, "name"), _string(item, "arguments"))
            )
        case "function_call_output", _:
            said = {"tool_call_id": _string(item, "call_id"), "content": _string(item, "output")}
            messages.append({"role": "tool", **said})
        case _:
            raise NoConversationError(_UNCONVERTED)


def _continue_answer(field: str, text: str, messages: list[Json]) -> None:
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get(field) is None:
        messages[-1][field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _answer_text(item: Json) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    texts = _texts(content, "output_text")
    # Of an answer vLLM takes the first part alone, and only where the item says what it is.
    if len(texts) != 1 or "type" not in item:
        raise NoConversationError(_UNCONVERTED)
    return texts[0]


def _thought(item: Json) -> str:
    if item.get("encrypted_content"):
        raise NoConversationError(_UNCONVERTED)
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if item.get(field):
            return _texts(item[field], kind)[0]
    return ""


def _function_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise NoConversationError(_UNCONVERTED)
    return _function(tool, tool.get("parameters"))


def messages_chat(body: Mapping[str, Any]) -> Json:
    """The chat completion that renders to the prompt of a `/v1/messages` body.

    Raises:
        NoConversationError: it has media, or what only the engine can turn into a prompt.
    """
    limit = body.get("max_tokens")
    if not body.get("model") or type(limit) is not int or limit < 1:
        raise NoConversationError("malformed")
    thinking = _fields(body.get("thinking") or {})
    budget = thinking.get("budget_tokens")
    if thinking.get("type") == "enabled" and not (type(budget) is int and _LEAST_BUDGET <= budget < limit):
        raise NoConversationError("malformed")
    # What switches thinking off depends on the model and on a setting of the engine.
    if thinking.get("type") == "disabled":
        raise NoConversationError(_UNCONVERTED)
    messages: list[Json] = []
    if body.get("system"):
        _add_system(body["system"], messages)
    said = body.get("messages")
    if not isinstance(said, list) or not said:
        raise NoConversationError("malformed")
    for message in said:
        _add_message(_fields(message), messages)
    chat: Json = {"messages": messages}
    if body.get("tools") is not None:
        if not isinstance(body["tools"], list):
            raise NoConversationError("malformed")
        chat["tools"] = [_tool(_fields(tool)) for tool in body["tools"]]
        chat["tool_choice"] = _fields(body.get("tool_choice") or {"type": "auto"}).get("type")
    effort = _fields(body.get("output_config") or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat | _template_kwargs(body)


def _add_system(system: object, messages: list[Json]) -> None:
    if not isinstance(system, str):
        texts = _texts(system, "text")
        system = "".join(text for text in texts if not text.startswith(_BILLING_HEADER))
    if system:
        messages.append({"role": "system", "content": system})


def _add_message(message: Json, messages: list[Json]) -> None:
    role, content = message.get("role"), message.get("content")
    # Whether instructions within a conversation are moved to its beginning depends on the template.
    if role not in ("user", "assistant"):
        raise NoConversationError(_UNCONVERTED)
    made: Json = {"role": role}
    if isinstance(content, str):
        made["content"] = content
    elif isinstance(content, list):
        _add_blocks([_fields(block) for block in content], made, messages)
    else:
        raise NoConversationError("malformed")
    if role == "assistant" or "content" in made:
        messages.append(made)


def _add_blocks(blocks: Sequence[Json], made: Json, messages: list[Json]) -> None:
    """Put blocks of one message into `made`; results of tools become messages before it."""
    texts, calls, thoughts = [], [], []
    for block in blocks:
        match made["role"], block.get("type"):
            case _, "text":
                texts.append(_string(block, "text"))
            case "assistant", "tool_use":
                calls.append(_tool_call(block))
            case "assistant", "thinking":
                thoughts.append(_string(block, "thinking"))
            case "assistant", "redacted_thinking":
                pass
            case "user", "tool_result":
                messages.append(_tool_result(block))
            case _, "image" | "document":
                raise NoConversationError("media")
            case _:
                raise NoConversationError(_UNCONVERTED)
    texts = [text for text in texts if text]
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if len(texts) == 1:
        made["content"] = texts[0]
    elif texts:
        made["content"] = [{"type": "text", "text": text} for text in texts]


def _tool_call(block: Json) -> Json:
    arguments = json.dumps(_fields(block.get("input") or {}))
    return _call(_string(block, "id"), _string(block, "name"), arguments)


def _call(number: str, name: str, arguments: str) -> Json:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: Json) -> Json:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(_texts(content, "text"))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}


def _tool(tool: Json) -> Json:
    schema = _fields(tool.get("input_schema"))
    return _function(tool, schema if "type" in schema else schema | {"type": "object"})


def _function(tool: Json, parameters: Any) -> Json:
    function = {
        "name": _string(tool, "name"),
        "description": tool.get("description"),
        "parameters": parameters,
    }
    more = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function | more}


def _template_kwargs(body: Mapping[str, Any]) -> Json:
    kwargs = body.get("chat_template_kwargs")
    return {} if kwargs is None else {"chat_template_kwargs": _fields(kwargs)}


def _texts(parts: object, kind: str) -> list[str]:
    """The texts of a list of nothing but parts of this kind."""
    if not isinstance(parts, list):
        raise NoConversationError("malformed")
    fields = [_fields(part) for part in parts]
    if any(part.get("type") != kind for part in fields):
        raise NoConversationError("media" if _has_media(fields) else _UNCONVERTED)
    return [_string(part, "text") for part in fields]


def _has_media(parts: Sequence[Json]) -> bool:
    return any(part.get("type") in ("image", "document", "input_image", "input_file") for part in parts)


def _fields(value: object) -> Json:
    if not isinstance(value, dict):
        raise NoConversationError("malformed")
    return value


def _string(fields: Json, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise NoConversationError("malformed")
    return value
