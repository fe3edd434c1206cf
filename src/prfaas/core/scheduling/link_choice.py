"""Which links may be used: up, known well enough, and for caches with bandwidth to spare."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from prfaas.core.scheduling.parameters import Bounds
from prfaas.core.scheduling.view import LinkView, View

# A link whose facts are older than this many times `View.stale_after_s` is taken for down.
DOWN_AFTER_STALE = 6


@dataclass(frozen=True, slots=True)
class AbundanceMarks:
    """Up to where a link's bandwidth counts as abundant (section 3.4.3); else, or with old facts, it is scarce."""

    utilisation: Annotated[
        float, Bounds("up to this share of a link's capacity caches may cross it", least=0, below=1)
    ] = 0.5
    """Share of the capacity in use. Below 1, so that an abundant link has something left."""
    queue_s: Annotated[float, Bounds("up to this queue of a link caches may cross it", unit="s", least=0)] = (
        0.25
    )


def usable_link(view: View, source: str, target: str) -> LinkView | None:
    """The link between two clusters; None where it is absent, down, or its facts are far too old."""
    link = view.links.get((source, target))
    if link is None or not link.up or link.capacity_bits_per_s <= 0:
        return None
    if view.now_s - link.seen_s > DOWN_AFTER_STALE * view.stale_after_s:
        return None
    return link


def is_stale(link: LinkView, view: View) -> bool:
    """Whether the link's queue and utilisation are too old to be believed."""
    return view.now_s - link.seen_s > view.stale_after_s


def unpriced(threshold: float, remotes: Iterable[tuple[object, LinkView]]) -> float:
    """A threshold that links of these were too congested for, as it was without that; infinite where none is."""
    congestion = 0.0
    for _, link in remotes:
        if link.congestion > congestion:
            congestion = link.congestion
    return threshold / (1.0 + congestion) if congestion else math.inf


def abundant_link(view: View, source: str, target: str, marks: AbundanceMarks) -> LinkView | None:
    """The link that caches may cross from cluster to cluster (section 3.4.3), None where there is none.

    A congested one has no bandwidth to spare.
    """
    link = view.links.get((source, target))
    if (
        link is None
        or not link.up
        or link.capacity_bits_per_s <= 0
        or is_stale(link, view)
        or link.congestion
    ):
        return None
    if link.egress_bits_per_s > marks.utilisation * link.capacity_bits_per_s:
        return None
    return link if link.drained_s - view.now_s <= marks.queue_s else None
