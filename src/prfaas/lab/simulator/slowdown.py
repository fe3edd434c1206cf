"""How much longer engines take than their profiles say, over time: a machine is not always as fast."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Of every prefill of a deployment, in pieces."""

    pieces: Sequence[tuple[float, float]]
    """(time_s, factor): from then on prefills take so many times as long. The first is at 0 s."""

    def __post_init__(self) -> None:
        if not self.pieces or self.pieces[0][0] != 0.0:
            raise ValueError("a slowdown has a factor from 0 s on")
        for time_s, factor in self.pieces:
            if not (math.isfinite(time_s) and math.isfinite(factor) and factor > 0):
                raise ValueError(f"a slowdown is a factor above 0, not {factor:g} from {time_s:g} s on")
        for (before_s, _), (time_s, _) in pairwise(self.pieces):
            if time_s <= before_s:
                raise ValueError(f"the times of a slowdown rise, but {time_s:g} s comes after {before_s:g} s")

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
