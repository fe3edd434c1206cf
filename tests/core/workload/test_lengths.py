import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.workload.laws import mean_above, mean_at_most, tail

from prfaas.core.workload.empirical import Empirical, fixed
from prfaas.core.workload.lengths import (
    LengthDistribution,
    TruncatedLogNormal,
    Uniform,
    Workload,
    WorkloadError,
)

lengths_st = st.integers(1, 2000)


@st.composite
def log_normals(draw: st.DrawFn) -> TruncatedLogNormal:
    low = draw(st.floats(1, 500))
    high = low * draw(st.floats(1.5, 1000))
    try:
        return TruncatedLogNormal(draw(st.floats(0, 12)), draw(st.floats(0.2, 2.5)), low, high)
    except WorkloadError:
        assume(False)
        raise


uniforms = st.builds(lambda low, width: Uniform(low, low + width), st.floats(1, 500), st.floats(1, 5000))
empiricals = st.lists(st.tuples(lengths_st, st.floats(0.01, 10)), min_size=1, max_size=30).map(
    lambda pairs: Empirical([length for length, _ in pairs], [weight for _, weight in pairs])
)
distributions: st.SearchStrategy[LengthDistribution] = st.one_of(log_normals(), uniforms, empiricals)


def sampled(distribution: LengthDistribution, count: int = 20_000) -> np.ndarray:
    """Stratified samples: quantiles of the midpoints of `count` equal slices of probability."""
    return np.array([distribution.quantile((k + 0.5) / count) for k in range(count)])


def test_moments_of_the_papers_workload() -> None:
    """paper/equations.md: mean 27,486, P90 62,410, P(L > 19,400) = 0.4957, 45,046 and 10,224 above and below."""
    lengths = TruncatedLogNormal(9.90, 1.00, 128, 131072)
    assert lengths.mean() == pytest.approx(27_486, abs=0.5)
    assert lengths.quantile(0.9) == pytest.approx(62_410, abs=0.5)
    assert tail(lengths, 19_400) == pytest.approx(0.4957, abs=5e-5)
    assert mean_above(lengths, 19_400) == pytest.approx(45_046, abs=0.5)
    assert mean_at_most(lengths, 19_400) == pytest.approx(10_224, abs=0.5)


def test_log_normal_agrees_with_integration_of_its_density() -> None:
    from scipy import integrate

    mu, sigma, low, high, t = 7.0, 0.8, 300.0, 9000.0, 1500.0

    def density(x: float) -> float:
        return math.exp(-((math.log(x) - mu) ** 2) / (2 * sigma**2)) / x

    def integral(power: int, start: float) -> float:
        return integrate.quad(lambda x: x**power * density(x), start, high, epsabs=0, epsrel=1e-10)[0]

    lengths = TruncatedLogNormal(mu, sigma, low, high)
    assert tail(lengths, t) == pytest.approx(integral(0, t) / integral(0, low), rel=1e-8)
    assert lengths.mean() == pytest.approx(integral(1, low) / integral(0, low), rel=1e-8)
    assert mean_above(lengths, t) == pytest.approx(integral(1, t) / integral(0, t), rel=1e-8)
    second = integral(2, low) / integral(0, low)
    assert lengths.expect(lambda x: x**2) == pytest.approx(second, rel=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.one_of(log_normals(), uniforms), st.floats(0.05, 0.95))
def test_moments_agree_with_samples(lengths: LengthDistribution, q: float) -> None:
    samples, t = sampled(lengths, 4000), lengths.quantile(q)
    assert lengths.mean() == pytest.approx(samples.mean(), rel=2e-3)
    assert tail(lengths, t) == pytest.approx((samples > t).mean(), abs=1e-3)
    assert mean_above(lengths, t) == pytest.approx(samples[samples > t].mean(), rel=2e-2)
    assert mean_at_most(lengths, t) == pytest.approx(samples[samples <= t].mean(), rel=2e-2)


@given(st.lists(st.tuples(lengths_st, st.integers(1, 9)), min_size=1, max_size=20), st.floats(0, 2100))
def test_empirical_is_the_plain_sum(pairs: list[tuple[int, int]], t: float) -> None:
    lengths = Empirical([length for length, _ in pairs], [weight for _, weight in pairs])
    total = sum(weight for _, weight in pairs)
    above = [(length, weight) for length, weight in pairs if length > t]
    below = [(length, weight) for length, weight in pairs if length <= t]
    assert lengths.mean() == pytest.approx(sum(a * w for a, w in pairs) / total)
    assert tail(lengths, t) == pytest.approx(sum(w for _, w in above) / total, abs=1e-12)
    for part, mean in ((above, mean_above(lengths, t)), (below, mean_at_most(lengths, t))):
        expected = sum(a * w for a, w in part) / sum(w for _, w in part) if part else None
        assert mean is None if expected is None else mean == pytest.approx(expected)
    assert lengths.expect(lambda x: x * x) == pytest.approx(sum(a * a * w for a, w in pairs) / total)


@settings(deadline=None)
@given(distributions, st.floats(0.0, 1.0))
def test_quantile_is_the_inverse_of_the_distribution(lengths: LengthDistribution, q: float) -> None:
    length = lengths.quantile(q)
    assert lengths.low <= length <= lengths.high
    assert 1 - tail(lengths, length) >= q - 1e-6
    if length > lengths.low * (1 + 1e-6):
        assert 1 - tail(lengths, length * (1 - 1e-6)) <= q + 1e-3


