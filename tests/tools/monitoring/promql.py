"""Which labels the result of a PromQL expression has, by the parser of promql-parser; or what is wrong in it."""

from collections.abc import Mapping
from typing import Any

import promql_parser as parser

Labels = frozenset[str]
_SETS = ("and", "or", "unless")


class WrongExpressionError(Exception):
    """It is no PromQL, or names a series or a label that there is not."""


def result_labels(expression: str, samples: Mapping[str, tuple[str, ...]]) -> Labels | None:
    """The labels of an expression's result; None: a number.

    Args:
        expression: PromQL, of `by`, `on` and `group_left`; no `without` and no `ignoring`.
        samples: every series that there is → its labels.

    Raises:
        WrongExpressionError: see there. Also where two sides can never match, since their labels are others.
    """
    try:
        parsed = parser.parse(expression)
    except ValueError as error:
        raise WrongExpressionError(f"{expression}: {error}") from None
    return _Reader(expression, samples).labels(parsed)


class _Reader:
    def __init__(self, expression: str, samples: Mapping[str, tuple[str, ...]]) -> None:
        self._expression = expression
        self._samples = samples

    def _expect(self, wanted: bool, problem: str) -> None:
        if not wanted:
            raise WrongExpressionError(f"{self._expression}: {problem}")

    def labels(self, node: Any) -> Labels | None:
        if isinstance(node, parser.NumberLiteral | parser.StringLiteral):
            return None
        if isinstance(node, parser.MatrixSelector):
            return self._selected(node.vector_selector)
        if isinstance(node, parser.VectorSelector):
            return self._selected(node)
        if isinstance(node, parser.ParenExpr | parser.UnaryExpr | parser.SubqueryExpr):
            return self.labels(node.expr)
        if isinstance(node, parser.AggregateExpr):
            return self._grouped(node)
        if isinstance(node, parser.Call):
            return self._called(node)
        assert isinstance(node, parser.BinaryExpr), type(node)
        return self._joined(node)

    def _selected(self, selector: Any) -> Labels:
        self._expect(selector.name in self._samples, f"there is no series {selector.name}")
        labels = frozenset(self._samples[selector.name])
        for matcher in selector.matchers.matchers:
            self._expect(matcher.name in labels, f"{selector.name} has no label {matcher.name}")
        return labels

    def _grouped(self, node: Any) -> Labels:
        inside = self.labels(node.expr)
        assert inside is not None
        by = self._named(node.modifier)
        self._expect(by <= inside, f"{sorted(by - inside)} are no labels of what is grouped")
        return by

    def _named(self, modifier: Any) -> Labels:
        if modifier is None:
            return frozenset()
        self._expect("by" in str(modifier) or "on" in str(modifier), f"{modifier} is not known here")
        return frozenset(modifier.labels)

    def _called(self, node: Any) -> Labels | None:
        vectors = [found for found in map(self.labels, node.args) if found is not None]
        if not vectors or node.func.name in ("absent", "absent_over_time"):
            return None if node.func.name == "time" else frozenset()
        (inside,) = vectors
        if node.func.name == "histogram_quantile":
            self._expect("le" in inside, "a quantile needs the label le")
            return inside - {"le"}
        return inside

    def _joined(self, node: Any) -> Labels | None:
        left, right = self.labels(node.lhs), self.labels(node.rhs)
        if left is None or right is None:
            return right if left is None else left
        op, modifier = str(node.op), node.modifier
        if modifier is None or modifier.matching is None:
            if op == "or":
                return left | right
            self._expect(left == right, f"only one side of {op} has {sorted(left ^ right)}")
            return left
        on = self._named(modifier.matching)
        self._expect(on <= left & right, f"{sorted(on - (left & right))} are not on both sides of {op}")
        if op in _SETS:
            return left
        if modifier.card == parser.VectorMatchCardinality.ManyToOne:
            taken = frozenset(modifier.group_labels or ())
            self._expect(taken <= right, f"{sorted(taken - right)} are no labels of what is joined")
            return left | taken
        return on
