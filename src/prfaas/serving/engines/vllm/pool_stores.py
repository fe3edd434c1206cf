"""Stores into the pool: which blocks of an engine's steps, and at which ends of prefixes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.geometry import PageIdentity
from prfaas.core.pool.keys import KeyChain, page_id, tenant_id
from prfaas.serving.engines.vllm.metadata import PoolPages, PoolStore
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.protocol import PageRef

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

BlockIds = Sequence[Sequence[int]]

# Where a table has this block, the engine has none: vLLM's null block.
_NO_BLOCK = 0


class StoreProgress:
    """Progress of storing one request's blocks since it was last scheduled from the start."""

    __slots__ = (
        "attention_tokens", "ends_tokens", "missing_tokens", "newest_end", "own_tokens", "window_blocks",
    )  # fmt: skip

    def __init__(self, attention_tokens: int, ends_tokens: int) -> None:
        self.attention_tokens = attention_tokens
        """Full-attention blocks up to there are in the pool or were ordered."""
        self.ends_tokens = ends_tokens
        """The last end at which states and windows could be had."""
        self.own_tokens = 0
        """Length of the engine's own hit while it isn't known whether the pool has it too."""
        self.missing_tokens = 0
        """So much of it is still to be ordered, since the pool lacks it."""
        self.window_blocks: dict[int, int] = {}
        """Index of the first block that was not ordered yet, by window group."""
        self.newest_end: dict[bytes, tuple[KvGroup, int]] = {}
        """Pages (group, block) that only the newest end of the prompt, or of the answer, needs."""


@dataclass(slots=True)
class PooledRequest:
    """A request whose prefix the pool may have, or get."""

    request: "Request"
    chain: KeyChain
    salt: str
    adapter: str
    tenant: bytes
    progress: StoreProgress | None = None
    """None until it is scheduled."""
    quiet_tokens: int = 0
    """Steps that end before there complete no block."""
    is_storing: bool = False
    """Copies were ordered, and may be running."""

    @classmethod
    def of(cls, request: "Request", step_tokens: int) -> "PooledRequest":
        """The request, of which no token has been hashed."""
        salt = request.cache_salt or ""
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        return cls(request, KeyChain(step_tokens, salt, adapter), salt, adapter, tenant_id(salt))

    def begin(self, progress: StoreProgress | None) -> None:
        """Its next step is its first one. `progress`: None where only the step will tell what the engine had."""
        self.progress = progress
        self.quiet_tokens = 0


class _Page(NamedTuple):
    """A block that the pool should have."""

    pooled: PooledRequest
    group: KvGroup
    block: int
    """Its index in the request's table."""
    block_id: int
    for_newest: bool = False
    """It is needed by the newest end of an answer only."""

    @property
    def end_tokens(self) -> int:
        return (self.block + 1) * self.group.block_tokens

    @property
    def id(self) -> bytes:
        return page_id(self.pooled.chain.key_at(self.end_tokens), self.group.index)


@dataclass(slots=True)
class _Wishes:
    """All that one step adds."""

    pages: list[_Page] = field(default_factory=list)
    ends: list[tuple[PooledRequest, int, bool]] = field(default_factory=list)
    """Ends at which states or windows are stored; True: the end stays when the answer goes on."""


