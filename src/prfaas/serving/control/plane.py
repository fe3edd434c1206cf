"""The live control plane of one gateway: everything that routing knows, kept up to date by its loops."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from prfaas.core.deployment import CONTROL, AppliedDeployment, Deployment, Instance
from prfaas.core.kv import KvModel
from prfaas.core.prefix import PromptChains, PromptTokens
from prfaas.core.prefix.events import EventBatch
from prfaas.core.scheduling import Decision, RoutingRequest, make_policy
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.serving.control.cluster_state import Clock, ClusterState, OpenPrefill
from prfaas.serving.control.compatibility import Compatibility
from prfaas.serving.control.drains import InstanceDrains
from prfaas.serving.control.engine_http import EngineAccess, EngineHttp
from prfaas.serving.control.engine_monitor import EngineMonitor
from prfaas.serving.control.engine_reading import EngineReading
from prfaas.serving.control.guarded_policy import guarded
from prfaas.serving.control.health import HealthWatch
from prfaas.serving.control.hot_prefixes import HotPrefixes
from prfaas.serving.control.kv_events import EventFeed, events_endpoints
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.link_monitor import LinkMonitor, LinkPort, PoolPort, observer_of
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.metrics import ControlMetrics, GaugeWriter
from prfaas.serving.control.planning_inputs import LiveFacts, policy_of, prefill_curves, view_of
from prfaas.serving.control.pool_monitor import PoolMonitor
from prfaas.serving.control.prefill_admission import PrefillAdmission
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge, empty_index, seed_of
from prfaas.serving.control.role_allocation import RoleAllocation, RoleChange, RoleChanges, stage_utilisation
from prfaas.serving.control.rosters import Rosters
from prfaas.serving.control.state import Overview, Routed, state_of
from prfaas.serving.control.thresholds import Thresholds
from prfaas.serving.control.waits import PredictedWaits
from prfaas.serving.own_process import LoopClock
from prfaas.serving.pool.copier import PoolCopier, pool_observers
from prfaas.serving.transport.tls_identity import TlsIdentity


class LivePlane:
    """Implements `gateway.control_plane.ControlPlane`. It belongs to one running event loop.

    Before `run` no engine is asked anything, and requests are routed by the deployment file alone.
    """

    def __init__(
        self,
        deployment: Deployment,
        key: bytes,
        registry: CollectorRegistry,
        kv_model: KvModel | None,
        *,
        clock: Clock = time.monotonic,
        http: EngineAccess | None = None,
        sender_of: Callable[[Instance, int], LinkPort] | None = None,
        pool_ports: Mapping[str, PoolPort] | None = None,
        tls: TlsIdentity | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            deployment: the deployment file.
            key: the deployment's key.
            registry: gets the `prfaas_control_*` metrics.
            kv_model: of the deployment's model, as `planning_inputs.kv_model_of` loads it; None: unknown.
            clock: seconds that never go back.
            http: how engines are asked for /health and /metrics; None: over the network.
            sender_of: how the KV port of an instance's rank is asked for its links; None: over the network.
            pool_ports: how the KV ports of pools are asked, by name; None: over the network.
            tls: who the gateway is, for instances that it speaks TLS with.
        """
        self.deployment = deployment
        self._routed = Routed()
        self.clock = clock
        self.instances = {instance.name: instance for instance in deployment.instances}
        self._http: EngineAccess = http or EngineHttp(tls)
        self.loop_clock = LoopClock()
        self.listeners = listeners = Listeners()
        self._local = make_policy("local_only")
        self.metrics = ControlMetrics(registry)
        self.policy = guarded(deployment.routing.policy, policy_of(deployment), self.metrics.policy_failures)
        self.curves = prefill_curves(deployment)
        self.cluster_state = ClusterState(
            view_of(deployment, kv_model, self.curves, clock()), clock=clock, on_service=self._on_service
        )
        endpoints = events_endpoints(deployment, deployment.instances)
        pool_endpoints = events_endpoints(deployment, deployment.pools)
        self.waits = PredictedWaits(self.cluster_state, seats=deployment.engine.max_num_seqs, clock=clock)
        seed = seed_of(key)
        self.prefix_knowledge = PrefixKnowledge(
            empty_index(seed, kv_model),
            self.cluster_state,
            seed=seed,
            is_hybrid=self.cluster_state.view.kv.is_hybrid,
            with_events=endpoints,
            clock=clock,
        )
        self.prefill_admission = PrefillAdmission(
            self.cluster_state,
            batch_tokens=deployment.engine.max_num_batched_tokens,
            reusable_at=self.prefix_knowledge.reusable_at,
            clock=clock,
        )
        self.drains = InstanceDrains(self.cluster_state, clock=clock, on_change=self._changed)
        self.event_feed = EventFeed(endpoints | pool_endpoints, apply=self._apply, drop=self._drop)
        self.engines = EngineMonitor(
            deployment,
            self._http,
            self.cluster_state,
            clock=clock,
            on_restart=self._on_restart,
            on_reading=self._on_reading,
        )
        self.kv_port_of = sender_of or observer_of(key, tls)
        # One connection to each KV port, for what the control plane asks there.
        self.kv_ports = {
            instance.name: tuple(self.kv_port_of(instance, rank) for rank in range(instance.kv_ranks))
            for instance in deployment.instances
        }
        self._pool_ports = pool_observers(deployment, CONTROL, key, tls) if pool_ports is None else pool_ports
        self.health = HealthWatch(
            deployment,
            self._http,
            self.kv_ports,
            self.cluster_state,
            clock=clock,
            loop_clock=self.loop_clock,
            stuck_s=lambda name: self.engines.meters[name].stuck_s,
            on_lost_cache=lambda name: self._lost_cache(name, "died"),
            on_change=self._on_health,
            on_frozen=listeners.tell_frozen,
        )
        self.window = LengthWindow(deployment.control.window_s)
        self.facts = facts = LiveFacts(
            deployment, kv_model, self.cluster_state, self.curves, self.engines.meters
        )
        self.thresholds = Thresholds(
            deployment, self.cluster_state, facts, self.window, clock=clock, on_change=self._on_threshold
        )
        self.rosters = Rosters(deployment, self.kv_ports, self.prefix_knowledge.learn_stats)
        self.compatibility = Compatibility(
            deployment, self.kv_ports, self.cluster_state, listeners.tell_silent
        )
        self.links = LinkMonitor(
            deployment,
            lambda instance, rank: self.kv_ports[instance.name][rank],
            self.cluster_state,
            clock=clock,
            on_change=self.thresholds.ask_for_link,
            on_answer=self.health.pulse.heard_kv,
            pool_ports=self._pool_ports,
        )
        self.pool_senders = {name: (port,) for name, port in self._pool_ports.items()}
        self.pools = PoolMonitor(deployment, self._pool_ports, self.cluster_state.view.pools, clock=clock)
        self.budget = LinkBudget(
            deployment,
            {**self.kv_ports, **self.pool_senders},
            self.cluster_state.view.links,
            self.links.samples,
            clock=clock,
        )
        self.role_changes = RoleChanges(
            self.cluster_state,
            clock=clock,
            on_begin=self.prefill_admission.changed,
            on_end=self._on_conversion,
        )
        self.role_allocation = RoleAllocation(
            deployment.control,
            facts,
            stage_utilisation(self.cluster_state, self.engines.meters, self.prefill_admission.waiting, clock),
            self.window,
            self.role_changes,
            clock=clock,
            policy=self.policy,
        )
        self.copier = PoolCopier(deployment, key, self._pool_ports)
        self.hot_prefixes = HotPrefixes(
            self.cluster_state,
            clock=clock,
            metrics=self.metrics.copies,
            copier=self.copier if deployment.pools else None,
        )
        self.overview = Overview(
            AppliedDeployment(deployment, ""),
            clock(),
            self.cluster_state,
            self.prefix_knowledge,
            self.event_feed,
            self.links,
            self.compatibility,
            self.engines,
            self.pools,
            self.health,
            self.window,
            self.thresholds,
            self.role_changes,
            self.prefill_admission,
            self.role_allocation,
            self.hot_prefixes,
            self._routed,
            self.rosters,
        )
        self._gauge_writer = GaugeWriter(self.overview, self.metrics, clock=clock)

    def chains(self, token_ids: Sequence[int], salt: str, adapter: str) -> PromptChains:
        """What the cached prefixes of a prompt are looked up by. May be called in a thread."""
        chains = self.prefix_knowledge.chains(token_ids, salt, adapter)
        return replace(chains, prompt=PromptTokens(token_ids, salt, adapter))

    def route(
        self,
        num_tokens: int,
        chains: PromptChains | None,
        *,
        avoid: Collection[str] = (),
        offload: bool = True,
        first_from_prefill: bool = False,
    ) -> Decision:
        """Where a prompt goes; raises NoDecodeInstanceError. See `gateway.control_plane`."""
        view = self.cluster_state.at(self.clock())
        if avoid:
            view = view.without(avoid)
        if chains is None:
            decision = self._local.decide(RoutingRequest(0), view)
            return replace(
                decision, prefill=decision.decode, uncached_tokens=num_tokens, prefill_tokens=num_tokens
            )
        match = self.prefix_knowledge.match(chains)
        self._routed.total += 1
        request = self.prefix_knowledge.request(match, num_tokens, self._routed.total, first_from_prefill)
        policy = self.policy if offload else self._local
        decision = match.bound(policy.decide(request, view), num_tokens, self.cluster_state.kv_between)
        self._count(decision)
        if offload and not avoid and view.pools:
            self.hot_prefixes.note_pools(decision.prefill, chains, match.pools)
        elif offload and not avoid and request.held:
            missed = self.prefix_knowledge.missed_prefix(decision.prefill, chains, request.held)
            if missed is not None:
                self.hot_prefixes.note(missed)
        return decision

    def instance(self, name: str) -> Instance:
        """The instance called `name`."""
        found = self.instances.get(name)
        return found if found is not None else self.deployment.instance(name)

    def own_last_tokens(self, name: str) -> int:
        """Of a prompt, what the instance computes itself, whatever is moved to it."""
        return self.prefix_knowledge.own_last_tokens(name)

    def admit(self, decision: Decision, chains: PromptChains) -> AbstractAsyncContextManager[Decision]:
        """Until an instance is free for the prefill, and while it has it. See `gateway.control_plane`."""
        return self.prefill_admission.admit(decision, chains)

    def planned(self, decision: Decision) -> AbstractContextManager[None]:
        """While a decision is about to be carried out. See `gateway.control_plane`."""
        return self.cluster_state.planned(decision)

    @contextmanager
    def prefilling(self, decision: Decision) -> Iterator[OpenPrefill]:
        """While a prefill elsewhere and its transfer are under way. See `gateway.control_plane`."""
        pair = (
            self.cluster_state.instance(decision.prefill).cluster,
            self.cluster_state.instance(decision.decode).cluster,
        )
        try:
            with self.cluster_state.prefilling(decision) as prefill:
                yield prefill
        except Exception:
            # The producer is suspected, lives and answers: so the link failed. After a client's fault it is no suspect.
            if self.health.has_failed(decision.prefill):
                self.links.failed(pair)
            raise
        if prefill.is_measured:
            self.links.succeeded(pair)

    def wait_s(self, decision: Decision | None) -> float:
        """What a request would wait. See `gateway.control_plane`."""
        return self.waits.least() if decision is None else self.waits.of(decision)

    def answer_s(self, decode: str, max_tokens: int | None) -> float:
        """What an answer takes from its first token to its last. See `gateway.control_plane`."""
        return self.engines.meters[decode].answer_s(max_tokens)

    def decoding(self, name: str, tokens: int, reused_tokens: int = 0) -> AbstractContextManager[None]:
        """While a request is open at its decode instance. See `gateway.control_plane`."""
        return self.waits.decoding(name, tokens, reused_tokens)

    def expect(self, name: str, chains: PromptChains) -> None:
        """The instance will hold this prompt in a moment."""
        self.prefix_knowledge.expect(name, chains)

    def observe(self, num_tokens: int, uncached_tokens: int) -> None:
        """One request as the scheduler's statistics should see it."""
        self.window.add(min(uncached_tokens, num_tokens), self.clock())

    def suspect(self, name: str, reason: str, *, lost_cache: bool = False) -> None:
        """A request failed at `name`: out of routing until a probe is good."""
        self.health.suspect(name, reason, lost_cache=lost_cache)

    def drain(self, name: str, *, wanted: bool) -> None:
        """Let nothing new go to an instance from now on, or let it take part again."""
        self.drains.drain(name, wanted=wanted)

    def give_notice(self, name: str, notice_s: float) -> None:
        """An instance is gone in so many seconds. See `gateway.control_plane`."""
        self.drains.give_notice(name, notice_s)
        self.metrics.notices.labels(name).inc()
        self.listeners.tell_noticed(name, notice_s)

    def hold_threshold(self, cluster: str, tokens: float | None) -> None:
        """An operator's threshold. See `gateway.control_plane`."""
        self.thresholds.hold(cluster, tokens)

    def incompatible(self, producer: str, consumer: str) -> str | None:
        """Why one takes no KV from the other, as far as it is known. See `gateway.control_plane`."""
        return self.compatibility.reason(producer, consumer)

    async def ask_incompatible(self, producer: str, consumer: str) -> str | None:
        """The same, after the producer was asked."""
        await self.compatibility.ask(producer)
        return self.compatibility.reason(producer, consumer)

    def idle_decode_instance(self) -> str | None:
        """A healthy instance that decodes and has nothing to do; None if there is none."""
        takes_decodes = (n for n in self.cluster_state.names if self.cluster_state.instance(n).takes_decodes)
        return next((name for name in takes_decodes if not self.is_used(name)), None)

    def is_used(self, name: str) -> bool:
        """Whether a request is open at the instance, or on its way there."""
        return self.cluster_state.instance(name).in_flight > 0

    def state(self) -> dict[str, Any]:
        """The deployment as it is now, ready for JSON."""
        return state_of(self.overview, self.clock())

    async def run(self) -> None:
        """All loops, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for loop in (
                self.loop_clock,
                self.event_feed,
                self.links,
                self.budget,
                self.compatibility,
                self.rosters,
                self.engines,
                self.pools,
                self.health,
                self.thresholds,
                self.role_allocation,
                self.hot_prefixes,
                self._gauge_writer,
            ):
                group.create_task(loop.run())

    async def close(self) -> None:
        """Give back connections; after `run` has ended."""
        await self.links.close()
        await self.copier.close()
        ports = (port for ranks in self.kv_ports.values() for port in ranks)
        await asyncio.gather(*(port.close() for port in ports), return_exceptions=True)
        await self._http.close()

    def _apply(self, name: str, batch: EventBatch) -> None:
        with self.metrics.index_apply_seconds.time():
            self.prefix_knowledge.apply(name, batch)
        self.metrics.events.labels(name).inc(len(batch.events))

    def _drop(self, name: str, reason: str) -> None:
        self.prefix_knowledge.drop(name, reason)
        self.metrics.drops.labels(name, reason).inc()
        if reason == "unanswered" and self.prefix_knowledge.is_pool(name):
            # Unlike an engine, a pool can tell all that it holds, however old.
            self.event_feed.reset(name, reason)

    def _lost_cache(self, name: str, reason: str) -> None:
        self._drop(name, reason)
        self.event_feed.reset(name, reason)

    def _on_restart(self, name: str) -> None:
        self._lost_cache(name, "new-process")
        if self.drains.has_left(name):
            self.drain(name, wanted=False)

    def _on_service(self, cluster: str, tokens: int, reused_tokens: int, seconds: float) -> None:
        ratio = self.curves[cluster].add(tokens, reused_tokens, seconds, self.clock())
        self.metrics.service_ratio.labels(cluster).observe(ratio)

    def _on_health(self, name: str, healthy: bool) -> None:
        if not healthy:
            self.metrics.suspicions.labels(name).inc()
        self._changed(name)

    def _on_reading(self, instance: Instance, reading: EngineReading) -> None:
        self.health.pulse.heard_http(instance.name)
        self.prefix_knowledge.learn(instance, reading)
        self.pools.learn(instance, self.engines.meters[instance.name])
        self.waits.learn(instance.name, self.engines.meters[instance.name])

    def _on_threshold(self, cluster: str, reason: str) -> None:
        self.metrics.threshold_changes.labels(cluster, reason).inc()

    def _on_conversion(self, change: RoleChange) -> None:
        self.metrics.conversions.labels(change.cluster, change.to_role, change.outcome).inc()
        self._changed(change.instance)

    def _changed(self, name: str) -> None:
        self.prefill_admission.changed(name)
        self.thresholds.ask("roles")

    def _count(self, decision: Decision) -> None:
        self._routed.reasons[decision.route][decision.reason] += 1
        self.metrics.decisions.labels(str(decision.route), decision.reason).inc()
        if decision.cache_transfer is not None:
            self.metrics.cache_transfers.inc()
