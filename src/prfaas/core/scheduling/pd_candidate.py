"""One PD cluster as a place for a request: who decodes, the best local prefill, who could prefill remotely.

Prefix caches of other clusters: when they count, and when they move first (section 3.4.3).
"""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from prfaas.core.scheduling.candidates import (
    AbundanceMarks,
    BestCandidate,
    PrefillCandidate,
    abundant_link,
    best_candidate,
    least_loaded,
    least_queued,
    prefill_by,
    streamed_s,
    usable_link,
)
from prfaas.core.scheduling.decision import CacheTransfer, RoutingRequest
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, View
from prfaas.core.units import BITS_PER_BYTE


class PrefixSource(Protocol):
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
    local: PrefillCandidate
    local_reason: str
    held_tokens: int
    least_wait_s: float
    remotes: list[tuple[BestCandidate, LinkView]]
    has_prfaas: bool
    threshold_tokens: float
    sources: list[PrefixSource]

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

    own: dict[str, BestCandidate]
    far: list[BestCandidate]
    sources: list[PrefixSource]


def nodes_of(request: RoutingRequest, view: View) -> Nodes:
    """Of every cluster with an instance that may prefill."""
    own: dict[str, BestCandidate] = {}
    far: list[BestCandidate] = []
    sources: list[PrefixSource] = []
    for cluster in view.clusters.values():
        node = best_candidate(request, cluster, view)
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
    far: list[BestCandidate] = []
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
    request: RoutingRequest, view: View, cluster: ClusterView, decode: InstanceView, own: BestCandidate | None
) -> tuple[PrefillCandidate, str, int]:
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


# Of the tokens to compute: a cache transfer costs two more hops of the gateway, whatever its size.
_LEAST_SHARE = 0.1


def uncached_tokens(request: RoutingRequest, view: View, site: Site, marks: AbundanceMarks) -> int:
    """The length that a threshold is compared with.

    Bandwidth scarce: l_total − l_pd. Where a cluster has abundant bandwidth to this one, its cache counts too:
    l_total − max(l_pd, l_prfaas).
    """
    for source in site.sources:
        if source.held_tokens <= site.held_tokens:
            break
        if abundant_link(view, source.cluster.name, site.cluster.name, marks) is not None:
            return request.num_tokens - source.held_tokens
    return own_uncached_tokens(request, site)


def own_uncached_tokens(request: RoutingRequest, site: Site) -> int:
    """l_total − l_pd: what the PD cluster would have to compute if no cache moved."""
    return request.num_tokens - site.held_tokens


def sends_less(local: PrefillCandidate, there: PrefillCandidate) -> bool:
    """Whether computing there is done sooner and moves fewer bytes than the cache that the local option brings here.
    True if it brings none: it would compute everything."""
    if local.cache_transfer is None:
        return True
    return there.ttft_s <= local.ttft_s and there.kv_bytes < local.cache_transfer.kv_bytes


def with_cache(
    request: RoutingRequest, view: View, site: Site, option: PrefillCandidate, marks: AbundanceMarks
) -> PrefillCandidate:
    """The option after the longest cache of another cluster has moved to its instance, if that pays.

    Bandwidth must be abundant on a link from there. It must spare at least a tenth of the prefill's tokens, and
    the bytes, over what is left of the link and after its queue, must take less than the prefill that they spare.
    A decode instance that prefills itself gets none.
    """
    if not site.sources or option.instance is site.decode:
        return option
    found = _best_source(view, site, option, marks)
    if found is None:
        return option
    source, lane = found
    # The source computes a last token, the target another, and the decode instance the prompt's last.
    tokens = min(source.held_tokens, request.num_tokens - 3)
    if tokens - option.reusable_tokens < _LEAST_SHARE * (request.num_tokens - option.reusable_tokens):
        return option
    at_target = request.held.get(option.instance.name)
    skip = min(at_target.attention_tokens, tokens) if at_target is not None and view.kv.can_skip else 0
    kv_bytes = view.kv.prefix_bytes_to_move(tokens + 1, skip)
    moved_s = BITS_PER_BYTE * kv_bytes / (lane.capacity_bits_per_s - lane.egress_bits_per_s) + lane.rtt_s
    if lane.drained_s > view.now_s:
        moved_s += lane.drained_s - view.now_s
    prefill_s = option.cluster.prefill_s(request.num_tokens - tokens)
    if moved_s >= option.prefill_s - prefill_s:
        return option
    start_s = option.start_s if option.start_s > moved_s else moved_s
    ttft_s = start_s + prefill_s
    if option.link is not None:
        ttft_s = streamed_s(start_s, prefill_s, option.link_wait_s, option.link_s, option.link.rtt_s)
    return PrefillCandidate(
        option.cluster,
        option.instance,
        tokens,
        start_s,
        prefill_s,
        option.link,
        option.link_wait_s,
        option.link_s,
        ttft_s,
        option.kv_bytes,
        CacheTransfer(source.holder.name, tokens + 1, skip, kv_bytes),
    )


def _best_source(
    view: View, site: Site, option: PrefillCandidate, marks: AbundanceMarks
) -> tuple[PrefixSource, LinkView] | None:
    for source in site.sources:
        if source.held_tokens <= option.reusable_tokens:
            return None
        lane = abundant_link(view, source.cluster.name, option.cluster.name, marks)
        if lane is not None:
            return source, lane
    return None
