"""One engine that prefills and decodes together: continuous batching with chunked prefill, step by step.

It stands beside the disaggregated world: to compare the parts of the simulator with recorded runs of single engines,
and as the deployment that has no transfer at all. It schedules as vLLM's V1 scheduler does: in every step each running
request decodes one token; what is left of the step's tokens goes to prompts in the order of arrival, the last of which
may be cut; without room for a token, the request that began last starts over.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step, linear in what it does."""

    fixed_s: float
    """Reading the weights, launching."""
    token_s: float
    """Per token, whether of a prompt or decoded."""
    request_s: float
    """Per request that decodes, beyond its token."""
    context_token_s: float
    """Per token of KVCache that decoding reads."""

    def seconds(self, prompt_tokens: int, requests: int, context_tokens: int) -> float:
        """A step that computes `prompt_tokens` of prompts, and decodes for `requests` that hold `context_tokens`."""
        return (
            self.fixed_s
            + self.token_s * (prompt_tokens + requests)
            + self.request_s * requests
            + self.context_token_s * context_tokens
        )


@dataclass(frozen=True, slots=True)
class AggregatedEngine:
    """How the engine schedules, and what its steps take."""

    cost: StepCost
    max_running: int
    """Requests at a time."""
    step_tokens: int
    """Tokens of one step (vLLM's max_num_batched_tokens)."""
    kv_blocks: int | None = None
    """Its memory; None: as much as it takes."""
    block_tokens: int = 16
    schedules_ahead: bool = True
    """What a step does is settled when the step before it begins, so that the device never waits (vLLM's asynchronous
    scheduling). A request that comes to a busy engine then waits for up to two steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What became of the requests; arrays have one entry per request, in seconds."""

    begun_s: FloatArray
    """When its prefill began."""
    first_token_s: FloatArray
    last_token_s: FloatArray
    steps: int
    preemptions: int
    """How often a request started over."""


@dataclass(slots=True)
class _Request:
    index: int
    prompt_tokens: int
    """What to compute before the next token comes: after a preemption the answer so far, too."""
    answer_tokens: int
    computed: int = 0
    offset: int = 0
    """While it decodes in step s, it holds s + offset tokens."""
    end_step: int = 0


