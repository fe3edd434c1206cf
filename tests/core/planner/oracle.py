"""The paper's model once more, in plain loops over single lengths: what the planner is checked against."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.core.units import BITS_PER_BYTE

Curve = Callable[[float], float]


@dataclass(frozen=True)
class Best:
    rate: float
    n_prefill: int
    threshold: float


@dataclass(frozen=True)
class TwoClusters:
    """(length, probability) pairs and everything Eq. 1 to 6 need."""

    requests: Sequence[tuple[float, float]]
    prfaas_instances: int
    prfaas_s: Curve
    pd_instances: int
    pd_s: Curve
    decode_per_instance: float
    kv_bytes: Curve
    bits_per_s: float
    edge: float = 0.0
    """A threshold is up to half of this part higher or lower for a request."""

    def rate(self, threshold: float, n_prefill: int, *, by_length: bool = False) -> float:
        """Λ_max."""
        long, short = [], []
        for length, weight in self.requests:
            part = self._part_long(length, threshold)
            long += [(length, weight * part)] if part > 0 else []
            short += [(length, weight * (1 - part))] if part < 1 else []
        limits = [(self.pd_instances - n_prefill) * self.decode_per_instance]
        if long:
            work = total(long, self.prfaas_s, by_length)
            bits = 8 * total(long, self.kv_bytes, by_length)
            limits += [self.prfaas_instances / work, self.bits_per_s / bits]
        if short:
            limits.append(n_prefill / total(short, self.pd_s, by_length))
        return min(limits)

    def best(self, *, by_length: bool = False) -> Best:
        """Every threshold that makes a difference, every split."""
        found = Best(-1, 0, 0)
        steps = [k / 20 - 1 for k in range(41)] if self.edge else [0.0]
        lengths = [length / (1 + step * self.edge / 2) for length, _ in self.requests for step in steps]
        for threshold in [0.0, *lengths]:
            for n_prefill in range(self.pd_instances + 1):
                rate = self.rate(threshold, n_prefill, by_length=by_length)
                if rate > found.rate:
                    found = Best(rate, n_prefill, threshold)
        return found

    def _part_long(self, length: float, threshold: float) -> float:
        """How much of U, uniform on [0, 1), makes length > threshold · (1 + edge · (U − ½))."""
        if not self.edge or threshold == 0:
            return float(length > threshold)
        return min(max((length / threshold - 1 + self.edge / 2) / self.edge, 0.0), 1.0)


def total(part: Sequence[tuple[float, float]], f: Curve, by_length: bool) -> float:
    """P(part) × f(E[L | part]), or E[f(L); part]."""
    mass = math.fsum(weight for _, weight in part)
    if by_length:
        return math.fsum(weight * f(length) for length, weight in part)
    return mass * f(math.fsum(weight * length for length, weight in part) / mass)


@dataclass(frozen=True)
class ManyClusters:
    """Prefill clusters (instances, T) and PD clusters (instances, T, decode rate), links by (prefill, pd)."""

    requests: Sequence[tuple[float, float]]
    prfaas: Sequence[tuple[int, Curve]]
    pd: Sequence[tuple[int, Curve, float]]
    links: dict[tuple[int, int], float]
    kv_bytes: Curve

    def best_by_length(self) -> float:
        """Λ_max over all roles: for each, the least v = 1 / Λ such that the work of one request fits."""
        splits = itertools.product(*(range(instances + 1) for instances, _, _ in self.pd))
        return max(self._rate(split) for split in splits)

    def _rate(self, split: Sequence[int]) -> float:
        from scipy.optimize import linprog

        ways = [("far", i, j) for i, j in self.links] + [("near", j, j) for j in range(len(self.pd))]
        columns = [(way, r) for way in ways for r in range(len(self.requests))]
        upper: list[list[float]] = []
        for i, (instances, seconds) in enumerate(self.prfaas):
            upper.append(self._row(columns, lambda way, i=i: way[:2] == ("far", i), seconds, instances))
        for j, (instances, seconds, decode) in enumerate(self.pd):
            upper.append(self._row(columns, lambda way, j=j: way[:2] == ("near", j), seconds, split[j]))
            left = (instances - split[j]) * decode
            upper.append(self._row(columns, lambda way, j=j: way[2] == j, lambda _: 1.0, left))
        for (i, j), bandwidth in self.links.items():
            bits: Curve = lambda length: 8 * self.kv_bytes(length) / 1e9  # noqa: E731
            upper.append(
                self._row(columns, lambda way, i=i, j=j: way == ("far", i, j), bits, bandwidth / 1e9)
            )
        equal = [[float(r == each) for _, r in columns] + [0.0] for each in range(len(self.requests))]
        found = linprog(
            [0.0] * len(columns) + [1.0],
            A_ub=upper,
            b_ub=[0.0] * len(upper),
            A_eq=equal,
            b_eq=[weight for _, weight in self.requests],
        )
        return 1 / found.fun if found.status == 0 else 0.0

    def _row(
        self,
        columns: Sequence[tuple[tuple[str, int, int], int]],
        chosen: Callable[[tuple[str, int, int]], bool],
        cost: Curve,
        capacity: float,
    ) -> list[float]:
        return [cost(self.requests[r][0]) if chosen(way) else 0.0 for way, r in columns] + [-capacity]


def theta_prfaas(instances: int, prefill_s: float, bandwidth_bits_per_s: float, kv_bytes: float) -> float:
    """Eq. 3: min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long)), requests per second.

    Prefill and transfer overlap layer by layer, so the slower of the two counts.
    """
    return min(instances / prefill_s, bandwidth_bits_per_s / (kv_bytes * BITS_PER_BYTE))


def theta_pd_p(n_prefill: int, prefill_s: float) -> float:
    """Eq. 4: N_p / T_prefill(l_short), requests per second."""
    return n_prefill / prefill_s


def theta_pd_d(n_decode: int, decode_batch: float, decode_step_s: float, output_tokens: float) -> float:
    """Eq. 5: N_d · BS_max / (T_decode · L_out), requests per second."""
    return n_decode * decode_batch / (decode_step_s * output_tokens)


def lambda_max(theta_prfaas: float, theta_pd_p: float, theta_pd_d: float, offloaded_fraction: float) -> float:
    """Eq. 6: min(Θ_prfaas / p, Θ_pd-p / (1 − p), Θ_pd-d), requests per second; a stage without requests is no limit."""
    p = offloaded_fraction
    return min(
        theta_prfaas / p if p > 0 else math.inf,
        theta_pd_p / (1 - p) if p < 1 else math.inf,
        theta_pd_d,
    )
