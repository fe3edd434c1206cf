"""A simulated deployment whose decode instances compute prompts and write answers in the same steps."""

from prfaas.lab.simulator.chunked_world import ChunkedWorld
from prfaas.lab.simulator.instance import Engine, Job


class MixedWorld(ChunkedWorld):
    """A `World` with what a prefill by a decode instance and the answers there cost each other.

    As in vLLM's chunked prefill, a step has a chunk of the prompt and a token of every answer. So a token takes a chunk
    longer meanwhile, a chunk takes a decode step longer, and who comes waits for the end of the step under way.
    """

    def _start(self, engine: Engine, job: Job) -> None:
        clock, step_s = engine.clock, engine.step_s
        if not engine.mixed_tokens or clock is None or step_s is None:
            super()._start(engine, job)
            return
        chunks = max(job.computed_tokens / engine.mixed_tokens, 1.0)
        chunk_s = job.service_s / chunks
        if clock.batch:
            job.service_s += chunks * step_s(clock.batch)
        super()._start(engine, job)
        engine.chunk_s, engine.chunked_s = chunk_s, self.events.now_s
        clock.lengthen(chunk_s)

    def _prefilled(self, job: Job) -> None:
        super()._prefilled(job)
        engine = job.engine
        if engine.chunk_s and not engine.at_work and engine.clock is not None:
            engine.chunk_s = 0.0
            engine.clock.lengthen(0.0)
