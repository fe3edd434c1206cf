"""When a planning problem is the one that was solved last, so that its answer still holds."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from prfaas.core.arrays import FloatArray, np
from prfaas.core.planner import PlanProblem

_LENGTHS = np.geomspace(16.0, 4.0e6, 256)
_PLACES = np.geomspace(256.0, 1.0e6, 7)
# Of curves, links and answers: less changes no decision.
_NEAR = 0.01
# Two samples of n and m lengths of the same traffic differ by more, times sqrt(1 / n + 1 / m), in one of twenty cases
# (Kolmogorov and Smirnov).
_BY_CHANCE = 1.36


@dataclass(slots=True)
class KnownProblem:
    """Compares problems of several PD or PrfaaS clusters, whose solutions cost tenths of a second.

    Where lengths differ by no more than two samples of the same traffic do by chance, nothing new is known of them.
    They are always compared with those that were solved for, so that a slow drift is seen once it is large enough.
    """

    _key: Hashable = None
    _rest: FloatArray | None = None
    _beyond: FloatArray | None = None
    _count: int = 0

    def is_new(self, problem: PlanProblem, key: Hashable, sample_count: int) -> bool:
        """Whether it has to be solved; then it is taken to be. One of two clusters always is: it takes a millisecond.

        Args:
            problem: as it is now.
            key: what else the answer depends on.
            sample_count: how many requests the problem's lengths were taken from.
        """
        if problem.is_two_cluster:
            return True
        key = (key, tuple((pd.name, pd.instances, pd.group_ranks) for pd in problem.pd))
        rest, (beyond, _) = _numbers(problem), problem.workload.lengths.above(_LENGTHS)
        if self._rest is not None and self._beyond is not None and key == self._key:
            chance = _BY_CHANCE * math.sqrt(1 / max(sample_count, 1) + 1 / max(self._count, 1))
            if (
                rest.shape == self._rest.shape
                and np.allclose(rest, self._rest, rtol=_NEAR, atol=0.0)
                and float(np.abs(beyond - self._beyond).max()) <= chance
            ):
                return False
        self._key, self._rest, self._beyond, self._count = key, rest, beyond, sample_count
        return True


def _numbers(problem: PlanProblem) -> FloatArray:
    """Everything but the lengths that its solution depends on."""
    curves = [cluster.prefill_s(_PLACES) for cluster in problem.clusters]
    sizes = [(link.kv_bytes or problem.kv_bytes)(_PLACES) for link in problem.links]
    single = [
        problem.workload.output_tokens,
        *(cluster.instances for cluster in problem.prfaas),
        *(pd.decode_batch / pd.decode_step_s for pd in problem.pd),
        *(link.bandwidth_bits_per_s for link in problem.links),
    ]
    return np.concatenate([np.array(single, dtype=float), *curves, *sizes])
