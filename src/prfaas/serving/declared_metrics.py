"""Tables of metrics: a class whose attributes say which families of Prometheus metrics there are."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Family = TypeVar("Family")
Child = TypeVar("Child", covariant=True)
Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class Declared(Generic[Family]):
    """A family of metrics, as a table declares it. Instances of the table have the family in its place."""

    def __init__(self, kind: Callable[..., Family], text: str, *labels: str, name: str = "") -> None:
        """`name`: behind the table's prefix; empty: as the attribute is called."""
        self.labels = labels
        self._kind = kind
        self._text = text
        self._name = name

    def __set_name__(self, _table: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, metrics: "DeclaredMetrics", _table: type) -> Family:
        raise AttributeError(f"{self._name} is there once the table is in a registry")

    def made(self, prefix: str, registry: CollectorRegistry) -> Family:
        """The family in a registry."""
        return self._kind(prefix + self._name, self._text, self.labels, registry=registry)


class DeclaredMetrics:
    """A table of metrics in one registry. Every label must take values from a bounded set."""

    prefix: ClassVar[str]
    """Begins the names of all of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        declared = {name: each for name, each in vars(type(self)).items() if isinstance(each, Declared)}
        self.families: dict[Declared[Any], Any] = {}
        for name, each in declared.items():
            self.families[each] = family = each.made(self.prefix, registry)
            setattr(self, name, family)


class _Labelled(Protocol[Child]):
    def labels(self, *values: str) -> Child: ...


class CachedLabels(Generic[Child]):
    """A metric family that keeps its labelled children in a dictionary: the library takes a lock to find one.

    Children are never dropped. Families whose labels name members of the deployment are not for this: the series of a
    member that left are taken out.
    """

    def __init__(self, family: _Labelled[Child]) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], Child] = {}

    def labels(self, *values: str) -> Child:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._family.labels(*values)
        return child


def _cached(kind: Callable[..., Kind]) -> Callable[..., CachedLabels[Kind]]:
    return lambda *given, **named: CachedLabels(kind(*given, **named))


counter, gauge, histogram = partial(Declared, Counter), partial(Declared, Gauge), partial(Declared, Histogram)
cached_counter = partial(Declared, _cached(Counter))


def cached_histogram(
    buckets: tuple[float, ...], text: str, *labels: str
) -> Declared[CachedLabels[Histogram]]:
    """A histogram with these upper bounds, whose labels are cached."""
    return Declared(_cached(partial(Histogram, buckets=buckets)), text, *labels)
