"""Cached prefixes that go to where a prompt is prefilled, before that begins."""

from collections.abc import Callable, Mapping

from prfaas.lab.simulator.columns import Columns
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Engine, Job
from prfaas.lab.simulator.monitored_link import MonitoredLink
from prfaas.lab.simulator.pools import MachinePools


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
