"""A policy that is not ours, its decisions checked before anything follows them."""

import re
from collections.abc import Mapping
from pathlib import Path
from traceback import extract_tb

from prfaas.core.scheduling.decision import Decision, Route, RoutingRequest
from prfaas.core.scheduling.link_choice import usable_link
from prfaas.core.scheduling.policy import Policy
from prfaas.core.scheduling.view import ClusterView, InstanceView, NoDecodeInstanceError, View

_WORD = re.compile(r"[a-z][a-z0-9-]{0,31}")
# Reasons are labels of metrics, whose values must stay few.
_MOST_REASONS = 32


class UnsoundDecisionError(ValueError):
    """No decision, or one that can't be carried out."""


class CheckedPolicy:
    """Decides as `policy`, or raises."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._reasons: set[str] = set()
        self._clusters: dict[str, ClusterView] = {}
        self._instances: dict[str, InstanceView] = {}

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """The policy's decision.

        Raises:
            UnsoundDecisionError: it can't be carried out, or the policy raised the error that is its cause.
            NoDecodeInstanceError: nothing can decode.
        """
        try:
            decision = self.policy.decide(request, view)
        except NoDecodeInstanceError:
            raise
        except Exception as error:
            raise UnsoundDecisionError(
                f"the decision for a prompt of {request.num_tokens} tokens: {_raised(error)}"
            ) from error
        if view.clusters is not self._clusters:
            self._clusters, self._instances = view.clusters, instances_of(view)
        fault = fault_of(decision, request, view, self._instances) or self._fault_of_reason(decision.reason)
        if fault is not None:
            raise UnsoundDecisionError(f"the decision for a prompt of {request.num_tokens} tokens: {fault}")
        return decision

    def _fault_of_reason(self, reason: str) -> str | None:
        if reason in self._reasons:
            return None
        if not isinstance(reason, str) or not _WORD.fullmatch(reason):
            return (
                f"reason {reason!r} is no lower-case word of letters, digits and -, of 32 characters at most"
            )
        if len(self._reasons) >= _MOST_REASONS:
            return f"reason {reason!r} would be more than {_MOST_REASONS} different ones; use fewer"
        self._reasons.add(reason)
        return None


def _raised(error: Exception) -> str:
    """What a policy raised, and the last line of its own file that led there."""
    told = f"it raised {type(error).__name__}: {' '.join(str(error).split())}"
    frames = extract_tb(error.__traceback__)[1:]
    if not frames:
        return told
    own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{told} ({Path(own.filename).name}, line {own.lineno})"


def instances_of(view: View) -> dict[str, InstanceView]:
    """All instances by name."""
    return {each.name: each for cluster in view.clusters.values() for each in cluster.instances}


def fault_of(
    decision: object, request: RoutingRequest, view: View, instances: Mapping[str, InstanceView]
) -> str | None:
    """Why a decision can't be carried out, in a few words; None: it can."""
    if not isinstance(decision, Decision):
        return f"it is a {type(decision).__name__}, not a Decision"
    prefill, decode = instances.get(decision.prefill), instances.get(decision.decode)
    if prefill is None or decode is None:
        return f'there is no instance "{decision.decode if prefill else decision.prefill}"'
    for each in (prefill, decode):
        if each.name in view.avoid or each.closed:
            return f"{each.name} must not be used now"
    fault = None if prefill is decode else _fault_of_pair(prefill, decode, view)
    if view.clusters[decode.cluster].kind != "pd":
        fault = f"{decode.name} is in no pd cluster, and can't decode"
    is_far = prefill.cluster != decode.cluster
    if fault is None and decision.route is not (Route.OFFLOAD if is_far else Route.LOCAL):
        fault = f"route {decision.route} does not fit {prefill.name} and {decode.name}"
    return fault or _fault_of_numbers(decision, request)


def _fault_of_pair(prefill: InstanceView, decode: InstanceView, view: View) -> str | None:
    if not prefill.takes_prefills:
        return f"{prefill.name} takes no prefills now"
    if (prefill.name, decode.name) in view.blocked:
        return f"{decode.name} takes no KVCache from {prefill.name}"
    if prefill.cluster != decode.cluster and usable_link(view, prefill.cluster, decode.cluster) is None:
        return f"no usable link leads from {prefill.cluster} to {decode.cluster}"
    return None


def _fault_of_numbers(decision: Decision, request: RoutingRequest) -> str | None:
    for field, most in (
        ("uncached_tokens", request.num_tokens),
        ("prefill_tokens", request.num_tokens),
        ("skip_tokens", request.attention_at(decision.decode)),
    ):
        tokens = getattr(decision, field)
        if not isinstance(tokens, int) or not 0 <= tokens <= most:
            return f"{field} must be a whole number from 0 to {most}, not {tokens!r}"
    if not isinstance(decision.kv_bytes, int) or decision.kv_bytes < 0:
        return f"kv_bytes must be a whole number from 0 on, not {decision.kv_bytes!r}"
    for field in ("threshold_tokens", "predicted_ttft_s", "kv_wait_s"):
        number = getattr(decision, field)
        if not isinstance(number, int | float) or not number >= 0:
            return f"{field} must be a number from 0 on, not {number!r}"
    return None
