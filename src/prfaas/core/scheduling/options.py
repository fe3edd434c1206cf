"""All ways that a request could go, with what is predicted for each: what a policy of one's own chooses from."""

import math
from dataclasses import dataclass

from prfaas.core.scheduling.candidates import (
    PrefillCandidate,
    able_to_send,
    kv_bytes_to,
    prefill_by,
    prefill_candidates,
    streamed,
)
from prfaas.core.scheduling.decision import Decision, Route, RoutingRequest
from prfaas.core.scheduling.decoders import decode_choices, load_of, slot_wait_s
from prfaas.core.scheduling.link_choice import usable_link
from prfaas.core.scheduling.preemption import with_time_left
from prfaas.core.scheduling.routing import Choice, decision_of
from prfaas.core.scheduling.view import InstanceView, LinkView, View


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """One way: an instance prefills, another one decodes, and a link is crossed where they are in two clusters.

    Seconds count from now, `View.now_s`.
    """

    request: RoutingRequest
    view: View
    prefill: InstanceView
    """The instance that would prefill: of its cluster the one that would be done first."""
    decode: InstanceView
    """The instance that would decode: the one that every policy would take in this PD cluster."""
    link: LinkView | None
    """What the KVCache crosses; None where the PD cluster prefills itself."""
    candidate: PrefillCandidate

    @property
    def route(self) -> Route:
        """Whether it is offloaded."""
        return Route.LOCAL if self.link is None else Route.OFFLOAD

    @property
    def ttft_s(self) -> float:
        """Predicted: the wait, the prefill, and what of the transfer the prefill does not hide.

        Where the prefill gives the first token (`request.first_from_prefill`) no transfer is in it.
        """
        return self.candidate.ttft_s

    @property
    def loaded_s(self) -> float:
        """Predicted: until the decode instance has everything; `ttft_s`, or more where the prefill gives that token."""
        return self.candidate.loaded_s

    @property
    def wait_s(self) -> float:
        """Until the prefill starts, as predicted."""
        return self.candidate.start_s

    @property
    def prefill_s(self) -> float:
        """What the prefill itself takes, as predicted."""
        return self.candidate.prefill_s

    @property
    def link_wait_s(self) -> float:
        """Until the bytes that the link has accepted will have left; 0 without a link."""
        return self.candidate.link_wait_s

    @property
    def link_s(self) -> float:
        """What this request's KVCache alone takes on the link; 0 without one."""
        return self.candidate.link_s

    @property
    def kv_bytes(self) -> int:
        """KV bytes that cross the link; 0 without one."""
        return self.candidate.kv_bytes

    @property
    def prefill_tokens(self) -> int:
        """Tokens that `prefill` would compute: the prompt's, less what it holds."""
        return self.request.num_tokens - self.candidate.reusable_tokens

    @property
    def uncached_tokens(self) -> int:
        """What a threshold is compared with: the prompt's tokens less the longest prefix that the PD cluster holds."""
        held = max(self.request.reusable_at(each.name) for each in self._pd_instances)
        return self.request.num_tokens - held

    @property
    def threshold_tokens(self) -> float:
        """The PD cluster's threshold, as the slow side has set it; infinite where it has none."""
        return self.view.threshold_tokens.get(self.decode.cluster, math.inf)

    @property
    def decode_load(self) -> float:
        """The share of the decode instance's slots in use."""
        return load_of(self.decode)

    @property
    def decode_wait_s(self) -> float:
        """After `loaded_s`, until the decode instance has a slot, as predicted."""
        return slot_wait_s(self.decode, self.view, self.loaded_s)

    @property
    def _pd_instances(self) -> list[InstanceView]:
        return self.view.clusters[self.decode.cluster].instances

    def decision(self, reason: str = "own") -> Decision:
        """To go this way.

        Args:
            reason: one lower-case word (letters, digits, "-") for logs and metrics. Use few different ones.
        """
        choice = Choice(self.candidate, self.uncached_tokens, self.threshold_tokens, reason)
        return decision_of(self.request, self.view, self.decode, choice)


def options(request: RoutingRequest, view: View) -> list[PrefillOption]:
    """All ways that a request could go, at least one.

    For every PD cluster with an instance that can decode: first the prefill in the cluster, then one in each PrfaaS
    cluster that has a usable link to it. No cached prefix moves between clusters first. Instances that are down,
    draining, to be avoided, or that can't send to the decode instance are left out.

    Raises:
        NoDecodeInstanceError: nothing can decode.
    """
    view = with_time_left(request, view)
    decoders = decode_choices(request, view)
    everywhere = prefill_candidates(request, view)
    found = []
    for cluster, decode in decoders:
        near = able_to_send(request, view, decode, everywhere)
        here = near.own.get(cluster.name) if request.num_tokens > 1 else None
        local = here or prefill_by(request, view, cluster, decode)
        found.append(PrefillOption(request, view, local.instance, decode, None, candidate=local))
        if request.num_tokens <= 1:
            continue  # nothing to transfer: the last token is computed where it is decoded
        for node in near.far:
            link = usable_link(view, node.cluster.name, cluster.name)
            if link is not None:
                kv_bytes = kv_bytes_to(request, view, decode, link)
                far = streamed(request, node, link, view, kv_bytes)
                found.append(PrefillOption(request, view, far.instance, decode, link, candidate=far))
    return found
