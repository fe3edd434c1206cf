"""Pure routing decisions: a request and a view of the instances in, a decision out. No clock, no I/O."""

from prfaas.scheduling.decision import Decision, Route
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.static_threshold import static_threshold
from prfaas.scheduling.view import InstanceView, NoDecodeInstanceError, View

__all__ = [
    "Decision",
    "InstanceView",
    "NoDecodeInstanceError",
    "Route",
    "RoutingRequest",
    "View",
    "static_threshold",
]
