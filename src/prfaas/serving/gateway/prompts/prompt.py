"""What a request's body says: its prompt, and its answer.

Whether another engine than the decode engine may prefill the one, how long the other may be, and whether another engine
can continue it from the tokens so far.
"""

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, cast

import msgspec

from prfaas.core.prefix.hashing import PromptChains
from prfaas.serving.gateway.bodies import ApiError, Json
from prfaas.serving.transport.protocol.ticket import MAX_USES


class Endpoint(StrEnum):
    """What clients may ask an engine for: its name as in metrics, and its path."""

    path: str

    def __new__(cls, name: str, path: str) -> "Endpoint":
        endpoint = str.__new__(cls, name)
        endpoint._value_, endpoint.path = name, path
        return endpoint

    COMPLETIONS = "completions", "/v1/completions"
    CHAT = "chat", "/v1/chat/completions"
    RESPONSES = "responses", "/v1/responses"
    MESSAGES = "messages", "/v1/messages"
    COUNT_TOKENS = "count_tokens", "/v1/messages/count_tokens"
    GENERATE = "generate", "/inference/v1/generate"
    TOKENIZE = "tokenize", "/tokenize"
    DETOKENIZE = "detokenize", "/detokenize"
    RENDER_COMPLETION = "render_completion", "/v1/completions/render"
    RENDER_CHAT = "render_chat", "/v1/chat/completions/render"
    RENDER_RESPONSE = "render_response", "/v1/responses/render"
    RENDER_MESSAGE = "render_message", "/v1/messages/render"
    DERENDER_COMPLETION = "derender_completion", "/v1/completions/derender"
    DERENDER_CHAT = "derender_chat", "/v1/chat/completions/derender"
    EMBEDDINGS = "embeddings", "/v1/embeddings"
    POOLING = "pooling", "/pooling"
    CLASSIFY = "classify", "/classify"
    SCORE = "score", "/score"
    RERANK = "rerank", "/rerank"

    @property
    def generates(self) -> bool:
        """Whether an engine prefills and decodes for it. All else is one engine's, and is forwarded by load."""
        return self in _GENERATING


_GENERATING = frozenset(
    (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES, Endpoint.GENERATE)
)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt given as token ids, in the form that digest and hashes are taken of."""

    token_ids: "array[int]"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt given as text."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation of any API, or a text that an engine's own rules cut or complete."""

    plain: tuple[tuple[str, str | tuple[str, ...]], ...] | None
    """(role, content) pairs if the model's own template makes the text of usual fields; else None: an engine does."""
    takes_ids: bool
    """Whether the answer stays the same when vLLM is given the ids instead of rendering."""


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """Several prompts in one request."""

    prompts: tuple[TokenPrompt | TextPrompt, ...]


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """Prompts given as embeddings in place of token ids, perhaps among others."""

    encoded_chars: int
    """Length of their base64 text."""


@dataclass(frozen=True, slots=True)
class DirectPrompt:
    """Prompts that go to the decode engine as they are, and what is known of them."""

    reason: str
    """Why, in one word."""
    lengths: tuple[int, ...] = ()
    """Tokens of each; none: there are none, or the engine will refuse them."""
    chains: tuple[PromptChains, ...] = ()
    """Of each that is known in tokens, the longest ones."""

    @property
    def num_tokens(self) -> int:
        """Of all of them together."""
        return sum(self.lengths)


Prompt = TokenPrompt | TextPrompt | RenderedPrompt | BatchPrompt | EmbedsPrompt | DirectPrompt


def prompt_of(endpoint: Endpoint, body: Mapping[str, Any], *, has_media: bool = False) -> Prompt:
    """The prompt in `body`. What is malformed is a DirectPrompt: the decode engine refuses it in its own words.

    `has_media`: whether there are `media_parts`. What they show is in no ids.

    Raises:
        ApiError: 400, when only one engine could know the prompt, or vLLM would read out of it what nobody counts.
    """
    if not endpoint.generates:
        return DirectPrompt("forwarded")
    _check_counts(body.get("sampling_params") if endpoint is Endpoint.GENERATE else body)
    if not isinstance(body.get("model", ""), str | None):
        return DirectPrompt("malformed")
    if endpoint is Endpoint.GENERATE:
        if body.get("features"):
            raise ApiError(400, "Media are taken in messages here; leave `features` out.", param="features")
        given = body.get("token_ids")
        return _ids_prompt(given, "token_ids") if isinstance(given, list) else DirectPrompt("malformed")
    if endpoint is Endpoint.RESPONSES:
        _check_stored(body)
        return RenderedPrompt(None, takes_ids=not has_media)
    if endpoint is Endpoint.MESSAGES:
        # vLLM takes no ids here.
        return RenderedPrompt(None, takes_ids=False)
    if _samples(body) is None:
        return DirectPrompt("malformed")
    return _chat_prompt(body, has_media) if endpoint is Endpoint.CHAT else _completion_prompt(body)


