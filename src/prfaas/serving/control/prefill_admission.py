"""Whose prefill is next: requests that wait here until an instance of their cluster is free."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from prfaas.core.prefix import PromptChains
from prfaas.core.scheduling import Decision
from prfaas.core.scheduling.prefill_pool import PrefillPool
from prfaas.core.scheduling.view import prefillers
from prfaas.serving.control.cluster_state import ClusterState

Turn = asyncio.Future[str | None]


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
    ) -> None:
        """`reusable_at(chains, instance)`: tokens of a prompt that a prefill there need not compute."""
        self._cluster_state = cluster_state
        self._batch_tokens = batch_tokens
        self._reusable_at = reusable_at
        self._pools: dict[str, PrefillPool[Turn]] = {
            name: PrefillPool() for name in cluster_state.view.clusters
        }
        self._at_work = dict.fromkeys(cluster_state.names, 0)
        # Uncached tokens of those that wait.
        self._tokens: dict[Turn, int] = {}

    @asynccontextmanager
    async def admit(self, decision: Decision, chains: PromptChains) -> AsyncIterator[Decision]:
        """Wait for an instance, and have it for the prefill. Yields the decision with the one that it became.

        Decisions without an urgency don't wait, nor does anybody where no instance could come free any more: the
        request then fails as it would have without a pool, and goes another way.
        """
        if decision.urgency_s is None:
            yield decision
            return
        name = await self._granted(decision)
        tokens = decision.prefill_tokens
        if name != decision.prefill:
            reusable = min(self._reusable_at(chains, name), chains.num_tokens - 1)
            decision = replace(decision, prefill=name, prefill_tokens=chains.num_tokens - reusable)
        try:
            yield decision
        finally:
            self._at_work[name] -= tokens
            self._serve(name)

    def changed(self, name: str) -> None:
        """An instance came, went, or has other roles."""
        cluster = self._cluster_state.instance(name).cluster
        instances = self._cluster_state.view.clusters[cluster].instances
        able = prefillers(instances, ())
        if self._cluster_state.instance(name) not in able:
            self._pools[cluster].release(name)
        if not able:
            self._give_up(cluster)
        for each in instances:
            self._serve(each.name)

    def waiting(self, cluster: str) -> int:
        """Prefills that wait for any instance of a cluster."""
        return len(self._pools[cluster])

    async def _granted(self, decision: Decision) -> str:
        assert decision.urgency_s is not None
        view = self._cluster_state.view
        cluster = view.clusters[self._cluster_state.instance(decision.prefill).cluster]
        pool = self._pools[cluster.name]
        turn: Turn = asyncio.get_running_loop().create_future()
        work_s = cluster.prefill_s(decision.prefill_tokens)
        pool.offer(turn, decision.urgency_s, work_s, decision.prefill if decision.is_bound else None)
        self._tokens[turn] = decision.prefill_tokens
        cluster.waiting_s = pool.waiting_s
        for each in cluster.instances:
            self._serve(each.name)
        try:
            # What the pool holds is on its way to its decode instance and its link all the same.
            with self._cluster_state.awaiting_prefill(decision):
                name = await turn
        except BaseException:
            if not pool.withdraw(turn) and turn.done() and not turn.cancelled():
                self._returned(turn, decision)
            raise
        finally:
            self._tokens.pop(turn, None)
            cluster.waiting_s = pool.waiting_s
        if name is None:
            name = decision.prefill
            self._at_work[name] += decision.prefill_tokens
        return name

    def _returned(self, turn: Turn, decision: Decision) -> None:
        """A turn came in the moment in which its request went away."""
        name = turn.result()
        if name is not None:
            self._at_work[name] -= decision.prefill_tokens
            self._serve(name)

    def _serve(self, name: str) -> None:
        """Give an instance what it can take."""
        instance = self._cluster_state.instance(name)
        pool = self._pools[instance.cluster]
        while len(pool) and self._is_free(name) and prefillers((instance,), ()):
            turn = pool.take(name)
            if turn is None:
                break
            self._at_work[name] += self._tokens[turn]
            turn.set_result(name)
        self._cluster_state.view.clusters[instance.cluster].waiting_s = pool.waiting_s

    def _give_up(self, cluster: str) -> None:
        for turn in _drained(self._pools[cluster]):
            turn.set_result(None)

    def _is_free(self, name: str) -> bool:
        return self._at_work[name] < self._batch_tokens


def _drained(pool: PrefillPool[Turn]) -> Iterable[Turn]:
    while (turn := pool.take("")) is not None:
        yield turn
