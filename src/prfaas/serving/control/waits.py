"""Predicted waits of a new request: for its prefill, for its link, and for a seat at its decode engine.

And how long answers keep the slots that decode instances are chosen by, whether a prefill instance decodes on, and how
often it sends what another engine could go on from.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.decoders import learnt_slot_s
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, may_sample
from prfaas.core.scheduling.waits import least_prefill_wait_s, work_wait_s
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter

# Weight of the newest gap between two answers' ends.
_GAP_WEIGHT = 0.1


class PredictedWaits:
    """Predictions from the cluster's state, and how fast full decode engines finish answers.

    An engine works on `seats` requests at a time; those beyond wait inside of it. With x of them waiting, and one
    answer ending every g seconds, the next request waits (x + 1)·g. Gaps count only while requests wait, since a gap
    without a queue says how seldom requests come.
    """

    def __init__(self, cluster_state: ClusterState, meters: Mapping[str, EngineMeter], *, seats: int) -> None:
        """`meters`: of the engines, by instance. `seats`: requests that an engine works on at a time."""
        self._meters = meters
        self._cluster_state = cluster_state
        self._seats = seats
        self._clock = cluster_state.clock
        # Instance → when an answer ended last while others waited; and the mean gap between such ends.
        self._ended_s: dict[str, float] = {}
        self._gap_s: dict[str, float] = {}
        # Instance → its totals of answers that ended and of their tokens, when they were last looked at.
        self._answered: dict[str, tuple[float, float]] = {}

    @contextmanager
    def decoding(self, name: str, tokens: int, reused_tokens: int = 0, *, answers: int = 1) -> Iterator[None]:
        """While a request for so many answers is open at its decode instance, which also prefills `tokens` tokens of
        it, behind `reused_tokens` that it has."""
        with self._cluster_state.decoding(name, tokens, reused_tokens, answers=answers):
            try:
                yield
            finally:
                self._ended(name)

    def learn(self, name: str, meter: EngineMeter) -> None:
        """Take from an engine's newest reading how long the answers that ended since the one before kept their slots.

        The engine counts the answers of all gateways. Each takes its tokens times the engine's mean step.
        """
        newest, step_s = meter.newest, meter.token_gap_s
        if newest is None:
            return
        outputs, tokens = self._answered.get(name, (math.inf, math.inf))
        self._answered[name] = newest.outputs, newest.output_tokens
        answers, answer_tokens = newest.outputs - outputs, newest.output_tokens - tokens
        instance = self._cluster_state.instance(name)
        # The answers of an instance that only prefills have one token. Totals fall when an engine starts anew.
        if instance.decodes and answers > 0 and answer_tokens > 0 and step_s is not None:
            cluster = self._cluster_state.view.clusters[instance.cluster]
            cluster.slot_s = learnt_slot_s(cluster.slot_s, answers, answer_tokens * step_s)

    def answer_s(self, decode: str, max_tokens: int | None) -> float:
        """Seconds from an answer's first token to its last, as predicted; 0 where nothing is known of that yet.

        `max_tokens`: what the client allows; None: it does not say.
        """
        return self._meters[decode].answer_s(max_tokens)

    def seat_wait_s(self, name: str) -> float:
        """Until an engine would have a seat; 0 while it has one, or where nothing has ended yet."""
        waiting = self._cluster_state.instance(name).decoding - self._seats
        return (waiting + 1) * self._gap_s.get(name, 0.0) if waiting >= 0 else 0.0

    def of(self, decision: Decision) -> float:
        """Until the work of `decision` could begin everywhere: the longest of its waits."""
        work_s = work_wait_s(decision, *self._way_of(decision), self._clock())
        return max(work_s, self.seat_wait_s(decision.decode))

    def checkpoint_tokens(self, decision: Decision) -> int:
        """About how many tokens the prefill of `decision` computes between two checkpoints; 0: it sends none."""
        _, cluster, link = self._way_of(decision)
        return self._cluster_state.view.checkpoint_tokens(
            cluster, link, decision.prefill_tokens, decision.reused_tokens, decision.kv_bytes
        )

    def may_sample(self, decision: Decision) -> bool:
        """Whether the prefill of `decision` may sample the first token, by the rule that routing predicts with."""
        _, cluster, link = self._way_of(decision)
        return may_sample(cluster, link, self.checkpoint_tokens(decision))

    def _way_of(self, decision: Decision) -> tuple[InstanceView, ClusterView, LinkView | None]:
        """The prefill instance, its cluster, and the link that the KV crosses."""
        state = self._cluster_state
        instance = state.instance(decision.prefill)
        link = state.view.links.get((instance.cluster, state.instance(decision.decode).cluster))
        return instance, state.view.clusters[instance.cluster], link

    def least(self) -> float:
        """The least that any new request would wait."""
        clusters = self._cluster_state.view.clusters
        return max(least_prefill_wait_s(clusters, self._clock()), self._least_seat_s())

    def _least_seat_s(self) -> float:
        least_s = math.inf
        for cluster in self._cluster_state.view.clusters.values():
            for instance in cluster.instances:
                if instance.takes_decodes:
                    least_s = min(least_s, self.seat_wait_s(instance.name))
                    if not least_s:
                        return 0.0
        return 0.0 if least_s == math.inf else least_s

    def _ended(self, name: str) -> None:
        # The one that ends still counts here.
        if self._cluster_state.instance(name).decoding <= self._seats:
            self._ended_s.pop(name, None)
            return
        now_s = self._clock()
        before_s = self._ended_s.get(name)
        self._ended_s[name] = now_s
        if before_s is not None:
            gap_s = self._gap_s.get(name)
            new_s = now_s - before_s
            self._gap_s[name] = new_s if gap_s is None else gap_s + _GAP_WEIGHT * (new_s - gap_s)
