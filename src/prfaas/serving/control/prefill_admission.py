"""Admission of prefills: requests wait here until an instance of their cluster is free."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from prfaas.core.prefix import PromptChains
from prfaas.core.scheduling import Decision
from prfaas.core.scheduling.prefill_pool import PrefillPool
from prfaas.serving.control.cluster_state import Clock, ClusterState

Admission = asyncio.Future[str | None]


class PrefillAdmission:
    """One pool of waiting prefills per cluster, for policies that say how urgent each is.

    An instance is free while fewer than `batch_tokens` uncached tokens are at work there: what its engine takes
    into one step anyway. So short prompts share steps, and a long one has its instance for itself. Belongs to the
    event loop's thread.
    """

    def __init__(
        self,
        cluster_state: ClusterState,
        *,
        batch_tokens: int,
        reusable_at: Callable[[PromptChains, str], int],
        clock: Clock,
    ) -> None:
        """`reusable_at(chains, instance)`: tokens of a prompt that a prefill there need not compute."""
        self._clock = clock
        self._cluster_state = cluster_state
        self._batch_tokens = batch_tokens
        self._reusable_at = reusable_at
        self._pools: dict[str, PrefillPool[Admission]] = {
            name: PrefillPool(waits=cluster.waits) for name, cluster in cluster_state.view.clusters.items()
        }
        # Uncached tokens by instance.
        self._at_work: Counter[str] = Counter()
        # Uncached tokens of those that wait.
        self._tokens: dict[Admission, int] = {}

    @asynccontextmanager
    async def admit(self, decision: Decision, chains: PromptChains) -> AsyncIterator[Decision]:
        """Wait for an instance, and have it for the prefill. Yields the decision with the one that it became.

        Decisions without an urgency don't wait. Nor do others where no instance of the cluster can prefill any more:
        the request then fails as it would have without a pool, and is routed again.
        """
        if decision.urgency_s is None:
            yield decision
            return
        name = await self._wait_for_instance(decision)
        tokens = decision.prefill_tokens
        if name != decision.prefill:
            reusable = min(self._reusable_at(chains, name), chains.num_tokens - 1)
            decision = replace(decision, prefill=name, prefill_tokens=chains.num_tokens - reusable)
        try:
            yield decision
        finally:
            self._at_work[name] -= tokens
            self._serve(name, self._clock())

    def changed(self, name: str) -> None:
        """An instance came, went, or has other roles."""
        cluster = self._cluster_state.instance(name).cluster
        instances = self._cluster_state.view.clusters[cluster].instances
        if not self._cluster_state.instance(name).takes_prefills:
            self._pools[cluster].release(name)
        if not any(each.takes_prefills for each in instances):
            self._give_up(cluster)
        now_s = self._clock()
        for each in instances:
            self._serve(each.name, now_s)

    def is_working(self, name: str) -> bool:
        """Whether an instance has been given a prefill that has not ended."""
        return self._at_work[name] > 0

    def waiting(self, cluster: str) -> int:
        """Prefills that wait for any instance of a cluster."""
        return len(self._pools[cluster])

    async def _wait_for_instance(self, decision: Decision) -> str:
        assert decision.urgency_s is not None
        view = self._cluster_state.view
        cluster = view.clusters[self._cluster_state.instance(decision.prefill).cluster]
        pool = self._pools[cluster.name]
        admission: Admission = asyncio.get_running_loop().create_future()
        work_s = cluster.prefill_s(decision.prefill_tokens)
        # Another instance of the cluster may be one whose KV the decode instance does not take.
        may_send = {
            each.name for each in cluster.instances if (each.name, decision.decode) not in view.blocked
        }
        is_bound = decision.is_bound or len(may_send) < len(cluster.instances)
        only, now_s = decision.prefill if is_bound else None, self._clock()
        pool.offer(admission, decision.urgency_s, work_s, only, now_s=now_s)
        self._tokens[admission] = decision.prefill_tokens
        cluster.waiting_s = pool.waiting_s
        for each in cluster.instances:
            self._serve(each.name, now_s)
        try:
            # What the pool holds is on its way to its decode instance and its link all the same.
            with self._cluster_state.awaiting_prefill(decision):
                name = await admission
        except BaseException:
            if not pool.withdraw(admission) and admission.done() and not admission.cancelled():
                self._give_back(admission, decision)
            raise
        finally:
            self._tokens.pop(admission, None)
            cluster.waiting_s = pool.waiting_s
        if name is None:
            name = decision.prefill
            self._at_work[name] += decision.prefill_tokens
        return name

    def _give_back(self, admission: Admission, decision: Decision) -> None:
        """Give back an instance that was granted just when its request went away."""
        name = admission.result()
        if name is not None:
            self._at_work[name] -= decision.prefill_tokens
            self._serve(name, self._clock())

    def _serve(self, name: str, now_s: float) -> None:
        """Give an instance what it can take."""
        instance = self._cluster_state.instance(name)
        pool = self._pools[instance.cluster]
        while len(pool) and self._is_free(name) and instance.takes_prefills:
            admission = pool.take(name, now_s=now_s)
            if admission is None:
                break
            self._at_work[name] += self._tokens[admission]
            admission.set_result(name)
        self._cluster_state.view.clusters[instance.cluster].waiting_s = pool.waiting_s

    def _give_up(self, cluster: str) -> None:
        for admission in _drained(self._pools[cluster], self._clock()):
            admission.set_result(None)

    def _is_free(self, name: str) -> bool:
        return self._at_work[name] < self._batch_tokens


def _drained(pool: PrefillPool[Admission], now_s: float) -> Iterable[Admission]:
    while (admission := pool.take("", now_s=now_s)) is not None:
        yield admission
