"""Token ids of text that a model has generated, for another engine to go on from."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

# Enough of what comes before to see whether the text's first token would have been written another way there.
_CONTEXT_TOKENS = 16


class AnswerText:
    """Reads the model's tokenizer when it is first needed, which is hardly ever: when an engine dies."""

    def __init__(self, model_dir: Path) -> None:
        self._file = model_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._special_ids: frozenset[int] = frozenset()
        self._reading = asyncio.Lock()

    async def ids_after(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        """Ids that, after `prompt_ids`, stand for exactly `text`; None if there are none that certainly do.

        The model may have sampled others for the same text: there are many ways to cut it into tokens.
        """
        if not text:
            return []
        async with self._reading:
            return await asyncio.to_thread(self._ids_after, prompt_ids, text)

    def _ids_after(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        tokenizer = self._read()
        # U+FFFD stands for bytes that are no character (yet): which ones, nobody can tell.
        if tokenizer is None or "\ufffd" in text:
            return None
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        # What looks like a special token was generated in pieces, or it would not have become text.
        if not self._special_ids.isdisjoint(ids):
            return None
        context = list(prompt_ids[-_CONTEXT_TOKENS:])
        before = tokenizer.decode(context, skip_special_tokens=False)
        after = tokenizer.decode(context + ids, skip_special_tokens=False)
        return ids if after == before + text else None

    def _read(self) -> Tokenizer | None:
        if self._tokenizer is None and self._file.is_file():
            tokenizer = Tokenizer.from_file(str(self._file))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self._tokenizer = tokenizer
            added = tokenizer.get_added_tokens_decoder()
            self._special_ids = frozenset(number for number, token in added.items() if token.special)
        return self._tokenizer
