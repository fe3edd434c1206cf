"""One PD cluster as a place for a request: who decodes, the best local prefill, who could prefill remotely."""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from prfaas.scheduling.decoders import least_loaded
from prfaas.scheduling.links import usable_link
from prfaas.scheduling.nodes import PrefillNode, least_queued, prefill_node
from prfaas.scheduling.options import Option, prefill_by
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.view import ClusterView, InstanceView, LinkView, View


class Source(Protocol):
    """`holder` has the longest prefix of a request in its cluster, `held_tokens`. A PrefillNode is one."""

    cluster: ClusterView
    holder: InstanceView
    held_tokens: int


@dataclass(slots=True)
class _AtDecode:
    cluster: ClusterView
    holder: InstanceView
    held_tokens: int


_by_tokens = attrgetter("held_tokens")


@dataclass(slots=True)
class Site:
    """One PD cluster.

    `local_reason`: why the local prefill is not an ordinary one, else empty. `held_tokens`: the longest prefix
    that can spare computing in this cluster, l_pd. `least_wait_s`: its shortest prefill queue. `remotes`: PrfaaS
    clusters with an instance and a link. `has_prfaas`: there is a PrfaaS instance that could prefill if it were
    linked. `threshold_tokens`: the long-term one, infinite where there is none. `sources`: who holds the longest
    prefix in every cluster, the longest first; empty if nobody holds anything.
    """

    cluster: ClusterView
    decode: InstanceView
    local: Option
    local_reason: str
    held_tokens: int
    least_wait_s: float
    remotes: list[tuple[PrefillNode, LinkView]]
    has_prfaas: bool
    threshold_tokens: float
    sources: list[Source]

    def reason_to_stay(self, *, long: bool) -> str:
        """One word for why the request is prefilled here; `long`: although it is longer than the threshold."""
        if self.local_reason:
            return self.local_reason
        if not long:
            return "short"
        if self.remotes:
            return "busy-prfaas"
        return "no-link" if self.has_prfaas else "no-prfaas-instance"


@dataclass(slots=True)
class Nodes:
    """Who would prefill in every cluster, and who holds what.

    `own` by PD cluster, `far` those of PrfaaS clusters. `sources`: the longest prefix first, one per cluster that
    holds any.
    """

    own: dict[str, PrefillNode]
    far: list[PrefillNode]
    sources: list[Source]


def nodes_of(request: RoutingRequest, view: View) -> Nodes:
    """Of every cluster with an instance that may prefill."""
    own: dict[str, PrefillNode] = {}
    far: list[PrefillNode] = []
    sources: list[Source] = []
    for cluster in view.clusters.values():
        node = prefill_node(request, cluster, view)
        if node is None:
            continue
        if cluster.kind == "pd":
            own[cluster.name] = node
        else:
            far.append(node)
        if node.held_tokens:
            sources.append(node)
    if len(sources) > 1:
        sources.sort(key=_by_tokens, reverse=True)
    return Nodes(own, far, sources)


def lone_site(request: RoutingRequest, view: View) -> Site | None:
    """The site of the only PD cluster where nobody holds anything, in a third of the time: what a simulator asks for.

    None where there is anything out of the ordinary: `site_of` says what to do then.
    """
    home: ClusterView | None = None
    far: list[PrefillNode] = []
    for cluster in view.clusters.values():
        if cluster.kind == "prfaas":
            node = least_queued(request, cluster, view)
            if node is not None:
                far.append(node)
        elif home is not None:
            return None
        else:
            home = cluster
    if home is None or view.avoid:
        return None
    own = least_queued(request, home, view)
    decode = least_loaded(home.instances)
    if own is None or decode is None or decode.prefills:
        return None
    name = home.name
    remotes = []
    for node in far:
        link = usable_link(view, node.cluster.name, name)
        if link is not None:
            remotes.append((node, link))
    threshold = view.threshold_tokens.get(name, math.inf)
    return Site(home, decode, own, "", 0, own.least_wait_s, remotes, bool(far), threshold, [])


def site_of(
    request: RoutingRequest,
    view: View,
    cluster: ClusterView,
    decode: InstanceView,
    nodes: Nodes,
    *,
    caches_move: bool = True,
) -> Site:
    """The PD cluster `cluster`, given who would decode there; without `sources` unless `caches_move`."""
    own = nodes.own.get(cluster.name)
    local, reason, held_tokens = _local(request, view, cluster, decode, own)
    sources = nodes.sources if caches_move else []
    if caches_move and held_tokens > (0 if own is None else own.held_tokens):
        sources = [*sources, _AtDecode(cluster, decode, held_tokens)]
        sources.sort(key=_by_tokens, reverse=True)
    remotes = []
    for node in nodes.far:
        link = usable_link(view, node.cluster.name, cluster.name)
        if link is not None:
            remotes.append((node, link))
    least_wait_s = local.start_s if own is None else own.least_wait_s
    threshold = view.threshold_tokens.get(cluster.name, math.inf)
    has_prfaas = bool(nodes.far)
    return Site(
        cluster, decode, local, reason, held_tokens, least_wait_s, remotes, has_prfaas, threshold, sources
    )


def _local(
    request: RoutingRequest, view: View, cluster: ClusterView, decode: InstanceView, own: PrefillNode | None
) -> tuple[Option, str, int]:
    """The local prefill, why it is special if it is, and l_pd.

    The decode instance can prefill itself where it has that role too, or where it holds at least half the prompt:
    the rest is the smaller part then, and needs no transfer. It does so unless another would be done sooner, and
    always where there is no prefill instance.
    """
    if own is None:
        here = prefill_by(request, view, cluster, decode)
        return here, "no-prefill-instance", here.reusable_tokens
    if own.instance is decode:
        return own, "", own.held_tokens
    held = request.reusable_at(decode.name) if request.held else 0
    if 2 * held < request.num_tokens and not decode.prefills:
        return own, "", own.held_tokens
    here = prefill_by(request, view, cluster, decode)
    longest = max(held, own.held_tokens)
    if here.ttft_s > own.ttft_s:
        return own, "", longest
    return here, "" if decode.prefills else "held-by-decode", longest
