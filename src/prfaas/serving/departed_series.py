"""The series of instances, pools and links that have left the deployment leave `GET /metrics` too."""

from collections.abc import Collection, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram


class DepartedSeries:
    """Takes series out whose label names something that was there and is not any more.

    What is counted late of something that has left makes its series anew. So whatever once left is taken out at
    every call, until it is there again. Nobody may keep a labelled child: one of something that came back would
    not be shown.
    """

    def __init__(self, labelled: Mapping[str, Sequence[Counter | Gauge | Histogram]]) -> None:
        """`labelled`: label → the families that series are taken out of by it."""
        self._labelled = labelled
        self._present: dict[str, frozenset[str]] = {}
        self._departed: dict[str, frozenset[str]] = {}

    def keep(self, label: str, names: Collection[str]) -> None:
        """Of everything that the values of `label` have named so far, only `names` is there now."""
        present = frozenset(names)
        known = self._present.get(label, frozenset()) | self._departed.get(label, frozenset())
        self._present[label], self._departed[label] = present, known - present
        for name in self._departed[label]:
            for family in self._labelled.get(label, ()):
                family.remove_by_labels({label: name})
