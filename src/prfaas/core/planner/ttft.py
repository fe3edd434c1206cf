"""Time to the first token: prefill, the link, and waiting for an instance or a decode slot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from prfaas.core.arrays import FloatArray, np
from prfaas.core.deployment import FirstTokenSource
from prfaas.core.planner.problem import Path, PlanProblem
from prfaas.core.units import BITS_PER_BYTE

ESTIMATE_LABEL = (
    "estimate: Poisson arrivals, one first-come-first-served queue per prefill pool (M/G/k) and for the decode slots "
    "(M/G/c), links shared evenly"
)
_BISECTIONS = 60
# A smaller chance to wait is none.
_NEVER = 1e-9


@dataclass(frozen=True, slots=True)
class TtftEstimate:
    """TTFT with waiting at a given rate: an estimate, not a promise."""

    label: str
    load: float
    """The share of Λ_max that arrives."""
    requests_per_s: float
    mean_s: float | None
    """None if some stage has more work than time: by E[T(L)], which the paper's T(E[L]) understates."""
    p90_s: float | None
    busiest_utilisation: float
    """Of the fullest prefill pool, link or decode side."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkTime:
    """The time that a link adds to requests, one entry per service time. Layers are sent while the next is computed."""

    streamed_s: FloatArray
    """Seconds on the empty link of what can leave while the prefill runs."""
    late_s: FloatArray
    """The same of what can only leave at its end, or must be there before: states, windows, fetched prefixes."""
    before_s: FloatArray
    """Of `late_s` what must be there before."""
    round_trip_s: FloatArray
    busy_s: FloatArray
    """Seconds that the link works per request of the whole system."""

    def added_s(
        self, prefill_s: FloatArray, requests_per_s: float, first_token: FirstTokenSource = "decode"
    ) -> FloatArray:
        """Seconds from the end of the prefill to the last byte's arrival.

        Where the prefill gives the first token, they are what that has waited for the link: prefixes that came before,
        and round trips.

        Transfers share the link: each takes 1 / (1 − ρ) times as long as alone (M/G/1 processor sharing, Kleinrock,
        Queueing Systems II, 1976, section 4.4). The link must not be full.
        """
        left = 1 - requests_per_s * self.busy_s
        if first_token == "prefill":
            waits: FloatArray = self.round_trip_s + self.before_s / left
            return waits
        added: FloatArray = (
            self.round_trip_s + self.late_s / left + np.maximum(self.streamed_s / left - prefill_s, 0.0)
        )
        return added


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPoolLoad:
    """Equal prefill instances and what they work on."""

    name: str
    instances: int
    seconds: FloatArray
    """Service times."""
    weights: FloatArray
    """The probability that a request of the whole system has that service time here."""
    smooth: bool
    """False if the service times are the only values that occur."""
    link: LinkTime | None = None
    """None where nothing crosses a link."""
    work_s: float = field(init=False)
    """Seconds of work per request of the whole system."""
    squares_s2: float = field(init=False)
    """Seconds of work squared, the same way."""
    part: float = field(init=False)
    """Of all requests of the whole system."""

    def __post_init__(self) -> None:
        # Waits are asked for at many rates, and depend on nothing else.
        object.__setattr__(self, "work_s", float((self.seconds * self.weights).sum()))
        object.__setattr__(self, "squares_s2", float((self.seconds**2 * self.weights).sum()))
        object.__setattr__(self, "part", float(self.weights.sum()))

    def served_s(self, requests_per_s: float = 0.0, first_token: FirstTokenSource = "decode") -> FloatArray:
        """Prefill and what the link adds to the TTFT, without waiting for either's turn."""
        if self.link is None:
            return self.seconds
        return self.seconds + self.link.added_s(self.seconds, requests_per_s, first_token)


@dataclass(frozen=True, slots=True, eq=False)
class StageWork:
    """The work of a deployment's stages per request, at given roles and routes."""

    pools: tuple[PrefillPoolLoad, ...]
    link_rates: dict[str, float]
    """Requests per second of the whole system at which a link is full, by its name; only of links that are used."""
    decode_parts: dict[str, float]
    """The part of all requests that each PD cluster decodes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A queue: who waits, waits for an exponential time."""

    chance: float
    """To wait at all."""
    mean_s: float
    """Of those who do."""


