"""A model's chat template, rendered as Hugging Face tokenizers render it, for plain text conversations."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The template of `tokenizer_config.json` or `chat_template.jinja`; rendering is pure and thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateError for a template this environment cannot parse."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def of_model(cls, directory: Path) -> Self | None:
        """The default template of the model in `directory`, or None when it has none that we can use."""
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
        template_file = directory / "chat_template.jinja"
        source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = next((t.get("template") for t in source if t.get("name") == "default"), None)
        if not isinstance(source, str):
            return None
        try:
            return cls(source, _special_tokens(config))
        except jinja2.TemplateError:
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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
