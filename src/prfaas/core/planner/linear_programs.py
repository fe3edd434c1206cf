"""The linear programmes of the general case: which cluster prefills which lengths for which, and the roles.

A request of length l keeps a prefill instance busy for T(l), so that at the optimum every cluster gets an
interval of lengths: the thresholds of the paper, for any number of clusters. Lengths come in bins, with exact means of
curves over each bin.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prfaas.core.arrays import FloatArray, NDArray, OfLength, np
from prfaas.core.planner.problem import Path, PlanError, PlanProblem
from prfaas.core.units import BITS_PER_BYTE
from prfaas.core.workload.lengths import Bins, LengthDistribution


@dataclass(frozen=True, slots=True, eq=False)
class BinnedLengths:
    """A distribution of lengths cut into bins."""

    distribution: LengthDistribution
    bins: Bins
    fine: Bins
    """The same cut further, to take means over."""
    where: "NDArray[np.intp]"
    """The bin that each of `fine` lies in."""
    _means: "dict[tuple[OfLength, float], FloatArray]" = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, distribution: LengthDistribution, bins: Bins) -> "BinnedLengths":
        """Lengths cut into the given bins."""
        edges = np.concatenate([[0.0], distribution.fine_bins().upper, bins.lower, bins.upper])
        fine = distribution.bins_between(edges)
        where = np.minimum(np.searchsorted(bins.upper, fine.upper, side="left"), len(bins.upper) - 1)
        return cls(distribution, bins, fine, where)

    def divided(self, chosen: "NDArray[np.intp]", parts: int) -> "BinnedLengths":
        """Lengths with the chosen bins cut into equal intervals."""
        bins = self.bins
        cuts = [np.linspace(bins.lower[b], bins.upper[b], parts + 1) for b in chosen]
        edges = np.concatenate([bins.lower, bins.upper, *cuts])
        return BinnedLengths.of(self.distribution, self.distribution.bins_between(edges))

    def means(self, f: OfLength, share: float) -> FloatArray:
        """E[f(share × L) | bin] for every bin."""
        if (f, share) not in self._means:
            fine, count = self.fine, len(self.bins.weights)
            total = np.bincount(self.where, fine.weights * f(share * fine.lengths), count)
            self._means[f, share] = total / np.bincount(self.where, fine.weights, count)
        return self._means[f, share]


Resource = tuple[str, str]
"""("prefill" or "decode", cluster) or ("link", name)."""

# Roles may be this much worse than the best, in proportion: equal clusters would otherwise keep the search busy
# over equal choices.
_ROLE_GAP = 1e-4
_ROLE_TIME_LIMIT_S = 1.5
# Of equally good flows those that leave prefill and links the most room, then those with the least work: small
# enough not to pay for them with throughput.
_ROOM, _WORK = 1e-5, 1e-6
# A resource is full if more of it would shorten the time per request by more than this part of what all would; a
# level once reached is kept to but for the solver's tolerance.
_FULL, _SLACK = 1e-3, 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class ResourceUse:
    """The use of one resource by requests."""

    resource: Resource
    columns: "NDArray[np.int64]"
    """Indices of the flows (bin, path) that use it."""
    amounts: FloatArray
    """The use per request of each of these flows."""
    capacity: float | None
    """None: prefill instances, whose number depends on the roles."""


class Programme:
    """The programmes for one problem and one choice of bins.

    Shares are arrays of (bins × paths): the part of all requests that is of a bin and goes by a path.

    Args:
        problem: What is planned.
        paths: Those that may be used.
        lengths: The bins.
    """

    def __init__(self, problem: PlanProblem, paths: tuple[Path, ...], lengths: BinnedLengths) -> None:
        self._problem, self._paths, self._lengths = problem, paths, lengths
        self._bins = len(lengths.bins.weights)
        self._flows = self._bins * len(paths)
        self._rates = {pd.name: pd.decode_rate(problem.workload.output_tokens) for pd in problem.pd}
        self._uses = [*self._prefill_uses(), *self._link_uses(), *self._decode_uses()]

    def best_roles(self) -> tuple[dict[str, int], float]:
        """Prefill instances by PD cluster for the highest Λ, and a Λ that no choice of roles exceeds.

        Raises:
            PlanError: the solver gave up.
        """
        if len(self._problem.pd) == 1:
            # Λ is concave in one number: best where it rises no more. HiGHS was far off on small programmes.
            (pd,) = self._problem.pd
            rate = cache(lambda count: -float(self._at_roles(np.array([count])).fun))
            more = range(pd.group_ranks, pd.instances + 1, pd.group_ranks)
            place = bisect_left(more, True, key=lambda n: rate(n) <= (1 + 1e-9) * rate(n - more.step))
            return {pd.name: place * more.step}, rate(place * more.step)
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import diags_array

        upper, limits, equal = self._by_rate()
        roles = len(self._problem.pd)
        whole = np.concatenate([np.zeros(self._flows), np.ones(roles), [0.0]])
        # The programme's whole numbers are groups, which have their role together.
        ranks = np.array([pd.group_ranks for pd in self._problem.pd])
        if ranks.max() > 1:
            upper = upper @ diags_array(np.concatenate([np.ones(self._flows), ranks, [1.0]]))
        groups = np.array([pd.instances for pd in self._problem.pd]) // ranks
        highest = [np.full(self._flows, np.inf), groups, np.array([np.inf])]
        # HiGHS's presolve fails on some tiny programmes, and a slow machine may need longer for a first solution.
        for presolve, patience in ((True, 1), (False, 1), (True, 20)):
            found = milp(
                np.append(np.zeros(self._flows + roles), -1.0),
                integrality=whole,
                bounds=Bounds(0.0, np.concatenate(highest)),
                constraints=[LinearConstraint(upper, -np.inf, limits), LinearConstraint(equal, 0.0, 0.0)],
                options={
                    "mip_rel_gap": _ROLE_GAP,
                    "time_limit": patience * _ROLE_TIME_LIMIT_S,
                    "presolve": presolve,
                },
            )
            if found.x is not None:
                break
        if found.x is None:
            raise PlanError(f"the solver found no plan ({found.message})")
        chosen = found.x[self._flows : self._flows + roles]
        prefill = {
            pd.name: round(count) * pd.group_ranks for pd, count in zip(self._problem.pd, chosen, strict=True)
        }
        return prefill, -float(found.mip_dual_bound)

    def _at_roles(self, fixed: FloatArray) -> Any:
        """The solution with prefill instances that are given; its `fun` is −Λ."""
        upper, limits, equal = self._by_rate()
        low = np.concatenate([np.zeros(self._flows), fixed, [0.0]])
        high = np.concatenate([np.full(self._flows, np.inf), fixed, [np.inf]])
        objective = np.append(np.zeros(self._flows + len(fixed)), -1.0)
        return _solved(objective, upper, limits, equal, np.zeros(self._bins), low, high)

    def prices(self, prefill: Mapping[str, int]) -> dict[Resource, float]:
        """Λ gained per further prefill instance, decode instance or bit/s, at the given roles."""
        found = self._at_roles(np.array([prefill[pd.name] for pd in self._problem.pd], dtype=np.float64))
        prices = {}
        for use, marginal in zip(self._uses, found.ineqlin.marginals.tolist(), strict=True):
            kind, name = use.resource
            # Rows count links in parts of their bandwidth, and decode in requests per second.
            unit = (
                self._rates[name]
                if kind == "decode"
                else 1 / (use.capacity or 1.0)
                if kind == "link"
                else 1.0
            )
            prices[use.resource] = -marginal * unit
        return prices

    def shares(self, prefill: Mapping[str, int]) -> "FloatArray | None":
        """The flows of the highest Λ with the given roles, balanced (Eq. 7); None if nothing can flow."""
        found = self._balanced(prefill, self._each_bin(2), np.ones(self._bins), {})
        return None if found is None else self._shares_of(found)

    def fair_shares(self, prefill: Mapping[str, int], spread: Mapping[str, float]) -> "FloatArray | None":
        """The same if every PD cluster decodes its part (`spread`) of every bin; None if nothing can flow.

        Where a resource is full at the highest Λ the others still have a choice: of them the fullest is made as
        little full as can be, and so on, so that every PD cluster is balanced, not only the one that is the limit.
        """
        parts = np.tile([spread[pd.name] for pd in self._problem.pd], self._bins)
        equal = self._each_bin_and_pd(2)
        levels: dict[Resource, float] = {}
        found = None
        for _ in range(len(self._uses)):
            better = self._balanced(prefill, equal, parts, levels)
            if better is None:
                break
            found = better
            level = float(found.x[self._flows + 1])
            full = [
                use.resource
                for use, marginal in zip(self._uses, found.ineqlin.marginals.tolist(), strict=False)
                if use.resource not in levels and -marginal * self._capacity(use, prefill)[1] > _FULL
            ]
            if level <= 0 or not full:
                break
            levels |= dict.fromkeys(full, level * (1 + _SLACK))
        return None if found is None else self._shares_of(found)

    def _balanced(
        self, prefill: Mapping[str, int], equal: Any, sums: FloatArray, levels: Mapping[Resource, float]
    ) -> Any:
        """The solver's answer for the least time per request; `levels` are times that resources must keep to."""
        from scipy.sparse import coo_array

        # Columns: flows as parts of their bin (some bins are too improbable for the solver to see otherwise), then
        # v, the time per request of the fullest resource, and u, that of prefill and links.
        v, u = self._flows, self._flows + 1
        weights = np.repeat(self._lengths.bins.weights, len(self._paths))
        most = np.full(self._flows + 2, np.inf)
        limits = np.zeros(len(self._uses) + 1)
        rows, columns, values = [], [], []
        for row, use in enumerate(self._uses):
            capacity, per_row = self._capacity(use, prefill)
            if capacity <= 0:
                # As a row, this would let the solver's tolerance through.
                most[use.columns] = 0.0
            rows.append(np.full(len(use.columns) + 1, row))
            columns.append(np.append(use.columns, v if use.resource[0] == "decode" else u))
            kept_to = levels.get(use.resource)
            limits[row] = 0.0 if kept_to is None else per_row * kept_to
            unit = capacity if use.resource[0] == "link" else 1.0
            values.append(
                np.append(use.amounts * weights[use.columns] / unit, -per_row if kept_to is None else 0.0)
            )
        rows.append(np.full(2, len(self._uses)))
        columns.append(np.array([u, v]))
        values.append(np.array([1.0, -1.0]))
        shape = (len(self._uses) + 1, self._flows + 2)
        entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
        objective = np.append(self._work() * weights * _WORK, [1.0, _ROOM])
        upper = coo_array(entries, shape=shape).tocsr()
        try:
            return _solved(objective, upper, limits, equal, sums, np.zeros(shape[1]), most)
        except PlanError:
            return None

    def _capacity(self, use: ResourceUse, prefill: Mapping[str, int]) -> tuple[float, float]:
        """The resource's capacity at these roles, and in units of its row: a link counts in parts of itself."""
        kind, name = use.resource
        if kind == "decode":
            pd = self._problem.pd[[pd.name for pd in self._problem.pd].index(name)]
            capacity = (pd.instances - prefill[name]) * self._rates[name]
        else:
            capacity = float(prefill[name]) if use.capacity is None else use.capacity
        return capacity, 1.0 if kind == "link" else capacity

    def _shares_of(self, found: Any) -> FloatArray:
        weights = np.repeat(self._lengths.bins.weights, len(self._paths))
        portions = np.maximum(found.x[: self._flows], 0.0)
        shares: FloatArray = (portions * weights).reshape(self._bins, -1)
        return shares

    def _by_rate(self) -> "tuple[Any, FloatArray, Any]":
        """Rows over flows in requests/s, prefill instances per PD cluster, and Λ: uses, their limits, and bins."""
        from scipy.sparse import coo_array, csr_array, hstack

        width = self._flows + len(self._problem.pd) + 1
        role = {pd.name: self._flows + j for j, pd in enumerate(self._problem.pd)}
        rows, columns, values, limits = [], [], [], []
        for row, use in enumerate(self._uses):
            kind, name = use.resource
            extra: list[tuple[int, float]] = []
            limit = 0.0 if use.capacity is None else use.capacity
            if kind == "decode":
                extra = [(role[name], self._rates[name])]
            elif use.capacity is None:
                extra = [(role[name], -1.0)]
            # A link's bits per second are many: its row counts in parts of the link.
            unit = limit if kind == "link" else 1.0
            limits.append(limit / unit)
            rows.append(np.full(len(use.columns) + len(extra), row))
            columns.append(np.append(use.columns, [column for column, _ in extra]))
            values.append(np.append(use.amounts, [value for _, value in extra]) / unit)
        entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns).astype(np.int64)))
        upper = coo_array(entries, shape=(len(self._uses), width)).tocsr()
        weights = csr_array(-self._lengths.bins.weights.reshape(-1, 1))
        equal = hstack([self._each_bin(len(self._problem.pd)), weights]).tocsr()
        return upper, np.array(limits), equal

    def _each_bin(self, further: int) -> Any:
        """Rows that sum the flows of each bin, with `further` empty columns."""
        return self._sums(np.arange(self._bins).repeat(len(self._paths)), self._bins, further)

    def _each_bin_and_pd(self, further: int) -> Any:
        """The same by the PD cluster that decodes: rows (bin, PD cluster)."""
        names = [pd.name for pd in self._problem.pd]
        decodes = np.array([names.index(path.decode) for path in self._paths])
        rows = np.arange(self._bins)[:, None] * len(names) + decodes[None, :]
        return self._sums(rows.ravel(), self._bins * len(names), further)

    def _sums(self, rows: "NDArray[np.int64]", count: int, further: int) -> Any:
        from scipy.sparse import coo_array

        entries = (np.ones(self._flows), (rows, np.arange(self._flows)))
        return coo_array(entries, shape=(count, self._flows + further)).tocsr()

    def _columns_of(self, path: int) -> "NDArray[np.int64]":
        return np.arange(self._bins, dtype=np.int64) * len(self._paths) + path

    def _work(self) -> FloatArray:
        """Each flow's work per request, as a part of the whole of its resource, summed over resources."""
        work = np.zeros(self._flows)
        for use in self._uses:
            instances = {pd.name: float(pd.instances) for pd in self._problem.pd}
            if use.resource[0] != "decode":
                np.add.at(work, use.columns, use.amounts / (use.capacity or instances[use.resource[1]]))
        return work

    def _prefill_uses(self) -> list[ResourceUse]:
        names = {pd.name for pd in self._problem.pd}
        found = []
        for cluster in self._problem.clusters:
            used = [k for k, path in enumerate(self._paths) if path.prefill == cluster.name]
            if used:
                work = [self._lengths.means(cluster.prefill_s, self._paths[k].share) for k in used]
                found.append(
                    ResourceUse(
                        ("prefill", cluster.name),
                        np.concatenate([self._columns_of(k) for k in used]),
                        np.concatenate(work),
                        None if cluster.name in names else float(cluster.instances),
                    )
                )
        return found

    def _link_uses(self) -> list[ResourceUse]:
        found = []
        for link in self._problem.links:
            used = [
                (k, transfer.share)
                for k, path in enumerate(self._paths)
                for transfer in path.transfers
                if transfer.link == link.name
            ]
            if used and np.isfinite(link.bandwidth_bits_per_s):
                kv_bytes = self._problem.kv_bytes_over(link.name)
                sizes = [self._lengths.means(kv_bytes, share) for _, share in used]
                bits = np.concatenate(sizes) * BITS_PER_BYTE
                columns = np.concatenate([self._columns_of(k) for k, _ in used])
                found.append(ResourceUse(("link", link.name), columns, bits, link.bandwidth_bits_per_s))
        return found

    def _decode_uses(self) -> list[ResourceUse]:
        found = []
        for pd in self._problem.pd:
            used = [self._columns_of(k) for k, path in enumerate(self._paths) if path.decode == pd.name]
            columns = np.concatenate(used)
            capacity = pd.instances * self._rates[pd.name]
            found.append(ResourceUse(("decode", pd.name), columns, np.ones(len(columns)), capacity))
        return found


def _solved(
    objective: FloatArray,
    upper: Any,
    limits: FloatArray,
    equal: Any,
    sums: FloatArray,
    low: FloatArray,
    high: FloatArray,
) -> Any:
    from scipy.optimize import linprog

    bounds = np.stack([low, high], axis=1)
    for presolve in (True, False):
        found = linprog(
            objective,
            A_ub=upper,
            b_ub=limits,
            A_eq=equal,
            b_eq=sums,
            bounds=bounds,
            method="highs",
            options={"presolve": presolve},
        )
        if found.x is not None:
            return found
    raise PlanError(f"the solver found no plan ({found.message})")
