"""Series of what left go, of what is there stay, and of what came back count again."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge

from prfaas.serving.departed_series import DepartedSeries

NAMES = ("a", "b", "c")


class Counted:
    """Two families with the label `instance`, and one with another."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.healthy = Gauge("healthy", "", ("instance",), registry=self.registry)
        self.drops = Counter("drops", "", ("reason", "instance"), registry=self.registry)
        self.links = Gauge("links", "", ("link",), registry=self.registry)
        self.departed = DepartedSeries({"instance": [self.healthy, self.drops], "link": [self.links]})

    def named(self, label: str) -> set[str]:
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return {sample.labels[label] for sample in samples if label in sample.labels}


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES))), min_size=1, max_size=8
    )
)
def test_only_what_is_there_is_shown(steps: list[tuple[set[str], set[str]]]) -> None:
    """`steps`: who is there, and of whom something is counted late."""
    counted = Counted()
    counted.links.labels("a").set(1)
    seen: set[str] = set()
    for present, late in steps:
        for name in present:
            counted.healthy.labels(name).set(1)
        # Only of what was there once can anything come late.
        seen |= present
        for name in late & seen:
            counted.drops.labels("gap", name).inc()
        counted.departed.keep("instance", present)
        assert counted.named("instance") == present
        # A link is not an instance, whatever its name.
        assert counted.named("link") == {"a"}


def test_what_came_back_counts_from_nothing() -> None:
    counted = Counted()

    def shown() -> Mapping[str, float]:
        samples = (sample for family in counted.registry.collect() for sample in family.samples)
        return {sample.labels["instance"]: sample.value for sample in samples if sample.name == "drops_total"}

    counted.drops.labels("gap", "a").inc(5)
    for present in (["a"], [], ["a"]):
        counted.departed.keep("instance", present)
    assert shown() == {}
    counted.drops.labels("gap", "a").inc()
    counted.departed.keep("instance", ["a"])
    assert shown() == {"a": 1.0}
