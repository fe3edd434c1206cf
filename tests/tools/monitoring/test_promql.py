"""The judge of expressions finds what it is there to find."""

import pytest

from .promql import WrongExpressionError, result_labels

SAMPLES = {
    "a": ("job", "x"),
    "b": ("job", "x"),
    "info": ("job", "x", "cluster"),
    "h_bucket": ("job", "le"),
}


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("1 + 2", None),
        ("a > 1", {"job", "x"}),
        ("count(a)", set()),
        ("sum by (x) (rate(a[5m])) / sum by (x) (b)", {"x"}),
        ("a * on (job, x) group_left (cluster) info", {"job", "x", "cluster"}),
        ("a and on (x) info", {"job", "x"}),
        ("max by (x) (a) - time()", {"x"}),
        ("histogram_quantile(0.9, sum by (le) (rate(h_bucket[5m])))", set()),
        ("absent(a)", set()),
        ("sum(a or h_bucket)", set()),
    ],
)
def test_labels_of_results(expression: str, labels: set[str] | None) -> None:
    assert result_labels(expression, SAMPLES) == labels


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(a", "unclosed"),
        ("c", "no series c"),
        ('a{y="1"}', "no label y"),
        ("sum by (y) (a)", "'y'"),
        ("a / info", "'cluster'"),
        ("a and on (cluster) info", "'cluster'"),
        ("a * on (x) group_left (y) info", "'y'"),
        ("histogram_quantile(0.9, rate(a[5m]))", "le"),
    ],
)
def test_mistakes(expression: str, problem: str) -> None:
    with pytest.raises(WrongExpressionError, match=problem):
        result_labels(expression, SAMPLES)