NO_WAIT = Wait(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DecodeQueue:
    """The decode slots of one PD cluster at a rate."""

    part: float
    """Of all requests."""
    utilisation: float
    wait: Wait


def link_time(problem: PlanProblem, path: Path, lengths: FloatArray, weights: FloatArray) -> LinkTime | None:
    """The time that links add to requests of a path; None if it crosses none.

    Args:
        problem: Its links and sizes.
        path: The way of the requests.
        lengths: Of prompts in tokens, cached ones counted.
        weights: Their probabilities among all requests.
    """
    if not path.transfers:
        return None
    links = {link.name: link for link in problem.links}
    streamed_s, late_s, before_s = (np.zeros(len(lengths)) for _ in range(3))
    round_trip_s = busy_s = 0.0
    for number, transfer in enumerate(path.transfers, start=1):
        link = links[transfer.link]
        tokens = transfer.share * lengths
        sizes = problem.kv_bytes_over(link.name)(tokens)
        token_bytes = problem.streamed_token_bytes if link.kv_bytes is None else link.streamed_token_bytes
        # A prefix that is fetched must be there before the prefill begins; only the way back overlaps with it.
        is_back = number == len(path.transfers) and not path.is_local
        streamed = np.minimum(sizes, token_bytes * tokens) if is_back else np.zeros(len(lengths))
        unit_s = BITS_PER_BYTE / min(link.bandwidth_bits_per_s, link.transfer_limit_bits_per_s)
        streamed_s += streamed * unit_s
        late_s += (sizes - streamed) * unit_s
        if not is_back:
            before_s += sizes * unit_s
        round_trip_s += link.rtt_s
        busy_s = max(busy_s, float((weights * sizes).sum()) * BITS_PER_BYTE / link.bandwidth_bits_per_s)
    full = np.ones(len(lengths))
    return LinkTime(streamed_s, late_s, before_s, round_trip_s * full, busy_s * full)


def joined(parts: Sequence[LinkTime | None], counts: Sequence[int]) -> LinkTime | None:
    """The link times of several paths, one after the other, each with so many entries; None if none has any."""
    if all(part is None for part in parts):
        return None

    pairs = list(zip(parts, counts, strict=True))

    def every(name: str) -> FloatArray:
        return np.concatenate([np.zeros(n) if part is None else getattr(part, name) for part, n in pairs])

    return LinkTime(**{each.name: every(each.name) for each in fields(LinkTime)})


def service_ttft(
    pools: tuple[PrefillPoolLoad, ...], first_token: FirstTokenSource = "decode"
) -> tuple[float, float]:
    """Mean and P90 of prefill and link in seconds, without waiting: what Table 6 prints."""
    seconds = np.concatenate([pool.served_s(0.0, first_token) for pool in pools])
    weights = np.concatenate([pool.weights for pool in pools])
    order = np.argsort(seconds)
    seconds, weights = seconds[order], weights[order] / weights.sum()
    cumulative = np.cumsum(weights)
    mean = float((seconds * weights).sum())
    if all(pool.smooth for pool in pools):
        return mean, float(np.interp(0.9, cumulative - weights / 2, seconds))
    return mean, float(seconds[min(int(np.searchsorted(cumulative, 0.9 - 1e-12)), len(seconds) - 1)])


class TtftDistribution:
    """TTFT with waiting at a rate of requests.

    Per prefill pool M/G/k by Allen and Cunneen: the wait of M/M/k (Erlang C) times (1 + CV²) / 2, exponential given
    that there is one; the same for the decode slots, on top. Not a bound: real arrivals come in bursts.

    Args:
        pools: The prefill pools.
        requests_per_s: What arrives at the whole system.
        decode: The decode slots; none: as if nobody ever waited for one.
        first_token: Who gives it. One of the prefill waits for no link and no slot, but all stages must keep up.
    """

    def __init__(
        self,
        pools: tuple[PrefillPoolLoad, ...],
        requests_per_s: float,
        decode: Sequence[DecodeQueue] = (),
        first_token: FirstTokenSource = "decode",
    ) -> None:
        self._pools = pools
        self.busiest_utilisation = max(_utilisations(pools, requests_per_s, decode), default=0.0)
        self._decode = decode if decode and first_token == "decode" else (DecodeQueue(1.0, 0.0, NO_WAIT),)
        self.is_finite = self.busiest_utilisation < 1
        if self.is_finite:
            self._served_s = [pool.served_s(requests_per_s, first_token) for pool in pools]
            self._waits = [wait_of(pool, requests_per_s) for pool in pools]

    def mean_s(self) -> float:
        """Infinite if some stage is full."""
        if not self.is_finite:
            return math.inf
        decode_s = sum((queue.part * queue.wait.chance * queue.wait.mean_s for queue in self._decode), 0.0)
        return decode_s + sum(
            (
                float((pool.weights * (served_s + wait.chance * wait.mean_s)).sum())
                for pool, served_s, wait in zip(self._pools, self._served_s, self._waits, strict=True)
            ),
            0.0,
        )

    def at_most(self, seconds: float) -> float:
        """The part of all requests whose TTFT is no longer; 0 if some stage is full."""
        if not self.is_finite:
            return 0.0
        return sum(
            (
                queue.part * float((pool.weights * _in_time(seconds - served_s, wait, queue.wait)).sum())
                for pool, served_s, wait in zip(self._pools, self._served_s, self._waits, strict=True)
                for queue in self._decode
            ),
            0.0,
        )

    def quantile_s(self, quantile: float) -> float:
        """Infinite if some stage is full."""
        if not self.is_finite:
            return math.inf
        low, high = 0.0, 1.0
        while self.at_most(high) < quantile:
            high *= 2
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.at_most(middle) < quantile else (low, middle)
        return high


def _utilisations(
    pools: tuple[PrefillPoolLoad, ...], requests_per_s: float, decode: Sequence[DecodeQueue]
) -> list[float]:
    found = [queue.utilisation for queue in decode]
    for pool in pools:
        if pool.instances:
            found.append(requests_per_s * pool.work_s / pool.instances)
        elif pool.weights.any():
            found.append(math.inf)
        if pool.link is not None and len(pool.link.busy_s):
            found.append(requests_per_s * float(pool.link.busy_s.max()))
    return found


def _in_time(left_s: FloatArray, first: Wait, second: Wait) -> FloatArray:
    """P(both waits together <= left) for every entry."""
    left = np.maximum(left_s, 0.0)
    if second.chance < _NEVER:
        late = first.chance * _tail(left, first.mean_s)
    else:
        both = first.chance * second.chance
        late = (
            (first.chance - both) * _tail(left, first.mean_s)
            + (second.chance - both) * _tail(left, second.mean_s)
            + both * _tail_of_two(left, first.mean_s, second.mean_s)
        )
    in_time: FloatArray = np.where(left_s >= 0, 1 - late, 0.0)
    return in_time


def _tail(left: FloatArray, mean_s: float) -> FloatArray:
    tail: FloatArray = np.exp(-left / mean_s) if mean_s > 0 else np.zeros(len(left))
    return tail


def _tail_of_two(left: FloatArray, one_s: float, other_s: float) -> FloatArray:
    """P(X + Y > left) of two exponential times."""
    if one_s <= 0 or other_s <= 0:
        return _tail(left, max(one_s, other_s))
    if abs(one_s - other_s) < 1e-6 * one_s:
        equal: FloatArray = (1 + left / one_s) * np.exp(-left / one_s)
        return equal
    tail: FloatArray = (one_s * np.exp(-left / one_s) - other_s * np.exp(-left / other_s)) / (one_s - other_s)
    return tail


def erlang_c(servers: int, offered: float) -> float:
    """The chance to wait in M/M/k with `offered` < `servers` Erlang, by the stable recursion of Erlang B."""
    blocked = 1.0
    for k in range(1, servers + 1):
        carried = offered * blocked
        blocked = carried / (k + carried)
    return blocked / (1 - offered / servers * (1 - blocked))


def wait_of(pool: PrefillPoolLoad, rate: float) -> Wait:
    """The wait for a prefill instance at `rate` requests per second of the system.

    First come, first served. The pool must have less work than time.
    """
    share = pool.part
    if share <= 0:
        return NO_WAIT
    arrivals = rate * share
    service_s = pool.work_s / share
    variation = max(pool.squares_s2 / share / service_s**2 - 1, 0.0)
    offered = arrivals * service_s
    chance = erlang_c(pool.instances, offered)
    return Wait(chance, (1 + variation) / 2 * service_s / (pool.instances - offered))


def decode_queues(
    problem: PlanProblem, prefill: Mapping[str, int], work: StageWork, requests_per_s: float
) -> tuple[DecodeQueue, ...]:
    """The decode slots of every PD cluster that decodes, as M/M/c at a rate of the whole system."""
    output = problem.workload.output_tokens
    found = []
    for pd in problem.pd:
        part = work.decode_parts[pd.name]
        if part <= 0:
            continue
        # What fills this cluster, in its own requests and in the system's.
        own_rate = (pd.instances - prefill[pd.name]) * pd.decode_rate(output)
        rate, answer_s = own_rate / part, pd.decode_step_s * output
        wait = _slot_wait(requests_per_s * part, own_rate, answer_s)
        utilisation = requests_per_s / rate if rate > 0 else math.inf
        # Slots are whole: they can be too few a little before the rate is reached.
        if wait is None:
            utilisation = max(utilisation, 1.0)
        found.append(DecodeQueue(part, utilisation, wait or NO_WAIT))
    return tuple(found)


def _slot_wait(requests_per_s: float, full_rate: float, answer_s: float) -> Wait | None:
    """Answers are taken for exponentially distributed. None: more work than time."""
    slots, offered = max(round(full_rate * answer_s), 1), requests_per_s * answer_s
    if offered >= slots or requests_per_s >= full_rate:
        return None
    chance = erlang_c(slots, offered)
    return Wait(chance, answer_s / (slots - offered)) if chance > 0 else NO_WAIT
