"""Routing policies by name."""

from collections.abc import Callable
from typing import Protocol

from prfaas.core.scheduling.baselines import LeastTtft, LocalOnly, OffloadAll, RoundRobin, StaticThreshold
from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.paper import Paper
from prfaas.core.scheduling.tilted import Tilted
from prfaas.core.scheduling.view import View


class Policy(Protocol):
    """Decides where a request goes, from nothing but the request and the view, which it leaves as it is."""

    @property
    def name(self) -> str:
        """As in `POLICIES`."""

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""


_POLICIES: dict[str, Callable[..., Policy]] = {
    policy.name: policy
    for policy in (Paper, Tilted, LocalOnly, OffloadAll, StaticThreshold, LeastTtft, RoundRobin)
}
POLICIES = tuple(_POLICIES)


def policy_named(name: str, **params: object) -> Policy:
    """The policy of that name with its parameters; those left out have the defaults of its class.

    Raises:
        ValueError: there is no such policy, a parameter it does not have or needs, or one out of range.
    """
    if name not in _POLICIES:
        raise ValueError(f'there is no policy "{name}"; there are {", ".join(POLICIES)}')
    try:
        return _POLICIES[name](**params)
    except TypeError as error:
        raise ValueError(f'policy "{name}": {error}') from error