class PoolStores:
    """Orders copies of new blocks into the pool.

    Full attention goes there as soon as a step completes a block. States and windows go there only for ends from
    which a later request may go on: the last block boundary of the prompt, a junction with another prompt, the first
    boundary after every `checkpoint_tokens`, and the newest boundary of the answer, which supersedes the one before.
    All is O(new blocks), and one call of the daemon for a step.
    """

    def __init__(self, client: PoolClient, groups: Sequence[KvGroup], checkpoint_tokens: int) -> None:
        self._client = client
        self._full = [group for group in groups if group.kind is GroupKind.FULL]
        self._windows = [group for group in groups if group.kind is GroupKind.WINDOW]
        self._states = {group.index: group for group in groups if group.kind is GroupKind.STATE}
        self._lead = min(self._full, key=lambda group: group.index)
        self._checkpoint_tokens = checkpoint_tokens
        self._step_tokens = math.gcd(*(group.block_tokens for group in groups))
        self._boundary_tokens = math.lcm(*(group.block_tokens for group in groups))

    def order(self, requests: Mapping[str, PooledRequest], output: "SchedulerOutput") -> list[PoolStore]:
        """The copies to make once this step has run; runs before vLLM advances `num_computed_tokens`."""
        epoch, block_state = self._client.epoch, output.kv_connector_block_state
        if not epoch or block_state is None:
            return []
        wishes = _Wishes()
        offers = block_state.boundary_state_offloads
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            pooled = requests.get(request_id)
            if pooled is None:
                continue
            offered = offers.get(request_id, ())
            if request_id in output.scheduled_spec_decode_tokens:
                # Which drafts are taken is known after the step, and a state goes through all of them: final is what
                # the steps before have left.
                scheduled_tokens, offered = 0, ()
            end_tokens = pooled.request.num_computed_tokens + scheduled_tokens
            if end_tokens >= pooled.quiet_tokens or offered:
                self._add(wishes, pooled, scheduled_tokens, block_state, offered)
        for request_id in offers.keys() - output.num_scheduled_tokens.keys():
            pooled = requests.get(request_id)
            if pooled is not None:
                self._add(wishes, pooled, 0, block_state, offers[request_id])
        if not wishes.pages:
            return []
        granted = self._reserve(wishes.pages)
        self._look_for_gaps(wishes.pages, granted)
        self._supersede(wishes, granted)
        return list(_orders(granted, epoch))

    def _add(
        self,
        wishes: _Wishes,
        pooled: PooledRequest,
        scheduled_tokens: int,
        block_state: "KVConnectorBlockState",
        offers: Sequence[tuple[int, int, int]],
    ) -> None:
        """What one request's step completes."""
        request = pooled.request
        start_tokens = request.num_computed_tokens
        # A token that is sampled while the step runs ahead has no id yet.
        end_tokens = min(start_tokens + scheduled_tokens, request.num_tokens)
        progress = pooled.progress
        if progress is None:
            progress = pooled.progress = self._begin(start_tokens)
        table = block_state.get_block_ids(request.request_id)
        if table is None:
            return
        pooled.chain.extend(request.all_token_ids)
        for group in self._full:
            first, end = progress.attention_tokens // group.block_tokens, end_tokens // group.block_tokens
            wishes.pages += _pages(pooled, group, table, range(first, end))
            wishes.pages += _pages(pooled, group, table, range(progress.missing_tokens // group.block_tokens))
        progress.missing_tokens = 0
        progress.attention_tokens = max(end_tokens, progress.attention_tokens)
        pooled.quiet_tokens = (end_tokens // self._step_tokens + 1) * self._step_tokens
        self._add_ends(wishes, pooled, progress, start_tokens, end_tokens, table, offers)

    def _begin(self, own_tokens: int) -> StoreProgress:
        """The pool most likely has what the engine had: the last boundary's blocks tell, at no further cost."""
        progress = StoreProgress(max(own_tokens - self._boundary_tokens, 0), own_tokens)
        progress.own_tokens = own_tokens
        return progress

    def _add_ends(
        self,
        wishes: _Wishes,
        pooled: PooledRequest,
        progress: StoreProgress,
        start_tokens: int,
        end_tokens: int,
        table: BlockIds,
        offers: Sequence[tuple[int, int, int]],
    ) -> None:
        """States and windows of the ends that this step has passed."""
        # Where a state lies is only known by vLLM's offer of it: its place in the table does not say.
        states: dict[int, list[tuple[KvGroup, int]]] = {}
        for index, block_id, boundary in offers:
            group = self._states.get(index)
            if group is not None and boundary % self._boundary_tokens == 0:
                states.setdefault(boundary, []).append((group, block_id))
        candidates = states if self._states else self._window_ends(pooled, progress, end_tokens)
        for end in sorted(candidates):
            if end <= progress.ends_tokens or end > pooled.chain.num_tokens:
                continue
            stays = self._stays(pooled, progress, end, end_tokens - start_tokens)
            progress.ends_tokens = end
            if stays is None:
                continue
            found = [
                _Page(pooled, group, end // group.block_tokens - 1, block_id, not stays)
                for group, block_id in states.get(end, ())
            ]
            for group in self._windows:
                first = max(group.first_block(end, 0), progress.window_blocks.get(group.index, 0))
                blocks = range(first, end // group.block_tokens)
                progress.window_blocks[group.index] = max(blocks.stop, first)
                found += _pages(pooled, group, table, blocks, for_newest=not stays)
            if found:
                wishes.pages += found
                wishes.ends.append((pooled, end, stays))

    def _window_ends(self, pooled: PooledRequest, progress: StoreProgress, end_tokens: int) -> Iterable[int]:
        """Without states every boundary could be an end: those that are wanted."""
        if not self._windows:
            return ()
        unit, every = self._boundary_tokens, self._checkpoint_tokens
        request = pooled.request
        prompt_end = self._prompt_end(request)
        ends = {prompt_end, request.shared_prefix_boundary // unit * unit}
        first, last = progress.ends_tokens // every + 1, end_tokens // every
        ends |= {-(-number * every // unit) * unit for number in range(first, last + 1)}
        newest = end_tokens // unit * unit
        if newest > prompt_end:
            ends.add(newest)
        return {end for end in ends if end <= end_tokens}

    def _stays(
        self, pooled: PooledRequest, progress: StoreProgress, end: int, step_tokens: int
    ) -> bool | None:
        """Whether an end is wanted for good (True), as the newest one (False), or not at all (None)."""
        request, every = pooled.request, self._checkpoint_tokens
        prompt_end = self._prompt_end(request)
        junction = request.shared_prefix_boundary // self._boundary_tokens * self._boundary_tokens
        if end in (prompt_end, junction) or end // every > progress.ends_tokens // every:
            return True
        # vLLM (0.32) may end no step at a first prompt's last boundary, since it rounds to `cache_config.block_size`
        # (128 on CPUs, where a hybrid's blocks have 256 tokens): then the state before it is the last one.
        may_be_last = request.num_prompt_tokens - end <= step_tokens
        return False if end > prompt_end or may_be_last else None

    def _prompt_end(self, request: "Request") -> int:
        """The end from which the same prompt goes on: its last token is always computed."""
        prompt_tokens: int = request.num_prompt_tokens
        return (prompt_tokens - 1) // self._boundary_tokens * self._boundary_tokens

    def _reserve(self, pages: Sequence[_Page]) -> list[tuple[_Page, PageRef]]:
        """The pages that the pool lacks and has room for."""
        by_tenant: dict[bytes, list[_Page]] = {}
        for page in pages:
            by_tenant.setdefault(page.pooled.tenant, []).append(page)
        granted = []
        for tenant, wished in by_tenant.items():
            refs = self._client.reserve(tenant, [(page.id, self._identity(page)) for page in wished])
            for page, ref in zip(wished, refs or (), strict=False):
                if ref is not None:
                    granted.append((page, ref))
        return granted

    def _identity(self, page: _Page) -> PageIdentity | None:
        if page.group is not self._lead:
            return None
        pooled, block = page.pooled, range(page.block * page.group.block_tokens, page.end_tokens)
        token_ids = pooled.request.all_token_ids
        return PageIdentity.of(pooled.chain, token_ids, block, pooled.salt, pooled.adapter)

    def _look_for_gaps(self, pages: Sequence[_Page], granted: Sequence[tuple[_Page, PageRef]]) -> None:
        """Where the pool lacked the last blocks of an engine's own hit, it may lack all of them."""
        for page, _ in granted:
            progress = page.pooled.progress
            if progress is not None and page.end_tokens <= progress.own_tokens:
                progress.missing_tokens = progress.own_tokens - self._boundary_tokens
                page.pooled.quiet_tokens = 0
                progress.own_tokens = 0
        for page in pages:
            if page.pooled.progress is not None:
                page.pooled.progress.own_tokens = 0

    def _supersede(self, wishes: _Wishes, granted: Sequence[tuple[_Page, PageRef]]) -> None:
        """Discard what only the end before the newest one needed, where the newest got its place."""
        superseded: list[bytes] = []
        stored_ends = {
            (id(page.pooled), page.end_tokens) for page, _ in granted if page.group.kind is not GroupKind.FULL
        }
        for pooled, end, stays in wishes.ends:
            progress = pooled.progress
            if progress is None or (id(pooled), end) not in stored_ends:
                continue
            prompt_end = self._prompt_end(pooled.request)
            for name, (group, block) in tuple(progress.newest_end.items()):
                if (block + 1) * group.block_tokens <= prompt_end < end:
                    # From the prompt's own last end the same prompt goes on, whatever is answered.
                    del progress.newest_end[name]
                elif group.kind is GroupKind.STATE or block < group.first_block(end, 0):
                    superseded.append(name)
                    del progress.newest_end[name]
            if stays:
                progress.newest_end.clear()
        for page, _ in granted:
            progress = page.pooled.progress
            page.pooled.is_storing = True
            if progress is not None and page.for_newest:
                progress.newest_end[page.id] = page.group, page.block
        if superseded:
            self._client.discard(superseded)


def _pages(
    pooled: PooledRequest, group: KvGroup, table: BlockIds, blocks: range, *, for_newest: bool = False
) -> list[_Page]:
    ids = table[group.index]
    return [
        _Page(pooled, group, block, ids[block], for_newest)
        for block in blocks
        if block < len(ids) and ids[block] != _NO_BLOCK
    ]


def _orders(granted: Iterable[tuple[_Page, PageRef]], epoch: int) -> Iterator[PoolStore]:
    """One order for each request's full attention, and one for what vLLM may free after the step."""
    runs: dict[tuple[str, bool], list[list[tuple[_Page, PageRef]]]] = {}
    for page, ref in granted:
        of_request = runs.setdefault(
            (page.pooled.request.request_id, page.group.kind is not GroupKind.FULL), []
        )
        last = of_request[-1][-1][0] if of_request else None
        if last and last.group is page.group and last.block + 1 == page.block:
            of_request[-1].append((page, ref))
        else:
            of_request.append([(page, ref)])
    for (request_id, urgent), of_request in runs.items():
        parts = tuple(
            PoolPages(
                run[0][0].group.index,
                run[0][0].block,
                tuple(page.block_id for page, _ in run),
                tuple(ref for _, ref in run),
            )
            for run in of_request
        )
        yield PoolStore(request_id, epoch, parts, urgent)
