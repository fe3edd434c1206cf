"""Token ids of a prompt exactly as the decode engine makes them, by the cheapest way that is known to be exact."""

import logging
import math
import time
from array import array
from collections.abc import Sequence
from http import HTTPStatus
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jinja2
import msgspec

from prfaas.core.deployment import Instance
from prfaas.core.deployment.model import ModelRef
from prfaas.core.kv.config_fields import ConfigError, ConfigFields
from prfaas.core.kv.hf_config import read_config, text_fields
from prfaas.core.prefix.hashing import MediaItem
from prfaas.serving.gateway.bodies import JSON_BYTES_PER_TOKEN, ApiError, Json, dump_body
from prfaas.serving.gateway.context import GatewayContext, ThreadOffload
from prfaas.serving.gateway.engine_client import FROZEN, Blame, EngineCallError, accuse
from prfaas.serving.gateway.prompts.prompt import (
    BatchPrompt,
    DirectPrompt,
    EmbedsPrompt,
    Endpoint,
    RenderedPrompt,
    TextPrompt,
    TokenPrompt,
    answer_limit,
    prompt_of,
    why_whole,
)
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.prompts.tokenizers import ChatTemplate, Encoder, encoder_of


class LocalTokenizer:
    """The model's tokenizer and chat template in the gateway: text and plain conversations to token ids (uint32).

    `Tokenization` finds out whether vLLM makes the same ids.
    """

    def __init__(
        self, encoder: Encoder, template: ChatTemplate | None, threads: ThreadOffload, max_model_len: int
    ) -> None:
        self._encoder = encoder
        self._template = template
        self._threads = threads
        self._max_model_len = max_model_len

    @classmethod
    def of_model(cls, model: ModelRef, threads: ThreadOffload) -> "LocalTokenizer | None":
        """From the files of a checkpoint; None when there is no `tokenizer.json`."""
        file = model.path / "tokenizer.json"
        if not file.is_file():
            return None
        return cls(encoder_of(file), ChatTemplate.of_model(model.path), threads, model.max_model_len)

    async def ids(self, prompt: TextPrompt | RenderedPrompt, size_bytes: int) -> "array[int] | None":
        """Ids of a text, or of a plain conversation with a generation prompt; None where an engine has to render it.

        Special tokens written in a text are recognised, as in vLLM. `size_bytes`: of the body that the prompt came in;
        empty messages take as long to render as others. Raises ApiError for a text too long.
        """
        if isinstance(prompt, TextPrompt):
            text, special = prompt.text, prompt.add_special_tokens
            return await self._threads.run(len(text), self._encode, text, add_special_tokens=special)
        template, messages = self._template, prompt.plain
        if template is None or messages is None:
            return None
        try:
            # The template writes its special tokens itself.
            return await self._threads.run(
                size_bytes, lambda: self._encode(template.render(messages), add_special_tokens=False)
            )
        except jinja2.TemplateError:
            return None

    def check_length(self, text: str) -> None:
        """Raises ApiError for a text of more characters than the model's tokens can stand for."""
        most = self._max_model_len
        most_chars = most * self._encoder.longest_token
        if len(text) > most_chars:
            raise too_long(
                most,
                f"{len(text)} characters (more than {most_chars} characters, which is the upper bound for {most} input "
                "tokens)",
                parameter="input_text",
                value=len(text),
            )

    def _encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Raises ApiError for a text that has too many tokens for certain, before all of them are made."""
        self.check_length(text)
        most = self._max_model_len
        if len(text) > _BEGIN_CHARS * most:
            begin = self._encoder.encode(text[: _BEGIN_CHARS * most], add_special_tokens=add_special_tokens)
            # Where it is cut, its end may have other tokens than in the whole text.
            if len(begin) > most + most // 4:
                raise too_long(most, f"at least {len(begin)} input tokens", value=len(begin))
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)


def too_long(max_model_len: int, found: str, *, parameter: str = "input_tokens", value: int) -> ApiError:
    """The refusal of a prompt, in vLLM's words (0.32). `found`: what it contains."""
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {found}. Please "
        f"reduce the length of the input prompt. (parameter={parameter}, value={value})",
        param=parameter,
        reason="length",
    )