def serve(
    engine: AggregatedEngine,
    arrival_s: Sequence[float],
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
) -> Served:
    """Serve requests one after the other on one engine.

    Args:
        engine: How it schedules.
        arrival_s: Ascending times.
        input_tokens: Of each prompt.
        output_tokens: Of each answer, at least 1.

    Raises:
        ValueError: a request that does not fit the engine's memory even alone.
    """
    run = _Batching(engine, arrival_s)
    for index, (prompt, answer) in enumerate(zip(input_tokens, output_tokens, strict=True)):
        blocks = -(-(prompt + answer) // engine.block_tokens)
        if engine.kv_blocks is not None and blocks > engine.kv_blocks:
            raise ValueError(f"request {index} needs {blocks} blocks; the engine has {engine.kv_blocks}")
        run.coming.append(_Request(index, prompt, answer))
    while run.coming or run.waiting or run.running or run.cut is not None:
        run.step()
    return Served(run.begun_s, run.first_token_s, run.last_token_s, run.steps, run.preemptions)


@dataclass(slots=True)
class _Batching:
    engine: AggregatedEngine
    arrival_s: Sequence[float]
    now_s: float = 0.0
    began_s: float = 0.0
    """When the last step began."""
    steps: int = 0
    preemptions: int = 0
    coming: "deque[_Request]" = field(default_factory=deque)
    waiting: "deque[_Request]" = field(default_factory=deque)
    running: "dict[int, _Request]" = field(default_factory=dict)
    """Those that decode, by index, in the order in which they began."""
    cut: _Request | None = None
    """Whose prompt did not fit into the last step."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    context_tokens: int = 0
    blocks_used: int = 0
    growing: list[int] = field(default_factory=list)
    """How many running requests need a new block in steps of each remainder by the block's size."""
    begun_s: FloatArray = field(init=False)
    first_token_s: FloatArray = field(init=False)
    last_token_s: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        self.begun_s, self.first_token_s, self.last_token_s = (np.full(count, np.nan) for _ in range(3))
        self.growing = [0] * self.engine.block_tokens

    def step(self) -> None:
        is_idle = not (self.waiting or self.running or self.cut is not None)
        if is_idle:
            self.now_s = max(self.now_s, self.arrival_s[self.coming[0].index])
        settled_s = self.began_s if self.engine.schedules_ahead and not is_idle else self.now_s
        self.began_s = self.now_s
        while self.coming and self.arrival_s[self.coming[0].index] <= settled_s:
            self.waiting.append(self.coming.popleft())
        self.steps = step = self.steps + 1
        self._make_room()
        decoding, context_tokens = len(self.running), self.context_tokens
        self.blocks_used += self.growing[step % self.engine.block_tokens]
        prompt_tokens, prefilled = self._prefill(self.engine.step_tokens - decoding)
        self.now_s += self.engine.cost.seconds(prompt_tokens, decoding, context_tokens)
        self.context_tokens += decoding
        while self.ends and self.ends[0][0] == step:
            self._end(self.running[heappop(self.ends)[1]])
        for request in prefilled:
            self._decode_from_next(request)

    def _make_room(self) -> None:
        if self.engine.kv_blocks is None:
            return
        place = self.steps % self.engine.block_tokens
        while self.blocks_used + self.growing[place] > self.engine.kv_blocks:
            self._preempt()

    def _preempt(self) -> None:
        """The one that began last gives its memory back, and waits before all others."""
        self.preemptions += 1
        if self.cut is not None:
            request, self.cut = self.cut, None
            self.blocks_used -= self._blocks(request.prompt_tokens)
        else:
            request = self.running[next(reversed(self.running))]
            held = self._leave(request)
            remaining = request.end_step - self.steps + 1
            # The newest token was not computed yet, so it comes with the new prompt.
            request.prompt_tokens, request.answer_tokens = held + 1, remaining
            self.ends = [entry for entry in self.ends if entry[1] != request.index]
            self.ends.sort()
        request.computed = 0
        self.waiting.appendleft(request)

    def _prefill(self, tokens: int) -> tuple[int, list[_Request]]:
        """Up to so many tokens of prompts; how many it were, and the requests that are through."""
        left = tokens
        done: list[_Request] = []
        while left > 0:
            request = self.cut
            if request is None:
                if not self.waiting or len(self.running) + len(done) >= self.engine.max_running:
                    break
                request = self.waiting[0]
                blocks = self._blocks(request.prompt_tokens)
                if self.engine.kv_blocks is not None and self.blocks_used + blocks > self.engine.kv_blocks:
                    break
                self.waiting.popleft()
                self.blocks_used += blocks
                if np.isnan(self.begun_s[request.index]):
                    self.begun_s[request.index] = self.now_s
            chunk = min(request.prompt_tokens - request.computed, left)
            request.computed += chunk
            left -= chunk
            self.cut = request if request.computed < request.prompt_tokens else None
            if self.cut is None:
                done.append(request)
        return tokens - left, done

    def _decode_from_next(self, request: _Request) -> None:
        """Its first token came with the step that is over now."""
        if np.isnan(self.first_token_s[request.index]):
            self.first_token_s[request.index] = self.now_s
        request.answer_tokens -= 1
        # In the next step it computes the token that just came.
        request.offset = request.prompt_tokens - self.steps
        self.running[request.index] = request
        self.context_tokens += request.prompt_tokens
        self.growing[self._growth(request)] += 1
        request.end_step = self.steps + request.answer_tokens
        if request.answer_tokens == 0:
            self._end(request)
        else:
            heappush(self.ends, (request.end_step, request.index))

    def _end(self, request: _Request) -> None:
        self.last_token_s[request.index] = self.now_s
        self._leave(request, after_step=True)

    def _leave(self, request: _Request, *, after_step: bool = False) -> int:
        """Out of the batch; how many tokens of KVCache it held."""
        del self.running[request.index]
        held = self.steps + request.offset - (0 if after_step else 1)
        self.context_tokens -= held
        self.blocks_used -= self._blocks(held)
        self.growing[self._growth(request)] -= 1
        return held

    def _growth(self, request: _Request) -> int:
        """The remainder of the steps in which its new token opens a block: where it then holds 1 mod the block."""
        return (1 - request.offset) % self.engine.block_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.engine.block_tokens)
