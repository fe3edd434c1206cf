"""The pool inside vLLM's scheduler: what of a request's prefix is loaded from it, and whether that pays."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.worth import LoadWorth
from prfaas.serving.engines.vllm.layout import EngineGroup, block_bytes
from prfaas.serving.engines.vllm.metadata import PoolLoad, PoolPages, PoolStore, StepReports
from prfaas.serving.engines.vllm.pool_stores import BlockIds, PooledRequest, PoolStores, StoreProgress
from prfaas.serving.engines.vllm.settings import ConnectorSettings
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.protocol import PoolMatch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# What a waiting request has found is pinned no longer than that before it is looked up again.
PIN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Question:
    """What was asked for a request; an answer holds while that stays the same."""

    local_tokens: int
    limit_tokens: int
    whole: bool
    epoch: int
    """Of the daemon's start."""


@dataclass(slots=True)
class _Answer:
    """What the pool adds to a waiting request."""

    question: _Question
    at_s: float
    start_tokens: int
    """The load begins there: at the own hit's end, or at 0 in place of the own hit."""
    tokens: int = 0
    """That are loaded; 0: none."""
    match: PoolMatch | None = None
    """Pinned where `tokens` is not 0."""
    junction_tokens: int = 0
    """The pool has attention up to there, but no state; 0: no such place."""
    takes_over: bool = False
    """The own hit is given up for it."""


@dataclass(slots=True)
class _Loading:
    """A load that was ordered and has not been reported."""

    pin: int
    loaded_bytes: int
    ssd_bytes: int
    copy_s: float = 0.0
    wait_s: float = 0.0


