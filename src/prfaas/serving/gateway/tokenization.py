"""Token ids of a prompt exactly as the decode engine makes them, by the cheapest way that is known to be
exact.

The model's tokenizer and chat template inside the gateway, off the event loop.
"""

import asyncio
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jinja2

from prfaas.core.deployment import Instance
from prfaas.serving.gateway.engine_client import EngineCallError, EngineClient
from prfaas.serving.gateway.options import GatewayOptions, ThreadOffload
from prfaas.serving.gateway.prompts import ChatPrompt, Endpoint, TextPrompt, TokenPrompt, as_token_ids
from prfaas.serving.gateway.tokenizers import ChatTemplate, Encoder, encoder_of


class LocalTokenizer:
    """Text and plain conversations → token ids (uint32). Whether vLLM agrees is not known here (see
    `tokenizing.py`)."""

    def __init__(
        self, encoder: Encoder, template: ChatTemplate | None, thread_offload: ThreadOffload
    ) -> None:
        self._encoder = encoder
        self._template = template
        self._offloop = thread_offload

    @classmethod
    def of_model(cls, directory: Path, thread_offload: ThreadOffload) -> "LocalTokenizer | None":
        """From a checkpoint directory; None when it has no `tokenizer.json`. Reads files: call it off the
        loop."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            return None
        return cls(encoder_of(file), ChatTemplate.of_model(directory), thread_offload)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Ids of `text`; special tokens written in it are recognised, as in vLLM."""
        return await self._offloop.run(
            len(text), self._encoder.encode, text, add_special_tokens=add_special_tokens
        )

    async def chat_ids(self, messages: Sequence[tuple[str, str | tuple[str, ...]]]) -> "array[int]":
        """Ids of the rendered conversation with a generation prompt. Raises jinja2.TemplateError."""
        template = self._template
        if template is None:
            raise ValueError("the model has no chat template that the gateway can render")
        chars = sum(len(c) if isinstance(c, str) else sum(map(len, c)) for _, c in messages)
        # The template writes its special tokens itself.
        return await self._offloop.run(
            chars, lambda: self._encoder.encode(template.render(messages), add_special_tokens=False)
        )


logger = logging.getLogger(__name__)

_SAMPLE_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "  Two spaces, a tab\t, naïve café, 数字, 🙂🙃, <|im_end|></s> and\r\n\r\n  CRLF. \n",
)
_SAMPLE_CHATS: tuple[tuple[tuple[str, str | tuple[str, ...]], ...], ...] = (
    (("user", _SAMPLE_TEXTS[0]),),
    (
        ("system", " Be terse. \n"),
        ("user", _SAMPLE_TEXTS[1]),
        ("assistant", "\n Why? "),
        ("user", ("a ", " b\n", "")),
    ),
)


class TokenizerSource(StrEnum):
    """Where ids come from. `OWN`: the gateway's tokenizer; `ENGINE`: the engine's /tokenize; `NONE`: neither
    is exact."""

    OWN = "own"
    ENGINE = "engine"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """`exact`: checked to be what the engine makes itself, so it may be given to the engine in place of the
    text."""

    token_ids: Sequence[int]
    exact: bool


