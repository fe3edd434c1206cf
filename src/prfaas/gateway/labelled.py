"""Metric families that keep their labelled children in a dictionary: the library takes a lock to find one."""

from typing import Generic, Protocol, TypeVar

Child = TypeVar("Child", covariant=True)


class Family(Protocol[Child]):
    """A metric with labels, of prometheus-client."""

    def labels(self, *values: str) -> Child: ...


class Labelled(Generic[Child]):
    """A metric family; every label must take values from a bounded set, for children are kept."""

    def __init__(self, family: Family[Child]) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], Child] = {}

    def labels(self, *values: str) -> Child:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._family.labels(*values)
        return child
