"""What a request could do in one PD cluster: who would decode, and all ways to prefill for it."""

import math
from collections.abc import Sequence
from operator import attrgetter

from msgspec import Struct

from prfaas.core.scheduling.candidates import (
    BestCandidate,
    PrefillCandidate,
    PrefillCandidates,
    PrefixSource,
    is_kept_apart,
    least_queued,
    prefill_by,
)
from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.egress import is_worth_offloading
from prfaas.core.scheduling.link_choice import usable_link
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, View
from prfaas.core.workload.empirical import edge_factor

_by_tokens = attrgetter("held_tokens")


class PdCandidate(Struct, kw_only=True):
    """One PD cluster that a request may go to, with all ways to prefill for it."""

    cluster: ClusterView
    decode: InstanceView
    """The instance that would decode."""
    local: PrefillCandidate
    """The best prefill inside the cluster."""
    local_reason: str
    """Why the local prefill is not an ordinary one, else empty."""
    held_tokens: int
    """The longest prefix that can spare computing in this cluster: l_pd."""
    least_wait_s: float
    """Its shortest prefill queue."""
    has_prfaas: bool
    """There is a PrfaaS instance that could prefill if it were linked."""
    threshold_tokens: float
    """The long-term threshold, infinite where there is none; a part of it where a local prefill holds up others."""
    remotes: list[tuple[BestCandidate, LinkView]] = []
    """PrfaaS clusters with an instance and a link; none: everything stays in the cluster."""
    sources: list[PrefixSource] = []
    """The longest prefix of every cluster that holds any, the longest first; none: caches stay where they are."""
    is_kept_apart: bool = False
    """There is a PrfaaS instance that could prefill if the decode instance took its KV."""
    is_too_dear: bool = False
    """There is a PrfaaS instance with a link, but what it would spare is not worth the price of the bytes."""

    def reason_to_stay(self, *, long: bool) -> str:
        """One word for why the request is prefilled here; `long`: although it is longer than the threshold."""
        if self.local_reason:
            return self.local_reason
        if not long:
            return "short"
        if self.remotes:
            return "busy-prfaas"
        if self.is_too_dear:
            return "egress-price"
        if self.has_prfaas:
            return "no-link"
        return "incompatible" if self.is_kept_apart else "no-prfaas-instance"


def _linked(
    request: RoutingRequest,
    view: View,
    decode: InstanceView,
    local: PrefillCandidate,
    far: Sequence[BestCandidate],
) -> tuple[list[tuple[BestCandidate, LinkView]], bool]:
    """Those of other clusters that have a link to `decode`, and whether one is left out for its link's price."""
    remotes, dear = [], False
    for node in far:
        link = usable_link(view, node.cluster.name, decode.cluster)
        if link is None:
            continue
        if link.egress_price_per_byte and not is_worth_offloading(request, view, decode, local, node, link):
            dear = True
        else:
            remotes.append((node, link))
    return remotes, dear


def pd_candidate_of(
    request: RoutingRequest,
    view: View,
    cluster: ClusterView,
    decode: InstanceView,
    prefill: PrefillCandidates,
) -> PdCandidate:
    """The PD cluster `cluster`, given who would decode there; without `remotes` and `sources`: nothing moves."""
    own, has_prfaas = prefill.own.get(cluster.name), bool(prefill.far)
    local, reason, held_tokens = _local(request, view, cluster, decode, own)
    if reason == "no-prefill-instance" and is_kept_apart(view, decode, "pd"):
        reason = "incompatible"
    return PdCandidate(
        cluster=cluster,
        decode=decode,
        local=local,
        local_reason=reason,
        held_tokens=held_tokens,
        least_wait_s=local.start_s if own is None else own.least_wait_s,
        has_prfaas=has_prfaas,
        threshold_tokens=_threshold(request, view, local),
        is_kept_apart=not has_prfaas and is_kept_apart(view, decode, "prfaas"),
    )


def let_prefill_move(
    request: RoutingRequest, view: View, pd: PdCandidate, far: Sequence[BestCandidate]
) -> None:
    """Give `pd` those of `far` whose link to it is usable, and worth its price."""
    pd.remotes, pd.is_too_dear = _linked(request, view, pd.decode, pd.local, far)


