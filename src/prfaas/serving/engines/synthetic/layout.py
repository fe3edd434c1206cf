"""How a stand-in's KV is cut into groups, pages and transfer regions: as vLLM does it for the same model."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from prfaas.core.kv import FullAttention, KvModel, LinearState, SlidingWindow
from prfaas.serving.engines.errors import EngineError

STATE_BLOCK_TOKENS = 256
PLAIN_BLOCK_TOKENS = 128
"""vLLM's block sizes on CPUs, with and without linear state."""


class GroupKind(Enum):
    """What a layer keeps; the value is vLLM's word in KV events."""

    FULL = "full_attention"
    WINDOW = "sliding_window"
    STATE = "mamba"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table, numbered from `first_layer`. `layer_bytes`: one block's bytes in each."""

    index: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int
    first_layer: int
    layer_bytes: tuple[int, ...]

    @property
    def layers(self) -> range:
        """Numbers of the group's layers in the model."""
        return range(self.first_layer, self.first_layer + len(self.layer_bytes))

    @property
    def window_blocks(self) -> int:
        """Blocks before a boundary that the window reaches into."""
        return -(-(self.window_tokens - 1) // self.block_tokens)

    def first_block(self, num_tokens: int, skip_tokens: int) -> int:
        """Index of the first block that must move so that token `num_tokens` can be computed elsewhere."""
        match self.kind:
            case GroupKind.FULL:
                return skip_tokens // self.block_tokens
            case GroupKind.WINDOW:
                return max(0, num_tokens - self.window_tokens + 1) // self.block_tokens
            case GroupKind.STATE:
                return (num_tokens - 1) // self.block_tokens

    def end_block(self, num_tokens: int) -> int:
        """One past the index of the last block that must move."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's share of a transfer: consecutive pages of `page_bytes`."""

    group: KvGroup
    layer: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class SyntheticLayout:
    """Groups in the order of vLLM's KV events (linear state and windows first), regions with full attention first."""

    groups: tuple[KvGroup, ...]
    regions: tuple[Region, ...] = field(init=False)

    def __post_init__(self) -> None:
        ordered = sorted(self.groups, key=lambda group: group.kind is not GroupKind.FULL)
        regions = tuple(
            Region(group, layer, page_bytes)
            for group in ordered
            for layer, page_bytes in zip(group.layers, group.layer_bytes, strict=True)
        )
        object.__setattr__(self, "regions", regions)

    @classmethod
    def of_model(cls, model: KvModel) -> "SyntheticLayout":
        """Groups of equally many layers, as vLLM makes them: as many layers each as the rarest kind has.

        Raises:
            EngineError: the model has no full-attention layer, whose blocks the prefix cache is built on.
        """
        block_tokens = STATE_BLOCK_TOKENS if model.has_linear_state else PLAIN_BLOCK_TOKENS
        kinds: dict[tuple[GroupKind, int], list[int]] = {}
        for group in model.groups:
            kind, window_tokens, layer_bytes = _of_group(group, block_tokens)
            kinds.setdefault((kind, window_tokens), []).extend([layer_bytes] * group.layers)
        full = kinds.pop((GroupKind.FULL, 0), None)
        if not full:
            raise EngineError(f"{model.name} has no full-attention layer; synthetic engines need one")
        size = min([len(full), *(len(layers) for layers in kinds.values())])
        groups: list[KvGroup] = []
        first_layer = 0
        for (kind, window_tokens), layers in [*kinds.items(), ((GroupKind.FULL, 0), full)]:
            step = len(layers) if kind is GroupKind.FULL else size
            for start in range(0, len(layers), step):
                part = tuple(layers[start : start + step])
                groups.append(KvGroup(len(groups), kind, block_tokens, window_tokens, first_layer, part))
                first_layer += len(part)
        return cls(tuple(groups))

    @property
    def full(self) -> KvGroup:
        """The full-attention group."""
        return self.groups[-1]

    @property
    def others(self) -> tuple[KvGroup, ...]:
        """The groups of linear state and of windows."""
        return self.groups[:-1]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, the same in every group."""
        return self.full.block_tokens

    @property
    def has_window(self) -> bool:
        """True if some layers see a window only."""
        return any(group.kind is GroupKind.WINDOW for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the shared pool: the largest group's block."""
        return max(sum(group.layer_bytes) for group in self.groups)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens occupies while it runs."""
        blocks = self.full.end_block(num_tokens)
        return blocks + sum(
            1 if group.kind is GroupKind.STATE else min(group.window_blocks + 1, blocks)
            for group in self.others
        )

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """Bytes of every region in a transfer of the KV of tokens [skip_tokens, num_tokens).

        Raises:
            ValueError: not 0 <= skip_tokens <= num_tokens, or no token.
        """
        if not 0 <= skip_tokens <= num_tokens or num_tokens < 1:
            raise ValueError(f"a transfer of tokens [{skip_tokens}, {num_tokens}) is not possible")
        return [
            (region.group.end_block(num_tokens) - region.group.first_block(num_tokens, skip_tokens))
            * region.page_bytes
            for region in self.regions
        ]

    def fingerprint(self, model_name: str) -> dict[str, str | int]:
        """What both ends must share; "engine" keeps real engines and stand-ins apart."""
        regions: Sequence[tuple[object, ...]] = [
            (r.layer, r.group.kind.value, r.group.block_tokens, r.group.window_tokens, r.page_bytes)
            for r in self.regions
        ]
        digest = hashlib.blake2b(json.dumps(regions).encode(), digest_size=8).hexdigest()
        return {"engine": "synthetic", "model": model_name, "layers": len(regions), "pages": digest}


def _of_group(
    group: FullAttention | SlidingWindow | LinearState, block_tokens: int
) -> tuple[GroupKind, int, int]:
    """(kind, window in tokens, bytes of one layer's block)."""
    match group:
        case FullAttention():
            return GroupKind.FULL, 0, group.token_bytes // group.layers * block_tokens
        case SlidingWindow():
            return GroupKind.WINDOW, group.window_tokens, group.token_bytes // group.layers * block_tokens
        case LinearState():
            return GroupKind.STATE, 0, group.state_bytes
