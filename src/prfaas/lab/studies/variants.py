"""The scheduler with parts of it switched off."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Above every queue and utilisation there is: what is compared with it never counts.
_NEVER = 1e12


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, or what is left of it without a part."""

    label: str
    without: str
    """The part that is missing, in words."""
    policy: str
    params: Mapping[str, object] = field(default_factory=dict)
    """Of the policy."""
    adapts: bool = True
    """Whether thresholds are searched again."""
    allocation: bool = True
    """Whether roles change."""
    needs_caches: bool = False
    """Whether it only differs where there are caches."""


PAPER = Variant("paper", "nothing", "paper")
TILTED = Variant("tilted", "nothing", "tilted")

_OTHERS_CACHES = {"abundance_utilisation": 0.0, "abundance_queue_s": 0.0}

OF_PAPER = (
    Variant("local_only", "the threshold: everything is prefilled in the PD cluster", "local_only"),
    Variant("offload_all", "the threshold: everything is prefilled in the PrfaaS cluster", "offload_all"),
    Variant(
        "paper, utilisation unseen",
        "the factor for a link's utilisation (`utilisation_mark` out of reach)",
        "paper",
        {"utilisation_mark": _NEVER},
    ),
    Variant(
        "paper, queues unseen",
        "the factor for queues of prefill and link (`queue_mark` out of reach)",
        "paper",
        {"queue_mark": _NEVER},
    ),
    Variant(
        "paper, own caches only",
        "caches of the other cluster (abundance marks at 0)",
        "paper",
        _OTHERS_CACHES,
        needs_caches=True,
    ),
    Variant("paper, fixed threshold", "threshold re-optimisation", "paper", adapts=False),
    Variant("paper, fixed roles", "long-term allocation", "paper", allocation=False),
    Variant("paper, no slow side", "re-optimisation and allocation", "paper", adapts=False, allocation=False),
    Variant(
        "static_threshold",
        "everything but a threshold that stays where the planner put it",
        "static_threshold",
        adapts=False,
        allocation=False,
    ),
)
OF_TILTED = (
    Variant("tilted, β = 0", "the tilt: queues don't move the threshold", "tilted", {"beta": 0.0}),
    Variant("tilted, ageing = 0", "the order: first come, first served", "tilted", {"ageing": 0.0}),
    Variant("tilted, both 0", "tilt and order", "tilted", {"beta": 0.0, "ageing": 0.0}),
    Variant(
        "tilted, own caches only", "caches of the other cluster", "tilted", _OTHERS_CACHES, needs_caches=True
    ),
    Variant(
        "tilted, no slow side", "re-optimisation and allocation", "tilted", adapts=False, allocation=False
    ),
)
