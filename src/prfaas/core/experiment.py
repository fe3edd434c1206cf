"""What a scheduler is worth as a whole: it runs against another one in slices of time, in pairs whose order is drawn.

Requests share queues and caches, so single ones that go another way only say what one more such request is worth. Whole
slices say what all of them are. What a slice leaves behind is waited out at the beginning of the next one.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Arm = Literal["as-is", "other"]

_LEAST_REQUESTS = 5
"""Of a slice that counts."""
_LEAST_PAIRS = 3
# Requests of one queue have much in common: so many say as much as one that stands alone.
_ALIKE = 10.0
_SIGMAS = 3.0
# First tokens of an arm before a guard speaks.
_LEAST_JUDGED = 50


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time in which all requests are decided alike."""

    number: int
    """Since 1970; slices 2 k and 2 k + 1 are a pair."""
    arm: Arm
    counts: bool
    """The washout is over."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of Unix time. All gateways of a deployment have the same, since they have its secret."""

    slice_s: float
    washout_s: float
    """At the beginning of each, while queues are still those of the one before."""
    secret: bytes
    """Without it nobody can tell which slice of a pair is which."""

    def at(self, unix_s: float) -> Slice:
        """The slice that a moment lies in."""
        number, since_s = divmod(unix_s, self.slice_s)
        pair, second = divmod(int(number), 2)
        drawn = hashlib.blake2b(
            pair.to_bytes(8, "little"), digest_size=1, key=self.secret, person=b"prfaas-slices"
        )
        return Slice(
            number=int(number),
            arm="other" if drawn.digest()[0] % 2 == second else "as-is",
            counts=since_s >= self.washout_s,
        )


@dataclass(frozen=True, slots=True)
class SliceMean:
    """Requests of one slice that had their first token."""

    number: int
    arm: str
    requests: int
    mean_s: float
    """Until the first token."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What the scheduler is worth against the other one. Seconds are until the first token, means of slices."""

    pairs: int
    as_is_s: float
    other_s: float
    half_s: float
    """Half the 95 % interval of the difference, from the spread of pairs."""

    @property
    def saved_s(self) -> float:
        """By how much sooner first tokens come as it is; negative: later."""
        return self.other_s - self.as_is_s


def effect(slices: Iterable[SliceMean]) -> Effect | None:
    """The mean difference of the pairs whose slices are both there; None with fewer than three."""
    arms: dict[int, dict[str, float]] = {}
    for each in slices:
        if each.requests >= _LEAST_REQUESTS:
            arms.setdefault(each.number // 2, {})[each.arm] = each.mean_s
    pairs = [(pair["as-is"], pair["other"]) for pair in arms.values() if len(pair) == 2]
    if len(pairs) < _LEAST_PAIRS:
        return None
    as_is_s, other_s = map(fmean, zip(*pairs, strict=True))
    _, half_s = mean_and_half([other - as_is for as_is, other in pairs])
    return Effect(pairs=len(pairs), as_is_s=as_is_s, other_s=other_s, half_s=half_s)


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """The mean of two numbers or more, and half of its 95 % interval (Student's t)."""
    from scipy.special import stdtrit

    count = len(values)
    return fmean(values), float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count)


@dataclass(slots=True)
class _Sum:
    """Of first tokens, and of requests that failed."""

    count: int = 0
    total_s: float = 0.0
    squares: float = 0.0
    failed: int = 0

    def add(self, first_token_s: float | None) -> None:
        if first_token_s is None:
            self.failed += 1
            return
        self.count += 1
        self.total_s += first_token_s
        self.squares += first_token_s * first_token_s

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count

    @property
    def error_s(self) -> float:
        """Of the mean, with what requests of one queue have in common."""
        return math.sqrt(max(self.squares / self.count - self.mean_s**2, 0.0) * _ALIKE / self.count)

    @property
    def failed_share(self) -> float:
        return self.failed / (self.count + self.failed)


class Guard:
    """Says when an experiment must end, since the other scheduler hurts."""

    def __init__(self, most_harm: float) -> None:
        """`most_harm`: so much longer first tokens may take on average, as a share of what they take as it is."""
        self._most_harm = most_harm
        self._as_is = _Sum()
        self._other = _Sum()
        self._number = -1

    def harm(self, at: Slice, first_token_s: float | None) -> str | None:
        """Count a request of a slice, None: it failed; why the experiment must end, None: it need not.

        The other scheduler is judged by one slice at a time: what was well before excuses nothing. Its washout counts,
        too, since clients wait there as well.
        """
        if at.arm == "as-is":
            if at.counts:
                self._as_is.add(first_token_s)
            return None
        if at.number != self._number:
            self._number, self._other = at.number, _Sum()
        now, before = self._other, self._as_is
        now.add(first_token_s)
        if min(now.count + now.failed, before.count) < _LEAST_JUDGED:
            return None
        more = now.failed_share - before.failed_share
        if more > _SIGMAS * math.sqrt(_ALIKE / 4.0 / (now.count + now.failed)):
            return f"{now.failed_share:.0%} of the requests failed, {before.failed_share:.0%} as it is"
        if not now.count:
            return None
        error_s = _SIGMAS * math.hypot(now.error_s, before.error_s)
        if now.mean_s - error_s > (1.0 + self._most_harm) * before.mean_s:
            return f"first tokens took {now.mean_s:.3g} s on average, {before.mean_s:.3g} s as it is"
        return None
