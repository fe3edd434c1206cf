"""Token ids of a prompt exactly as the decode engine makes them, by the cheapest way that is known to be exact."""

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import jinja2

from prfaas.core.deployment import Instance
from prfaas.serving.gateway.bodies import JSON_BYTES_PER_TOKEN
from prfaas.serving.gateway.context import GatewayContext, ThreadOffload
from prfaas.serving.gateway.engine_client import FROZEN, Blame, EngineCallError
from prfaas.serving.gateway.prompts.prompt import (
    ChatPrompt,
    DirectPrompt,
    Endpoint,
    TextPrompt,
    TokenPrompt,
    answer_limit,
    as_token_ids,
    prompt_of,
)
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.prompts.tokenizers import ChatTemplate, Encoder, encoder_of


class LocalTokenizer:
    """The model's tokenizer and chat template in the gateway: text and plain conversations to token ids (uint32).

    `Tokenization` finds out whether vLLM makes the same ids.
    """

    def __init__(self, encoder: Encoder, template: ChatTemplate | None, threads: ThreadOffload) -> None:
        self._encoder = encoder
        self._template = template
        self._threads = threads

    @classmethod
    def of_model(cls, directory: Path, threads: ThreadOffload) -> "LocalTokenizer | None":
        """From a checkpoint directory, whose files it reads; None when there is no `tokenizer.json`."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            return None
        return cls(encoder_of(file), ChatTemplate.of_model(directory), threads)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Ids of `text`; special tokens written in it are recognised, as in vLLM."""
        return await self._threads.run(
            len(text), self._encoder.encode, text, add_special_tokens=add_special_tokens
        )

    async def chat_ids(self, messages: Sequence[tuple[str, str | tuple[str, ...]]]) -> "array[int]":
        """Ids of the rendered conversation with a generation prompt. Raises jinja2.TemplateError."""
        template = self._template
        if template is None:
            raise ValueError("the model has no chat template that the gateway can render")
        chars = sum(len(c) if isinstance(c, str) else sum(map(len, c)) for _, c in messages)
        # The template writes its special tokens itself.
        return await self._threads.run(
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

# vLLM writes an earlier call's fields in another order for responses than for chats, which some templates show.
_SAMPLE_CALL: dict[str, Any] = {
    "input": [
        {"role": "user", "content": _SAMPLE_TEXTS[0]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "it"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "seen"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "look",
            "description": "d",
            "parameters": {"type": "object"},
            "strict": None,
        }
    ],
}


class TokenizerSource(StrEnum):
    """Where exact ids of an endpoint's prompts come from."""

    OWN = "own"
    """The gateway's own tokenizer."""
    ENGINE = "engine"
    """The engine's `/tokenize`."""
    NONE = "none"
    """Neither is exact."""


class Tokenization:
    """Decides per endpoint whose ids to use, by asking an engine once; until then it uses the engine's.

    The question is a one-token generation that returns the prompt's ids. `/tokenize` alone would not tell: vLLM
    renders some models' chats (gpt-oss) in another way than it tokenizes them.
    """

    def __init__(self, local: LocalTokenizer | None, model: str, context: GatewayContext) -> None:
        """`model`: the name by which engines know it."""
        self._local = local
        self._model = model
        self._plane = context.plane
        self._client = context.client
        self._json_threads = context.json_threads
        self._timeout_s = context.options.tokenize_timeout_s
        self._max_model_len = context.max_model_len
        self._sources: dict[Endpoint, TokenizerSource] = {}
        self._calls_agree = False
        self._check = asyncio.Lock()

    async def tokenize(self, request: ServingRequest) -> TokenizedPrompt | DirectPrompt:
        """The prompt's token ids and the hashes of its blocks.

        Returns:
            DirectPrompt, with the reason, when the prompt is to go to the decode engine without a look at it.
        """
        begun_s = time.perf_counter()
        try:
            return await self._tokenize(request)
        finally:
            request.record.since("tokenize", begun_s)

    async def hash_blocks(
        self, request: ServingRequest, token_ids: Sequence[int], *, exact: bool
    ) -> TokenizedPrompt:
        """`token_ids` as the prompt of `request`, with the hashes of their blocks."""
        chains = await self._json_threads.run(
            len(token_ids) * JSON_BYTES_PER_TOKEN,
            self._plane.prefixes.chains,
            token_ids,
            request.salt,
            request.adapter,
        )
        # Without exact ids the engine tokenizes by itself; the digest in the ticket then guards the KV.
        takes_ids = isinstance(request.prompt, ChatPrompt) and request.prompt.takes_ids and exact
        return TokenizedPrompt(token_ids, chains, exact, takes_ids)

    async def _tokenize(self, request: ServingRequest) -> TokenizedPrompt | DirectPrompt:
        if isinstance(request.prompt, DirectPrompt):
            return request.prompt
        try:
            ids, exact = await self._ids(request.prompt, request.endpoint)
        except EngineCallError as error:
            return DirectPrompt("refused" if error.is_clients_fault else "not-tokenized")
        if ids is None:
            return DirectPrompt("not-tokenized")
        if not 1 < len(ids) < self._max_model_len or len(ids) + _answer_limit(request) > self._max_model_len:
            return DirectPrompt("length")
        return await self.hash_blocks(request, ids, exact=exact)

    async def _ids(
        self, prompt: TokenPrompt | TextPrompt | ChatPrompt, endpoint: Endpoint
    ) -> "tuple[array[int] | None, bool]":
        """Ids, None when they can't be had exactly, and whether the engine makes the same. Raises EngineCallError.

        In place of an engine that does not answer another one is asked. A dead one is taken out of routing.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids, True
        if self._sources.get(endpoint) is TokenizerSource.OWN and _is_plain(prompt):
            return await self._own_prompt_ids(prompt)
        asked = self._plane.members.instance(self._plane.router.route(0, None).decode)
        try:
            return await self._exact_ids(prompt, endpoint, asked)
        except EngineCallError as error:
            if error.reason not in ("unreachable", "died", "connect-timeout", FROZEN):
                raise
            if error.blame is not Blame.NONE:
                self._plane.health.suspect(asked.name, str(error), lost_cache=error.blame is Blame.DEAD)
            asked = self._plane.members.instance(
                self._plane.router.route(0, None, avoid=(asked.name,)).decode
            )
            return await self._exact_ids(prompt, endpoint, asked)

    async def _exact_ids(
        self, prompt: TextPrompt | ChatPrompt, endpoint: Endpoint, decode: Instance
    ) -> "tuple[array[int] | None, bool]":
        source = await self._source(endpoint, decode)
        if source is TokenizerSource.NONE:
            return None, False
        if source is TokenizerSource.OWN and _is_plain(prompt):
            return await self._own_prompt_ids(prompt)
        if endpoint is Endpoint.RESPONSES and _has_calls(prompt) and not self._calls_agree:
            return None, False
        return await self._engine_prompt_ids(prompt, decode)

    async def _own_prompt_ids(self, prompt: TextPrompt | ChatPrompt) -> "tuple[array[int] | None, bool]":
        assert self._local is not None
        if isinstance(prompt, TextPrompt):
            return await self._local.text_ids(prompt.text, add_special_tokens=prompt.add_special_tokens), True
        assert prompt.plain is not None
        try:
            return await self._local.chat_ids(prompt.plain), True
        except jinja2.TemplateError:
            return None, False

    async def _engine_prompt_ids(
        self, prompt: TextPrompt | ChatPrompt, decode: Instance
    ) -> "tuple[array[int], bool]":
        if isinstance(prompt, TextPrompt):
            request: dict[str, Any] = {"prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
            return await self._engine_ids(request, decode), True
        # The chat endpoint may treat tools and template arguments otherwise than /tokenize does: such ids are
        # good for a prefill (the ticket's digest catches a difference) but not to stand in for the messages.
        return await self._engine_ids(dict(prompt.request), decode), prompt.plain is not None

    async def check(self, decode: Instance) -> None:
        """Find out now what the usual endpoints need, rather than at their first request. Raises EngineCallError."""
        for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT):
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
        if endpoint is Endpoint.MESSAGES:
            return await self._find_messages_source(decode)
        samples = _SAMPLE_TEXTS if endpoint is Endpoint.COMPLETIONS else _SAMPLE_CHATS
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
                # Engines tell no ids of a conversation that they make in another way than of chats (gpt-oss).
                has_none = endpoint is Endpoint.RESPONSES and error.reason == "garbled"
                if not error.is_clients_fault and not has_none:
                    raise
                # A model without a chat template, say: clients get the same refusal.
                return TokenizerSource.NONE
            own = own and await self._own_ids(sample) == truth
        if endpoint is Endpoint.RESPONSES:
            self._calls_agree = await self._finds_calls_alike(decode)
        if not own:
            logger.warning("%s: the gateway's own tokenizer differs from %s's", endpoint, decode.name)
        return TokenizerSource.OWN if own else TokenizerSource.ENGINE if engine else TokenizerSource.NONE

    async def _finds_calls_alike(self, decode: Instance) -> bool:
        """Whether `/tokenize` makes the prompt of a response with a function's call as the engine does."""
        chat = prompt_of(Endpoint.RESPONSES, _SAMPLE_CALL)
        assert isinstance(chat, ChatPrompt)
        try:
            truth = await self._true_response_ids(_SAMPLE_CALL, decode)
            return await self._engine_ids(dict(chat.request), decode) == truth
        except EngineCallError as error:
            if not error.is_clients_fault:
                raise
            return False

    async def _find_messages_source(self, decode: Instance) -> TokenizerSource:
        """That of chats, which vLLM makes of messages, if the engine counts as many tokens."""
        source = self._sources.get(Endpoint.CHAT) or await self._find_source(Endpoint.CHAT, decode)
        if source is TokenizerSource.NONE:
            return source
        for sample in _SAMPLE_CHATS:
            chat = _messages(sample)
            asked: dict[str, Any] = {"model": self._model, "messages": chat}
            if chat[0]["role"] == "system":
                asked |= {"system": chat[0]["content"], "messages": chat[1:]}
            try:
                count = await self._client.call_json(
                    decode, Endpoint.COUNT_TOKENS.path, asked, self._timeout_s
                )
                ids = await self._engine_ids({"messages": chat}, decode)
            except EngineCallError as error:
                if not error.is_clients_fault:
                    raise
                return TokenizerSource.NONE
            if not isinstance(count, dict) or count.get("input_tokens") != len(ids):
                logger.warning("messages: %s makes other prompts of them than of chats", decode.name)
                return TokenizerSource.NONE
        return source

    async def _own_ids(self, sample: Any) -> "array[int] | None":
        assert self._local is not None
        if isinstance(sample, str):
            return await self._local.text_ids(sample, add_special_tokens=True)
        try:
            return await self._local.chat_ids(sample)
        except jinja2.TemplateError:
            return None

    async def _true_ids(self, endpoint: Endpoint, request: dict[str, Any], decode: Instance) -> "array[int]":
        if endpoint is Endpoint.RESPONSES:
            chat = [m | {"content": _input_content(m["content"])} for m in request["messages"]]
            return await self._true_response_ids({"input": chat}, decode)
        body = {"model": self._model, **request, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = await self._client.call_json(decode, endpoint.path, body, self._timeout_s)
        ids = None
        if isinstance(answer, dict):
            choices = answer.get("choices") or [{}]
            ids = answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        return _checked(ids, decode, f"{endpoint.path} returned no prompt_token_ids")

    async def _true_response_ids(self, asked: dict[str, Any], decode: Instance) -> "array[int]":
        body = {
            "model": self._model,
            **asked,
            "max_output_tokens": 1,
            "temperature": 0,
            "store": False,
            "enable_response_messages": True,
        }
        answer = await self._client.call_json(decode, Endpoint.RESPONSES.path, body, self._timeout_s)
        ids = None
        if isinstance(answer, dict):
            rendered = answer.get("input_messages") or [{}]
            ids = rendered[0].get("tokens")
        return _checked(ids, decode, f"{Endpoint.RESPONSES.path} returned no ids of its prompt")

    async def _engine_ids(self, request: dict[str, Any], decode: Instance) -> "array[int]":
        body = {"model": self._model, **request}
        answer = await self._client.call_json(decode, "/tokenize", body, self._timeout_s)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        return _checked(ids, decode, "/tokenize returned no tokens")


def _is_plain(prompt: TextPrompt | ChatPrompt) -> bool:
    """Whether the model's own tokenizer and template alone decide the ids."""
    return isinstance(prompt, TextPrompt) or prompt.plain is not None


def _has_calls(prompt: TextPrompt | ChatPrompt) -> bool:
    return isinstance(prompt, ChatPrompt) and any("tool_calls" in said for said in prompt.request["messages"])


def _checked(ids: object, decode: Instance, trouble: str) -> "array[int]":
    token_ids = as_token_ids(ids) if isinstance(ids, list) else None
    if token_ids is None:
        raise EngineCallError(decode.name, "garbled", trouble)
    return token_ids


def _answer_limit(request: ServingRequest) -> int:
    """Tokens of answer for which vLLM wants room; where it is given ids, it would cut the answer short instead."""
    if request.endpoint is Endpoint.COMPLETIONS:
        return 0
    return answer_limit(request.endpoint, request.body) or 0


def _input_content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part | {"type": "input_text"} for part in content]


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
