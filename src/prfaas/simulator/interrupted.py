"""A link that fails at given times."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.simulator.capacity import CapacityProcess


@dataclass(frozen=True, slots=True)
class Interrupted:
    """`process`, with nothing between the two times of each of `outages` (seconds)."""

    process: CapacityProcess
    outages: Sequence[tuple[float, float]]

    def changes(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        """See `CapacityProcess.changes`."""
        ends = sorted(
            (at_s, change) for start_s, end_s in self.outages for at_s, change in ((start_s, 1), (end_s, -1))
        )
        cuts = 0
        now_bits_per_s = 0.0
        for at_s, bits_per_s in self.process.changes(rng):
            while ends and ends[0][0] < at_s:
                cut_s, change = ends.pop(0)
                cuts += change
                yield cut_s, 0.0 if cuts else now_bits_per_s
            now_bits_per_s = bits_per_s
            yield at_s, 0.0 if cuts else now_bits_per_s
        for cut_s, change in ends:
            cuts += change
            yield cut_s, 0.0 if cuts else now_bits_per_s
