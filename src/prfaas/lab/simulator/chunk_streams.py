"""Streams that follow the chunks of their prefill, in place of one even rate."""

from collections.abc import Iterator

from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Job
from prfaas.lab.simulator.send_queue import FluidTransfer

_Rates = Iterator[tuple[float, float]]
"""Seconds, and bits per second for so long."""


class ChunkStreams:
    """Sets the rates of streams whose prefills run in chunks.

    The first chunks of a long prompt attend to few tokens, so they take less time than the last ones and their KV needs
    more of a link. What the engine had cached of the prompt leaves with the first one.
    """

    def __init__(self, events: Events) -> None:
        self._events = events

    def begin(self, job: Job) -> None:
        """A job's prefill has begun, and its stream if it has one."""
        if job.transfer is not None:
            self._go_on((job, self._rates(job, job.transfer)))

    def _go_on(self, stream: tuple[Job, _Rates]) -> None:
        job, rates = stream
        link, transfer = job.link, job.transfer
        if link is None or transfer is None:
            return
        lasts_s, bits_per_s = next(rates, (0.0, 0.0))
        if lasts_s and link.fluid.produce_at(transfer, bits_per_s):
            self._events.at(self._events.now_s + lasts_s, self._go_on, stream)

    def _rates(self, job: Job, transfer: FluidTransfer) -> _Rates:
        """Of one chunk after another."""
        engine = job.engine
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
