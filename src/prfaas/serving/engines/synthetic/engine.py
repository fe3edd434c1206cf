"""One stand-in engine: prefill, load, decode; the prefix cache and the transport around them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from prfaas.core.deployment import EngineConfig
from prfaas.serving.engines.synthetic.cache import Context, Lease, PrefixCache
from prfaas.serving.engines.synthetic.content import TokenChain
from prfaas.serving.engines.synthetic.endpoints import Endpoints, PrefillSend
from prfaas.serving.engines.synthetic.pace import DecodeClock, Pace
from prfaas.serving.transport.protocol.ticket import Ticket, TicketError, prompt_digest

logger = logging.getLogger(__name__)

# Layers that finish within less leave together: an event loop is no finer clock than that.
_LAYER_SLICE_S = 0.005
_LATENESS_S = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and how many tokens to answer with."""

    token_ids: Sequence[int]
    max_tokens: int
    samples: int = 1
    """Answers to the same prompt."""
    salt: str = ""
    """Keeps the prefix cache of one tenant apart; "" for none."""
    adapter: str = ""
    """The LoRA adapter; "" for none."""
    tickets: tuple[str, ...] = ()
    """Sealed, as they came."""
    cached_tokens: int | None = None
    """Tokens that were cached where the KV comes from, if the gateway tells; reported once that KV is loaded."""


@dataclass(slots=True)
class TransferRoles:
    """Transfers that the tickets of a request ask of this engine."""

    send: tuple[Ticket, str] | None = None
    """The transfer to send, with its sealed ticket."""
    load: Ticket | None = None
    """The transfer to load."""
    unwanted: tuple[Ticket, ...] = ()
    """Transfers to this engine that are of another prompt."""

    @classmethod
    def of(cls, work: Work, name: str, key: bytes) -> "TransferRoles":
        """Read the tickets: one that is not valid for this engine and prompt gives no role."""
        roles = cls()
        for sealed in work.tickets:
            try:
                ticket = Ticket.unseal(sealed, key, time.time())
            except TicketError as error:
                logger.warning("%s prefills locally: %s", name, error)
                continue
            ids = work.token_ids[: ticket.num_tokens]
            same = prompt_digest(ids, work.salt, work.adapter) == ticket.prompt_digest
            if ticket.producer == name and same and len(work.token_ids) == ticket.num_tokens:
                roles.send = (ticket, sealed)
            elif ticket.consumer == name and same and len(work.token_ids) > ticket.num_tokens:
                roles.load = ticket
            elif ticket.consumer == name:
                roles.unwanted += (ticket,)
            else:
                logger.warning("%s prefills locally: a ticket is for another engine or prompt", name)
        return roles


@dataclass(slots=True)
class EngineCounts:
    """Requests and tokens of one stand-in."""

    running: int = 0
    waiting: int = 0
    finished: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    damaged_loads: int = 0
    """Transfers whose bytes were not what their tokens give."""


@dataclass(slots=True)
class _RequestState:
    """How far a request has come."""

    context: Context
    lease: Lease
    done_tokens: int = 0
    """Tokens in its context."""
    stored_tokens: int = 0
    """Tokens whose blocks are stored."""
    cached_tokens: int = 0
    """Tokens that were cached before: held here, or where loaded KV came from."""


class GeneratedAnswer:
    """An answer that grows."""

    def __init__(self, engine: "SyntheticEngine", work: Work, state: _RequestState) -> None:
        self.cached_tokens = state.cached_tokens
        self.prompt_tokens = len(work.token_ids)
        self._engine = engine
        self._state = state
        self._max_tokens = work.max_tokens
        # A local prefill has computed the last prompt token, and so the first token of the answer.
        self._ahead = state.done_tokens - self.prompt_tokens + 1
        self._base_steps = engine.clock.steps()
        chain = state.context.chain
        chain.extend(work.max_tokens, state.context.taint, engine.vocabulary)
        self.token_ids: Sequence[int] = chain.ids[self.prompt_tokens :]
        """The whole answer: known from the start, but only `produced()` of it may be shown."""

    @property
    def step_s(self) -> float:
        """Seconds between two tokens now."""
        return self._engine.clock.step_now_s

    def produced(self) -> int:
        """Tokens of the answer that are there by now."""
        steps = int(self._engine.clock.steps() - self._base_steps + 1e-6)
        return min(self._max_tokens, steps + self._ahead)

    async def reach(self, count: int) -> None:
        """Wait until `count` tokens are there; blocks that decoding fills are stored on the way."""
        block_tokens = self._state.context.chain.block_tokens
        at = self._state.stored_tokens // block_tokens + 1
        while (computed := at * block_tokens) <= self.prompt_tokens + count - 1:
            await self._wait(computed - self.prompt_tokens + 1)
            self._engine.store_decoded(self._state, computed)
            at += 1
        await self._wait(count)

    async def _wait(self, count: int) -> None:
        await self._engine.clock.reach(self._base_steps + count - self._ahead)


