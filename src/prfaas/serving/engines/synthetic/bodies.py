"""Request bodies as a stand-in reads them: the fields that the gateway sends and load tools use, no more."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from prfaas.serving.engines.synthetic.text import Text
from prfaas.serving.engines.synthetic.work import FROM_PARAMETER, PARAMETER, Work

_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_CHAT_TOKENS = 256
_MAX_SAMPLES = 128


class BodyError(ValueError):
    """The request can't be answered; the text says why. `status` is its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Models:
    """Names that requests may give as their model, and how long prompt and answer may be."""

    served_name: str
    adapters: Collection[str]
    max_model_len: int

    def adapter(self, name: object) -> str:
        """The LoRA adapter that a model name means, "" for the model itself."""
        if name is None or name == self.served_name:
            return ""
        if isinstance(name, str) and name in self.adapters:
            return name
        raise BodyError(f"The model `{name}` does not exist.", 404)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: a prompt or several, and the form of the answer."""

    works: tuple[Work, ...]
    chat: bool
    model: str
    stream: bool
    include_usage: bool
    return_token_ids: bool


def parse(raw: bytes, *, chat: bool, models: Models, text: Text) -> Asked:
    """Read the body of a generation. CPU-bound: milliseconds per 100K tokens.

    Raises:
        BodyError: it can't be answered.
    """
    body = json_object(raw)
    adapter = models.adapter(body.get("model"))
    params = body.get("kv_transfer_params")
    params = params if isinstance(params, dict) else {}
    prompts = [_chat_ids(body, params, text)] if chat else prompt_ids(body.get("prompt"), text)
    samples = _whole(body, "n", 1, _MAX_SAMPLES) or 1
    wanted = _whole(body, "max_completion_tokens", 1) if chat else None
    wanted = wanted or _whole(body, "max_tokens", 1)
    works = []
    for ids in prompts:
        room = models.max_model_len - len(ids)
        if not ids or room < 1:
            raise BodyError(
                f"The prompt has {len(ids)} tokens; it must have 1 to {models.max_model_len - 1}."
            )
        default = _DEFAULT_CHAT_TOKENS if chat else _DEFAULT_COMPLETION_TOKENS
        works.append(
            Work(
                token_ids=ids,
                max_tokens=min(wanted or default, room),
                samples=samples,
                salt=_text(body.get("cache_salt")),
                adapter=adapter,
                tickets=tuple(
                    filter(None, (_text(params.get(name)) for name in (PARAMETER, FROM_PARAMETER)))
                ),
            )
        )
    options = body.get("stream_options")
    return Asked(
        works=tuple(works),
        chat=chat,
        model=adapter or models.served_name,
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        return_token_ids=body.get("return_token_ids") is True,
    )


def parse_tokenize(raw: bytes, text: Text) -> Sequence[int]:
    """The ids that a body of /tokenize asks for."""
    body = json_object(raw)
    if "messages" in body:
        return _chat_ids(body, {}, text)
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BodyError("/tokenize needs `prompt` (a string) or `messages`.")
    return text.encode(prompt, add_special_tokens=body.get("add_special_tokens") is not False)


def prompt_ids(prompt: object, text: Text) -> list[Sequence[int]]:
    """A completion's prompt or prompts: text, ids, or a list of either."""
    if isinstance(prompt, str):
        return [text.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return [_ids(prompt)]
        if all(isinstance(each, str) for each in prompt):
            return [text.encode(each) for each in prompt]
        return [_ids(each) for each in prompt]
    raise BodyError("`prompt` must be a string, token ids, or a list of either.")


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BodyError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise BodyError("The request body must be a JSON object.")
    return body


def _chat_ids(body: dict[str, Any], params: dict[str, Any], text: Text) -> Sequence[int]:
    given = params.get("prompt_token_ids")
    if given is not None:
        return _ids(given)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BodyError("`messages` must be a list of messages.")
    try:
        rendered = text.render(
            messages, body.get("tools"), open_turn=body.get("add_generation_prompt") is not False
        )
    except ValueError as error:
        raise BodyError(str(error)) from None
    # The template writes its special tokens itself.
    return text.encode(rendered, add_special_tokens=False)


def _ids(value: object) -> Sequence[int]:
    try:
        # The conversion is the check: looking at each id from here would cost more than all the rest.
        return array("I", value if isinstance(value, list) else [None])
    except (TypeError, OverflowError):
        raise BodyError("Token ids must be a list of whole numbers of 32 bits.") from None


def _whole(body: dict[str, Any], field: str, low: int, high: int = 1 << 30) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise BodyError(f"`{field}` must be a whole number from {low} to {high}.")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
