"""How much longer engines take than their profiles say, over time: a machine is not always as fast."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prfaas.lab.simulator.capacity import check_pieces


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Of every prefill of a deployment, in pieces."""

    pieces: Sequence[tuple[float, float]]
    """(time_s, factor): from then on prefills take so many times as long. The first is at 0 s."""

    def __post_init__(self) -> None:
        check_pieces("a slowdown", self.pieces)
        if not all(factor > 0 for _, factor in self.pieces):
            raise ValueError("a slowdown is a factor above 0")

    def stretched_s(self, start_s: float, work_s: float) -> float:
        """How long it takes from `start_s` on what takes `work_s` by the profile."""
        place = bisect_right(self.pieces, (start_s, math.inf)) - 1
        at_s, left_s = start_s, work_s
        for (_, factor), (next_s, _) in pairwise(self.pieces[place:]):
            done_s = (next_s - at_s) / factor
            if done_s >= left_s:
                return at_s + left_s * factor - start_s
            at_s, left_s = next_s, left_s - done_s
        return at_s + left_s * self.pieces[-1][1] - start_s