def let_caches_move(pd: PdCandidate, prefill: PrefillCandidates) -> None:
    """Give `pd` the prefixes of all clusters, its decode instance's among them where that is its cluster's longest."""
    own = prefill.own.get(pd.cluster.name)
    pd.sources = prefill.sources
    if pd.held_tokens > (0 if own is None else max(own.held_tokens, own.reusable_tokens)):
        at_decode = PrefixSource(cluster=pd.cluster, holder=pd.decode, held_tokens=pd.held_tokens)
        pd.sources = [*prefill.sources, at_decode]
        pd.sources.sort(key=_by_tokens, reverse=True)


def _local(
    request: RoutingRequest, view: View, cluster: ClusterView, decode: InstanceView, own: BestCandidate | None
) -> tuple[PrefillCandidate, str, int]:
    """The local prefill, why it is special if it is, and l_pd.

    The decode instance can prefill itself where it has that role too, or where it holds at least half the prompt:
    the rest is the smaller part then, and needs no transfer. It does so unless another would be done sooner, each of
    its answers waiting as long as it prefills, and always where there is no prefill instance.
    """
    if own is None:
        here = prefill_by(request, view, cluster, decode)
        return here, "no-prefill-instance", here.reusable_tokens
    longest = max(own.held_tokens, own.reusable_tokens)
    if own.instance is decode:
        # No cache comes to an instance that prefills what it decodes.
        here = own if own.cache_transfer is None else prefill_by(request, view, cluster, decode)
        return here, "", longest
    held = request.reusable_at(decode.name)
    if 2 * held < request.num_tokens and not decode.prefills:
        return own, "", longest
    waiting = 0 if decode.prefills else decode.decoding
    here = prefill_by(request, view, cluster, decode, waiting=waiting)
    longest = max(held, longest)
    if here.ttft_s + here.stall_s > own.ttft_s + own.stall_s:
        return own, "", longest
    return here, "" if decode.prefills else "held-by-decode", longest


def _threshold(request: RoutingRequest, view: View, local: PrefillCandidate) -> float:
    """The threshold of this request where it is to stay in the cluster of `local`.

    A prefill that all ranks of a group wait for takes from the cluster what one so many times as long takes alone.
    """
    threshold = view.threshold_tokens.get(local.cluster.name, math.inf) * edge_factor(request.ordinal)
    return threshold / (1 + local.instance.held_up) if local.instance.group else threshold


def lone_pd_candidate(request: RoutingRequest, view: View) -> PdCandidate | None:
    """As `pd_candidate_of` where there is one PD cluster and no instance holds anything of the prompt.

    It takes a third of the time, and most requests of a simulator are of this kind. None where anything is out of the
    ordinary; then `pd_candidate_of` has to be asked. For prompts of two tokens and more.
    """
    if request.held or view.avoid or view.blocked:
        return None
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
    if home is None:
        return None
    own, decode = least_queued(request, home, view), _soonest_free(home.instances)
    if own is None or decode is None or decode.prefills:
        return None
    remotes, is_too_dear = _linked(request, view, decode, own, far)
    return PdCandidate(
        cluster=home,
        decode=decode,
        local=own,
        local_reason="",
        held_tokens=0,
        least_wait_s=own.least_wait_s,
        remotes=remotes,
        has_prfaas=bool(far),
        threshold_tokens=_threshold(request, view, own),
        is_too_dear=is_too_dear,
    )


def _soonest_free(instances: Sequence[InstanceView]) -> InstanceView | None:
    """As `decode_choices` where none holds anything: the soonest slot, the lightest load, the fewest in flight."""
    chosen: InstanceView | None = None
    best = (math.inf, 0)
    for instance in instances:
        if not instance.decodes:
            continue
        load = instance.decoding / instance.decode_slots
        if load >= 1.0:
            load += 1.0 / instance.decode_slots  # the wait for a slot, in units of the cluster's `slot_s`
        rank = load, instance.in_flight
        if rank < best and instance.is_open:
            chosen, best = instance, rank
    return chosen
