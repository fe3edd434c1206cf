"""Which answers another engine can continue from the tokens so far, and the bodies that ask it to."""

from typing import Any

from prfaas.serving.gateway.bodies import Json, WrittenIds
from prfaas.serving.gateway.prompts.prompt import DEFAULT_COMPLETION_TOKENS, Endpoint

# With these vLLM 0.32 goes by what it has generated itself, and to a second engine that is the prompt.
_COUNTING_OUTPUT = (
    "frequency_penalty",
    "presence_penalty",
    "bad_words",
    "repetition_detection",
    "vllm_xargs",
    "structured_outputs",
    "use_beam_search",
)
# With these an answer is more than its own text or has no token ids, or the prompt would be cut once more.
_OTHER_FORMS = (
    "echo",
    "prompt_logprobs",
    "return_prompt_text",
    "suffix",
    "truncate_prompt_tokens",
    "prompt_embeds",
)


def can_resume(endpoint: Endpoint, body: Json) -> bool:
    """Whether the rest of a streamed answer to `body` depends on nothing but the tokens before it.

    Not those of other APIs: vLLM tells no token ids there.
    """
    if body.get("stream") is not True or endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return False
    if any(body.get(field) for field in _COUNTING_OUTPUT + _OTHER_FORMS) or _has_grammar(body):
        return False
    # With hidden reasoning there are no ids. A seeded generator would have to be wound forward.
    is_seeded = body.get("seed") not in (None, -1) and body.get("temperature") != 0
    return body.get("n") in (None, 1) and body.get("include_reasoning") is not False and not is_seeded


def _has_grammar(body: Json) -> bool:
    """Whether vLLM allows only some tokens, by where in a grammar the answer is."""
    wanted = body.get("response_format")
    if wanted is not None and (not isinstance(wanted, dict) or wanted.get("type") != "text"):
        return True
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools or body.get("tool_choice") == "none":
        return False
    is_free = body.get("tool_choice") in (None, "auto") and body.get("parallel_tool_calls") is not False
    return not is_free or any(_is_strict(tool) for tool in tools)


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def stop_strings(body: Json) -> tuple[str, ...]:
    """What ends an answer where it stands in its text."""
    stop = body.get("stop")
    given = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return tuple(text for text in given if isinstance(text, str) and text)


def wants_usage(body: Json) -> bool:
    """Whether the client asked for the usage at the stream's end."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def tokens_left(
    endpoint: Endpoint, body: Json, prompt_tokens: int, sent_tokens: int, max_model_len: int
) -> int:
    """How many tokens may follow the first `sent_tokens` of an answer; 0 or less: none."""
    room = max_model_len - prompt_tokens - sent_tokens
    limit = body.get("max_tokens")
    if endpoint is Endpoint.CHAT:
        limit = body.get("max_completion_tokens") or limit
    elif limit is None:
        limit = DEFAULT_COMPLETION_TOKENS
    return room if limit is None else min(room, limit - sent_tokens)


def rest_body(endpoint: Endpoint, body: Json, written: WrittenIds, sent_tokens: int, max_tokens: int) -> Json:
    """`body` as of a request for what follows `written`: the prompt and `sent_tokens` tokens of the answer.

    A chat gets the ids beside its messages. Stop strings are the gateway's to find: they may have begun already.
    """
    rest = {name: value for name, value in body.items() if name not in ("stop", "truncate_prompt_tokens")}
    rest |= (
        {"max_tokens": max_tokens}
        if endpoint is Endpoint.COMPLETIONS
        else {"max_completion_tokens": max_tokens}
    )
    if body.get("min_tokens") is not None:
        rest["min_tokens"] = max(body["min_tokens"] - sent_tokens, 0)
    if endpoint is Endpoint.COMPLETIONS:
        rest["prompt"] = written
    return rest
