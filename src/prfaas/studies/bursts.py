"""Bursts of any height at the same mean rate."""

from prfaas.workload.traffic import Arrivals, Mmpp, Phase, Poisson

CALM_S, BURST_S = 60.0, 15.0


def bursts(rate_rps: float, peak: float) -> Arrivals:
    """Bursts of `peak` × the mean rate for 15 s on average, between calms of 60 s; peak 1 is a Poisson process.

    Raises:
        ValueError: a peak below 1, or above what even silence between bursts allows (5).
    """
    share = BURST_S / (CALM_S + BURST_S)
    calm = (1 - share * peak) / (1 - share)
    if not (peak >= 1 and calm > -1e-9):
        raise ValueError(f"a peak is from 1 to {1 / share:g} times the mean rate, not {peak!r}")
    if peak == 1:
        return Poisson(rate_rps)
    return Mmpp((Phase(max(calm, 0.0) * rate_rps, CALM_S), Phase(peak * rate_rps, BURST_S)))
