"""KVCache of jobs on its way: streams that follow the chunks of a prefill, and cached prefixes that go before it."""

from collections.abc import Callable, Iterator, Mapping

from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.columns import Columns
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Engine, Job
from prfaas.lab.simulator.monitored_link import MonitoredLink
from prfaas.lab.simulator.pools import MachinePools
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


class CacheMoves:
    """Carries the cache transfers of decisions out: instance to instance, or pool to pool."""

    def __init__(
        self,
        events: Events,
        engines: Mapping[str, Engine],
        links: Mapping[tuple[str, str], MonitoredLink],
        pools: MachinePools | None,
        columns: Columns,
        is_here: Callable[[Job], None],
    ) -> None:
        """`is_here` is called with a job when its prefix has come to its prefill instance, or to that one's pool."""
        self._events = events
        self._engines = engines
        self._links = links
        self._pools = pools
        self._columns = columns
        self._is_here = is_here

    def begin(self, job: Job) -> None:
        """Move the prefix that the job's decision wants."""
        moved = job.decision.cache_transfer
        assert moved is not None
        target, now_s = job.engine.cluster.name, self._events.now_s
        begins_s = now_s
        if moved.from_pool:
            assert self._pools is not None
            source = self._pools.source_cluster(moved)
            if source == target:
                self._events.at(self._pools.read(job, moved, now_s), self._is_here, job)
                return
            self._pools.send(job, moved)
        else:
            holder = self._engines[moved.source]
            source = holder.cluster.name
            # What an instance sends it has computed the last token of, behind the prefills that it had.
            begins_s = max(now_s, holder.view.busy_until_s)
        job.prefix_link = self._links[source, target]
        if begins_s > now_s:
            self._events.at(begins_s, self._send, job)
        else:
            self._send(job)

    def _send(self, job: Job) -> None:
        moved, link = job.decision.cache_transfer, job.prefix_link
        if job.is_void or moved is None or link is None:
            return
        nbytes = (
            moved.kv_bytes
            if moved.from_pool
            else link.kv.total_bytes(moved.reusable_tokens, moved.skip_tokens)
        )
        self._columns.link_bytes[job.number] += nbytes
        job.transfer = link.fluid.send(
            (moved.source, job.engine.name), nbytes, self._is_here, job, background=True
        )