class SyntheticEngine:
    """FIFO prefill, one request at a time, in chunks as long as the file's steps; decode in a batch of `max_num_seqs`.

    Prefill does not slow decode down: both go at their profile's pace, also on an engine that does both.
    Use it from one event loop.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        pace: Pace,
        cache: PrefixCache,
        endpoints: Endpoints,
        vocabulary: Sequence[int],
    ) -> None:
        self.name = name
        self.cache = cache
        self.endpoints = endpoints
        self.vocabulary = vocabulary
        self.clock = DecodeClock(pace.step_s)
        self.counts = EngineCounts()
        self._pace = pace
        self._chunk_tokens = config.max_num_batched_tokens
        self._loop = asyncio.get_running_loop()
        self._prefill_turn = asyncio.Lock()
        self._prefill_free_s = 0.0
        self._stalled_until_s = 0.0
        self._seats = asyncio.Semaphore(config.max_num_seqs)

    @asynccontextmanager
    async def generate(self, work: Work) -> AsyncIterator[GeneratedAnswer]:
        """Prefill or load `work`'s prompt, then decode: entered when the first token is about to come.

        Raises:
            RoomError: the prompt and its answer can never fit into the cache.
        """
        roles = TransferRoles.of(work, self.name, self.endpoints.key)
        for ticket in roles.unwanted:
            self.endpoints.drop(ticket, "the request has another prompt")
        chain = TokenChain(work.token_ids, self.cache.layout.block_tokens, work.adapter)
        self.counts.prefix_queries += len(chain)
        self.counts.waiting += 1
        try:
            async with AsyncExitStack() as held:
                state = await self._prepare(work, chain, roles, held)
                if work.max_tokens > 1 or state.done_tokens < len(work.token_ids):
                    await held.enter_async_context(self._seats)
                    self.clock.change_batch(work.samples)
                    held.callback(self.clock.change_batch, -work.samples)
                with self._running():
                    yield GeneratedAnswer(self, work, state)
            self._count_finished(work)
        except BaseException:
            self.counts.cancelled += 1
            if roles.load is not None:
                self.endpoints.drop(roles.load, "the request ended before its load")
            raise
        finally:
            self.counts.waiting -= 1

    def store_decoded(self, state: _RequestState, computed_tokens: int) -> None:
        """Decoding has filled a block."""
        state.context.compute(self.cache.layout.groups, state.done_tokens, computed_tokens)
        self.cache.store(state.context, state.lease, state.stored_tokens, computed_tokens, states=True)
        state.done_tokens = state.stored_tokens = computed_tokens

    def stall(self, seconds: float) -> None:
        """Neither prefill nor decode goes on for so long, while every port answers: as when a GPU hangs."""
        self._stalled_until_s = max(self._stalled_until_s, self._loop.time() + seconds)
        self.clock.hold(seconds)

    async def close(self) -> None:
        """Stop the clock; requests that still run never end by themselves."""
        self.clock.close()
        await self.endpoints.close()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.counts.running += 1
        self.counts.waiting -= 1
        try:
            yield
        finally:
            self.counts.running -= 1
            self.counts.waiting += 1

    async def _prepare(
        self, work: Work, chain: TokenChain, roles: TransferRoles, held: AsyncExitStack
    ) -> _RequestState:
        """Load all but the last token of the prompt into a context, or prefill all of it."""
        load = roles.load if roles.load is not None and await self._await_arrival(roles.load) else None
        is_whole = load is not None and self.endpoints.tokens_of(load) == len(chain) - 1
        if load is not None and is_whole and roles.send is None:
            state = await self._admit(work, chain, held)
            if await self._load(load, state):
                if work.cached_tokens is not None:
                    state.cached_tokens = work.cached_tokens
                return state
            # Never wait for the turn with pages in hand: who has the turn may wait for pages.
            state.lease.close()
            load = None
        queued = self._prefill_turn.locked()
        async with self._prefill_turn:
            state = await self._admit(work, chain, held)
            if load is not None and not await self._load(load, state):
                state.lease.close()
                state = await self._admit(work, chain, held)
            if not state.done_tokens:
                self._reuse(state, len(chain) - 1)
            elif load is not None:
                # The rest of a prompt whose beginning another engine held.
                state.cached_tokens = state.done_tokens
            with self._running():
                await self._prefill(state, roles.send, queued=queued)
        return state

    async def _admit(self, work: Work, chain: TokenChain, held: AsyncExitStack) -> _RequestState:
        """An empty context, once there is room for prompt and answer."""
        pages = self.cache.layout.pages_for(len(chain) + work.max_tokens)
        lease = await self.cache.pool.lease(pages)
        held.callback(lease.close)
        return _RequestState(Context(chain, work.salt, work.adapter), lease)

    async def _await_arrival(self, ticket: Ticket) -> bool:
        problem = await self.endpoints.arrival(ticket)
        if problem:
            logger.warning("%s prefills locally: %s", self.name, problem)
            self.endpoints.counts["loads_failed"] += 1
        return not problem

    async def _load(self, ticket: Ticket, state: _RequestState) -> bool:
        """Make a transfer part of the context, on top of the full-attention blocks that are held.

        False if it can't be; the state must not be used then.
        """
        context, cache = state.context, self.cache
        hit = cache.hit(context, len(context.chain) - 1)
        held_tokens = hit.usable_tokens if cache.layout.has_window else hit.attention_tokens
        num_tokens = self.endpoints.tokens_of(ticket)
        if not ticket.skip_tokens <= held_tokens < num_tokens:
            self.endpoints.drop(ticket, f"{held_tokens} tokens are held, {ticket.skip_tokens} were skipped")
            return False
        cache.reuse(context, state.lease, held_tokens, attention_only=True)
        taint = context.taint
        if not await self.endpoints.load(ticket, context, held_tokens, num_tokens):
            self.endpoints.counts["loads_failed"] += 1
            return False
        self.endpoints.counts["loads_completed"] += num_tokens == ticket.num_tokens
        self.endpoints.counts["loads_resumed"] += num_tokens < ticket.num_tokens
        self.counts.damaged_loads += context.taint != taint
        self.counts.prefix_hits += held_tokens
        state.done_tokens, state.cached_tokens = num_tokens, held_tokens
        cache.store(context, state.lease, held_tokens, num_tokens, states=False)
        state.stored_tokens = num_tokens
        return True

    def _reuse(self, state: _RequestState, limit_tokens: int) -> None:
        """Make what is held of the first `limit_tokens` tokens part of the context."""
        tokens = self.cache.hit(state.context, limit_tokens).usable_tokens
        self.cache.reuse(state.context, state.lease, tokens, attention_only=False)
        state.done_tokens = state.stored_tokens = state.cached_tokens = tokens
        self.counts.prefix_hits += tokens

    async def _prefill(self, state: _RequestState, send: tuple[Ticket, str] | None, *, queued: bool) -> None:
        """Compute the rest of the prompt, chunk by chunk; the caller has the turn."""
        context, start_tokens = state.context, state.done_tokens
        sending = None
        if send is not None:
            sending = self.endpoints.open(send[0], send[1], context, state.cached_tokens)
        # By schedule, not by the wake-ups: their lateness must not add up over chunks and requests.
        now_s = self._loop.time()
        on_time = queued and now_s - self._prefill_free_s < _LATENESS_S
        at_s = begin_s = self._prefill_free_s if on_time else now_s
        try:
            for end_tokens in self._chunk_ends(start_tokens, len(context.chain)):
                context.compute(self.cache.layout.groups, state.done_tokens, end_tokens)
                from_s, at_s = at_s, begin_s + self._pace.prefill_s(end_tokens - start_tokens, start_tokens)
                await self._compute_chunk(sending, end_tokens, from_s, at_s)
                self.cache.store(context, state.lease, state.stored_tokens, end_tokens, states=True)
                self.counts.prefilled_tokens += end_tokens - state.done_tokens
                state.done_tokens = state.stored_tokens = end_tokens
        except BaseException:
            if sending is not None:
                sending.transfer.abort("the prefill was cancelled")
            raise
        finally:
            self._prefill_free_s = min(at_s, self._loop.time())

    async def _compute_chunk(
        self, sending: PrefillSend | None, end_tokens: int, from_s: float, until_s: float
    ) -> None:
        layers = len(self.cache.layout.full.layers) if sending is not None else 1
        slices = max(1, min(layers, int((until_s - from_s) / _LAYER_SLICE_S)))
        for done in range(1, slices + 1):
            await asyncio.sleep(from_s + (until_s - from_s) * done / slices - self._loop.time())
            while (left_s := self._stalled_until_s - self._loop.time()) > 0:
                await asyncio.sleep(left_s)
            if sending is not None:
                first, last = layers * (done - 1) // slices, layers * done // slices
                sending.layers_done(range(first, last), end_tokens)
        if sending is not None:
            sending.chunk_done(end_tokens)
            self.endpoints.put_checkpoint(sending, end_tokens)

    def _chunk_ends(self, start_tokens: int, num_tokens: int) -> list[int]:
        """Chunks end on block boundaries, as vLLM cuts them for linear state; the last boundary is one of them."""
        block_tokens = self.cache.layout.block_tokens
        step = max(self._chunk_tokens // block_tokens, 1) * block_tokens
        boundary = num_tokens // block_tokens * block_tokens
        ends = []
        end = start_tokens // block_tokens * block_tokens
        while end < boundary:
            end = min(end + step, boundary)
            ends.append(end)
        return [*ends, num_tokens] if boundary < num_tokens else ends

    def _count_finished(self, work: Work) -> None:
        self.counts.finished += 1
        self.counts.prompt_tokens += len(work.token_ids)
        self.counts.generated_tokens += work.max_tokens * work.samples
