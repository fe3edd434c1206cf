"""The slow side of routing: the length threshold, searched again on what is observed."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from prfaas.core.deployment import AppliedDeployment
from prfaas.core.planner import PlanError
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.scheduling.threshold import SETTLE_S, Reason, ThresholdChange, ThresholdOptimiser
from prfaas.core.workload.lengths import TruncatedLogNormal, WorkloadError
from prfaas.serving.control.cluster_state import Clock
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.control.planning_inputs import LiveFacts
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)

DEFAULT_TOKENS = 8192
_HISTORY = 50
# Section 4.1's mix, for the first thresholds only: nothing has been observed yet.
_MU, _SIGMA, _LOW_TOKENS = 9.90, 1.00, 128.0


Rates: TypeAlias = tuple[float | None, float | None]
"""Requests per second that prefill and links could carry before, and with the new threshold; None: unknown."""


@dataclass(frozen=True, slots=True)
class ThresholdEntry:
    """One change of one PD cluster's threshold."""

    at_s: float
    cluster: str
    tokens: float
    reason: str
    rates: Rates


class Thresholds(Part):
    """Sets `View.threshold_tokens`, with a history of why.

    At the start: as configured; else what the planner finds for the profiles and the paper's mix of lengths; without
    profiles 8192 tokens, a quarter of the longest prompt at most. From the first 50 observed requests on: searched
    every `threshold_period_s` and a second after roles, instances or links have changed.
    """

    def __init__(
        self,
        running: RunningDeployment,
        facts: LiveFacts,
        window: LengthWindow,
        *,
        clock: Clock,
        on_change: Callable[[str, str], None],
    ) -> None:
        """`on_change` is called with (cluster, reason) for every change but the first."""
        self._running = running
        self._facts = facts
        self.window = window
        self._clock = clock
        self._on_change = on_change
        self._optimiser = ThresholdOptimiser()
        self._asked: Reason | None = None
        self._wake = asyncio.Event()
        self._has_searched = False
        self.held: set[str] = set()
        """Clusters whose threshold an operator has set: no search moves it."""
        self._is_paused = False
        self._next_search_s = -math.inf
        self.history: deque[ThresholdEntry] = deque(maxlen=_HISTORY)
        self.last: dict[str, Any] = {}
        self._begin()

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """A threshold that the file configures otherwise counts at once.

        A PD cluster that joins begins with what the file configures, or with the default.
        """
        was, routing = before.said.routing, now.said.routing
        if routing.threshold_tokens not in (None, was.threshold_tokens):
            for cluster in now.said.pd_clusters:
                self._move(cluster.name, float(routing.threshold_tokens or 0), "configured")
        first, why = self._unplanned()
        for name in first.keys() - self._facts.view.threshold_tokens.keys():
            self._set(name, first[name], why)
            self._has_searched = self._has_searched and why != "default"
        self._has_searched = self._has_searched and routing.policy == was.policy
        self.ask("roles")

    def ask(self, reason: Reason) -> None:
        """Search soon: something changed that thresholds depend on."""
        self._asked = reason
        self._wake.set()

    def ask_for_link(self, link: str) -> None:
        """Search soon: a link went down, came back, or can carry much more or less."""
        logger.debug("thresholds are searched because of link %s", link)
        self.ask("link")

    def hold(self, cluster: str, tokens: float | None) -> None:
        """Set a PD cluster's threshold until told otherwise; None: let it be searched again.

        Raises:
            ValueError: the policy does not read this threshold, or another gateway decides it.
        """
        if self._is_paused:
            raise ValueError(
                "thresholds are set at the gateway that leads, while etcd answers; `prfaas status` names it"
            )
        if self._running.current.routing.policy == "static_threshold":
            raise ValueError(
                "the policy static_threshold keeps routing.threshold_tokens of the deployment file; "
                "a threshold can be set for policies that search it"
            )
        if tokens is None:
            self.held.discard(cluster)
            self.ask("policy")
            return
        self.held.add(cluster)
        self._move(cluster, float(tokens), "operator")
        logger.info("threshold of %s: %.0f tokens, by an operator", cluster, tokens)

    def pause(self, paused: bool) -> None:
        """Leave the decisions to another gateway, or take them back: then the first search comes a period later."""
        if self._is_paused and not paused:
            self._next_search_s = self._clock() + self._running.current.control.threshold_period_s
        self._is_paused = paused

    def take_over(self, cluster: str, tokens: float, leader: str, *, is_held: bool = False) -> None:
        """Another gateway has decided a threshold. `is_held`: an operator has set it there."""
        before = self._facts.view.threshold_tokens
        if cluster not in before:
            return
        (self.held.add if is_held else self.held.discard)(cluster)
        if before[cluster] != tokens:
            self._set(cluster, tokens, f"decided by {leader}")
            logger.info("threshold of %s: %.0f tokens, decided by %s", cluster, tokens, leader)
        self._has_searched = True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._running.current.control.threshold_period_s):
                    await self._wake.wait()
                await asyncio.sleep(SETTLE_S)
            except TimeoutError:
                pass
            self._wake.clear()
            if not self._is_paused and self._clock() >= self._next_search_s:
                await self.search()

    async def search(self) -> None:
        """Search once with what is known now; the planner works in a thread."""
        if self._running.current.routing.policy == "static_threshold":
            # It never reads the view's threshold: one that moved would only be shown.
            self.last = {"result": "fixed by policy static_threshold"}
            return
        reason: Reason = (self._asked or "periodic") if self._has_searched else "start"
        now_s = self._clock()
        lengths = self.window.lengths(now_s)
        if lengths is None:
            self.last = {"result": "too few requests", "requests": self.window.count(now_s)}
            return
        try:
            problem = self._facts.problem(lengths)
        except (PlanError, WorkloadError) as error:
            self.last = {"result": str(error)}
            return
        self._asked, self._has_searched = None, True
        change = await asyncio.to_thread(
            self._optimiser.propose,
            problem,
            {pd.name: self._facts.prefill_instances(pd.name) for pd in problem.pd},
            dict(self._facts.view.threshold_tokens),
            sample_count=self.window.count(now_s),
            reason=reason,
        )
        if self._is_paused:
            self.last = {"result": "another gateway decides now", "reason": reason}
            return
        self.last = {"result": "kept" if change is None else "moved", "reason": reason}
        if change is not None:
            self.last |= {"rate_before": change.rate_before, "rate_after": change.rate_after}
            self._set_all(change)

    def state(self, now_s: float) -> Json:
        """Each cluster's, the last changes, newest last, and the last search; and what was observed."""
        history = [
            {
                "age_s": round(now_s - entry.at_s, 3),
                "cluster": entry.cluster,
                "tokens": json_tokens(entry.tokens),
                "reason": entry.reason,
                "rate_before": entry.rates[0],
                "rate_after": entry.rates[1],
            }
            for entry in self.history
        ]
        clusters = {
            cluster.name: {
                "threshold_tokens": json_tokens(tokens) if tokens is not None else None,
                "threshold_held": cluster.name in self.held,
            }
            for cluster in self._running.current.clusters
            for tokens in (self._facts.view.threshold_tokens.get(cluster.name),)
        }
        requests = {
            "in_window": self.window.count(now_s),
            "per_s": round(self.window.rate_per_s(now_s), 4),
            "uncached_lengths": self.window.histogram(now_s),
        }
        return {
            "clusters": clusters,
            "thresholds": {"history": history, "last_search": self.last},
            "requests": requests,
        }

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        """Write the gauges of thresholds."""
        for cluster, tokens in self._facts.view.threshold_tokens.items():
            metrics.threshold_tokens.labels(cluster).set(tokens)

    def _begin(self) -> None:
        first, why = self._unplanned()
        if why == "default" and all(
            cluster.profile is not None for cluster in self._running.current.clusters
        ):
            first, why = self._planned(first), "planned from profiles"
        # A default is replaced by the first search, whatever its gain; what was planned or configured is not.
        self._has_searched = why != "default"
        for cluster, tokens in first.items():
            self._set(cluster, tokens, why)

    def _planned(self, default: Mapping[str, float]) -> Mapping[str, float]:
        longest = float(self._running.current.model.max_model_len)
        try:
            lengths = TruncatedLogNormal(_MU, _SIGMA, min(_LOW_TOKENS, longest / 2), longest)
            problem = self._facts.problem(lengths)
            prefill = {pd.name: self._facts.prefill_instances(pd.name) for pd in problem.pd}
            change = self._optimiser.propose(problem, prefill, {}, sample_count=1, reason="start")
        except (PlanError, WorkloadError) as error:
            logger.warning("no threshold can be planned from the profiles: %s", error)
            return default
        return change.tokens if change is not None else default

    def _unplanned(self) -> tuple[Mapping[str, float], str]:
        """By PD cluster what the file configures, or the default; and which of the two it is."""
        tokens, why = self._running.current.routing.threshold_tokens, "configured"
        if tokens is None:
            tokens, why = min(DEFAULT_TOKENS, self._running.current.model.max_model_len // 4), "default"
        return {cluster.name: float(tokens) for cluster in self._running.current.pd_clusters}, why

    def _set_all(self, change: ThresholdChange) -> None:
        for cluster, tokens in change.tokens.items():
            before = self._facts.view.threshold_tokens.get(cluster)
            if tokens != before and cluster not in self.held:
                self._move(cluster, tokens, change.reason, (change.rate_before, change.rate_after))
                logger.info("threshold of %s: %s -> %.0f tokens (%s)", cluster, before, tokens, change.reason)

    def _move(self, cluster: str, tokens: float, reason: str, rates: Rates = (None, None)) -> None:
        """Set a threshold, and count that it has moved."""
        self._set(cluster, tokens, reason, rates)
        self._on_change(cluster, reason)

    def _set(self, cluster: str, tokens: float, reason: str, rates: Rates = (None, None)) -> None:
        self._facts.view.threshold_tokens[cluster] = tokens
        self.history.append(ThresholdEntry(self._clock(), cluster, tokens, reason, rates))


def json_tokens(tokens: float) -> float | None:
    """A threshold for JSON: None where nothing is ever offloaded."""
    return None if math.isinf(tokens) else round(tokens, 1)
