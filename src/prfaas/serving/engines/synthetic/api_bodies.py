"""Bodies of the OpenAI API as a stand-in reads and writes them, in the shapes of vLLM.

Read are the fields that the gateway sends and load tools use, no more.
"""

import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from prfaas.serving.engines.synthetic.engine import GeneratedAnswer, Work
from prfaas.serving.engines.synthetic.text import Text
from prfaas.serving.transport.protocol.ticket import (
    CACHED_TOKENS_PARAMETER,
    PREFIX_TICKET_PARAMETER,
    REMOTE_PREFILL_PARAMETER,
    TICKET_PARAMETER,
)

DONE = b"data: [DONE]\n\n"

_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_CHAT_TOKENS = 256
_MAX_SAMPLES = 128


class BodyError(ValueError):
    """The request can't be answered; the text says why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer."""


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The model and its adapters, as requests may name them."""

    served_name: str
    adapters: Collection[str]
    max_model_len: int
    """Tokens of prompt and answer together, at most."""

    def adapter(self, name: object) -> str:
        """The LoRA adapter that a model name means, "" for the model itself."""
        if name is None or name == self.served_name:
            return ""
        if isinstance(name, str) and name in self.adapters:
            return name
        raise BodyError(f"The model `{name}` does not exist.", 404)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to generate, and the form of its answer."""

    works: tuple[Work, ...]
    """One for each prompt."""
    chat: bool
    """A chat completion, else a text completion."""
    model: str
    """As the answer names it."""
    stream: bool
    include_usage: bool
    """A stream ends with an event of token counts."""
    return_token_ids: bool
    names_tokens: bool = False
    """A text completion's log probabilities name each token by its id; each is certain of itself."""


def parse_generation(
    body: dict[str, Any], models: ServedModels, text: Text, *, chat: bool
) -> GenerationRequest:
    """Read the body of a request to generate. CPU-bound: milliseconds per 100K tokens.

    Raises:
        BodyError: it can't be answered.
    """
    adapter = models.adapter(body.get("model"))
    params = body.get("kv_transfer_params")
    params = params if isinstance(params, dict) else {}
    tickets = (_text_field(params.get(name)) for name in (TICKET_PARAMETER, PREFIX_TICKET_PARAMETER))
    shown = tuple(filter(None, tickets))
    prompts = [chat_ids(body, params, text)] if chat else prompt_ids(body.get("prompt"), text)
    samples = _integer_field(body, "n", 1, _MAX_SAMPLES) or 1
    wanted = _integer_field(body, "max_completion_tokens", 1) if chat else None
    wanted = wanted or _integer_field(body, "max_tokens", 1)
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
                salt=_text_field(body.get("cache_salt")),
                adapter=adapter,
                tickets=shown,
                cached_tokens=_cached_tokens(params),
            )
        )
    options = body.get("stream_options")
    return GenerationRequest(
        works=tuple(works),
        chat=chat,
        model=adapter or models.served_name,
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        return_token_ids=body.get("return_token_ids") is True,
        names_tokens=body.get("return_tokens_as_token_ids") is True and body.get("logprobs") is not None,
    )


def parse_tokenize(body: dict[str, Any], text: Text) -> Sequence[int]:
    """The ids that a body of /tokenize asks for."""
    if "messages" in body:
        return chat_ids(body, {}, text)
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BodyError("/tokenize needs `prompt` (a string) or `messages`.")
    return text.encode(prompt, add_special_tokens=body.get("add_special_tokens") is not False)


def parse_detokenize(body: dict[str, Any], text: Text) -> str:
    """The text that a body of /detokenize asks for."""
    return text.plain(_ids(body.get("tokens")))


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


def chat_ids(body: dict[str, Any], params: dict[str, Any], text: Text) -> Sequence[int]:
    """A conversation's ids: those in `params` if there are any. Raises BodyError."""
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


def _integer_field(body: dict[str, Any], field: str, low: int, high: int = 1 << 30) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise BodyError(f"`{field}` must be a whole number from {low} to {high}.")
    return value


def _cached_tokens(params: dict[str, Any]) -> int | None:
    told = params.get(CACHED_TOKENS_PARAMETER)
    return told if params.get(REMOTE_PREFILL_PARAMETER) and isinstance(told, int) else None


def _text_field(value: object) -> str:
    return value if isinstance(value, str) else ""


class AnswerWriter:
    """Writes one request's answer, whole or in pieces. The choices of prompt p have the indices p·n, p·n + 1, …"""

    def __init__(self, request: GenerationRequest, text: Text) -> None:
        self._request = request
        self._text = text
        self._id = f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid4().hex}"
        self._created = int(time.time())

    def whole(self, generations: Sequence[GeneratedAnswer]) -> bytes:
        """The answer that is not streamed."""

        def said(text: str) -> dict[str, Any]:
            return {"message": {"role": "assistant", "content": text, "tool_calls": []}}

        choices = [
            choice
            for prompt, generation in enumerate(generations)
            for choice in self._choices(prompt, generation.token_ids, said, opens=True, finished=True)
        ]
        answer = self._envelope("chat.completion" if self._request.chat else "text_completion", choices)
        answer["usage"] = self._usage(generations)
        answer["kv_transfer_params"] = None
        if self._request.chat and self._request.return_token_ids:
            answer["prompt_token_ids"] = list(self._request.works[0].token_ids)
        return orjson.dumps(answer)

    def piece(self, prompt: int, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """One event with what has come since the last one of a prompt; `first` also opens a chat answer."""
        request = self._request

        def said(text: str) -> dict[str, Any]:
            return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

        choices = list(self._choices(prompt, token_ids, said, opens=first, finished=last))
        event = self._envelope("chat.completion.chunk" if request.chat else "text_completion", choices)
        if first and request.chat and request.return_token_ids:
            event["prompt_token_ids"] = list(request.works[prompt].token_ids)
        return _event(event)

    def end(self, generations: Sequence[GeneratedAnswer]) -> bytes:
        """The end of a stream: the usage if `stream_options.include_usage` asks for it, and the mark."""
        if not self._request.include_usage:
            return DONE
        event = self._envelope("chat.completion.chunk" if self._request.chat else "text_completion", [])
        event["usage"] = self._usage(generations)
        return _event(event) + DONE

    def _choices(
        self,
        prompt: int,
        token_ids: Sequence[int],
        said: Callable[[str], dict[str, Any]],
        *,
        opens: bool,
        finished: bool,
    ) -> Iterator[dict[str, Any]]:
        """Those of a prompt. `said`: how a chat says a text; `opens`: with them its answer begins."""
        request, work = self._request, self._request.works[prompt]
        ids = list(token_ids)
        text = self._text.decode(ids)
        for sample in range(work.samples):
            choice = {
                "index": prompt * work.samples + sample,
                "logprobs": self._logprobs(ids),
                "finish_reason": "length" if finished else None,
                "stop_reason": None,
                "token_ids": ids if request.return_token_ids else None,
                **(said(text) if request.chat else {"text": text}),
            }
            if opens and request.return_token_ids and not request.chat:
                choice["prompt_token_ids"] = list(work.token_ids)
            yield choice

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        if not self._request.names_tokens or self._request.chat:
            return None
        return {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [0.0] * len(ids)}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _usage(self, generations: Sequence[GeneratedAnswer]) -> dict[str, Any]:
        prompt = sum(generation.prompt_tokens for generation in generations)
        completion = sum(work.max_tokens * work.samples for work in self._request.works)
        cached = sum(generation.cached_tokens for generation in generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
