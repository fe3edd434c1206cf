"""How many bytes should have moved: `kvmodel` to the token, then rounded up to the engine's pages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.kvmodel import FullAttention, Group, KvModel, LinearState

# Block sizes that vLLM uses or may be told to use, in tokens.
_PAGE_TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Moved:
    """One transfer: the KV of tokens [skip_tokens, num_tokens), and the bytes that it took."""

    num_tokens: int
    skip_tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Tokens per page of full-attention and of sliding-window layers (equal where a model has only one kind)."""

    full_tokens: int
    window_tokens: int

    def bytes_to_move(self, model: KvModel, num_tokens: int, skip_tokens: int) -> int:
        """Bytes of the whole pages that must move."""
        return sum(group.bytes_to_move(num_tokens, skip_tokens, self._of(group)) for group in model.groups)

    def _of(self, group: Group) -> int:
        if isinstance(group, LinearState):
            return 1
        return self.full_tokens if isinstance(group, FullAttention) else self.window_tokens


def find_pages(model: KvModel, transfers: Sequence[Moved]) -> Pages | None:
    """The page sizes with which `kvmodel` gives the moved bytes of every transfer exactly; None if none do.

    Engines choose page sizes themselves and tell nobody; one choice must explain all transfers of a run.
    """
    sizes = (
        itertools.product(_PAGE_TOKENS, repeat=2)
        if model.is_hybrid
        else ((size, size) for size in _PAGE_TOKENS)
    )
    # Equal sizes first: they are the simpler explanation where several fit.
    for full_tokens, window_tokens in sorted(sizes, key=lambda pair: pair[0] != pair[1]):
        pages = Pages(full_tokens, window_tokens)
        if all(pages.bytes_to_move(model, t.num_tokens, t.skip_tokens) == t.kv_bytes for t in transfers):
            return pages
    return None
