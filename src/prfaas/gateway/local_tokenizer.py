"""The model's tokenizer and chat template inside the gateway, off the event loop."""

from array import array
from collections.abc import Sequence
from pathlib import Path

from prfaas.gateway.chat_template import ChatTemplate
from prfaas.gateway.encoder import Encoder, encoder_of
from prfaas.gateway.offloop import OffLoop


class LocalTokenizer:
    """Text and plain conversations → token ids (uint32). Whether vLLM agrees is not known here (see
    `tokenizing.py`)."""

    def __init__(self, encoder: Encoder, template: ChatTemplate | None, offloop: OffLoop) -> None:
        self._encoder = encoder
        self._template = template
        self._offloop = offloop

    @classmethod
    def of_model(cls, directory: Path, offloop: OffLoop) -> "LocalTokenizer | None":
        """From a checkpoint directory; None when it has no `tokenizer.json`. Reads files: call it off the
        loop."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            return None
        return cls(encoder_of(file), ChatTemplate.of_model(directory), offloop)

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
