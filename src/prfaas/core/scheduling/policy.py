"""Routing policies by name: our own, installed ones, any class of a module."""

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Protocol, cast

from prfaas.core.deployment.types import BUILT_IN_POLICIES, POLICY_ENTRY_POINTS
from prfaas.core.scheduling.baselines import LeastTtft, LocalOnly, OffloadAll, RoundRobin, StaticThreshold
from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.paper import Paper
from prfaas.core.scheduling.parameters import PolicyError, checked
from prfaas.core.scheduling.tilted import Tilted
from prfaas.core.scheduling.view import View


class Policy(Protocol):
    """Decides where a request goes. A class needs not derive from this: the method is enough.

    It is pure: a decision depends on the request and the view alone, both of which it leaves as they are. No clock
    (the time is `view.now_s`), no randomness, no I/O, no memory of requests before. The live gateway decides in its
    event loop, one request after another: stay below 0.1 ms with 64 instances.
    """

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Where one request goes.

        Args:
            request: its length, and what every instance holds of it.
            view: the deployment now: clusters, instances, links, thresholds.

        Raises:
            NoDecodeInstanceError: nothing can decode.
        """


_BUILT_IN: dict[str, type] = {
    policy.name: policy
    for policy in (Paper, Tilted, LocalOnly, OffloadAll, StaticThreshold, LeastTtft, RoundRobin)
}
POLICIES = BUILT_IN_POLICIES
"""Names of the policies that come with prfaas."""


def make_policy(name: str, params: Mapping[str, object] | None = None) -> Policy:
    """The policy of that name with its parameters; those left out have the defaults of its class.

    Args:
        name: one of `POLICIES`, the name of an entry point of the group `prfaas.policies`, or `package.module:Class`.
        params: of the policy, as `routing.params` of a deployment file.

    Raises:
        PolicyError: there is no such policy, it can't be imported, or a parameter it does not have, needs, or that is
            out of range.
    """
    policy = policy_class(name)
    arguments = checked(name, policy, params or {})
    try:
        return cast(Policy, policy(**arguments))
    except Exception as error:
        raise PolicyError(f"policy {name} can't be made: {_in_words(error)}") from error


def policy_named(name: str, **params: object) -> Policy:
    """`make_policy` with the parameters as keywords."""
    return make_policy(name, params)


def policy_class(name: str) -> type:
    """The class that a name stands for. It is imported.

    Raises:
        PolicyError: there is none, or it is no policy.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        found = {each.name: each.value for each in importlib.metadata.entry_points(group=POLICY_ENTRY_POINTS)}
        if name not in found:
            raise PolicyError(
                f'there is no policy "{name}"; there are {", ".join(known_policies())}, and any class written as '
                "package.module:Class"
            )
        module, _, attribute = found[name].partition(":")
    policy = _attribute(name, _module(name, module), attribute)
    if not (isinstance(policy, type) and callable(getattr(policy, "decide", None))):
        raise PolicyError(
            f"policy {name} is no policy: it must be a class with a method decide(request, view)"
        )
    return policy


def known_policies() -> dict[str, str]:
    """Every policy that has a name, and the package and version that it comes from. None is imported."""
    known = dict.fromkeys(POLICIES, "prfaas")
    for each in importlib.metadata.entry_points(group=POLICY_ENTRY_POINTS):
        if each.name not in known:
            known[each.name] = f"{each.dist.name} {each.dist.version}" if each.dist else each.value
    return known


def _module(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise PolicyError(
            f'policy {name}: module "{module}" can\'t be imported: {_in_words(error)}'
        ) from error


def _attribute(name: str, module: Any, attribute: str) -> Any:
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PolicyError(f'policy {name}: module "{module.__name__}" has no class "{attribute}"')
        found = getattr(found, part)
    return found


def _in_words(error: Exception) -> str:
    return f"{error} ({type(error).__name__})"
