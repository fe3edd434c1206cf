"""Other lengths than the file's: longer, shorter, mixed."""

import numpy as np

from prfaas.workload import Empirical, LengthDistribution

_BINS = 2048


def stretched(lengths: LengthDistribution, factor: float, low_tokens: float, high_tokens: float) -> Empirical:
    """factor × L; what leaves [low, high], the lengths that profiles cover, counts as the nearest that does not."""
    bins = lengths.scaled(factor).bins(_BINS)
    return Empirical(np.clip(bins.lengths, low_tokens, high_tokens), bins.weights)


def mixed(first: Empirical, second: Empirical, share_of_second: float) -> Empirical:
    """Either, by chance."""
    return Empirical(
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate([first.probabilities * (1 - share_of_second), second.probabilities * share_of_second]),
    )
