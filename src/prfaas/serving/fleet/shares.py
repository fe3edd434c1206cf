"""Open work of a fleet's gateways: each reports its own, and counts the others'."""

from collections import deque
from collections.abc import Mapping

import msgspec

from prfaas.core.scheduling.gateway_share import (
    MOST_LENGTHS,
    GatewayShare,
    OtherGateways,
    new_lengths,
    total,
)
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.prefill_admission import PrefillAdmission

# Less than a tenth of a second is no news, and every put costs etcd a write to disk.
_DIGITS = 1
# Observed lengths are told for so long: others miss them only where etcd is silent for longer.
_LENGTHS_S = 2.0


class FleetShares:
    """One gateway's share of the open work: prefills and requests, bytes promised to links, lengths observed."""

    def __init__(
        self, cluster_state: ClusterState, admission: PrefillAdmission, window: LengthWindow
    ) -> None:
        """The parts of this gateway that have open work, and that count others'."""
        self._cluster_state = cluster_state
        self._admission = admission
        self._window = window
        self._lengths: deque[tuple[float, int]] = deque(maxlen=MOST_LENGTHS)
        self._lengths_total = 0
        self._seen_lengths: dict[str, int] = {}

    def observe(self, uncached_tokens: int) -> None:
        """One request of this gateway, for the statistics of all."""
        self._lengths.append((self._cluster_state.clock(), max(uncached_tokens, 0)))
        self._lengths_total += 1

    def own(self) -> GatewayShare:
        """What this gateway tells the others now. Times to a tenth of a second."""
        while self._lengths and self._lengths[0][0] < self._cluster_state.clock() - _LENGTHS_S:
            self._lengths.popleft()
        replace = msgspec.structs.replace
        share = total([self._cluster_state.own_share(), self._admission.own_share()])
        return replace(
            share,
            instances={
                name: replace(each, prefill_s=round(each.prefill_s, _DIGITS))
                for name, each in share.instances.items()
            },
            clusters={
                name: replace(
                    each, waiting_s=round(each.waiting_s, _DIGITS), served_s=round(each.served_s, _DIGITS)
                )
                for name, each in share.clusters.items()
            },
            lengths=[tokens for _, tokens in self._lengths],
            lengths_total=self._lengths_total,
        )

    @property
    def open_requests(self) -> int:
        """Requests that are open here."""
        return requests_of(self._cluster_state.own_share())

    def count(self, shares: Mapping[str, GatewayShare]) -> None:
        """Count what the others have told, by their names, in place of what they told before."""
        now_s = self._cluster_state.clock()
        for gone in self._seen_lengths.keys() - shares.keys():
            del self._seen_lengths[gone]
        for name, share in shares.items():
            for tokens in new_lengths(share, self._seen_lengths.get(name, 0)):
                self._window.add(tokens, now_s)
            self._seen_lengths[name] = share.lengths_total
        others = OtherGateways(shares)
        self._cluster_state.set_others(others.total())
        self._admission.set_others(others)


def requests_of(share: GatewayShare) -> int:
    """The number of requests that a gateway has open."""
    return sum(part.requests for part in share.instances.values())
