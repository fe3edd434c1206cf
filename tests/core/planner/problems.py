"""Planning problems for tests: the paper's case study in formulas, and random ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from prfaas.core.planner import PdCluster, PlanLink, PlanProblem, PrfaasCluster
from prfaas.core.planner.fixed_roles import PrefillSide
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import LengthDistribution, TruncatedLogNormal, Uniform, Workload

from .oracle import TwoClusters

# Table 5 of the paper, and the parabola for H20 of paper/equations.md.
_LENGTHS, _SECONDS = [1024, 8192, 32768, 131072], [0.44, 0.72, 1.84, 7.40]
_CUBIC = np.polyfit(_LENGTHS, _SECONDS, 3)
PAPER_LENGTHS = TruncatedLogNormal(9.90, 1.00, 128, 131072)


def h200_s(tokens: np.ndarray) -> np.ndarray:
    return np.polyval(_CUBIC, tokens)


def h20_s(tokens: np.ndarray) -> np.ndarray:
    return 2.93992601e-10 * tokens**2 + 1.30041148e-04 * tokens + 0.469028381


def kv_bytes_1t(tokens: np.ndarray) -> np.ndarray:
    return 173.906 * 2**20 + 17280 * tokens


def paper_problem(
    *,
    bits_per_s: float = 100e9,
    prfaas: int = 4,
    pd: int = 8,
    lengths: LengthDistribution = PAPER_LENGTHS,
    output_tokens: float = 1024,
    prfaas_ratio: float | None = None,
    pd_ratio: float | None = None,
    back: bool = False,
    load: float = 0.7,
) -> PlanProblem:
    links = [PlanLink("east", "home", bits_per_s)]
    if back:
        links.append(PlanLink("home", "east", bits_per_s))
    return PlanProblem(
        "paper",
        (PrfaasCluster("east", "h200", prfaas, 8, h200_s, prfaas_ratio),) if prfaas else (),
        (PdCluster("home", "h20", pd, 8, h20_s, 20, 0.025, pd_ratio),),
        tuple(links) if prfaas else (),
        Workload(lengths, output_tokens),
        kv_bytes_1t,
        {"h200": 2.0, "h20": 1.0},
        load,
    )


@dataclass(frozen=True)
class Quadratic:
    """c0 + c1 x + c2 x², for arrays and numbers alike."""

    c0: float
    c1: float
    c2: float = 0.0

    def __call__(self, x):  # type: ignore[no-untyped-def]
        return self.c0 + self.c1 * x + self.c2 * x * x


def curves(*, linear: bool = False) -> st.SearchStrategy[Quadratic]:
    """Prefill seconds for lengths of some thousand tokens."""
    curved = st.just(0.0) if linear else st.floats(0, 1e-8)
    return st.builds(Quadratic, st.floats(0.05, 0.8), st.floats(5e-5, 5e-4), curved)


sizes = st.builds(Quadratic, st.floats(0, 2e8), st.floats(1e3, 3e5))
bandwidths = st.floats(7.5, 11.5).map(lambda exponent: 10**exponent)
atoms = st.lists(
    st.tuples(st.integers(16, 60_000), st.integers(1, 9)), min_size=1, max_size=12, unique_by=lambda x: x[0]
).map(sorted)
continuous: st.SearchStrategy[LengthDistribution] = st.one_of(
    st.builds(lambda low, width: Uniform(low, low + width), st.floats(50, 5000), st.floats(100, 60_000)),
    st.builds(
        lambda mu, sigma, low, factor: TruncatedLogNormal(mu, sigma, low, low * factor),
        st.floats(7, 11),
        st.floats(0.4, 1.5),
        st.floats(64, 1000),
        st.floats(20, 200),
    ),
)


@st.composite
def two_clusters(
    draw: st.DrawFn,
    lengths: st.SearchStrategy[LengthDistribution] | None = None,
    *,
    linear: bool = False,
) -> tuple[PlanProblem, Callable[[list[tuple[float, float]]], TwoClusters]]:
    """A random problem, and the oracle for it given its requests as (length, probability)."""
    fast, slow = draw(curves(linear=linear)), draw(curves(linear=linear))
    size, bandwidth = draw(sizes), draw(bandwidths)
    prfaas, pd = draw(st.integers(1, 6)), draw(st.integers(2, 8))
    batch, step_s, output = draw(st.integers(1, 40)), draw(st.floats(0.005, 0.05)), draw(st.integers(1, 1500))
    if lengths is None:
        pairs = draw(atoms)
        chosen: LengthDistribution = Empirical([a for a, _ in pairs], [w for _, w in pairs])
    else:
        chosen = draw(lengths)
    problem = PlanProblem(
        "random",
        (PrfaasCluster("far", "a", prfaas, 8, fast),),
        (PdCluster("near", "b", pd, 4, slow, batch, step_s),),
        (PlanLink("far", "near", bandwidth),),
        Workload(chosen, output),
        size,
        {"a": 2.0, "b": 1.0},
    )

    def oracle(requests: list[tuple[float, float]]) -> TwoClusters:
        decode = batch / (step_s * output)
        edge = 0.05 if lengths is None else 0.0
        return TwoClusters(requests, prfaas, fast, pd, slow, decode, size, bandwidth, edge)

    return problem, oracle


def requests_of(lengths: LengthDistribution, count: int) -> list[tuple[float, float]]:
    """All atoms, or means of about `count` bins: (length, probability)."""
    bins = lengths.bins(count)
    return list(zip(bins.lengths.tolist(), bins.weights.tolist(), strict=True))


def rate_of(side: PrefillSide, threshold: float) -> float:
    """Requests per second that the prefill side of a PD cluster can carry with a threshold."""
    rate = side.best_beside(threshold, math.inf)[2]
    assert rate is not None
    return rate


def best_of_side(side: PrefillSide) -> float:
    """Its best threshold in tokens."""
    return side.best_beside(None, 0.0)[0]
