"""Where requests go: what is known of a prompt and the view, put to the routing policy."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from prfaas.core.deployment import AppliedDeployment
from prfaas.core.prefix import PromptChains
from prfaas.core.scheduling import Decision, Policy, Route, RoutingRequest, make_policy
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.guarded_policy import guarded
from prfaas.serving.control.hot_prefixes import HotPrefixes
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.control.planning_inputs import policy_of
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge
from prfaas.serving.running_deployment import RunningDeployment


class Router(Part):
    """Decides for one request after the other, by the policy that the file names now."""

    def __init__(
        self,
        running: RunningDeployment,
        cluster_state: ClusterState,
        prefixes: PrefixKnowledge,
        hot_prefixes: HotPrefixes,
        metrics: ControlMetrics,
    ) -> None:
        """
        Args:
            running: names the policy and its parameters.
            cluster_state: has the view that the policy reads.
            prefixes: who holds what of a prompt.
            hot_prefixes: is told what was missed.
            metrics: count decisions.

        Raises:
            DeploymentError: there is no such policy, or it does not take these parameters.
        """
        self._running = running
        self._cluster_state = cluster_state
        self._prefixes = prefixes
        self._hot_prefixes = hot_prefixes
        self._metrics = metrics
        self._local = make_policy("local_only")
        self._routed = 0
        self._reasons: dict[Route, Counter[str]] = {route: Counter() for route in Route}
        self.policy = self._named()

    def route(
        self,
        num_tokens: int,
        chains: PromptChains | None,
        *,
        avoid: Collection[str] = (),
        offload: bool = True,
        first_from_prefill: bool = False,
    ) -> Decision:
        """Decide where a prompt of `num_tokens` tokens goes.

        Args:
            num_tokens: of the whole prompt.
            chains: None when the prompt was not looked at. The decision is then a decode instance that
                prefills itself.
            avoid: instances that have failed this request.
            offload: False: never to another cluster.
            first_from_prefill: where another instance prefills, the client has its first token from there.

        Raises:
            NoDecodeInstanceError: no instance can decode.
        """
        state = self._cluster_state
        view = state.at(state.clock())
        if avoid:
            view = view.without(avoid)
        if chains is None:
            decision = self._local.decide(RoutingRequest(0), view)
            return replace(
                decision, prefill=decision.decode, uncached_tokens=num_tokens, prefill_tokens=num_tokens
            )
        match = self._prefixes.match(chains)
        self._routed += 1
        request = self._prefixes.request(match, num_tokens, self._routed, first_from_prefill)
        policy = self.policy if offload else self._local
        decision = match.bound(policy.decide(request, view), num_tokens, state.kv_between)
        self._count(decision)
        if offload and not avoid and view.pools:
            self._hot_prefixes.note_pools(decision.prefill, chains, match.pools)
        elif offload and not avoid and request.held:
            missed = self._prefixes.missed_prefix(decision.prefill, chains, request.held)
            if missed is not None:
                self._hot_prefixes.note(missed)
        return decision

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Decide by another policy. Raises DeploymentError where it can't be made."""
        if now.said.routing != before.said.routing:
            self.policy = self._named()

    def state(self, _now_s: float) -> Json:
        """Decisions so far, by route and reason."""
        routes = {str(route): dict(reasons) for route, reasons in self._reasons.items()}
        return {"requests": {"routed": self._routed}, "routes": routes}

    def _named(self) -> Policy:
        current = self._running.current
        return guarded(current.routing.policy, policy_of(current), self._metrics.policy_failures)

    def _count(self, decision: Decision) -> None:
        self._reasons[decision.route][decision.reason] += 1
        self._metrics.decisions.labels(str(decision.route), decision.reason).inc()
        if decision.cache_transfer is not None:
            self._metrics.cache_transfers.inc()
