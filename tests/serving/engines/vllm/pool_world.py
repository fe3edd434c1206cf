"""A pool in a dict, with the daemon's rules, and requests as vLLM's scheduler has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.depth import needed_blocks, usable_end
from prfaas.core.pool.geometry import PageIdentity
from prfaas.core.pool.keys import KEY_BYTES, page_id
from prfaas.serving.engines.vllm.metadata import PoolStore
from prfaas.serving.pool.protocol import MatchedPages, PageRef, PoolMatch


@dataclass
class Request:
    """The fields that the connector reads."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    kv_cache_report_mode: str = "incremental"
    prompt_embeds: Any = None
    mm_features: list[Any] = field(default_factory=list)
    resumable: bool = False
    pooling_params: Any = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    all_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids or ())
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class BlockState:
    """What vLLM offers of the requests' blocks in one step."""

    tables: dict[str, tuple[list[int], ...]]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        return self.tables.get(request_id)


@dataclass
class Output:
    """One step of the scheduler."""

    num_scheduled_tokens: dict[str, int]
    kv_connector_block_state: BlockState
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class Blocks:
    """The blocks that a request was given."""

    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


@dataclass
class ConnectorOutput:
    """What the workers report after a step."""

    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    kv_connector_worker_meta: Any = None


class DictPool:
    """What a `PoolClient` of a scheduler answers."""

    def __init__(self, groups: Sequence[KvGroup], step_tokens: int) -> None:
        self.epoch = 1
        self.pages: dict[bytes, PageRef] = {}
        self.identities: dict[bytes, PageIdentity] = {}
        self.tenants: dict[bytes, bytes] = {}
        self.pins: set[int] = set()
        self.discarded: list[bytes] = []
        self.calls: list[str] = []
        self.room = 1 << 30
        self.on_ssd_behind = 1 << 60
        self._groups = groups
        self._step_tokens = step_tokens
        self._next = 1

    def match(
        self, chain: bytes, start_tokens: int, limit_tokens: int, *, whole: bool, tenant: bytes, pin: bool
    ) -> PoolMatch | None:
        self.calls.append("match")
        if not self.epoch:
            return None
        keys = [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]
        groups = [g for g in self._groups if whole or g.kind is GroupKind.FULL]
        held = {g.index: {key for key in keys if page_id(key, g.index) in self.pages} for g in groups}
        depth = usable_end(groups, keys, self._step_tokens, held, start_tokens, limit_tokens)
        if not depth.usable_tokens:
            return PoolMatch(0, 0, depth.attention_tokens, 0, (), self.epoch)
        kinds = {group.index: group for group in groups}
        pages = tuple(
            MatchedPages(
                index,
                blocks.start,
                tuple(
                    self.pages[
                        page_id(keys[(block + 1) * kinds[index].block_tokens // self._step_tokens - 1], index)
                    ]
                    for block in blocks
                ),
            )
            for index, blocks in needed_blocks(groups, start_tokens, depth.usable_tokens)
        )
        self._next += 1
        self.pins.add(self._next)
        in_memory = min(depth.usable_tokens, self.on_ssd_behind)
        return PoolMatch(
            self._next, depth.usable_tokens, depth.attention_tokens, in_memory, pages, self.epoch
        )

    def unpin(self, pin: int) -> None:
        self.pins.discard(pin)

    def reserve(
        self, tenant: bytes, pages: Sequence[tuple[bytes, PageIdentity | None]]
    ) -> list[PageRef | None] | None:
        self.calls.append("reserve")
        answers: list[PageRef | None] = []
        for name, identity in pages:
            if name in self.pages or self.room <= 0:
                answers.append(None)
                continue
            self.room -= 1
            self._next += 1
            self.pages[name] = PageRef(self._next, self._next * 64)
            self.tenants[name] = tenant
            if identity is not None:
                self.identities[name] = identity
            answers.append(self.pages[name])
        return answers

    def discard(self, page_ids: Sequence[bytes]) -> None:
        self.calls.append("discard")
        self.discarded += page_ids
        for name in page_ids:
            self.pages.pop(name, None)

    def close(self) -> None:
        self.epoch = 0


def stored(stores: Sequence[PoolStore]) -> dict[int, list[int]]:
    """The blocks that the orders store, by group."""
    blocks: dict[int, list[int]] = {}
    for store in stores:
        for part in store.parts:
            assert len(part.block_ids) == len(part.pages) > 0
            first = part.first_block
            blocks.setdefault(part.group, []).extend(range(first, first + len(part.block_ids)))
    return {group: sorted(each) for group, each in blocks.items()}