logger = logging.getLogger(__name__)

# A text of more characters for each token that a prompt may have is looked at by its beginning first.
_BEGIN_CHARS = 8
# The prefixes of so many prompts of a batch are looked for, the longest ones: each takes a moment of the loop.
_MOST_HASHED = 32
# What a prompt has, about, whose tokens no engine tells.
_BYTES_PER_TOKEN = 4

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

_SAMPLE_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "  Two spaces, a tab\t, naïve café, 数字, 🙂🙃, <|im_end|></s> and\r\n\r\n  CRLF. \n",
)
# Of each endpoint whose plain prompts the own tokenizer may take.
_SAMPLES: dict[Endpoint, tuple[Json, ...]] = {
    Endpoint.COMPLETIONS: tuple({"prompt": text} for text in _SAMPLE_TEXTS),
    Endpoint.CHAT: (
        {"messages": [{"role": "user", "content": _SAMPLE_TEXTS[0]}]},
        {
            "messages": [
                {"role": "system", "content": " Be terse. \n"},
                {"role": "user", "content": _SAMPLE_TEXTS[1]},
                {"role": "assistant", "content": "\n Why? "},
                {"role": "user", "content": [{"type": "text", "text": text} for text in ("a ", " b\n", "")]},
            ]
        },
    ),
}


class _Place(msgspec.Struct):
    offset: _TokenId
    length: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


class _Features(msgspec.Struct):
    """Of each kind of media the items' digests and places, in their order."""

    mm_hashes: dict[str, list[Annotated[str, msgspec.Meta(max_length=256)]]]
    mm_placeholders: dict[str, list[_Place]]


class _Rendered(msgspec.Struct):
    """What is used of an answer of `/render` (vLLM 0.32: `GenerateRequest`)."""

    token_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    sampling_params: dict[str, Any] | None = None
    features: _Features | None = None

    def prompt(self) -> "RenderedIds":
        """Raises ValueError where items and places don't fit."""
        found = self.features or _Features({}, {})
        items = [
            MediaItem(digest, place.offset, place.length)
            for kind, digests in found.mm_hashes.items()
            for digest, place in zip(digests, found.mm_placeholders.get(kind, ()), strict=True)
        ]
        items.sort(key=attrgetter("offset"))
        if items and max(item.offset + item.tokens for item in items) > len(self.token_ids):
            raise ValueError("an item of media is beyond the prompt's end")
        return RenderedIds(array("I", self.token_ids), tuple(items), self.sampling_params)


_RenderedBatch = Annotated[list[_Rendered], msgspec.Meta(min_length=1)]


class RenderedIds(NamedTuple):
    """One prompt as an engine makes it."""

    token_ids: "array[int]"
    media: tuple[MediaItem, ...] = ()
    sampling_params: Json | None = None
    """How its answer is sampled, as the engine makes it of a request's fields; None: none was asked."""


