"""A checkpoint's tokenizer and chat template, read with the libraries that make the ids that vLLM makes."""

import importlib
import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from prfaas.core.bounded_file import MODEL_BYTES, file_json, file_text

_TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The template of `tokenizer_config.json` or `chat_template.jinja`; rendering is pure and thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateError for a template this environment cannot parse."""
        self._template = _compiled(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def of_model(cls, directory: Path) -> Self | None:
        """The default template of the model in `directory`, or None when it has none that we can use."""
        config_file, template_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        try:
            config = file_json(config_file, MODEL_BYTES) if config_file.is_file() else {}
            has_file = template_file.is_file()
            source = file_text(template_file, MODEL_BYTES) if has_file else config.get("chat_template")
            if isinstance(source, list):
                source = next((t.get("template") for t in source if t.get("name") == "default"), None)
            return cls(source, _special_tokens(config)) if isinstance(source, str) else None
        except (OSError, ValueError, AttributeError, jinja2.TemplateError) as error:
            logger.warning("engines render conversations: the model's template can't be used: %s", error)
            return None

    def render(self, messages: Sequence[tuple[str, str | Sequence[str]]]) -> str:
        """The prompt's text for (role, content) pairs; several text parts are joined by newlines as vLLM
        does.

        Raises jinja2.TemplateError when the template refuses the conversation.
        """
        conversation = [
            {
                "role": role,
                "content": content if isinstance(content, str) else "\n".join(filter(None, content)),
            }
            for role, content in messages
        ]
        return self._template.render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
        )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for field in _TOKEN_FIELDS:
        token = config.get(field)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[field] = token
    return tokens


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """A template that several have, as all engines of a model, is compiled once."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


logger = logging.getLogger(__name__)

# What tokenizers disagree about, if they do: spaces, line ends, digits, case, scripts, combining characters, joined
# emoji, control characters, what looks like a special token.
_SAMPLES = (
    "",
    " ",
    "Hello, world! It's the 3rd of 12345678 tests; they'LL pass.",
    "  two  spaces\tand\t\ttabs \n\n\n  lines\r\n\r\nCRLF  \u00a0 no-break \u3000 wide\u200b\ufeff",
    "def f(x):\n        return {'a': [1_000.5e-3, None]}  # comment\n\n\n\nclass A: ...\n",
    "naïve café, Straße, İstanbul, ﬁ ligature, e\u0301 é, Å Å, ½ ² ③",
    "数字と漢字、ひらがな。한국어 문장. Привет, мир! שלום עולם مرحبا بالعالم ไทยไม่มีช่องว่าง",
    "🙂🙃 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 \U0001f9d1\u200d\U0001f4bb",
    "\x00\x01\x7f\ufffd\u202e<|im_start|><|endoftext|></s><s>[INST] <unk> <|im_end",
    "a" * 300 + "!" * 100 + "\n" * 50 + " " * 200 + "1" * 50,
)


class ReferenceEncoder:
    """`tokenizers`, which vLLM itself uses for most models."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        # The batch call skips the offsets, a fifth of the time.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)


class FastEncoder:
    """`fastokens`: the same ids in a tenth to a fortieth of the CPU time, without an object per token."""

    def __init__(self, file: Path, longest_token: int) -> None:
        """Raises ImportError when it is not installed, ValueError or another error for what it can't read."""
        self.longest_token = longest_token
        tokenizer: Any = importlib.import_module("fastokens").Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        ids, _offsets = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        return array("I", ids)


Encoder = ReferenceEncoder | FastEncoder
"""Token ids (uint32) of a text, in which special tokens are recognised, as in vLLM. May be called in threads."""


def encoder_of(file: Path) -> Encoder:
    """The fastest encoder for `file`, a `tokenizer.json`, whose ids are those of `tokenizers`."""
    tokenizer = Tokenizer.from_file(str(file))
    reference = ReferenceEncoder(tokenizer)
    try:
        fast = FastEncoder(file, reference.longest_token)
        different = first_difference(fast, reference, tokenizer)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Whatever goes wrong with it, there is a way without it; and a panic in Rust is no Exception.
        logger.info("tokenizing with tokenizers, for fastokens can't be used: %s", error)
        return reference
    if different is not None:
        logger.warning("tokenizing with tokenizers, for fastokens makes other ids of %.60r", different)
        return reference
    return fast


def first_difference(encoder: Encoder, reference: Encoder, tokenizer: Tokenizer) -> str | None:
    """A sample of which the two make different ids; None if there is none. `tokenizer` tells the added tokens."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    samples = (*_SAMPLES, "x " + " y\n".join(added) + " z", *(f"a{content}b" for content in added[:100]))
    for sample in samples:
        for special in (True, False):
            ours = encoder.encode(sample, add_special_tokens=special)
            if ours != reference.encode(sample, add_special_tokens=special):
                return sample
    return None