class Tokenization:
    """Decides per endpoint, by asking the engine once, whose ids to use; until then the engine's.

    The question is a one-token generation that returns the prompt's ids: `/tokenize` alone would not tell,
    since vLLM renders some models' chats (gpt-oss) in another way than it tokenizes them.
    """

    def __init__(
        self, local: LocalTokenizer | None, client: EngineClient, model: str, options: GatewayOptions
    ) -> None:
        self._local = local
        self._client = client
        self._model = model
        self._options = options
        self._sources: dict[Endpoint, TokenizerSource] = {}
        self._check = asyncio.Lock()

    def source(self, endpoint: Endpoint) -> TokenizerSource | None:
        """What was found for `endpoint`; None before the engine was asked."""
        return self._sources.get(endpoint)

    async def tokenize(
        self, prompt: TokenPrompt | TextPrompt | ChatPrompt, decode: Instance
    ) -> Tokenized | None:
        """Ids of `prompt`, or None when they cannot be had exactly. Raises EngineError when the engine
        refuses."""
        if isinstance(prompt, TokenPrompt):
            return Tokenized(prompt.token_ids, exact=True)
        endpoint = Endpoint.CHAT if isinstance(prompt, ChatPrompt) else Endpoint.COMPLETIONS
        source = await self._source(endpoint, decode)
        if source is TokenizerSource.OWN and self._local is not None:
            if isinstance(prompt, TextPrompt):
                ids = await self._local.text_ids(prompt.text, add_special_tokens=prompt.add_special_tokens)
                return Tokenized(ids, exact=True)
            if prompt.plain is not None:
                try:
                    return Tokenized(await self._local.chat_ids(prompt.plain), exact=True)
                except jinja2.TemplateError:
                    return None
        if source is TokenizerSource.NONE:
            return None
        if isinstance(prompt, TextPrompt):
            request: dict[str, Any] = {"prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
            return Tokenized(await self._engine_ids(request, decode), exact=True)
        # The chat endpoint may treat tools and template arguments otherwise than /tokenize does: such ids are
        # good for a prefill (the ticket's digest catches a difference) but not to stand in for the messages.
        return Tokenized(await self._engine_ids(dict(prompt.request), decode), exact=prompt.plain is not None)

    async def check(self, decode: Instance) -> None:
        """Find out now what each endpoint needs, rather than at its first request. Raises EngineError."""
        for endpoint in Endpoint:
            await self._source(endpoint, decode)

    async def _source(self, endpoint: Endpoint, decode: Instance) -> TokenizerSource:
        found = self._sources.get(endpoint)
        if found is not None:
            return found
        async with self._check:
            if endpoint not in self._sources:
                self._sources[endpoint] = await self._find_source(endpoint, decode)
                logger.info("%s: token ids come from %s", endpoint, self._sources[endpoint])
            return self._sources[endpoint]

    async def _find_source(self, endpoint: Endpoint, decode: Instance) -> TokenizerSource:
        samples = _SAMPLE_CHATS if endpoint is Endpoint.CHAT else _SAMPLE_TEXTS
        own = self._local is not None and (endpoint is Endpoint.COMPLETIONS or self._local.has_template)
        engine = True
        for sample in samples:
            request: dict[str, Any] = (
                {"prompt": sample} if isinstance(sample, str) else {"messages": _messages(sample)}
            )
            try:
                truth = await self._true_ids(endpoint, request, decode)
                engine = engine and await self._engine_ids(request, decode) == truth
            except EngineCallError as error:
                if not error.is_clients_fault:
                    raise
                # A model without a chat template, say: clients get the same refusal.
                return TokenizerSource.NONE
            own = own and await self._own_ids(sample) == truth
        if not own:
            logger.warning("%s: the gateway's own tokenizer differs from %s's", endpoint, decode.name)
        return TokenizerSource.OWN if own else TokenizerSource.ENGINE if engine else TokenizerSource.NONE

    async def _own_ids(self, sample: Any) -> "array[int] | None":
        assert self._local is not None
        if isinstance(sample, str):
            return await self._local.text_ids(sample, add_special_tokens=True)
        try:
            return await self._local.chat_ids(sample)
        except jinja2.TemplateError:
            return None

    async def _true_ids(self, endpoint: Endpoint, request: dict[str, Any], decode: Instance) -> "array[int]":
        body = {"model": self._model, **request, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = await self._client.call_json(decode, endpoint.path, body, self._options.tokenize_timeout_s)
        ids = None
        if isinstance(answer, dict):
            choices = answer.get("choices") or [{}]
            ids = answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        return _checked(ids, decode, f"{endpoint.path} returned no prompt_token_ids")

    async def _engine_ids(self, request: dict[str, Any], decode: Instance) -> "array[int]":
        body = {"model": self._model, **request}
        answer = await self._client.call_json(decode, "/tokenize", body, self._options.tokenize_timeout_s)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        return _checked(ids, decode, "/tokenize returned no tokens")


def _checked(ids: object, decode: Instance, trouble: str) -> "array[int]":
    token_ids = as_token_ids(ids) if isinstance(ids, list) else None
    if token_ids is None:
        raise EngineCallError(decode.name, "garbled", trouble)
    return token_ids


def _messages(chat: Sequence[tuple[str, str | tuple[str, ...]]]) -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "content": content
            if isinstance(content, str)
            else [{"type": "text", "text": text} for text in content],
        }
        for role, content in chat
    ]