class Tokenization:
    """Takes the gateway's own tokenizer where all decode engines make the same ids of plain prompts. Else one renders.

    Each engine is asked to render samples once for each process of it, since another one may have another template.
    """

    def __init__(self, local: LocalTokenizer | None, model: str, context: GatewayContext) -> None:
        """`model`: the name by which engines know it."""
        self._local = local
        self._model = model
        self._context = context
        self._plane = context.plane
        self._embedding_chars = _embedding_chars(context.running.current.model.path)
        # Instance → the endpoints for whose samples its process makes the ids of the own tokenizer.
        self._agreed: dict[str, frozenset[Endpoint]] = {}
        for signal in (self._plane.listeners.restarted, self._plane.listeners.lost_cache):
            signal.append(self._forget)

    def _forget(self, name: str) -> None:
        """What is behind an instance's name is another process now, or none."""
        self._agreed.pop(name, None)

    async def tokenize(self, request: ServingRequest) -> TokenizedPrompt | DirectPrompt:
        """The prompt's token ids and the hashes of its blocks, or why the decode engine has to prefill all of it.

        Raises ApiError 400 for one that is longer than the model takes.
        """
        begun_s = time.perf_counter()
        try:
            return await self._tokenize(request)
        finally:
            request.record.since("tokenize", begun_s)

    async def hash_blocks(
        self, request: ServingRequest, token_ids: Sequence[int], media: tuple[MediaItem, ...] = ()
    ) -> TokenizedPrompt:
        """`token_ids` as the prompt of `request`, with the hashes of their blocks."""
        chains = await self._context.json_threads.run(
            len(token_ids) * JSON_BYTES_PER_TOKEN,
            self._plane.prefixes.chains,
            token_ids,
            request.salt,
            request.adapter,
            media,
        )
        takes_ids = isinstance(request.prompt, RenderedPrompt) and request.prompt.takes_ids and not media
        return TokenizedPrompt(request, token_ids, chains, takes_ids, media)

    async def _tokenize(self, request: ServingRequest) -> TokenizedPrompt | DirectPrompt:
        prompt = request.prompt
        if isinstance(prompt, DirectPrompt):
            text = request.body.get("prompt")
            if request.endpoint is Endpoint.TOKENIZE and isinstance(text, str) and self._local is not None:
                # vLLM would make the tokens of any text here.
                self._local.check_length(text)
            return prompt
        if isinstance(prompt, EmbedsPrompt):
            return DirectPrompt("embeds", (max(int(prompt.encoded_chars / self._embedding_chars), 1),))
        try:
            prompts = await self._all_own_ids(request, prompt) or await self.rendered(request)
        except EngineCallError as error:
            # 403: the engine renders nothing, for nobody.
            if error.is_clients_fault and error.status != HTTPStatus.FORBIDDEN:
                return DirectPrompt("refused")
            return DirectPrompt("not-rendered", (request.size_bytes // _BYTES_PER_TOKEN,))
        longest = max(len(each.token_ids) for each in prompts)
        if longest > self._context.max_model_len:
            # The engine would take seconds for megabytes of ids, to say the same.
            raise too_long(
                self._context.max_model_len,
                f"{longest} input tokens, which exceeds this limit even without any output tokens",
                value=longest,
            )
        limit = answer_limit(request.endpoint, request.body) or 0
        # With a completion's ids vLLM cuts the answer short instead.
        needed = limit if request.endpoint is Endpoint.COMPLETIONS else longest + limit
        if max(longest + 1, needed) > self._context.max_model_len:
            return DirectPrompt("length")
        whole = self._why_whole(request, prompts)
        if whole is None:
            return await self.hash_blocks(request, *prompts[0][:2])
        prompts.sort(key=lambda each: len(each.token_ids), reverse=True)
        hashed = [await self.hash_blocks(request, *each[:2]) for each in prompts[:_MOST_HASHED]]
        lengths = tuple(len(each.token_ids) for each in prompts)
        return DirectPrompt(whole, lengths, tuple(each.chains for each in hashed))

    def _why_whole(self, request: ServingRequest, prompts: Sequence[RenderedIds]) -> str | None:
        """Why the decode engine has to prefill all of it, in one word; None: another one may."""
        if len(prompts) > 1:
            return "batch"
        whole = why_whole(request.endpoint, request.body)
        if whole is None and len(prompts[0].token_ids) == 1:
            # The last token of a prompt is always computed where it is decoded.
            return "single-token"
        kv = self._plane.cluster_state.view.kv
        # A prefill of a client's body ends behind the last token: what some layers hold before it is lost then.
        # Embeddings among the media are in no digest.
        media = prompts[0].media
        can_move = bool(media) and not kv.is_hybrid and kv.can_skip
        if whole is None and (media or request.has_media) and not can_move:
            return "media"
        return whole

    async def rendered(self, request: ServingRequest) -> list[RenderedIds]:
        """Each prompt as an engine makes it. Raises EngineCallError and NoDecodeInstanceError.

        In place of an engine that does not answer, or is to end, another one is asked. It is taken out of routing.
        """
        # The answer's rules change no prompt, and `/render` knows nothing of beams.
        asked_for = {name: value for name, value in request.body.items() if name != "use_beam_search"}
        if request.has_media:
            # Their digests and places, no pixels.
            asked_for["mm_payload"] = "none"
        body = await self._context.json_threads.run(request.size_bytes, dump_body, asked_for)
        router, members = self._plane.router, self._plane.members
        asked = members.instance(router.at_decode(0).decode)
        try:
            return await self._render(request.endpoint, body, asked)
        except EngineCallError as error:
            is_away = error.reason in ("unreachable", "died", "connect-timeout", FROZEN)
            if not is_away and error.blame is not Blame.ENDING:
                raise
            accuse(self._plane, asked.name, error)
            another = members.instance(router.at_decode(0, avoid=(asked.name,)).decode)
            return await self._render(request.endpoint, body, another)

    async def _all_own_ids(
        self, request: ServingRequest, prompt: TokenPrompt | TextPrompt | RenderedPrompt | BatchPrompt
    ) -> "list[RenderedIds] | None":
        """Ids that no engine has to be asked for; None where an engine is to render, or to judge the request."""
        if request.endpoint is Endpoint.GENERATE and isinstance(prompt, TokenPrompt):
            return [RenderedIds(prompt.token_ids)]
        if not request.is_usual:
            return None
        # Whether the own tokenizer makes the ids of every engine that may decode now.
        decoders = self._plane.router.decoders()
        agrees = bool(decoders) and all(request.endpoint in self._agreed.get(name, ()) for name in decoders)
        found = []
        for each in prompt.prompts if isinstance(prompt, BatchPrompt) else (prompt,):
            if isinstance(each, TokenPrompt):
                found.append(RenderedIds(each.token_ids))
                continue
            own = await self._local.ids(each, request.size_bytes) if self._local and agrees else None
            if own is None:
                return None
            found.append(RenderedIds(own))
        return found

    async def learn(self, decode: Instance) -> None:
        """Find out whether an engine makes the own tokenizer's ids, unless it is known. Raises EngineCallError."""
        if decode.name in self._agreed:
            return
        agreed = set()
        for endpoint, samples in _SAMPLES.items():
            for sample in samples:
                body = dump_body({"model": self._model, "max_tokens": 1, **sample})
                prompt = prompt_of(endpoint, sample)
                assert isinstance(prompt, TextPrompt | RenderedPrompt)
                try:
                    rendered = await self._render(endpoint, body, decode)
                except EngineCallError as error:
                    # A model without a chat template, say: clients get the same refusal.
                    if not error.is_clients_fault:
                        raise
                    break
                own = None if self._local is None else await self._local.ids(prompt, len(body))
                if own is None or [own] != [each.token_ids for each in rendered]:
                    break
            else:
                agreed.add(endpoint)
            source = "own" if endpoint in agreed else "engine"
            logger.info("%s: token ids come from %s (%s)", endpoint, source, decode.name)
        self._agreed[decode.name] = frozenset(agreed)

    async def _render(self, endpoint: Endpoint, body: bytes, decode: Instance) -> list[RenderedIds]:
        """What an engine makes of each prompt. Raises EngineCallError."""
        path = f"{endpoint.path}/render"
        headers = {"Content-Type": "application/json"}
        answer = await self._context.client.call(
            decode, path, body, headers, self._context.options.tokenize_timeout_s
        )
        try:
            if endpoint is Endpoint.COMPLETIONS:
                rendered = msgspec.json.decode(answer, type=_RenderedBatch)
            else:
                rendered = [msgspec.json.decode(answer, type=_Rendered)]
            return [each.prompt() for each in rendered]
        except ValueError as error:
            raise EngineCallError(decode.name, "garbled", f"{path} returned no token ids: {error}") from None


def _embedding_chars(model: Path) -> float:
    """Characters of base64 that stand for one token's embedding of 16-bit numbers; longer ones count as more tokens."""
    try:
        fields = ConfigFields(text_fields(read_config(model / "config.json")))
        return 2 * fields.whole("hidden_size") * 4 / 3
    except ConfigError:
        return math.inf
