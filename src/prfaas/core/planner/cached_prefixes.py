"""Prefill times over uncached lengths where prompts have cached prefixes, to which their new tokens attend."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prfaas.core.arrays import FloatArray, OfLength, np
from prfaas.core.planner.problem import PlanProblem

_BINS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True)
class UsualPrefill:
    """T(u) times what prefixes add: for arrays of uncached tokens, of the same shape.

    A plan knows how long prompts are without their prefixes, and no more. So of every half octave of uncached lengths
    it gets what those of a sample take with their prefixes, over what they would take without. Equal ones are equal
    values.
    """

    prefill_s: OfLength
    """T: seconds without a cached prefix."""
    log_tokens: tuple[float, ...]
    """Natural logarithms of lengths, ascending."""
    ratios: tuple[float, ...]
    """What prefixes add there, as a factor of 1 or more; between two of them it is interpolated."""
    _arrays: "tuple[FloatArray, FloatArray]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_arrays", (np.array(self.log_tokens), np.array(self.ratios)))

    @classmethod
    def of_prompts(
        cls,
        prefill_s: OfLength,
        uncached_tokens: FloatArray,
        reused_tokens: FloatArray,
        range_tokens: tuple[float, float],
    ) -> "UsualPrefill":
        """From a sample of prompts.

        Args:
            prefill_s: T, known on `range_tokens`.
            uncached_tokens: Of every prompt, what is computed.
            reused_tokens: Of every prompt, what its cache has.
            range_tokens: Lengths outside count as the nearest end.
        """
        low, high = range_tokens
        uncached = np.clip(uncached_tokens, low, high)
        whole = np.clip(uncached + reused_tokens, uncached, high)
        alone_s = prefill_s(uncached)
        # As `after_prefix_s`; a prefix below the range counts as long as its end, which takes from what it adds.
        longer_s = prefill_s(whole) - prefill_s(np.clip(whole - uncached, low, high))
        taken_s = np.where(reused_tokens > 0, np.maximum(longer_s, alone_s), alone_s)
        bins = (np.log2(uncached / low) * _BINS_PER_OCTAVE).astype(np.int64)
        weight_s = np.bincount(bins, alone_s)
        some = weight_s > 0
        logs = np.bincount(bins, alone_s * np.log(uncached))[some] / weight_s[some]
        ratios = np.bincount(bins, taken_s)[some] / weight_s[some]
        return cls(prefill_s, tuple(logs.tolist()), tuple(ratios.tolist()))

    def __call__(self, tokens: FloatArray) -> FloatArray:
        seconds: FloatArray = self.prefill_s(tokens) * np.interp(np.log(tokens), *self._arrays)
        return seconds


def with_prefixes(
    problem: PlanProblem,
    uncached_tokens: Sequence[float],
    reused_tokens: Sequence[float],
    range_tokens: tuple[float, float],
) -> PlanProblem:
    """The same clusters, with prefills that take what those of these prompts take behind their prefixes."""
    uncached, reused = (np.array(each, dtype=np.float64) for each in (uncached_tokens, reused_tokens))

    def usual(prefill_s: OfLength) -> UsualPrefill:
        return UsualPrefill.of_prompts(prefill_s, uncached, reused, range_tokens)

    return replace(
        problem,
        prfaas=tuple(replace(cluster, prefill_s=usual(cluster.prefill_s)) for cluster in problem.prfaas),
        pd=tuple(replace(cluster, prefill_s=usual(cluster.prefill_s)) for cluster in problem.pd),
    )