# vLLM's forms (pydantic) read 3 out of "3", 3.0 and true, and a prompt out of lists of these.
_COUNTS = ("n", "min_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens")


def _check_counts(said: object) -> None:
    """Raises ApiError 400 for a count of tokens or answers that is no whole number, though vLLM would take it."""
    for name in _COUNTS:
        count = said.get(name) if isinstance(said, dict) else None
        if type(count or 0) is not int:
            raise ApiError(400, f"`{name}` must be a whole number.", param=name)


def _check_stored(body: Mapping[str, Any]) -> None:
    """Raises ApiError 400 where a body of `/v1/responses` names what only one engine knows."""
    for field in ("previous_response_id", "background"):
        if body.get(field):
            sentence = (
                f"`{field}` is not served here: what an engine stores, the other engines do not know. "
                "Send the whole conversation in `input`, and wait for its answer."
            )
            raise ApiError(400, sentence, param=field)


def why_whole(endpoint: Endpoint, body: Mapping[str, Any]) -> str | None:
    """Why the decode engine has to prefill a prompt itself, in one word; None: another one may."""
    if endpoint is Endpoint.GENERATE:
        # Its parameters are vLLM's own, by names that may change.
        return "generate"
    if endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return None
    # vLLM reads neither cached nor external KV for prompt logprobs. A beam's requests carry no ticket.
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs")):
        return PROMPT_LOGPROBS
    if body.get("use_beam_search"):
        return "beam-search"
    return "samples" if samples_of(endpoint, body) > MAX_USES else None


PROMPT_LOGPROBS = "prompt-logprobs"


def samples_of(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """How many answers are wanted of each prompt (`n`).

    vLLM makes every sample a request, and each of them loads the transfer.
    """
    said = body.get("sampling_params") if endpoint is Endpoint.GENERATE else body
    has_samples = endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.GENERATE)
    return (_samples(said) or 1) if has_samples and isinstance(said, Mapping) else 1


def answers_of(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """How many answers are wanted of all prompts together: so many requests an engine makes of this one."""
    prompts = body.get("prompt_embeds") or body.get("prompt")
    samples = samples_of(endpoint, body)
    if endpoint is Endpoint.COMPLETIONS and isinstance(prompts, list) and prompts:
        return samples * len(prompts) if isinstance(prompts[0], str | list) else samples
    return samples


def _samples(body: Mapping[str, Any]) -> int | None:
    """`n`; None where it is no number of answers."""
    samples = body.get("n")
    if samples is None:
        return 1
    return samples if type(samples) is int and samples >= 1 else None


def _completion_prompt(body: Mapping[str, Any]) -> Prompt:
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    if embeds is not None and embeds != []:
        if prompt:
            sentence = "`prompt` and `prompt_embeds` must come in requests of their own."
            raise ApiError(400, sentence, param="prompt_embeds")
        return _embeds_prompt(embeds)
    if isinstance(prompt, array):
        return TokenPrompt(prompt)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        special = body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise ApiError(400, "`add_special_tokens` must be true or false.", param="add_special_tokens")
        return TextPrompt(prompt, special)
    if not isinstance(prompt, list) or not prompt:
        return DirectPrompt("malformed")
    if isinstance(prompt[0], str | list):
        return _batch_prompt(body, prompt)
    return _ids_prompt(prompt, "prompt")


def _ids_prompt(ids: Sequence[object], field: str) -> Prompt:
    """Of ids that are out of range the engine says so. Raises ApiError 400 for what is no id."""
    try:
        # A fifth of the time that Python takes to look at each one's type.
        msgspec.convert(ids, Sequence[int])
    except msgspec.ValidationError:
        sentence = f"`{field}` must have token ids that are whole numbers, or texts."
        raise ApiError(400, sentence, param=field) from None
    try:
        return TokenPrompt(array("I", cast(Sequence[int], ids))) if ids else DirectPrompt("malformed")
    except OverflowError:
        return DirectPrompt("malformed")


def _batch_prompt(body: Mapping[str, Any], prompts: Sequence[object]) -> Prompt:
    batch = [_completion_prompt({**body, "prompt": prompt}) for prompt in prompts]
    each = tuple(prompt for prompt in batch if isinstance(prompt, TokenPrompt | TextPrompt))
    return BatchPrompt(each) if len(each) == len(batch) else DirectPrompt("malformed")


def _embeds_prompt(embeds: object) -> Prompt:
    each = embeds if isinstance(embeds, list) else [embeds]
    if not each or not all(isinstance(one, str) for one in each):
        return DirectPrompt("malformed")
    return EmbedsPrompt(sum(map(len, each)))


def _chat_prompt(body: Mapping[str, Any], has_media: bool) -> Prompt:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return DirectPrompt("malformed")
    if has_media:
        return RenderedPrompt(None, takes_ids=False)
    # With ids given, vLLM does not render: it could neither echo the last message nor return the prompt's text, and it
    # would cut the ids once more.
    takes_ids = not any(body.get(field) for field in ("echo", "return_prompt_text", "truncate_prompt_tokens"))
    # Without messages there may be tools and documents, which an engine renders.
    is_plain = messages and not body.get("add_special_tokens")
    return RenderedPrompt(_plain_messages(messages) if is_plain else None, takes_ids)


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[_TextPart], msgspec.Meta(min_length=1)]


