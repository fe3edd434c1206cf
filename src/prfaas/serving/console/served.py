"""What became of a gateway's requests of the last minutes: whether it serves well, and whether offloading pays."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

REFUSED_S = 60.0
"""For so long refusals and failures are told: an alarm that ends by itself."""
WORTH_S = 300.0
"""The time that says whether offloading pays."""
_BUCKET_S = 10.0
_REFUSALS = (429, 503)


@dataclass(slots=True)
class _Bucket:
    """Requests that ended within some seconds."""

    ended: int = 0
    refused: int = 0
    """For want of room or of an engine, not for what they asked."""
    failed: int = 0
    offloaded: int = 0
    compared: int = 0
    """Offloaded ones that had their first token, and whose way at home was predicted: `gateway.ledger` makes it so."""
    first_token_s: float = 0.0
    """Of the compared ones, from the decision on; a sum."""
    at_home_s: float = 0.0
    """What these would have taken in their PD clusters; a sum."""
    egress_cost: float = 0.0


class Served:
    """Counts requests as they end. It is bounded, whatever their number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._buckets: deque[tuple[int, _Bucket]] = deque(maxlen=int(WORTH_S / _BUCKET_S))

    def add(
        self,
        status: int | None,
        *,
        failed: bool,
        offloaded: bool = False,
        first_token_s: float | None = None,
        at_home_s: float | None = None,
        egress_cost: float = 0.0,
    ) -> None:
        """A request has ended.

        Args:
            status: of HTTP; None: its client left before.
            failed: an engine or the gateway is to blame.
            offloaded: it was prefilled in another cluster.
            first_token_s: from the decision on; None: no stream, or none came.
            at_home_s: what was predicted for its own cluster; None: nothing was.
            egress_cost: of its bytes on links.
        """
        now = self._bucket()
        now.ended += 1
        if status in _REFUSALS:
            now.refused += 1
        elif failed:
            now.failed += 1
        now.offloaded += offloaded
        now.egress_cost += egress_cost
        if offloaded and first_token_s is not None and at_home_s is not None:
            now.compared += 1
            now.first_token_s += first_token_s
            now.at_home_s += at_home_s

    def told(self) -> dict[str, dict[str, float]]:
        """The sums of the last minute (`now`) and of the last minutes (`lately`), ready for JSON."""
        return {"now": self._sum(REFUSED_S), "lately": self._sum(WORTH_S)}

    def _bucket(self) -> _Bucket:
        number = int(self._clock() // _BUCKET_S)
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append((number, _Bucket()))
        return self._buckets[-1][1]

    def _sum(self, span_s: float) -> dict[str, float]:
        first = int(self._clock() // _BUCKET_S) - int(span_s / _BUCKET_S) + 1
        parts = [asdict(bucket) for number, bucket in self._buckets if number >= first]
        return {each.name: sum(part[each.name] for part in parts) for each in fields(_Bucket)}
