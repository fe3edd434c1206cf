"""The paper's case study as a live deployment would see it: curves, links, sampled lengths."""

import numpy as np
from numpy.typing import NDArray

from prfaas.core.latency.files import load_profile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PlanProblem
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.core.workload.lengths import LengthDistribution, TruncatedLogNormal

H200, H20 = load_profile("internal-1t-h200"), load_profile("internal-1t-h20")
LENGTHS = TruncatedLogNormal(9.90, 1.00, 128, 131072)
NOW_S = 1000.0


def kv_bytes(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    return 173.906 * 2**20 + 17280 * tokens


def draw(rng: np.random.Generator, count: int, factor: float = 1.0) -> NDArray[np.float64]:
    """`count` lengths of the paper's distribution, times `factor`."""
    lengths = rng.lognormal(9.90, 1.00, 3 * count)
    lengths = lengths[(lengths >= 128) & (lengths <= 131072)][:count]
    return np.clip(lengths * factor, 1, 131072)


def window_of(lengths: NDArray[np.float64]) -> LengthWindow:
    window = LengthWindow(600)
    for length in lengths.tolist():
        window.add(length, NOW_S)
    return window


def observed(rng: np.random.Generator, count: int, factor: float = 1.0) -> LengthDistribution:
    lengths = window_of(draw(rng, count, factor)).lengths(NOW_S)
    assert lengths is not None
    return lengths


def problem_of(
    lengths: LengthDistribution = LENGTHS,
    *,
    prfaas: int = 4,
    pd: int = 8,
    bits_per_s: float = 100e9,
    output_tokens: float = 1024,
) -> PlanProblem:
    return problem_now(
        [
            ClusterFacts("east", "prfaas", prfaas, ServiceCurve.of_profile(H200)),
            ClusterFacts("home", "pd", pd, ServiceCurve.of_profile(H20), 20, 0.025),
        ],
        [LinkFacts("east", "home", bits_per_s)],
        lengths,
        output_tokens,
        kv_bytes,
    )