class PoolScheduler:
    """Looks up each request's prefix once, keeps its pin until the blocks are there, and orders the load.

    A dead daemon is an empty pool. A request whose load failed never asks again: it would fail for ever.
    """

    def __init__(
        self,
        client: PoolClient,
        groups: Sequence[KvGroup],
        block_bytes: Mapping[int, int],
        checkpoint_tokens: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            client: a session of the kind "scheduler".
            groups: the engine's, at least one of full attention.
            block_bytes: of one block of each group's layers, by the group's index.
            checkpoint_tokens: a state or window is stored at least every so many tokens.
            now_s: a clock.
        """
        self._client = client
        self._groups = groups
        self._block_bytes = block_bytes
        self._now_s = now_s
        self._step_tokens = math.gcd(*(group.block_tokens for group in groups))
        self._boundary_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._has_states = any(group.kind is GroupKind.STATE for group in groups)
        self._is_hybrid = any(group.kind is not GroupKind.FULL for group in groups)
        self._stores = PoolStores(client, groups, checkpoint_tokens)
        self._requests: dict[str, PooledRequest] = {}
        self._barred: set[str] = set()
        self._answers: dict[str, _Answer] = {}
        self._taking_over: list[PooledRequest] = []
        self._took_over: set[str] = set()
        self._ordered: list[PoolLoad] = []
        self._loading: dict[str, _Loading] = {}
        self._clock = _StepClock(now_s)
        self.worth = LoadWorth()
        self.stats = ConnectorStats()
        self.reconciled_hit: Callable[[Request], int] | None = None
        """Tokens of the engine's own hit on which all its KV groups agree; None: not known, then it is not replaced."""

    @classmethod
    def of_engine(
        cls,
        settings: ConnectorSettings,
        kv_cache_config: "KVCacheConfig",
        groups: Sequence[EngineGroup],
    ) -> "PoolScheduler | None":
        """The scheduler side of an engine, connected; None where it has no pool."""
        if settings.pool_socket is None:
            return None
        if not any(group.kind is GroupKind.FULL for group in groups) or any(each.is_ring for each in groups):
            logger.warning("%s has no pool: its model has no full attention, or it has rings", settings.name)
            return None
        timeout_s = settings.pool.timeout_s
        client = PoolClient(
            settings.pool_socket, "scheduler", None, timeout_s=timeout_s, engine_id=settings.name
        )
        client.connect()
        return cls(client, groups, block_bytes(kv_cache_config, groups), settings.pool.checkpoint_tokens)

    def close(self) -> None:
        """End the session; its pins are dropped."""
        self._client.close()

    def take_stats(self) -> ConnectorStats | None:
        """Counters since the last call, None when nothing happened."""
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, ConnectorStats()
        return stats

    # ---- requests

    def on_new_request(self, request: "Request") -> None:
        """Remember a request whose tokens alone say what its KV is."""
        if (
            request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.mm_features
            and not request.resumable
            and request.pooling_params is None
        ):
            self._requests[request.request_id] = PooledRequest.of(request, self._step_tokens)

    def request_finished(self, request_id: str) -> bool:
        """Forget a request. True where copies of its blocks were ordered, which may be running."""
        self._release(request_id)
        self._barred.discard(request_id)
        self._took_over.discard(request_id)
        pooled = self._requests.pop(request_id, None)
        return pooled is not None and pooled.is_storing

    def is_storing(self, request_id: str) -> bool:
        """True if copies of the request's blocks were ordered."""
        pooled = self._requests.get(request_id)
        return pooled is not None and pooled.is_storing

    # ---- what is loaded

    def has_attention(self, request: "Request", start_tokens: int, end_tokens: int) -> bool:
        """True if the pool has the full attention of tokens [start, end); it is pinned for `load` then."""
        pooled = self._usable(request)
        if pooled is None:
            return False
        known = self._known(request, start_tokens, end_tokens, whole=False)
        if known is None:
            known = self._ask(pooled, start_tokens, start_tokens, end_tokens, whole=False)
            match = known.match
            if match is not None and all(
                match.usable_tokens // group.block_tokens >= end_tokens // group.block_tokens
                for group in self._groups
                if group.kind is GroupKind.FULL
            ):
                known.tokens = end_tokens - start_tokens
            self._keep(request, known)
        return known.tokens > 0

    def hit_tokens(self, request: "Request", local_tokens: int) -> int | None:
        """Tokens that the pool adds to the engine's own hit; None: ask again at the next step.

        vLLM asks at every step while the request waits for blocks: the daemon is not asked again for the same.
        """
        name = request.request_id
        is_taking_over = name in self._took_over and request.skip_reading_prefix_cache
        if is_taking_over:
            # `orders` had set it: vLLM was not to look for an own hit this time.
            request.skip_reading_prefix_cache = False
        pooled = self._usable(request)
        if pooled is None or request.skip_reading_prefix_cache:
            return None if is_taking_over else 0
        limit_tokens = request.num_tokens - 1
        answer = self._known(request, local_tokens, limit_tokens, whole=True)
        if answer is not None and answer.takes_over and not is_taking_over and name in self._took_over:
            # There was no room for it: a second time would keep the request waiting.
            answer = None
        if answer is None:
            answer = self._ask(pooled, local_tokens, local_tokens, limit_tokens, whole=True)
            self._weigh(answer, local_tokens)
            if not answer.tokens and self._has_states and name not in self._took_over:
                answer = self._without_own_hit(pooled, answer)
            self._keep(request, answer)
        if answer.takes_over and not is_taking_over:
            self._took_over.add(name)
            self._taking_over.append(pooled)
            return None
        if is_taking_over and not answer.tokens:
            return None
        if answer.junction_tokens:
            # vLLM ends a step there and offers its state. It sets the field anew before each of these calls.
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, answer.junction_tokens)
        return answer.tokens

    def load(self, request: "Request", table: BlockIds) -> None:
        """Order the load that the last answer promised, into blocks that the request has now."""
        answer = self._answers.pop(request.request_id)
        match = answer.match
        assert match is not None, "only pinned pages are promised"
        parts = tuple(
            PoolPages(
                pages.group,
                pages.first_block,
                tuple(table[pages.group][pages.first_block : pages.first_block + len(pages.refs)]),
                pages.refs,
            )
            for pages in match.pages
        )
        self._ordered.append(PoolLoad(request.request_id, match.pin, match.epoch, parts))
        loaded_bytes, ssd_bytes = self._bytes(answer)
        self._loading[request.request_id] = _Loading(match.pin, loaded_bytes, ssd_bytes)
        tokens_in_memory = self._tokens_in_memory(answer)
        self.stats.add("pool_hit_tokens_memory", tokens_in_memory)
        self.stats.add("pool_hit_tokens_ssd", answer.tokens - tokens_in_memory)
        self.begin_behind(request, answer.start_tokens + answer.tokens)

    def begin_behind(self, request: "Request", tokens: int) -> None:
        """Store only what follows `tokens`: the rest is in the pool, or the engine had it."""
        pooled = self._requests.get(request.request_id)
        if pooled is not None:
            whole = tokens // self._boundary_tokens * self._boundary_tokens
            pooled.begin(StoreProgress(whole, whole))

    def give_up(self, request_id: str) -> None:
        """The request goes on without the pool, or is preempted."""
        self._release(request_id)

    # ---- steps

    def orders(self, output: "SchedulerOutput") -> tuple[list[PoolLoad], list[PoolStore]]:
        """The loads and copies that begin with this step; runs before vLLM advances `num_computed_tokens`."""
        tokens, seconds = self._clock.step(output.num_scheduled_tokens, output.total_num_scheduled_tokens)
        if tokens:
            self.worth.prefill.add(tokens, seconds)
        for pooled in self._taking_over:
            pooled.request.skip_reading_prefix_cache = True
        self._taking_over.clear()
        for request_id in output.preempted_req_ids or ():
            self._release(request_id)
            preempted = self._requests.get(request_id)
            if preempted is not None:
                preempted.begin(None)
        loads, self._ordered = self._ordered, []
        return loads, self._stores.order(self._requests, output)

    def update(self, output: "KVConnectorOutput") -> None:
        """Loads that ended, and what they took."""
        times = output.kv_connector_worker_meta
        if isinstance(times, StepReports):
            for request_id, time_ in times.loads.items():
                loading = self._loading.get(request_id)
                if loading is not None:
                    loading.copy_s = max(loading.copy_s, time_.elapsed_s - time_.wait_s)
                    loading.wait_s = max(loading.wait_s, time_.wait_s)
        failed = output.failed_recving or set()
        for request_id in failed:
            if request_id in self._loading and request_id in self._requests:
                self._barred.add(request_id)
        for request_id in output.finished_recving or ():
            loading = self._loading.pop(request_id, None)
            if loading is None:
                continue
            self._client.unpin(loading.pin)
            if request_id not in self._barred and loading.copy_s:
                self.worth.load_took(loading.loaded_bytes, loading.ssd_bytes, loading.copy_s, loading.wait_s)

    # ---- look-ups

    def _usable(self, request: "Request") -> PooledRequest | None:
        if not self._client.epoch or request.request_id in self._barred:
            return None
        return self._requests.get(request.request_id)

    def _known(
        self, request: "Request", local_tokens: int, limit_tokens: int, *, whole: bool
    ) -> _Answer | None:
        """The answer to the same question, if it is young enough."""
        answer = self._answers.get(request.request_id)
        if answer is None or self._now_s() - answer.at_s > PIN_S:
            return None
        question = _Question(local_tokens, limit_tokens, whole, self._client.epoch)
        if answer.takes_over and not local_tokens:
            # The own hit is out of the way: what was found for the first question is the answer to this one.
            question = _Question(answer.question.local_tokens, limit_tokens, whole, self._client.epoch)
        return answer if answer.question == question else None

    def _ask(
        self, pooled: PooledRequest, local_tokens: int, start_tokens: int, limit_tokens: int, *, whole: bool
    ) -> _Answer:
        """Ask the daemon for what it has behind `start_tokens`."""
        self._release(pooled.request.request_id)
        question = _Question(local_tokens, limit_tokens, whole, self._client.epoch)
        answer = _Answer(question, self._now_s(), start_tokens)
        steps = limit_tokens // self._step_tokens
        if steps * self._step_tokens > start_tokens:
            pooled.chain.extend(pooled.request.all_token_ids)
            answer.match = self._client.match(
                pooled.chain.packed(0, steps),
                start_tokens,
                limit_tokens,
                whole=whole,
                tenant=pooled.tenant,
                pin=True,
            )
        return answer

    def _weigh(self, answer: _Answer, local_tokens: int) -> None:
        """Whether what was found is loaded, and where a state would have served."""
        match = answer.match
        if match is None:
            return
        spared_tokens = match.usable_tokens - local_tokens
        if spared_tokens > 0 and self.worth.pays(spared_tokens, *self._bytes(answer)):
            answer.tokens = match.usable_tokens - answer.start_tokens
        unit = self._boundary_tokens
        junction = min(match.attention_tokens, answer.question.limit_tokens) // unit * unit
        if self._is_hybrid and junction > max(local_tokens, match.usable_tokens):
            answer.junction_tokens = junction

    def _without_own_hit(self, pooled: PooledRequest, answer: _Answer) -> _Answer:
        """The own attention hit may lie behind the last state that the engine has: the pool may have a later one.

        vLLM (0.32) does not ask for ends within its own attention hit. It does once the own hit is switched off for
        this request, at the next step.
        """
        local_tokens, limit_tokens = answer.question.local_tokens, answer.question.limit_tokens
        own_tokens = self.reconciled_hit(pooled.request) if self.reconciled_hit is not None else local_tokens
        if own_tokens >= local_tokens:
            return answer
        self._keep(pooled.request, answer)
        other = self._ask(pooled, local_tokens, 0, limit_tokens, whole=True)
        self._weigh(other, own_tokens)
        other.takes_over = other.tokens > 0
        return other

    def _keep(self, request: "Request", answer: _Answer) -> None:
        """Remember the answer; pages that are not loaded need no pin."""
        if answer.match is not None and not answer.tokens:
            self._client.unpin(answer.match.pin)
            answer.match = None
        self._answers[request.request_id] = answer

    def _release(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None and answer.match is not None:
            self._client.unpin(answer.match.pin)

    def _bytes(self, answer: _Answer) -> tuple[int, int]:
        """Bytes of the load, and those of them that are on SSD."""
        match = answer.match
        assert match is not None, "only a match has bytes"
        loaded_bytes = sum(self._block_bytes[pages.group] * len(pages.refs) for pages in match.pages)
        tokens = match.usable_tokens - answer.start_tokens
        on_ssd = tokens - self._tokens_in_memory(answer)
        return loaded_bytes, loaded_bytes * on_ssd // tokens if tokens > 0 else 0

    @staticmethod
    def _tokens_in_memory(answer: _Answer) -> int:
        """How much of a match's usable part the pool has in memory."""
        match = answer.match
        assert match is not None, "only a match has tokens"
        start_tokens = answer.start_tokens
        return max(0, min(match.memory_tokens, match.usable_tokens) - start_tokens)


class _StepClock:
    """How long steps with prefills take, from one to the next of a request that is in both: no idle time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last: Mapping[str, int] = {}
        self._last_tokens = 0
        self._last_at_s = 0.0

    def step(self, scheduled: Mapping[str, int], total_tokens: int) -> tuple[int, float]:
        """A step begins. Returns tokens and seconds of the one before, 0 tokens if they tell nothing."""
        now_s = self._now_s()
        last, tokens, seconds = self._last, self._last_tokens, now_s - self._last_at_s
        self._last, self._last_tokens, self._last_at_s = scheduled, total_tokens, now_s
        has_prefill = tokens > len(last)
        return (tokens if has_prefill and not scheduled.keys().isdisjoint(last) else 0), seconds