def _plain_messages(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[tuple[str, str | tuple[str, ...]], ...] | None:
    try:
        said = msgspec.convert(messages, tuple[_PlainMessage, ...])
    except msgspec.ValidationError:
        return None
    plain: list[tuple[str, str | tuple[str, ...]]] = []
    for message in said:
        written = message.content
        content = written if isinstance(written, str) else tuple(part.text for part in written)
        # vLLM edits system messages that begin with this line.
        if message.role == "system":
            texts = (content,) if isinstance(content, str) else content
            if any(text.startswith("x-anthropic") for text in texts):
                return None
        plain.append((message.role, content))
    return tuple(plain)


# Parts of a message that are no media, in the words of all APIs.
_TEXT_PARTS = frozenset(
    (
        "text",
        "refusal",
        "input_text",
        "output_text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "reasoning_text",
        "summary_text",
        "tool_reference",
    )
)


# vLLM reads these of a part whatever its type says (renderers/chat_utils.py).
_MEDIA_FIELDS = frozenset(
    f"{kind}_{form}" for kind in ("image", "audio", "video", "prompt") for form in ("url", "embeds", "pil")
)


def media_parts(endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a body's messages that are more than text."""
    if endpoint.generates:
        found = [body.get("input" if endpoint is Endpoint.RESPONSES else "messages")]
    else:
        # What is scored, embedded or told again may stand anywhere.
        found = list(body.values())
    for said in found:
        for message in said if isinstance(said, list) else (said,):
            if isinstance(message, dict):
                yield from _media_in(message.get("content"))
                # Of a response's items a tool's result may have parts too.
                yield from _media_in(message.get("output"))


def _media_in(content: object) -> Iterator[Mapping[str, Any]]:
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if part.get("type", "text") not in _TEXT_PARTS or part.keys() & _MEDIA_FIELDS:
            yield part
        yield from _media_in(part.get("content"))


_URL = re.compile(r"(?i)\s*[a-z][a-z0-9+.-]*:[/\\]")
_PLAIN_URL = re.compile(r"(?i)https?://([a-z0-9.-]+)(:[0-9]+)?([/?#][^\\\s]*)?")


def check_media(media: Sequence[object], domains: Collection[str]) -> None:
    """Raises ApiError 400 where an engine would fetch `media_parts` from elsewhere than `domains`, or know by name.

    To vLLM what two clients call alike is one: the second one's words are put to what the first has sent.
    """
    if any(isinstance(part, Mapping) and part.get("uuid") is not None for part in media):
        raise ApiError(400, "Media are known by their content here; leave `uuid` out.", param="uuid")
    waiting = list(media)
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and _URL.match(value[:64]) and value[:5].lower() != "data:":
            plain = _PLAIN_URL.fullmatch(value)
            if plain is None or plain[1].lower() not in map(str.lower, domains):
                known = f"only from {', '.join(sorted(domains))}" if domains else "from no URL"
                raise ApiError(400, f"Media are taken {known} here; send them as data: URLs.", param="url")


_ANSWER_LIMITS = {
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
}


# What vLLM generates when a text completion does not say.
_DEFAULT_COMPLETION_TOKENS = 16


def answer_limit(endpoint: Endpoint, body: Mapping[str, Any]) -> int | None:
    """Tokens that the answer may have, as the client says; None where it does not say."""
    names = _ANSWER_LIMITS.get(endpoint, ())
    limit = next((body[name] for name in names if body.get(name) is not None), None)
    return limit if type(limit) is int else None


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
    return body.get("n") in (None, 1) and body.get("include_reasoning") is not False and not is_seeded(body)


def is_seeded(body: Json) -> bool:
    """Whether vLLM would make a random generator for the request: greedy ones need none, and −1 means no seed."""
    return body.get("seed") not in (None, -1) and body.get("temperature") != 0


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
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def tokens_left(
    endpoint: Endpoint, body: Json, prompt_tokens: int, sent_tokens: int, max_model_len: int
) -> int:
    """How many tokens may follow the first `sent_tokens` of an answer; 0 or less: none."""
    room = max_model_len - prompt_tokens - sent_tokens
    limit = answer_limit(endpoint, body)
    if limit is None and endpoint is Endpoint.COMPLETIONS:
        limit = _DEFAULT_COMPLETION_TOKENS
    return room if limit is None else min(room, limit - sent_tokens)


def rest_body(endpoint: Endpoint, body: Json, ids: "array[int]", sent_tokens: int, max_tokens: int) -> Json:
    """`body` as of a request for what follows `ids`: the prompt and `sent_tokens` tokens of the answer.

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
        rest["prompt"] = ids
    return rest