@settings(deadline=None)
@given(distributions, st.floats(0, 1e6))
def test_parts_add_up_and_empty_parts_have_no_mean(lengths: LengthDistribution, t: float) -> None:
    above, below, p = mean_above(lengths, t), mean_at_most(lengths, t), tail(lengths, t)
    assert (above is None) == (p == 0) and (below is None) == (p == 1)
    assert above is None or max(t, lengths.low) <= above <= lengths.high
    assert below is None or lengths.low <= below <= min(t, lengths.high)
    total = (above or 0) * p + (below or 0) * (1 - p)
    # Means of parts that hardly exist are limited to where they can be.
    if p == 0 or p == 1 or 1e-9 < p < 1 - 1e-9:
        assert total == pytest.approx(lengths.mean(), rel=1e-6)


@settings(deadline=None)
@given(distributions, st.integers(2, 80))
def test_bins_keep_probability_and_mean(lengths: LengthDistribution, n: int) -> None:
    bins = lengths.bins(n)
    assert bins.weights.sum() == pytest.approx(1, abs=1e-9)
    assert (bins.weights * bins.lengths).sum() == pytest.approx(lengths.mean(), rel=1e-6)
    assert (bins.lower <= bins.lengths).all() and (bins.lengths <= bins.upper).all()
    assert (bins.upper[:-1] <= bins.lower[1:]).all()


@settings(deadline=None)
@given(distributions, st.floats(0.01, 50), st.floats(0.01, 0.99))
def test_scaling_scales(lengths: LengthDistribution, factor: float, q: float) -> None:
    scaled = lengths.scaled(factor)
    assert scaled.mean() == pytest.approx(factor * lengths.mean(), rel=1e-6)
    assert scaled.quantile(q) == pytest.approx(factor * lengths.quantile(q), rel=1e-6)
    assert scaled.low == pytest.approx(factor * lengths.low)


@settings(deadline=None)
@given(distributions, st.floats(0.1, 0.9))
def test_expectations_of_parts_add_up(lengths: LengthDistribution, q: float) -> None:
    t = lengths.quantile(q)
    whole = lengths.expect(np.sqrt)
    parts = lengths.expect(np.sqrt, above=t) + lengths.expect(np.sqrt, up_to=t)
    assert parts == pytest.approx(whole, rel=1e-6)


def test_ends_of_the_range() -> None:
    lengths = TruncatedLogNormal(9.9, 1, 128, 131072)
    assert tail(lengths, 0) == tail(lengths, 127.9) == 1
    assert tail(lengths, 131072) == tail(lengths, 1e9) == 0
    assert mean_above(lengths, 131072) is None and mean_at_most(lengths, 127) is None
    assert mean_above(lengths, 1) == mean_at_most(lengths, 1e9) == lengths.mean()
    assert lengths.quantile(0) == 128 and lengths.quantile(1) == 131072


def test_far_tail_keeps_its_digits() -> None:
    """Ten deviations out the plain difference of two values of Φ is 0; the mean lies just above the cut."""
    lengths = TruncatedLogNormal(0.0, 1.0, math.exp(10), math.exp(12))
    assert math.exp(10) < lengths.mean() < 1.15 * math.exp(10)
    assert tail(lengths, lengths.quantile(0.5)) == pytest.approx(0.5, abs=1e-6)


def test_fixed_is_one_atom() -> None:
    lengths = fixed(500)
    assert lengths.mean() == lengths.low == lengths.high == lengths.quantile(0.3) == 500
    assert tail(lengths, 499) == 1 and tail(lengths, 500) == 0
    assert len(lengths.bins(10).weights) == 1


def test_workload_takes_off_what_is_cached() -> None:
    workload = Workload(Uniform(100, 300), 50, prefix_hit_ratio=0.25)
    assert (workload.uncached.low, workload.uncached.high) == (75, 225)
    assert Workload(Uniform(100, 300), 50).uncached.mean() == 200


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TruncatedLogNormal(9, 0, 1, 2), "sigma above 0"),
        (lambda: TruncatedLogNormal(9, 1, 5, 5), "0 < low < high"),
        (lambda: TruncatedLogNormal(0, 0.01, 1e5, 2e5), "has no lengths between"),
        (lambda: Uniform(0, 10), "0 < low < high"),
        (lambda: Empirical([]), "at least one length"),
        (lambda: Empirical([3, 0]), "above 0 tokens, not 0"),
        (lambda: Empirical([3, math.nan]), "above 0 tokens"),
        (lambda: Empirical([3], [1, 2]), "1 lengths but 2 weights"),
        (lambda: Empirical([3], [-1]), "0 or more, not -1"),
        (lambda: Empirical([3], [0]), "at least one weight"),
        (lambda: fixed(10).scaled(0), "factor above 0"),
        (lambda: fixed(10).quantile(1.1), "probability in [0, 1]"),
        (lambda: Workload(fixed(10), 5, 1.0), "in [0, 1), not 1.0"),
        (lambda: Workload(fixed(10), 0), "more than 0 tokens"),
    ],
)
def test_what_can_not_be_is_refused(make: object, words: str) -> None:
    with pytest.raises(WorkloadError) as error:
        make()  # type: ignore[operator]
    assert words in str(error.value)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.integers(1, 1 << 31)), min_size=1, max_size=50))
def test_counted_lengths_are_those_of_the_ordinary_way(pairs: list[tuple[float, int]]) -> None:
    lengths, counts = np.array([length for length, _ in pairs]), np.array([count for _, count in pairs])
    for order in (np.arange(len(pairs)), np.unique(lengths, return_index=True)[1]):
        ordinary = Empirical(lengths[order], counts[order])
        counted = Empirical.counted(lengths[order], counts[order])
        for field in ("lengths", "probabilities", "tail_mass", "tail_tokens"):
            assert np.array_equal(getattr(counted, field), getattr(ordinary, field))
