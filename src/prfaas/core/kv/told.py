"""The KVCache of a model of which nobody has written what its layers keep, as an engine tells it of its own pages."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.kv.layers import CompressedAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import Group, KvModel

_KINDS = {kind.value: kind for kind in GroupKind}
_MOST_KINDS = 1 << 10
# More than any page or block has.
_MOST = 1 << 40

ToldLayers = list[list[object]]
"""[kind, tokens of a block, tokens of a window, bytes of a page, ranks that keep the same, layers] of equal layers."""


def told_layers(regions: Iterable[tuple[KvGroup, int, int]]) -> ToldLayers:
    """What one rank says: of each layer its group, the bytes of a page, and how many ranks keep the same."""
    counted = Counter(
        (group.kind.value, group.block_tokens, group.window_tokens, page_bytes, copies)
        for group, page_bytes, copies in regions
    )
    return [[*shape, layers] for shape, layers in counted.items()]


def read_told_layers(told: object, name: str, ranks: int) -> KvModel:
    """The KVCache of a request on all `ranks` ranks of the engine that tells.

    Raises:
        ValueError: it is no such list, or a number is out of bounds.
    """
    if not isinstance(told, list) or not 1 <= len(told) <= _MOST_KINDS:
        raise ValueError("a list of layers is expected")
    return KvModel(name, tuple(_group(entry, ranks) for entry in told))


def _group(entry: Any, ranks: int) -> Group:
    told: list[Any] = entry if isinstance(entry, list) else [None]
    kind, *numbers = told
    # Booleans are integers in Python.
    if len(numbers) != 5 or not all(type(each) is int and 0 <= each <= _MOST for each in numbers):
        raise ValueError("a kind of layers has five numbers within their bounds")
    block_tokens, window_tokens, page_bytes, copies, layers = numbers
    if str(kind) not in _KINDS or not (block_tokens and page_bytes and copies and layers):
        raise ValueError(f"a kind of layers is one of {', '.join(_KINDS)}, with pages of some bytes")
    held = max(1, ranks // copies)
    match _KINDS[str(kind)]:
        case GroupKind.FULL:
            return CompressedAttention(layers, held, page_bytes, 0, page_tokens=block_tokens)
        case GroupKind.WINDOW:
            per_token = -(-page_bytes // block_tokens)
            window = SlidingWindow(layers, held, per_token, 0, window_tokens, dtype_bytes=1)
            return replace(window, block_tokens=block_tokens)
        case GroupKind.STATE:
            return LinearState(layers, held * page_bytes, 0, is_whole=True)
