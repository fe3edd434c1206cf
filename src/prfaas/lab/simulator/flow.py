"""Flows that each get one share of a link: a queue, a sender with its queues, all senders together."""

import math

from prfaas.core.link.budget import STANDING_PART, max_min


class Flow:
    """Of which it is known what is produced for it, and whether more has been produced than sent: then it is late."""

    __slots__ = ("bits_per_s", "is_late", "parent", "productions", "rate_bits_per_s")

    parent: "SharedFlow | None"
    """Who divides its part among this and others."""
    productions: int
    """Prefills that go on, and produce something."""
    bits_per_s: float
    """Of them all. One that is not late sends as much."""
    is_late: bool
    """It takes all that it gets."""
    rate_bits_per_s: float
    """What it sends while it is late."""

    def __init__(self, parent: "SharedFlow | None") -> None:
        self.parent = parent
        self.productions = 0
        self.bits_per_s = self.rate_bits_per_s = 0.0
        self.is_late = False

    def most_bits_per_s(self) -> float:
        """The highest rate that its connections carry together."""
        raise NotImplementedError

    def serve(self, bits_per_s: float, now_s: float) -> float:
        """Divide what a late one gets from now on; returns when that changes by itself."""
        raise NotImplementedError

    def produce(self, bits_per_s: float) -> None:
        """A prefill begins."""
        if not bits_per_s:
            return
        flow: Flow = self
        while True:
            flow.productions += 1
            flow.bits_per_s = rate = flow.bits_per_s + bits_per_s
            parent = flow.parent
            if parent is None:
                return
            if flow.is_late:
                parent.late_bits_per_s += bits_per_s
            elif rate > parent.peak_bits_per_s:
                parent.peak_bits_per_s = rate
            flow = parent

    def cease(self, bits_per_s: float) -> None:
        """A prefill ends."""
        if not bits_per_s:
            return
        flow: Flow = self
        while True:
            flow.productions = productions = flow.productions - 1
            # Where nothing is produced, nothing is left of what was rounded.
            flow.bits_per_s = flow.bits_per_s - bits_per_s if productions else 0.0
            parent = flow.parent
            if parent is None:
                return
            if flow.is_late:
                parent.late_bits_per_s -= bits_per_s
            flow = parent

    def become_late(self) -> None:
        """From now on it takes all that it gets."""
        flow: Flow = self
        while not flow.is_late:
            flow.is_late = True
            parent = flow.parent
            if parent is None:
                return
            parent.late[flow] = None
            parent.late_bits_per_s += flow.bits_per_s
            flow = parent

    def become_abreast(self) -> None:
        """All that is there is sent."""
        flow: Flow = self
        while flow.is_late:
            flow.is_late = False
            parent = flow.parent
            if parent is None:
                return
            del parent.late[flow]
            parent.late_bits_per_s -= flow.bits_per_s
            if flow.bits_per_s > parent.peak_bits_per_s:
                parent.peak_bits_per_s = flow.bits_per_s
            if parent.late:
                return
            parent.late_bits_per_s = 0.0
            flow = parent


class SharedFlow(Flow):
    """Max-min fair parts (D. Bertsekas and R. Gallager, "Data Networks", 6.5.2).

    No member gets more than its connections carry nor, while it is not late, more than its production. What it leaves
    is for the others, who share alike. So all that are late get the same.
    """

    __slots__ = ("_is_limited", "late", "late_bits_per_s", "members", "peak_bits_per_s")

    members: list[Flow]
    late: dict[Flow, None]
    late_bits_per_s: float
    """What is produced for those that are late."""
    peak_bits_per_s: float
    """No other member's production is faster."""

    def __init__(self, parent: "SharedFlow | None", *, is_limited: bool) -> None:
        """`is_limited`: connections carry a finite rate."""
        super().__init__(parent)
        self.members = []
        self.late = {}
        self.late_bits_per_s = 0.0
        self.peak_bits_per_s = 0.0
        self._is_limited = is_limited

    def most_bits_per_s(self) -> float:
        return max(self.bits_per_s - self.late_bits_per_s, 0.0) + sum(
            flow.most_bits_per_s() for flow in self.late
        )

    def serve(self, bits_per_s: float, now_s: float) -> float:
        late = self.late
        if not late:
            # All of them together produce more than that.
            max(self.members, key=_production_rate).become_late()
        while True:
            abreast_bits_per_s = self.bits_per_s - self.late_bits_per_s
            if abreast_bits_per_s < 0:
                abreast_bits_per_s = 0.0
            share = (bits_per_s - abreast_bits_per_s) / len(late)
            if share < 0:
                share = 0.0
            if self._is_limited:
                share = self._level(share)
            if self.peak_bits_per_s <= share:
                break
            self._fall_behind()
        next_s = math.inf
        rate = abreast_bits_per_s
        for flow in late:
            part = min(share, flow.most_bits_per_s()) if self._is_limited else share
            change_s = flow.serve(part, now_s)
            if change_s < next_s:
                next_s = change_s
            rate += flow.rate_bits_per_s
        self.rate_bits_per_s = rate
        return next_s

    def pace_of(self, member: Flow, bandwidth_bits_per_s: float) -> float:
        """The pace that a member with something to send gets of a bandwidth."""
        abreast_bits_per_s, late = self.bits_per_s - self.late_bits_per_s, len(self.late)
        if not member.is_late:
            abreast_bits_per_s -= member.bits_per_s
            late += 1
        standing = bandwidth_bits_per_s * STANDING_PART / len(self.members)
        part = (bandwidth_bits_per_s - abreast_bits_per_s) / late
        return part if part > standing else standing

    def _level(self, share: float) -> float:
        """What those that are late get who can carry it, where they would have so much each if all could."""
        most = [flow.most_bits_per_s() for flow in self.late]
        left = share * len(most)
        return math.inf if sum(most) <= left else max(max_min(left, most))

    def _fall_behind(self) -> None:
        """The fastest production gets more than a fair part: it has to wait from now on."""
        abreast = [flow for flow in self.members if not flow.is_late]
        fastest = max(abreast, key=_production_rate, default=None)
        if fastest is None or fastest.bits_per_s < self.peak_bits_per_s:
            self.peak_bits_per_s = 0.0 if fastest is None else fastest.bits_per_s
        else:
            fastest.become_late()


def _production_rate(flow: Flow) -> float:
    return flow.bits_per_s
