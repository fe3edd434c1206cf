"""A baseline: prefill instances in turn."""

import math
from dataclasses import dataclass
from typing import ClassVar

from prfaas.scheduling.decision import Decision
from prfaas.scheduling.decoders import decode_choices
from prfaas.scheduling.links import usable_link
from prfaas.scheduling.nodes import is_prefiller
from prfaas.scheduling.options import bits_to, prefill_by, streamed
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.routing import Choice, decision_of, single_token
from prfaas.scheduling.view import ClusterView, InstanceView, LinkView, View


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Request number k takes the k-th of all pairs of PD cluster and prefill instance that can reach it.

    The instance that decodes in a PD cluster is the one that any policy would take there.
    """

    name: ClassVar[str] = "round_robin"

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        decoders = decode_choices(request, view)
        if request.num_tokens <= 1:
            return single_token(request, view, decoders)
        turns = [turn for cluster, decode in decoders for turn in _turns(view, cluster, decode)]
        site, decode, cluster, instance, link = turns[request.ordinal % len(turns)]
        option = prefill_by(request, view, cluster, instance)
        if link is not None:
            option = streamed(option, link, view.now_s, bits_to(request, view, decode))
        held = max(request.reusable_at(each.name) for each in site.instances)
        threshold = view.threshold_tokens.get(site.name, math.inf)
        choice = Choice(option, request.num_tokens - held, threshold, "turn", option.ttft_s)
        return decision_of(request, view, decode, choice)


_Turn = tuple[ClusterView, InstanceView, ClusterView, InstanceView, LinkView | None]


def _turns(view: View, site: ClusterView, decode: InstanceView) -> list[_Turn]:
    """(PD cluster, its decode instance, prefill cluster, prefill instance, link between the clusters)."""
    here = [each for each in site.instances if is_prefiller(each, view)] or [decode]
    turns: list[_Turn] = [(site, decode, site, each, None) for each in here]
    for cluster in view.clusters.values():
        link = usable_link(view, cluster.name, site.name) if cluster.kind == "prfaas" else None
        if link is not None:
            far = [each for each in cluster.instances if is_prefiller(each, view)]
            turns += [(site, decode, cluster, each, link) for each in far]
    return turns
