"""Worlds whose prefills differ from the plain one's: in chunks, beside answers, and slower than their profiles."""

from collections.abc import Iterator

import numpy as np

from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.instance import Engine, Job
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.send_queue import FluidTransfer
from prfaas.lab.simulator.world import World

_Rates = Iterator[tuple[float, float]]
"""Seconds, and bits per second for so long."""


class ChunkedWorld(World):
    """A `World` in which streams follow the chunks of their prefill.

    The first chunks of a long prompt attend to few tokens, so they take less time than the last ones and their KV needs
    more of a link. What the engine had cached of the prompt leaves with the first one.
    """

    def _start(self, engine: Engine, job: Job) -> None:
        super()._start(engine, job)
        if engine.chunk_tokens and job.transfer is not None:
            self._go_on((job, self._rates(engine, job, job.transfer)))

    def _go_on(self, stream: tuple[Job, _Rates]) -> None:
        job, rates = stream
        link, transfer = job.link, job.transfer
        if link is None or transfer is None:
            return
        lasts_s, bits_per_s = next(rates, (0.0, 0.0))
        if lasts_s and link.fluid.produce_at(transfer, bits_per_s):
            self.events.at(self.events.now_s + lasts_s, self._go_on, stream)

    def _rates(self, engine: Engine, job: Job, transfer: FluidTransfer) -> _Rates:
        """Of one chunk after another."""
        skip_tokens, prefix_tokens = job.decision.skip_tokens, job.tokens - job.computed_tokens
        sent_tokens, link = job.tokens - 1 - skip_tokens, job.link
        if sent_tokens <= 0 or not job.computed_tokens or link is None:
            return
        window_bits = BITS_PER_BYTE * link.kv.window_bytes(job.tokens - 1, job.tokens - 1)
        token_bits = (transfer.total_bits - transfer.last_bits - window_bits) / sent_tokens
        pace = job.service_s / engine.after_prefix_s(job.computed_tokens, prefix_tokens)
        before_s, unsent_from, sent_bits = 0.0, skip_tokens, 0.0
        for begun in range(0, job.computed_tokens, engine.chunk_tokens):
            done = min(begun + engine.chunk_tokens, job.computed_tokens)
            at_s = engine.after_prefix_s(done, prefix_tokens) * pace
            end = min(prefix_tokens + done, job.tokens - 1)
            if at_s > before_s and end > unsent_from:
                # What windows hold of the prompt so far.
                held_bits = float(BITS_PER_BYTE * link.kv.window_bytes(job.tokens - 1, end))
                bits = token_bits * (end - unsent_from) + held_bits - sent_bits
                yield at_s - before_s, bits / (at_s - before_s)
                before_s, unsent_from, sent_bits = at_s, end, held_bits


class MixedWorld(ChunkedWorld):
    """A `World` with what a prefill by a decode instance and the answers there cost each other.

    As in vLLM's chunked prefill, a step has a chunk of the prompt and a token of every answer. So a token takes a chunk
    longer meanwhile, a chunk takes a decode step longer, and who comes waits for the end of the step under way. Ranks
    of a data-parallel group take their steps together: each as long as the longest.
    """

    def _start(self, engine: Engine, job: Job) -> None:
        clock, step_s = engine.clock, engine.step_s
        if not engine.mixed_tokens or clock is None or step_s is None:
            super()._start(engine, job)
            return
        chunks = max(job.computed_tokens / engine.mixed_tokens, 1.0)
        chunk_s = job.service_s / chunks
        batch = max(each.clock.batch for each in self._ranks_with(engine) if each.clock is not None)
        if batch:
            job.service_s += chunks * step_s(batch)
        super()._start(engine, job)
        engine.chunk_s, engine.chunked_s = chunk_s, self.events.now_s
        self._lengthen_steps(engine)

    def _prefilled(self, job: Job) -> None:
        super()._prefilled(job)
        engine = job.engine
        if engine.chunk_s and not engine.at_work and engine.clock is not None:
            engine.chunk_s = 0.0
            self._lengthen_steps(engine)

    def _ranks_with(self, engine: Engine) -> list[Engine]:
        return [self.engines[name] for name in engine.view.group] or [engine]

    def _lengthen_steps(self, engine: Engine) -> None:
        ranks = self._ranks_with(engine)
        longest_s = max(each.chunk_s for each in ranks)
        for each in ranks:
            if each.clock is not None:
                each.clock.lengthen(longest_s)


class SlowedWorld(MixedWorld):
    """A `MixedWorld` whose prefills take as much longer as the scenario says; policies expect what profiles say."""

    def _start(self, engine: Engine, job: Job) -> None:
        slowdown = self.scenario.slowdown
        if slowdown is not None:
            job.service_s = slowdown.stretched_s(self.events.now_s, job.service_s)
        super()._start(engine, job)


def world_of(scenario: Scenario, rng: np.random.Generator, block_tokens: int) -> World:
    """The empty world of a scenario; `rng` is for the links' capacities."""
    if scenario.slowdown is not None:
        return SlowedWorld(scenario, rng, block_tokens)
    if any(cluster.mixed_tokens for cluster in scenario.clusters):
        return MixedWorld(scenario, rng, block_tokens)
    if any(cluster.chunk_tokens for cluster in scenario.clusters):
        return ChunkedWorld(scenario, rng, block_tokens)
    return World(scenario, rng, block_tokens)
