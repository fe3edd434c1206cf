"""Routing of requests: the routing policy decides by the prompt's held prefixes and the view."""

import logging
import random
from collections import Counter
from collections.abc import Collection, Sequence

import prometheus_client
from msgspec.structs import replace

from prfaas.core.deployment import AppliedDeployment
from prfaas.core.deployment.types import BUILT_IN_POLICIES, DEFAULT_POLICY
from prfaas.core.prefix.hashing import PromptChains
from prfaas.core.scheduling.checked_policy import CheckedPolicy
from prfaas.core.scheduling.decision import HELD_OUT, Decision, OtherWay, Route, RoutingRequest
from prfaas.core.scheduling.policy import Policy, make_policy
from prfaas.core.scheduling.routing import prefill_at_decode
from prfaas.core.scheduling.view import View
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.experiment import Experiment
from prfaas.serving.control.hot_prefixes import HotPrefixes
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.control.planning_inputs import policy_of
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)


class GuardedPolicy:
    """Decides as `policy`; where that raises, or decides what can't be carried out, as the default policy."""

    def __init__(self, name: str, policy: Policy, failures: prometheus_client.Counter) -> None:
        self._name = name
        self._policy = CheckedPolicy(policy)
        self._default = make_policy(DEFAULT_POLICY)
        self._failures = failures
        self._failed = 0

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        try:
            return self._policy.decide(request, view)
        except Exception as error:
            self._note(error)
            return self._default.decide(request, view)

    def _note(self, error: Exception) -> None:
        self._failures.inc()
        self._failed += 1
        # The 1st, 10th, 100th, …: it may fail for every request.
        if str(self._failed).strip("0") == "1":
            logger.error(
                "policy %s failed (%d times so far), %s decided in its place: %s: %s",
                self._name,
                self._failed,
                DEFAULT_POLICY,
                type(error).__name__,
                error,
                exc_info=error,
            )


def _other_way(decision: Decision) -> OtherWay:
    return OtherWay(decision.prefill, decision.prefill_tokens, decision.first_token_s)


class Router(Part):
    """Decides for one request after the other, by the policy that the file names now."""

    def __init__(
        self,
        running: RunningDeployment,
        cluster_state: ClusterState,
        prefixes: PrefixKnowledge,
        hot_prefixes: HotPrefixes,
        experiment: Experiment,
        metrics: ControlMetrics,
    ) -> None:
        """
        Args:
            running: names the policy and its parameters.
            cluster_state: has the view that the policy reads.
            prefixes: who holds what of a prompt.
            hot_prefixes: is told what was missed.
            experiment: may have another policy decide.
            metrics: count decisions.

        Raises:
            DeploymentError: there is no such policy, or it does not take these parameters.
        """
        self._running = running
        self._cluster_state = cluster_state
        self._prefixes = prefixes
        self._hot_prefixes = hot_prefixes
        self._experiment = experiment
        self._metrics = metrics
        self._local = make_policy("local_only")
        self._routed = 0
        self._reasons: dict[Route, Counter[str]] = {route: Counter() for route in Route}
        self._policy = self._named()

    def route(
        self,
        num_tokens: int,
        chains: PromptChains,
        *,
        avoid: Collection[str] = (),
        offload: bool = True,
        first_from_prefill: bool = False,
    ) -> Decision:
        """Decide where a prompt of `num_tokens` tokens goes.

        Args:
            num_tokens: of the whole prompt.
            chains: hashes of its blocks.
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
        match = self._prefixes.match(chains)
        self._routed += 1
        request = self._prefixes.request(match, num_tokens, self._routed, first_from_prefill)
        policy, view = self._experiment.way(self._policy, view) if offload else (self._local, view)
        decision = policy.decide(request, view)
        if decision.route is Route.OFFLOAD and not avoid:
            decision = self._beside_local(decision, request, view)
        decision = match.bound(decision, num_tokens, state.kv_between)
        self._count(decision)
        if offload and not avoid and view.pools:
            self._hot_prefixes.note(decision.prefill, chains, match.pools)
        return decision

    def _beside_local(self, offloaded: Decision, request: RoutingRequest, view: View) -> Decision:
        """The decision with what the PD cluster itself would take, or the other way round for a few: the holdout.

        Nothing that a client sends has a part in who is held out.
        """
        ledger = self._running.current.gateway.ledger
        if ledger is None:
            return offloaded
        local = self._local.decide(request, view)
        if random.random() >= ledger.holdout:
            return replace(offloaded, other=_other_way(local))
        return replace(local, reason=HELD_OUT, other=_other_way(offloaded))

    def at_decode(
        self,
        num_tokens: int,
        chains: Sequence[PromptChains] = (),
        *,
        reason: str = "whole",
        reuses: bool = True,
        avoid: Collection[str] = (),
    ) -> Decision:
        """Decide which decode instance prefills itself what can't be split over instances.

        Args:
            num_tokens: of all its prompts together; 0: it has none, or one that will be refused.
            chains: of each prompt that is known in tokens.
            reason: in one word.
            reuses: False: the engine computes what it holds all the same.
            avoid: instances that have failed this request.

        Raises:
            NoDecodeInstanceError: no instance can decode.
        """
        view = self._cluster_state.at(self._cluster_state.clock())
        if avoid:
            view = view.without(avoid)
        request = self._prefixes.request_of_several(num_tokens, chains)
        return prefill_at_decode(request, view, reason, reuses=reuses)

    def decoders(self) -> list[str]:
        """The instances of which one may decode a request that comes now."""
        clusters = self._cluster_state.view.clusters.values()
        return [each.name for cluster in clusters for each in cluster.instances if each.takes_decodes]

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Decide by another policy. Raises DeploymentError where it can't be made."""
        if now.said.routing != before.said.routing:
            self._policy = self._named()

    def state(self, _now_s: float) -> Json:
        """Decisions so far, by route and reason."""
        routes = {str(route): dict(reasons) for route, reasons in self._reasons.items()}
        return {"requests": {"routed": self._routed}, "routes": routes}

    def _named(self) -> Policy:
        """The policy that the file names, guarded where it is not one of ours."""
        name, policy = self._running.current.routing.policy, policy_of(self._running.current)
        if name in BUILT_IN_POLICIES:
            return policy
        return GuardedPolicy(name, policy, self._metrics.policy_failures)

    def _count(self, decision: Decision) -> None:
        self._reasons[decision.route][decision.reason] += 1
        self._metrics.decisions.labels(str(decision.route), decision.reason).inc()
        if decision.cache_transfer is not None:
            self._metrics.cache_transfers.inc()
