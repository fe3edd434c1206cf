"""The traffic that a plan is for."""

import math
from dataclasses import dataclass

from prfaas.core.workload.lengths import LengthDistribution, WorkloadError


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of random length, answers of `output_tokens` tokens on average.

    `lengths` are whole prompts; of each, the first `prefix_hit_ratio` (0 <= r < 1) is found in a cache. With
    the default 0 they are uncached lengths already: the paper's L.

    Raises:
        WorkloadError: a ratio outside [0, 1), or answers without a token.
    """

    lengths: LengthDistribution
    output_tokens: float
    prefix_hit_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_hit_ratio < 1:
            raise WorkloadError(f"the prefix hit ratio must be in [0, 1), not {self.prefix_hit_ratio!r}")
        if not (math.isfinite(self.output_tokens) and self.output_tokens > 0):
            raise WorkloadError(
                f"answers must have more than 0 tokens on average, not {self.output_tokens!r}"
            )

    @property
    def uncached(self) -> LengthDistribution:
        """The lengths that must be computed: (1 − hit ratio) × length."""
        return self.lengths.scaled(1 - self.prefix_hit_ratio) if self.prefix_hit_ratio else self.lengths
