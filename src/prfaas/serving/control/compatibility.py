"""Incompatible pairs of instances: which take no KV from which, as the rejected senders report."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.transport.protocol.handshake import is_peer_name
from prfaas.serving.transport.protocol.sentences import legible
from prfaas.serving.transport.protocol.wire import read_body

logger = logging.getLogger(__name__)

Pair = tuple[str, str]


class _SenderStats(msgspec.Struct):
    rejected: dict[str, str] = {}
    silent: dict[str, str] = {}


class _Stats(msgspec.Struct):
    """The part of a STATS answer that says whom a sender does not reach, each with a sentence."""

    sender: _SenderStats


class Compatibility(Part):
    """Hears from every sender whom it cannot reach for a rejection, and keeps the pairs of the `View` right.

    A pair (producer, consumer) is blocked while the producer's newest report says so. Senders connect ahead of
    requests, and again after a rejection, every 30 s at least. So a pair is free again when one of the two has
    restarted with what the other expects. A sender that does not answer is believed as before.
    """

    def __init__(
        self,
        cluster_state: ClusterState,
        on_silent: Callable[[str, str, str], None] = lambda _producer, _consumer, _sentence: None,
    ) -> None:
        """
        Args:
            cluster_state: whose `View` gets the pairs.
            on_silent: told a producer, a consumer and a sentence, again and again, while the producer has given the
                path between them up.
        """
        self._on_silent = on_silent
        self._cluster_state = cluster_state
        # Producer and rank → consumer → sentence.
        self._rejected: dict[tuple[str, int], dict[str, str]] = {}
        self._reasons: dict[Pair, str] = {}

    def leave(self, name: str) -> None:
        """Forget what is known of an instance."""
        known = {
            key: {consumer: why for consumer, why in rejected.items() if consumer != name}
            for key, rejected in self._rejected.items()
            if key[0] != name
        }
        if known != self._rejected:
            self._rejected = known
            self._conclude()

    def reason(self, producer: str, consumer: str) -> str | None:
        """Why `consumer` takes no KV from `producer`; None where no rejection is known."""
        return self._reasons.get((producer, consumer))

    def state(self, _now_s: float) -> Json:
        """All pairs."""
        pairs = [
            {"producer": producer, "consumer": consumer, "reason": reason}
            for (producer, consumer), reason in sorted(self._reasons.items())
        ]
        return {"incompatible": pairs}

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        """Write the number of incompatible pairs."""
        metrics.incompatible.set(len(self._reasons))

    def hear(self, producer: str, rank: int, stats: Mapping[str, Any]) -> None:
        """Take what a rank has answered: whom it does not reach."""
        try:
            told = read_body(_Stats, stats).sender
        except ValueError as error:
            logger.debug("%s/%d does not say whom it may send to: %s", producer, rank, error)
            return
        for consumer, sentence in self._of_instances(told.silent).items():
            self._on_silent(producer, consumer, sentence)
        rejected = self._of_instances(told.rejected)
        if rejected != self._rejected.get((producer, rank), {}):
            self._rejected[producer, rank] = rejected
            self._conclude()

    def _of_instances(self, told: Mapping[str, str]) -> dict[str, str]:
        """Consumer → sentence, of what a sender reports of its peers."""
        named = (
            (peer.partition("/")[0], legible(sentence))
            for peer, sentence in told.items()
            if is_peer_name(peer)
        )
        return {consumer: sentence for consumer, sentence in named if consumer in self._cluster_state.names}

    def _conclude(self) -> None:
        reasons: dict[Pair, str] = {}
        for (producer, _), rejected in self._rejected.items():
            for consumer, sentence in rejected.items():
                reasons.setdefault((producer, consumer), sentence)
        for producer, consumer in reasons.keys() - self._reasons.keys():
            logger.warning(
                "%s sends nothing to %s until one of them restarts: %s",
                producer,
                consumer,
                reasons[producer, consumer],
            )
        for producer, consumer in self._reasons.keys() - reasons.keys():
            logger.info("%s may send to %s again", producer, consumer)
        self._reasons = reasons
        self._cluster_state.set_blocked(reasons)
