"""The order in which a policy lets prefills wait."""

from copy import deepcopy

from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.policy import Policy
from prfaas.core.scheduling.view import NoDecodeInstanceError, View

_SHORT_TOKENS, _LONG_TOKENS = 1_000, 100_000


def is_shortest_first(policy: Policy, view: View) -> bool:
    """Whether of two prompts that come together the short one is prefilled first, whatever instance has time.

    The policy is asked, not changed. False where prefills wait in the order of their arrival.
    """
    asked = deepcopy(policy)
    try:
        urgencies = [
            asked.decide(RoutingRequest(tokens, {}, 0), view).urgency_s
            for tokens in (_SHORT_TOKENS, _LONG_TOKENS)
        ]
    except NoDecodeInstanceError:
        return False
    short, long = urgencies
    return short is not None and long is not None and short < long
