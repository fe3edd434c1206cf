"""The order in which a policy lets prefills wait."""

from copy import deepcopy
from dataclasses import replace

from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.policy import Policy
from prfaas.core.scheduling.prefill_order import PrefillWaits
from prfaas.core.scheduling.view import ClusterView, NoDecodeInstanceError, View

_SHORT_TOKENS, _LONG_TOKENS = 1_000, 100_000
# Waits that no order overlooks, in prefills of the longer kind.
_WAITED_PREFILLS = 10.0


def is_shortest_first(policy: Policy, view: View) -> bool:
    """Whether of two prompts that come together the short one is prefilled first, whatever instance has time.

    The policy is asked, not changed, and told that prefills have waited: an order may follow what they waited. False
    where prefills wait in the order of their arrival.
    """
    asked = deepcopy(policy)
    busy = replace(view, clusters={name: _after_waits(each) for name, each in view.clusters.items()})
    try:
        urgencies = [
            asked.decide(RoutingRequest(tokens, {}, 0), busy).urgency_s
            for tokens in (_SHORT_TOKENS, _LONG_TOKENS)
        ]
    except NoDecodeInstanceError:
        return False
    short, long = urgencies
    return short is not None and long is not None and short < long


def _after_waits(cluster: ClusterView) -> ClusterView:
    waits, prefill_s = PrefillWaits(), cluster.prefill_s(_LONG_TOKENS)
    waits.add(_WAITED_PREFILLS * prefill_s, prefill_s)
    return replace(cluster, waits=waits)
