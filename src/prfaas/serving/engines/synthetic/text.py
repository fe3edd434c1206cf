"""Between text and tokens: the model's tokenizer and chat template, as a vLLM server applies them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from prfaas.core.bounded_file import MODEL_BYTES, file_json, file_text
from prfaas.serving.engines import EngineError

_ANSWER_TOKENS = 4096
_SPECIAL_FIELDS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Text:
    """Tokenizer and template of one checkpoint directory; shared by all engines of a process."""

    def __init__(self, directory: Path) -> None:
        """Raises EngineError when the directory has no `tokenizer.json`, or a configuration that can't be read."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise EngineError(f"{directory} has no tokenizer.json, which synthetic engines need")
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_file = directory / "tokenizer_config.json"
        try:
            config = file_json(config_file, MODEL_BYTES) if config_file.is_file() else {}
        except (OSError, ValueError) as error:
            raise EngineError(f"{config_file} can't be read: {error}") from None
        self._specials = {field: _token(config.get(field)) for field in _SPECIAL_FIELDS}
        template_file = directory / "chat_template.jinja"
        has_file = template_file.is_file()
        source = file_text(template_file, MODEL_BYTES) if has_file else config.get("chat_template")
        self._template = _environment().from_string(source) if isinstance(source, str) else None
        self._answers = self._plain_tokens()

    @property
    def vocabulary(self) -> Sequence[int]:
        """The ids that answers are made of: plain text each, never an end of the answer."""
        return list(self._answers)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], tools: object, *, open_turn: bool) -> str:
        """A conversation as the template writes it.

        Raises:
            ValueError: there is no template, or it refuses the conversation.
        """
        if self._template is None:
            raise ValueError("the model has no chat template")
        plain = [{**message, "content": _plain(message.get("content"))} for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=tools, documents=None, add_generation_prompt=open_turn, **self._specials
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from None

    def plain(self, token_ids: Sequence[int]) -> str:
        """Text of any tokens, special ones among them."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer's tokens."""
        return "".join(map(self._answers.__getitem__, token_ids))

    def _plain_tokens(self) -> dict[int, str]:
        size = min(self._tokenizer.get_vocab_size(with_added_tokens=False), _ANSWER_TOKENS)
        texts = self._tokenizer.decode_batch([[token] for token in range(size)])
        plain = {token: text for token, text in enumerate(texts) if text.isascii() and text.isprintable()}
        found = {token: text for token, text in plain.items() if text}
        if not found:
            raise EngineError("the tokenizer has no token of plain text to answer with")
        return found


def _plain(content: object) -> str:
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str) and text)
    return content if isinstance(content, str) else ""


def _token(value: object) -> str | None:
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # jinja's own filter escapes for HTML, which no chat template means.
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, indent=options.get("indent")
    )
    return environment
