"""A policy that is not ours must not lose a request: where it fails, the default policy decides."""

import logging

from prometheus_client import Counter

from prfaas.core.deployment import BUILT_IN_POLICIES, DEFAULT_POLICY
from prfaas.core.scheduling import CheckedPolicy, Decision, Policy, RoutingRequest, View, make_policy
from prfaas.core.scheduling.policy import is_shortest_first

logger = logging.getLogger(__name__)


class GuardedPolicy:
    """Decides as `policy`; where that raises, or decides what can't be carried out, as the default policy."""

    def __init__(self, name: str, policy: Policy, failures: Counter) -> None:
        self._name = name
        self._policy = CheckedPolicy(policy)
        self._default = make_policy(DEFAULT_POLICY)
        self._failures = failures
        self._failed = 0

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        try:
            return self._policy.decide(request, view)
        except Exception as error:
            self._note(error)
            return self._default.decide(request, view)

    def is_shortest_first(self, view: View) -> bool:
        """See `is_shortest_first` of core; of the default policy where the own one fails. No failure is counted."""
        try:
            return is_shortest_first(CheckedPolicy(self._policy.policy), view)
        except Exception:
            return is_shortest_first(self._default, view)

    def _note(self, error: Exception) -> None:
        self._failures.inc()
        self._failed += 1
        # The 1st, 10th, 100th, …: it may fail for every request.
        if str(self._failed).strip("0") == "1":
            logger.error(
                "policy %s failed (%d times so far), %s decided in its place: %s: %s",
                self._name,
                self._failed,
                DEFAULT_POLICY,
                type(error).__name__,
                error,
                exc_info=error,
            )


def guarded(name: str, policy: Policy, failures: Counter) -> Policy:
    """The policy itself where it is one of ours."""
    return policy if name in BUILT_IN_POLICIES else GuardedPolicy(name, policy, failures)


def prefills_shortest_first(policy: Policy, view: View) -> bool:
    """The order in which prefills wait under a policy that `guarded` gave. It never fails."""
    if isinstance(policy, GuardedPolicy):
        return policy.is_shortest_first(view)
    return is_shortest_first(policy, view)
