"""Lengths in bins, with exact means of curves over each bin."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prfaas.workload import Bins, LengthDistribution

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prfaas.planner.plan_problem import OfLength

    FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class BinnedLengths:
    """A distribution cut into `bins`; `fine` cuts every bin further, `where` says into which bin each belongs."""

    distribution: LengthDistribution
    bins: Bins
    fine: Bins
    where: "NDArray[np.intp]"
    _means: "dict[tuple[OfLength, float], FloatArray]" = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, distribution: LengthDistribution, bins: Bins) -> "BinnedLengths":
        """With bins of that distribution."""
        import numpy as np

        edges = np.concatenate([[0.0], distribution.fine_bins().upper, bins.lower, bins.upper])
        fine = distribution.bins_between(edges)
        where = np.minimum(np.searchsorted(bins.upper, fine.upper, side="left"), len(bins.upper) - 1)
        return cls(distribution, bins, fine, where)

    def divided(self, chosen: "NDArray[np.intp]", parts: int) -> "BinnedLengths":
        """With the chosen bins cut into equal intervals."""
        import numpy as np

        bins = self.bins
        cuts = [np.linspace(bins.lower[b], bins.upper[b], parts + 1) for b in chosen]
        edges = np.concatenate([bins.lower, bins.upper, *cuts])
        return BinnedLengths.of(self.distribution, self.distribution.bins_between(edges))

    def means(self, f: "OfLength", share: float) -> "FloatArray":
        """E[f(share × L) | bin] for every bin."""
        import numpy as np

        if (f, share) not in self._means:
            fine, count = self.fine, len(self.bins.weights)
            total = np.bincount(self.where, fine.weights * f(share * fine.lengths), count)
            self._means[f, share] = total / np.bincount(self.where, fine.weights, count)
        return self._means[f, share]
