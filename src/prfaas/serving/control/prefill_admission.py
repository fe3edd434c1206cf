"""Admission of prefills: requests wait here until an instance of their cluster is free."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from prfaas.core.deployment import Instance
from prfaas.core.prefix.hashing import PromptChains
from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.gateway_share import (
    NOTHING_AT_CLUSTER,
    NOTHING_AT_INSTANCE,
    ClusterShare,
    GatewayShare,
    InstanceShare,
    OtherGateways,
)
from prfaas.core.scheduling.prefill_pool import PrefillPool
from prfaas.core.scheduling.prefill_turns import PATIENCE_S, ServedWork, goes_first
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part

Admission = asyncio.Future[str | None]


class PrefillAdmission(Part):
    """One pool of waiting prefills per cluster, for policies that say how urgent each is.

    An instance is free while fewer than `batch_tokens` uncached tokens are at work there: what its engine takes
    into one step anyway. So short prompts share steps, and a long one has its instance for itself. Belongs to the
    event loop's thread.

    Several gateways share the instances: what the others have at work counts as what this one has (`set_others`), and
    who has had less of a cluster goes first (`core.scheduling.prefill_turns`). What two see free at the same moment
    both take: then an engine's queue has one prefill more for a moment.
    """

    def __init__(
        self,
        cluster_state: ClusterState,
        *,
        batch_tokens: int,
        reusable_at: Callable[[PromptChains, str], int],
    ) -> None:
        """`reusable_at(chains, instance)`: tokens of a prompt that a prefill there need not compute."""
        self._clock = cluster_state.clock
        self._cluster_state = cluster_state
        self._batch_tokens = batch_tokens
        self._reusable_at = reusable_at
        self._pools: dict[str, PrefillPool[Admission]] = {}
        self._served: dict[str, ServedWork] = {}
        for name in cluster_state.view.clusters:
            self._open(name)
        # Uncached tokens by instance.
        self._at_work: Counter[str] = Counter()
        # Uncached tokens of those that wait.
        self._tokens: dict[Admission, int] = {}
        self._others = OtherGateways()
        self._others_total = GatewayShare()
        # Since when an instance has had room that this gateway has left to another one.
        self._left_s: dict[str, float] = {}

    def join(self, instance: Instance) -> None:
        """The first instance of a cluster brings its pool."""
        if instance.cluster not in self._pools:
            self._open(instance.cluster)

    def leave(self, name: str) -> None:
        """The last instance of a cluster takes its pool, for which nothing waits any more."""
        cluster = self._cluster_state.instance(name).cluster
        if len(self._cluster_state.view.clusters[cluster].instances) == 1:
            del self._pools[cluster], self._served[cluster]

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
        leaves = name in self._cluster_state.view.leaves_s
        if leaves or not self._cluster_state.instance(name).takes_prefills:
            self._pools[cluster].release(name)
        if not any(each.takes_prefills for each in instances):
            self._give_up(cluster)
        now_s = self._clock()
        for each in instances:
            self._serve(each.name, now_s)

    def is_working(self, name: str) -> bool:
        """True if an instance has been given a prefill that has not ended."""
        return self._at_work[name] > 0

    def waiting(self, cluster: str) -> int:
        """Prefills of all gateways that wait for any instance of a cluster."""
        return (
            len(self._pools[cluster]) + self._others_total.clusters.get(cluster, NOTHING_AT_CLUSTER).waiting
        )

    def state(self, _now_s: float) -> Json:
        """Who waits."""
        return {"clusters": {name: {"waiting_prefills": self.waiting(name)} for name in self._pools}}

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        """Who waits."""
        for name in self._pools:
            metrics.waiting_prefills.labels(name).set(self.waiting(name))

    def own_share(self) -> GatewayShare:
        """This gateway's waiting and admitted prefills, for the other gateways of a fleet."""
        now_s = self._clock()
        bound = Counter[str]()
        clusters = {}
        for cluster, pool in self._pools.items():
            bound_here = pool.bound()
            bound += bound_here
            waiting = len(pool) - bound_here.total()
            # Rounded, for what is forgotten slowly is no news.
            served_s = round(self._served[cluster].at(now_s), 1)
            clusters[cluster] = ClusterShare(waiting, pool.waiting_s, served_s)
        instances = {
            name: InstanceShare(prefill_tokens=self._at_work[name], waiting=bound[name])
            for name in self._cluster_state.names
            if self._at_work[name] or bound[name]
        }
        return GatewayShare(
            instances=instances,
            clusters={name: share for name, share in clusters.items() if share != NOTHING_AT_CLUSTER},
        )

    def set_others(self, others: OtherGateways) -> None:
        """What the other gateways of a fleet have at work and waiting, from now on. Call it often: room that others
        leave is noticed only here."""
        self._others, self._others_total = others, others.total()
        now_s = self._clock()
        for name in self._cluster_state.names:
            self._serve(name, now_s)
        for cluster in self._pools:
            self._show_waiting(cluster)

    def _open(self, cluster: str) -> None:
        waits = self._cluster_state.view.clusters[cluster].waits
        self._pools[cluster], self._served[cluster] = PrefillPool(waits=waits), ServedWork()

    async def _wait_for_instance(self, decision: Decision) -> str:
        assert decision.urgency_s is not None
        view = self._cluster_state.view
        cluster = view.clusters[self._cluster_state.instance(decision.prefill).cluster]
        pool = self._pools[cluster.name]
        admission: Admission = asyncio.get_running_loop().create_future()
        work_s = cluster.after_prefix_s(decision.prefill_tokens, decision.reused_tokens)
        # Another instance of the cluster may be one whose KV the decode instance does not take.
        may_send = {
            each.name for each in cluster.instances if (each.name, decision.decode) not in view.blocked
        }
        is_bound = decision.is_bound or len(may_send) < len(cluster.instances)
        only, now_s = decision.prefill if is_bound else None, self._clock()
        pool.offer(admission, decision.urgency_s, work_s, only, now_s=now_s)
        self._tokens[admission] = decision.prefill_tokens
        self._show_waiting(cluster.name)
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
            self._show_waiting(cluster.name)
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
        if not len(pool) or not self._is_free(name):
            self._left_s.pop(name, None)
        while len(pool) and instance.takes_prefills and self._is_free(name) and self._is_next(name, now_s):
            admission = pool.next_of(name)
            if admission is not None and admission.cancelled():
                # Its request has gone, and has not run yet to take it back.
                pool.withdraw(admission)
                continue
            if admission is None or not self._has_time(name, admission, now_s):
                break
            self._served[instance.cluster].add(pool.work_s(admission), now_s)
            pool.take(name, now_s=now_s)
            self._at_work[name] += self._tokens[admission]
            admission.set_result(name)
        self._show_waiting(instance.cluster)

    def _give_up(self, cluster: str) -> None:
        pool, now_s = self._pools[cluster], self._clock()
        while (admission := pool.take("", now_s=now_s)) is not None:
            if not admission.cancelled():
                admission.set_result(None)

    def _is_free(self, name: str) -> bool:
        others = self._others_total.instances.get(name, NOTHING_AT_INSTANCE)
        return self._at_work[name] + others.prefill_tokens < self._batch_tokens

    def _has_time(self, name: str, admission: Admission, now_s: float) -> bool:
        """Whether an instance that is about to be taken away ends the prefill before."""
        leaves_s = self._cluster_state.view.leaves_s.get(name)
        if leaves_s is None:
            return True
        return now_s + self._pools[self._cluster_state.instance(name).cluster].work_s(admission) <= leaves_s

    def _is_next(self, name: str, now_s: float) -> bool:
        """Whether no other gateway is to take the room at an instance before this one."""
        cluster = self._cluster_state.instance(name).cluster
        if goes_first(self._served[cluster].at(now_s), cluster, name, self._others.each.values()):
            self._left_s.pop(name, None)
            return True
        return now_s - self._left_s.setdefault(name, now_s) >= PATIENCE_S

    def _show_waiting(self, cluster: str) -> None:
        others = self._others_total.clusters.get(cluster, NOTHING_AT_CLUSTER)
        self._cluster_state.view.clusters[cluster].waiting_s = (
            self._pools[cluster].waiting_s + others.waiting_s
        )
