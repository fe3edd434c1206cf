"""Which hot prefixes are worth copying to which cluster with unused bandwidth (section 3.2)."""

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from prfaas.core.prefix.index import PoolHit
from prfaas.core.scheduling.view import LinkView, PoolView, View
from prfaas.core.units import BITS_PER_BYTE

_Place = tuple[Hashable, str]


@dataclass(frozen=True, slots=True)
class Copy:
    """The KV of a prefix goes from one cluster to another."""

    key: Hashable
    source: str
    target: str
    tokens: int
    num_bytes: int
    misses: float
    """How often it was missing there lately, with decay."""


@dataclass(frozen=True, slots=True)
class MissedPrefix:
    """What a request lacks in its cluster, and pools of others hold."""

    tokens: int
    """Length of the prefix."""
    held_tokens: int
    """Of these the cluster holds so many."""
    num_bytes: int
    """Of the rest."""
    target: PoolView
    """The pool of the machine that prefills the request."""
    sources: Mapping[str, str]
    """Cluster → its pool that holds all of it."""


def missed_prefix(pools: Mapping[str, PoolHit] | None, prefill: str, view: View) -> MissedPrefix | None:
    """What a request misses that the instance `prefill` computes. `pools`: what each pool holds of it, by name."""
    here = next((pool for pool in view.pools.values() if prefill in pool.instances), None)
    if here is None or not pools:
        return None
    longest: dict[str, tuple[int, str]] = {}
    for name, hit in pools.items():
        place, found = view.pools[name].cluster, (hit.every_tier.reusable_tokens, name)
        longest[place] = max(longest.get(place, found), found)
    held_tokens, _ = longest.pop(here.cluster, (0, ""))
    most = max((tokens for tokens, _ in longest.values()), default=0)
    if most <= held_tokens:
        return None
    sources = {place: name for place, (tokens, name) in longest.items() if tokens == most}
    num_bytes = view.kv_of_pools(here.cluster).prefix_bytes_to_move(most, held_tokens)
    return MissedPrefix(most, held_tokens, num_bytes, here, sources)


@dataclass(slots=True)
class _Missing:
    """One prefix that a cluster lacks: the last misses, and their sum with decay as of the last one."""

    times_s: deque[float]
    misses: float
    tokens: int
    num_bytes: int
    held_in: tuple[str, ...]


@dataclass(slots=True)
class Rebalancer:
    """Counts what is missing where, and decides copies.

    A copy is due when its prefix was missing in a cluster `min_misses` times (at least 2) within `window_s`, another
    cluster with a live link to it was seen to hold the prefix, and the link has bytes to spare: what is left of its
    capacity less `headroom` and less what it carries, for the time since the last decision (at most `period_s`). The
    copies that spare the most computing per byte come first: misses × tokens / bytes. Each (prefix, cluster) is decided
    once per `cool_down_s`.

    Memory is bounded: `capacity` pairs of prefix and cluster seen once, and as many seen more often. Where one list
    is full its longest unseen goes: prefixes seen once, however many, push out nothing that came twice.
    """

    min_misses: int = 4
    window_s: float = 600.0
    period_s: float = 60.0
    headroom: float = 0.3
    cool_down_s: float = 1800.0
    capacity: int = 4096
    _once: OrderedDict[_Place, _Missing] = field(default_factory=OrderedDict, init=False)
    _often: OrderedDict[_Place, _Missing] = field(default_factory=OrderedDict, init=False)
    _decided_s: OrderedDict[_Place, float] = field(default_factory=OrderedDict, init=False)
    _last_s: float | None = field(default=None, init=False)

    def observe(
        self,
        key: Hashable,
        tokens: int,
        num_bytes: int,
        missing_in: str,
        held_in: Collection[str],
        now_s: float,
    ) -> None:
        """A request for `missing_in` had a prefix that this cluster lacks and the clusters `held_in` have. 2 µs."""
        place = (key, missing_in)
        before = self._often.get(place) or self._once.get(place)
        if before is None:
            times: deque[float] = deque((now_s,), self.min_misses)
            self._once[place] = _Missing(times, 1.0, tokens, num_bytes, tuple(held_in))
            if len(self._once) > self.capacity:
                self._once.popitem(last=False)
            return
        before.misses = before.misses * self._decay(now_s - before.times_s[-1]) + 1
        before.times_s.append(now_s)
        before.tokens, before.num_bytes, before.held_in = tokens, num_bytes, tuple(held_in)
        self._once.pop(place, None)
        self._often[place] = before
        self._often.move_to_end(place)
        if len(self._often) > self.capacity:
            self._often.popitem(last=False)

    def decide(self, links: Iterable[LinkView], now_s: float) -> tuple[Copy, ...]:
        """The copies to make now, best first. `links`: those whose facts can be believed."""
        elapsed_s = self.period_s if self._last_s is None else min(now_s - self._last_s, self.period_s)
        self._last_s = now_s
        spare = {
            (link.source, link.target): self._spare_bits_per_s(link) * elapsed_s / BITS_PER_BYTE
            for link in links
            if link.up and link.joins_pools
        }
        copies = []
        for place, missing in sorted(
            self._due(now_s), key=lambda due: (-self._worth(due[1], now_s), str(due[0]))
        ):
            key, target = place
            ways = [(spare.get((source, target), 0.0), source) for source in missing.held_in]
            room, source = max(ways, key=lambda way: (way[0], way[1]), default=(0.0, ""))
            if source == "" or room < missing.num_bytes:
                continue
            spare[source, target] -= missing.num_bytes
            misses = missing.misses * self._decay(now_s - missing.times_s[-1])
            copies.append(Copy(key, source, target, missing.tokens, missing.num_bytes, misses=misses))
            self._note(place, now_s)
        return tuple(copies)

    def is_often(self, key: Hashable, cluster: str) -> bool:
        """Whether the cluster missed the prefix more than once, as far as is remembered."""
        return (key, cluster) in self._often

    def __len__(self) -> int:
        """Pairs of prefix and cluster that are remembered."""
        return len(self._once) + len(self._often) + len(self._decided_s)

    def _due(self, now_s: float) -> list[tuple[_Place, _Missing]]:
        return [
            (place, missing)
            for place, missing in self._often.items()
            if len(missing.times_s) == self.min_misses
            and now_s - missing.times_s[0] <= self.window_s
            and now_s - self._decided_s.get(place, float("-inf")) >= self.cool_down_s
        ]

    def _note(self, place: _Place, now_s: float) -> None:
        self._decided_s[place] = now_s
        self._decided_s.move_to_end(place)
        while len(self._decided_s) > self.capacity:
            self._decided_s.popitem(last=False)
        self._often.pop(place, None)

    def _worth(self, missing: _Missing, now_s: float) -> float:
        misses = missing.misses * self._decay(now_s - missing.times_s[-1])
        return misses * missing.tokens / max(missing.num_bytes, 1)

    def _decay(self, age_s: float) -> float:
        """Half of a miss is forgotten after half of the window."""
        return float(0.5 ** (2 * max(age_s, 0.0) / self.window_s))

    def _spare_bits_per_s(self, link: LinkView) -> float:
        return max(link.capacity_bits_per_s * (1 - self.headroom) - link.egress_bits_per_s, 0.0)
