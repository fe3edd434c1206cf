"""One simulated instance, and the requests that it works on: its prefill queue and its decode batch."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.prefill_pool import PrefillPool
from prfaas.core.scheduling.view import ClusterView, InstanceView
from prfaas.lab.simulator.machine_pool import LoadedBytes
from prfaas.lab.simulator.monitored_link import MonitoredLink
from prfaas.lab.simulator.send_queue import FluidTransfer
from prfaas.lab.simulator.token_clock import TokenClock


class JobStage(IntEnum):
    """The event that a job waits for."""

    MOVING = 0
    """Its prefix, which comes from another cluster."""
    QUEUED = 1
    """Its instance."""
    POOLED = 2
    """Any instance of its cluster."""
    PREFILLING = 3
    """The end of its prefill."""
    SHARING = 4
    """The end of its last step, which the next prompts fill up."""
    SENDING = 5
    """The rest of its KV."""
    DECODING = 6
    """The end of its answer."""


_QUEUED = JobStage.QUEUED  # reading a member of an enum takes as long as a function call


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """One attempt to serve a request."""

    number: int
    """Counts arrivals, from 0."""
    arrival_s: float
    tokens: int
    """What must be in the KV cache before decoding; more than the prompt if an answer was cut off."""
    left_tokens: int
    """Of the answer."""
    blocks: list[int]
    """Of the prompt; empty: no other prompt begins alike."""
    stage: JobStage = field(init=False, default=_QUEUED)
    has_first: bool = field(init=False, default=False)
    """The client has its first token, or will have it on its way back from the prefill."""
    decision: Decision = field(init=False)
    computed_tokens: int = field(init=False)
    """What its prefill computes."""
    engine: "Engine" = field(init=False)
    """Where it prefills."""
    target: "Engine" = field(init=False)
    """Where it decodes."""
    service_s: float = field(init=False)
    """Seconds of its prefill, and of `load_s` before it."""
    queued_s: float = field(init=False)
    """Since when it waits for its engine alone."""
    early_tokens: int = field(init=False, default=0)
    """Of what its prefill computes: what filled up the steps of prompts before it."""
    step_end_s: float = field(init=False)
    """When the step ended in which the last of its tokens was one of those."""
    slot_since_s: float = field(init=False)
    """Since when it has its decode slot."""
    own_tokens: int = field(init=False)
    """What its prefill instance itself holds; known where there are pools."""
    reused_tokens: int = field(init=False)
    """What is not computed; known where there are pools."""
    load: LoadedBytes | None = field(init=False, default=None)
    """What it loads from the pool of its machine."""
    load_s: float = field(init=False, default=0.0)
    """What that takes if nothing else loads there."""
    link: MonitoredLink | None = field(init=False, default=None)
    """Between the two; None inside a cluster."""
    promised_bytes: int = field(init=False, default=0)
    """What was promised to that link."""
    every_tokens: int = field(init=False, default=0)
    """What its prefill computes between two checkpoints; 0: it sends none."""
    checkpoint_bytes: int = field(init=False, default=0)
    """Of all its checkpoints, which come on top of what was promised."""
    prefix_link: MonitoredLink | None = field(init=False, default=None)
    """On which its prefix comes."""
    transfer: FluidTransfer | None = field(init=False, default=None)
    """Under way, on either link."""
    is_void: bool = field(init=False, default=False)
    """Given up; another attempt took its place."""
    is_lost: bool = field(init=False, default=False)
    """Its prefill was lost with its instance."""

    def leave_link(self, now_s: float) -> None:
        """Nothing more of it is sent."""
        if self.transfer is not None:
            link = self.link if self.prefix_link is None else self.prefix_link
            assert link is not None
            link.fluid.cancel(self.transfer)
        if self.link is not None:
            self.link.settle(self.promised_bytes, now_s)

    @property
    def is_at_prefill(self) -> bool:
        """True while it needs its prefill instance: until all KV has left it."""
        return self.stage is not JobStage.DECODING and self.stage is not JobStage.POOLED


@dataclass(slots=True, eq=False, repr=False)
class Engine:
    """One instance. Its view is what policies read of it."""

    view: InstanceView
    cluster: ClusterView
    pool: PrefillPool[Job]
    """What any instance of its cluster may do."""
    clock: TokenClock | None
    """The decode batch; None where an instance can't decode."""
    step_s: Callable[[int], float] | None
    """Seconds of a decode step over the batch."""
    chunk_tokens: int = 0
    """Of a step, where the next prompts fill up what a prompt leaves of its last ones; 0: they don't."""
    block_tokens: int = 1
    """A step takes so many tokens of a prompt, or twice, three times as many, before the prompt's last full block."""
    mixed_tokens: int = 0
    """Of a prompt, computed with each step of the answers that are written here; 0: answers go on undisturbed."""
    number: int = 0
    """Counts the deployment's instances, from 0."""
    at_work: int = field(init=False, default=0)
    """Prefills that have begun and not ended: none or one."""
    free_at_s: float = field(init=False, default=0.0)
    """When that ends."""
    leaves_s: float = field(init=False, default=math.inf)
    """When it is taken away, where it has notice; else infinite."""
    chunk_s: float = field(init=False, default=0.0)
    """What so many of the present prompt take; 0 without `mixed_tokens`."""
    chunked_s: float = field(init=False, default=0.0)
    """When the first of its chunks began."""
    queue: deque[Job] = field(init=False, default_factory=deque)
    """Waits for this instance alone, in the order of arrival."""
    waiting: int = field(init=False, default=0)
    """Prefills that only this instance may do and that haven't begun: of its queue, bound ones of the pool, and those
    whose prefix is on its way."""
    waiting_s: float = field(init=False, default=0.0)
    """Seconds of their work."""
    prefilled_s: float = field(init=False, default=0.0)
    """Seconds of prefill begun so far."""
    name: str = field(init=False)
    after_prefix_s: Callable[[float, float], float] = field(init=False)
    ranks: "list[Engine]" = field(init=False)
    """Those of its data-parallel group, which take their steps together; itself alone where it is in none."""

    def __post_init__(self) -> None:
        self.name = self.view.name
        self.after_prefix_s = self.cluster.after_prefix_s
        self.ranks = [self]

    def accept(self, service_s: float, now_s: float) -> None:
        """Count work that will wait here."""
        self.waiting += 1
        self.waiting_s += service_s
        busy_until_s = self.view.busy_until_s
        self.view.busy_until_s = (busy_until_s if busy_until_s > now_s else now_s) + service_s

    def withdraw(self, service_s: float, now_s: float) -> None:
        """Take back work that waited here and won't be done."""
        self.take(service_s)
        self.view.busy_until_s = max(self.view.busy_until_s - service_s, now_s)

    def take(self, service_s: float) -> None:
        """Work that waited here waits no more."""
        self.waiting -= 1
        # Where nothing waits, nothing is left of what was rounded.
        self.waiting_s = max(self.waiting_s - service_s, 0.0) if self.waiting else 0.0

    def stop(self, now_s: float) -> None:
        """Its only prefill ends here: it goes elsewhere."""
        self.prefilled_s -= max(self.free_at_s - now_s, 0.0)
        self.at_work -= 1
        self.free_at_s = now_s
        self.view.busy_until_s = now_s + self.waiting_s

    def has_time(self, now_s: float) -> bool:
        """True if the next prefill of its cluster's queue would end before this instance is taken away."""
        if self.leaves_s == math.inf:
            return True
        job = self.pool.next_of(self.name)
        if job is None:
            return True
        return (
            now_s + self.after_prefix_s(job.computed_tokens, job.tokens - job.computed_tokens)
            <= self.leaves_s
        )

    def fill_up(self, job: Job, now_s: float) -> float:
        """Fill up the last steps of `job` with tokens of the prompts that wait here.

        As vLLM's scheduler does it: prompts in turn take of a step what it has left, in whole blocks up to their last
        full one. That one ends a step where a model has states, since a state is kept there.

        Args:
            job: Its last token would be computed now, with none of the prompts behind it.
            now_s: Now.

        Returns:
            Seconds by which its last step ends later.
        """
        own_tokens = job.computed_tokens - job.early_tokens
        if not own_tokens:
            return max(job.step_end_s - now_s, 0.0)
        last = own_tokens % self.block_tokens
        longest = self.chunk_tokens // self.block_tokens * self.block_tokens
        steps = [tokens for tokens in ((own_tokens - last) % longest, last) if tokens]
        token_s = job.service_s / job.computed_tokens
        late_s = sum(_seconds_of(other, other.early_tokens) for other in self.queue)
        left_tokens = sum(steps)
        for tokens in steps:
            filled = self._fill_step(tokens, now_s + late_s - left_tokens * token_s)
            late_s += sum((_seconds_of(other, tokens) for other, tokens in filled), 0.0)
            left_tokens -= tokens
            for other, _ in filled:
                other.step_end_s = now_s + late_s - left_tokens * token_s
        return late_s

    def _fill_step(self, tokens: int, start_s: float) -> list[tuple[Job, int]]:
        """What those that wait when a step starts compute in it beside so many tokens of another prompt."""
        left, block = self.chunk_tokens - tokens, self.block_tokens
        filled: list[tuple[Job, int]] = []
        for other in self.queue:
            full = other.computed_tokens - other.computed_tokens % block - other.early_tokens
            rest = other.computed_tokens - other.early_tokens
            taken = min(left, full) // block * block if full else min(left, rest)
            if other.queued_s > start_s or (rest and not taken):
                break
            other.early_tokens += taken
            left -= taken
            if taken:
                filled.append((other, taken))
        return filled

    def share_steps(self, job: Job) -> float:
        """Let a prefill that begins and the answers here cost each other what they do in the same steps.

        As in vLLM's chunked prefill, a step has a chunk of the prompt and a token of every answer. So a token takes a
        chunk longer meanwhile, a chunk takes a decode step longer, and who comes waits for the end of the step under
        way.

        Returns:
            Seconds of a chunk, for `lengthen_steps`; 0 where answers go on undisturbed.
        """
        if not self.mixed_tokens or self.clock is None or self.step_s is None:
            return 0.0
        chunks = max(job.computed_tokens / self.mixed_tokens, 1.0)
        chunk_s = job.service_s / chunks
        batch = max([each.clock.batch for each in self.ranks if each.clock is not None])
        if batch:
            job.service_s += chunks * self.step_s(batch)
        return chunk_s

    def lengthen_steps(self, chunk_s: float, now_s: float) -> None:
        """From now on a step has a chunk that takes so long; 0: none."""
        self.chunk_s, self.chunked_s = chunk_s, now_s
        longest_s = max([each.chunk_s for each in self.ranks])
        for each in self.ranks:
            if each.clock is not None:
                each.clock.lengthen(longest_s)

    def late_s(self, now_s: float) -> tuple[float, float]:
        """The delay of a request that gets its decode slot now, from prompts that are computed here.

        Its token is in the first step that begins behind the present one, and so is a chunk if any is left.

        Returns:
            Seconds by which its next token comes later, and how much of that its slot's clock does not count: the clock
            has all get a token per step from the moment they join.
        """
        if not (self.chunk_s and self.at_work and self.clock is not None and self.step_s is not None):
            return 0.0, 0.0
        step_s = self.chunk_s + self.step_s(max(self.clock.batch, 1))
        rest_s = step_s - (now_s - self.chunked_s) % step_s
        left_s = self.free_at_s - now_s + self.waiting_s
        late_s = rest_s + self.chunk_s if left_s > rest_s else left_s
        return late_s, late_s - self.chunk_s * min(left_s / step_s, 1.0)

    def busy_s(self, now_s: float) -> float:
        """Seconds of prefill done so far."""
        return self.prefilled_s - max(self.free_at_s - now_s, 0.0) if self.at_work else self.prefilled_s


def _seconds_of(job: Job, tokens: int) -> float:
    """Of its prefill, as much as so many tokens of what it computes."""
    return job.service_s * tokens / job.computed_tokens
