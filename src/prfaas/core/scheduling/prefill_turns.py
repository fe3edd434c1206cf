"""Which gateway of a fleet may give an instance its next prefill: who has had less of the cluster goes first."""

import math
from collections.abc import Iterable

from prfaas.core.scheduling.gateway_share import NOTHING_AT_CLUSTER, NOTHING_AT_INSTANCE, GatewayShare

QUANTUM_S = 1.0
"""So many seconds of prefill a gateway may be ahead of another one that waits."""

PATIENCE_S = 0.5
"""Room that nobody has taken for so long is for any gateway: who was to go first may be gone, or wait elsewhere."""

_HALF_LIFE_S = 10.0


class ServedWork:
    """Seconds of prefill that had a turn lately; half of it is forgotten every 10 s."""

    __slots__ = ("_at_s", "_work_s")

    def __init__(self) -> None:
        self._work_s = 0.0
        self._at_s = 0.0

    def add(self, work_s: float, now_s: float) -> None:
        """One more turn of `work_s` >= 0 predicted seconds."""
        self._work_s, self._at_s = self.at(now_s) + work_s, now_s

    def at(self, now_s: float) -> float:
        """Seconds that are not forgotten yet."""
        return self._work_s * math.exp2(-max(now_s - self._at_s, 0.0) / _HALF_LIFE_S)


def goes_first(served_s: float, cluster: str, instance: str, others: Iterable[GatewayShare]) -> bool:
    """Whether no other gateway that waits for this instance has had clearly less work of its cluster.

    Whoever has had the least always goes first, so there is always one that does.

    Args:
        served_s: `ServedWork` of the gateway that asks, for this cluster.
        cluster: of the instance.
        instance: the one that has room.
        others: what the other gateways of the fleet have told last.
    """
    return all(
        served_s - other.clusters.get(cluster, NOTHING_AT_CLUSTER).served_s <= QUANTUM_S
        for other in others
        if other.clusters.get(cluster, NOTHING_AT_CLUSTER).waiting
        or other.instances.get(instance, NOTHING_AT_INSTANCE).waiting
    )
