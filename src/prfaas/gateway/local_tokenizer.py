"""The model's tokenizer inside the gateway: `tokenizer.json` through the `tokenizers` library, off the event
loop."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from prfaas.gateway.chat_template import ChatTemplate
from prfaas.gateway.offloop import OffLoop


class LocalTokenizer:
    """Text and plain conversations → token ids. Whether vLLM agrees is not known here (see
    `tokenizing.py`)."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, offloop: OffLoop) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._offloop = offloop

    @classmethod
    def of_model(cls, directory: Path, offloop: OffLoop) -> "LocalTokenizer | None":
        """From a checkpoint directory; None when it has no `tokenizer.json`. Reads files: call it off the
        loop."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            return None
        return cls(Tokenizer.from_file(str(file)), ChatTemplate.of_model(directory), offloop)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, as in vLLM."""
        return await self._offloop.run(len(text), self._encode, text, add_special_tokens)

    async def chat_ids(self, messages: Sequence[tuple[str, str | tuple[str, ...]]]) -> list[int]:
        """Ids of the rendered conversation with a generation prompt. Raises jinja2.TemplateError."""
        template = self._template
        if template is None:
            raise ValueError("the model has no chat template that the gateway can render")
        chars = sum(len(c) if isinstance(c, str) else sum(map(len, c)) for _, c in messages)
        # The template writes its special tokens itself.
        return await self._offloop.run(chars, lambda: self._encode(template.render(messages), False))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call skips the offsets, a fifth of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids
