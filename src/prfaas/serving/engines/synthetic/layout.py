"""Groups, pages and transfer regions of a stand-in's KV, as vLLM has them for the same model."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.core.kv.groups import (
    GroupKind,
    KvGroup,
    Region,
    full_attention_first,
    region_bytes,
)
from prfaas.core.kv.layers import ChunkedWindow, FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.prefix.events import EVENT_KINDS
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.page_digests import DIGEST_FORMAT, DigestPlan

STATE_BLOCK_TOKENS = 256
PLAIN_BLOCK_TOKENS = 128
"""vLLM's block sizes on CPUs, with and without linear state."""


@dataclass(frozen=True, slots=True)
class SyntheticGroup(KvGroup):
    """One of the stand-in's KV cache groups."""

    first_layer: int
    """Number of the group's first layer in the model; the others follow."""
    layer_bytes: tuple[int, ...]
    """Bytes of one block in each layer."""

    @property
    def layers(self) -> range:
        """Numbers of the group's layers in the model."""
        return range(self.first_layer, self.first_layer + len(self.layer_bytes))

    @property
    def window_blocks(self) -> int:
        """Blocks before a block boundary that the window reaches into."""
        return -(-(self.window_tokens - 1) // self.block_tokens)


@dataclass(frozen=True, slots=True)
class SyntheticRegion(Region):
    """One layer's share of a transfer."""

    layer: int
    """Number of the layer in the model."""
    position: int
    """Number of the layer in its group."""


@dataclass(frozen=True, slots=True)
class SyntheticLayout:
    """Groups, pages and regions of a stand-in's KV."""

    groups: tuple[SyntheticGroup, ...]
    """In the order of vLLM's KV events: linear state and windows first."""
    regions: tuple[SyntheticRegion, ...] = field(init=False)
    """In the order of a transfer: full attention first."""

    def __post_init__(self) -> None:
        regions = tuple(
            SyntheticRegion(group, page_bytes, group.first_layer + position, position)
            for group in full_attention_first(self.groups)
            for position, page_bytes in enumerate(group.layer_bytes)
        )
        object.__setattr__(self, "regions", regions)

    @classmethod
    def of_model(cls, model: KvModel) -> "SyntheticLayout":
        """Groups of equally many layers, as vLLM makes them: as many layers each as the rarest kind has.

        Raises:
            EngineError: the model has no full-attention layer, whose blocks the prefix cache is built on, or it has
                chunked attention, which the vLLM connector doesn't move either.
        """
        if any(isinstance(group, ChunkedWindow) for group in model.groups):
            raise EngineError(f"{model.name} has chunked attention, which can't be transferred yet")
        block_tokens = STATE_BLOCK_TOKENS if model.has_linear_state else PLAIN_BLOCK_TOKENS
        kinds: dict[tuple[GroupKind, int], list[int]] = {}
        for group in model.groups:
            kind, window_tokens, layer_bytes = _of_group(group, block_tokens)
            kinds.setdefault((kind, window_tokens), []).extend([layer_bytes] * group.layers)
        full = kinds.pop((GroupKind.FULL, 0), None)
        if not full:
            raise EngineError(f"{model.name} has no full-attention layer; synthetic engines need one")
        size = min([len(full), *(len(layers) for layers in kinds.values())])
        groups: list[SyntheticGroup] = []
        first_layer = 0
        for (kind, window_tokens), layers in [*kinds.items(), ((GroupKind.FULL, 0), full)]:
            step = len(layers) if kind is GroupKind.FULL else size
            for start in range(0, len(layers), step):
                part = tuple(layers[start : start + step])
                groups.append(
                    SyntheticGroup(
                        len(groups), kind, block_tokens, window_tokens, first_layer, layer_bytes=part
                    )
                )
                first_layer += len(part)
        return cls(tuple(groups))

    @property
    def full(self) -> SyntheticGroup:
        """The full-attention group."""
        return self.groups[-1]

    @property
    def others(self) -> tuple[SyntheticGroup, ...]:
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
        """See `kv_groups.region_bytes`."""
        return region_bytes(self.regions, num_tokens, skip_tokens)

    @property
    def checkpoint_regions(self) -> tuple[SyntheticRegion, ...]:
        """The regions of a checkpoint, in its order: those of linear state and of windows."""
        return self.regions[len(self.full.layers) :]

    def digest_plan(self, *, digested: bool) -> DigestPlan:
        """The regions of transfers, with the places of their pages' digests."""
        return DigestPlan(self.regions, [str(region.layer) for region in self.regions], 0, digested=digested)

    def fingerprint(self, model_name: str, *, page_digests: bool) -> dict[str, str | int]:
        """Facts that both ends must share; "engine" keeps real engines and stand-ins apart."""
        regions: Sequence[tuple[object, ...]] = [
            (r.layer, EVENT_KINDS[r.group.kind], r.group.block_tokens, r.group.window_tokens, r.page_bytes)
            for r in self.regions
        ]
        digest = hashlib.blake2b(json.dumps(regions).encode(), digest_size=8).hexdigest()
        return {
            "engine": "synthetic",
            "model": model_name,
            "block_tokens": ",".join(str(b) for b in sorted({r.group.block_tokens for r in self.regions})),
            "layers": len(regions),
            "pages": digest,
            "page_digests": DIGEST_FORMAT if page_digests else "off",
        }


def _of_group(
    group: FullAttention | SlidingWindow | LinearState, block_tokens: int
) -> tuple[GroupKind, int, int]:
    """(kind, window in tokens, bytes of one layer's block)."""
    match group:
        case FullAttention():
            return GroupKind.FULL, 0, group.bytes_at(block_tokens) // group.layers
        case SlidingWindow():
            return GroupKind.WINDOW, group.window_tokens, group.token_bytes // group.layers * block_tokens
        case LinearState():
            return GroupKind.STATE, 0, group.state_bytes
