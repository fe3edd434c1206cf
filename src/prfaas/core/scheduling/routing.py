"""What all policies share: from a request to the PD clusters it could go to, and from a choice to a decision."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from prfaas.core.scheduling.candidates import (
    LONGEST_TINY_TOKENS,
    BestCandidate,
    PrefillCandidate,
    PrefillCandidates,
    PrefixSource,
    able_to_send,
    is_kept_apart,
    kv_bytes_to,
    least_queued,
    prefill_by,
    prefill_candidates,
    prefill_without_hop,
    streamed,
)
from prfaas.core.scheduling.decision import Decision, Route, RoutingRequest
from prfaas.core.scheduling.decoders import decode_choices, load_of, slot_free_s, slot_wait_s, soonest_free
from prfaas.core.scheduling.egress import is_worth_offloading
from prfaas.core.scheduling.hazard import streamed_delay_s
from prfaas.core.scheduling.link_choice import usable_link
from prfaas.core.scheduling.preemption import with_time_left
from prfaas.core.scheduling.tiers import hit_tokens
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, View
from prfaas.core.units import BITS_PER_BYTE


@dataclass(slots=True)
class _AtDecode:
    cluster: ClusterView
    holder: InstanceView
    held_tokens: int


_by_tokens = attrgetter("held_tokens")


@dataclass(slots=True)
class PdCandidate:
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
    remotes: list[tuple[BestCandidate, LinkView]]
    """PrfaaS clusters with an instance and a link."""
    has_prfaas: bool
    """There is a PrfaaS instance that could prefill if it were linked."""
    threshold_tokens: float
    """The long-term threshold, infinite where there is none."""
    sources: list[PrefixSource]
    """The longest prefix of every cluster that holds any, the longest first."""
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


def lone_pd_candidate(request: RoutingRequest, view: View) -> PdCandidate | None:
    """The candidate of the only PD cluster for a prompt of which no instance holds anything.

    It takes a third of the time of `pd_candidate_of`, and most requests of a simulator are of this kind. None where
    anything is out of the ordinary; then `pd_candidate_of` has to be asked. For prompts of two tokens and more.
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
    if home is None or view.avoid or view.blocked:
        return None
    own = least_queued(request, home, view)
    decode = soonest_free(home.instances)
    if own is None or decode is None or decode.prefills:
        return None
    name = home.name
    remotes, dear = _linked(request, view, decode, own, far)
    threshold = view.threshold_tokens.get(name, math.inf)
    waits_s = own.least_wait_s
    return PdCandidate(home, decode, own, "", 0, waits_s, remotes, bool(far), threshold, [], False, dear)


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
    """The PD cluster `cluster`, given who would decode there; without `sources`: caches stay where they are."""
    own = prefill.own.get(cluster.name)
    local, reason, held_tokens = _local(request, view, cluster, decode, own)
    remotes, dear = _linked(request, view, decode, local, prefill.far)
    least_wait_s = local.start_s if own is None else own.least_wait_s
    threshold = view.threshold_tokens.get(cluster.name, math.inf)
    far = bool(prefill.far)
    apart = bool(view.blocked) and not far and is_kept_apart(view, decode, "prfaas")
    if view.blocked and reason == "no-prefill-instance" and is_kept_apart(view, decode, "pd"):
        reason = "incompatible"
    return PdCandidate(
        cluster, decode, local, reason, held_tokens, least_wait_s, remotes, far, threshold, [], apart, dear
    )


def let_caches_move(pd: PdCandidate, prefill: PrefillCandidates) -> None:
    """Give `pd` the prefixes of all clusters, its decode instance's among them where that is its cluster's longest."""
    own = prefill.own.get(pd.cluster.name)
    pd.sources = prefill.sources
    if pd.held_tokens > (0 if own is None else max(own.held_tokens, own.reusable_tokens)):
        pd.sources = [*prefill.sources, _AtDecode(pd.cluster, pd.decode, pd.held_tokens)]
        pd.sources.sort(key=_by_tokens, reverse=True)


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
    longest = max(own.held_tokens, own.reusable_tokens)
    if own.instance is decode:
        # No cache comes to an instance that prefills what it decodes.
        here = own if own.cache_transfer is None else prefill_by(request, view, cluster, decode)
        return here, "", longest
    held = request.reusable_at(decode.name) if request.held else 0
    if 2 * held < request.num_tokens and not decode.prefills:
        return own, "", longest
    here = prefill_by(request, view, cluster, decode)
    longest = max(held, longest)
    if here.ttft_s > own.ttft_s:
        return own, "", longest
    return here, "" if decode.prefills else "held-by-decode", longest


# Reading a member of an enum takes as long as a function call.
_LOCAL, _OFFLOAD = Route.LOCAL, Route.OFFLOAD


@dataclass(slots=True)
class Choice:
    """What a policy wants in one PD cluster. The last two are as in `Decision`, and given by name."""

    option: PrefillCandidate
    uncached_tokens: int
    threshold_tokens: float
    reason: str
    urgency_s: float | None = field(default=None, kw_only=True)
    is_bound: bool = field(default=False, kw_only=True)


def route(
    request: RoutingRequest,
    view: View,
    choose: Callable[[RoutingRequest, View, PdCandidate], Choice],
    line_up: Callable[[RoutingRequest, View, Choice], None] | None = None,
) -> Decision:
    """The decision of a policy that chooses by `choose` in every PD cluster.

    `line_up` is called once, with the choice of the PD cluster that is taken: it sets the place in the line.

    PD clusters are compared by these, in this order: when what the policy would do there, if caches stayed where they
    are, has its first token, the wait for a decode slot included; the least load of the decode instance; the order of
    the view.

    Raises:
        NoDecodeInstanceError: nothing can decode.
    """
    if view.leaves_s:
        view = with_time_left(request, view)
    if request.num_tokens <= 1:
        return single_token(request, view, decode_choices(request, view))
    chosen = None if request.held else lone_pd_candidate(request, view)
    if chosen is not None:
        best = choose(request, view, chosen)
    else:
        chosen, best = _compared(request, view, choose)
    if line_up is not None:
        line_up(request, view, best)
    return decision_of(request, view, chosen.decode, best)


def _compared(
    request: RoutingRequest, view: View, choose: Callable[[RoutingRequest, View, PdCandidate], Choice]
) -> tuple[PdCandidate, Choice]:
    """The PD cluster that is taken, and what the policy does there."""
    decoders = decode_choices(request, view)
    prefill = prefill_candidates(request, view)
    chosen: PdCandidate | None = None
    best: Choice | None = None
    if len(decoders) == 1:
        here = able_to_send(request, view, decoders[0][1], prefill)
        chosen = pd_candidate_of(request, view, *decoders[0], here)
    else:
        soonest_s = math.inf
        far_s = min((node.ttft_s for node in prefill.far), default=math.inf)
        for cluster, decode in sorted(decoders, key=_by_load):
            free_s = slot_free_s(decode, cluster.slot_s)
            least_s = _least_s(request, view, cluster, decode, prefill, far_s)
            slot_s = least_s if least_s > free_s else free_s
            if soonest_s <= ((least_s + slot_s) / 2.0 if request.first_from_prefill else slot_s):
                continue
            able = able_to_send(request, view, decode, prefill) if view.blocked else prefill
            pd = pd_candidate_of(request, view, cluster, decode, able)
            choice = choose(request, view, pd)
            delay_s = _delay_s(request, choice.option, decode, free_s)
            if chosen is None or delay_s < soonest_s:
                best, chosen, here, soonest_s = choice, pd, able, delay_s
        assert chosen is not None  # there is at least one
    if best is None or request.held:
        let_caches_move(chosen, here)
        best = choose(request, view, chosen)
    return chosen, best


def _delay_s(request: RoutingRequest, option: PrefillCandidate, decode: InstanceView, free_s: float) -> float:
    """`PrefillCandidate.delay_s` with the wait for a decode slot, which a first token from the prefill is spared."""
    if not request.first_from_prefill or option.instance is decode:
        return max(option.ttft_s, free_s)
    return (option.ttft_s + max(option.loaded_s, free_s)) / 2.0


def _by_load(each: tuple[ClusterView, InstanceView]) -> float:
    return load_of(each[1])


def _least_s(
    request: RoutingRequest,
    view: View,
    cluster: ClusterView,
    decode: InstanceView,
    prefill: PrefillCandidates,
    far_s: float,
) -> float:
    """No prefill for this PD cluster can be done sooner, whatever a policy chooses; `far_s`: none in another cluster.

    0 where the decode instance itself might prefill.
    """
    own = prefill.own.get(cluster.name)
    if own is None or decode.prefills or view.blocked:
        return 0.0
    if request.held and 2 * request.reusable_at(decode.name) >= request.num_tokens:
        return 0.0
    return own.ttft_s if own.ttft_s < far_s else far_s


def soonest_remote(
    request: RoutingRequest, view: View, pd: PdCandidate, remotes: Sequence[tuple[BestCandidate, LinkView]]
) -> PrefillCandidate:
    """Of `remotes`, at least one, the one with the least predicted TTFT; by `delay_s` where that is something else."""
    first_from_prefill, now_s = request.first_from_prefill, view.now_s
    if len(remotes) == 1:
        kv_bytes = kv_bytes_to(request, view, pd.decode, remotes[0][1])
        return streamed(*remotes[0], view, kv_bytes, first_from_prefill)
    chosen: tuple[BestCandidate, LinkView, int] | None = None
    least_s = math.inf
    for node, link in remotes:
        # No KV arrives before it has been computed.
        if chosen is None or node.ttft_s < least_s:
            wait_s, kills_per_s = link.drained_s - now_s, node.cluster.kills_per_s
            kv_bytes = kv_bytes_to(request, view, pd.decode, link)
            delay_s = streamed_delay_s(
                node.start_s,
                node.prefill_s,
                wait_s if wait_s > 0.0 else 0.0,
                BITS_PER_BYTE * kv_bytes / link.capacity_bits_per_s,
                link.rtt_s,
                kills_per_s,
                view.checkpoint_s(link, first_from_prefill) if kills_per_s else math.inf,
                first_from_prefill,
            )
            if chosen is None or delay_s < least_s:
                chosen, least_s = (node, link, kv_bytes), delay_s
    assert chosen is not None  # there is at least one
    node, link, kv_bytes = chosen
    return streamed(node, link, view, kv_bytes, first_from_prefill)


def decision_of(request: RoutingRequest, view: View, decode: InstanceView, choice: Choice) -> Decision:
    """The choice with everything that is needed to carry it out; without a hop that costs more than it spares."""
    option, reason = choice.option, choice.reason
    if request.num_tokens <= LONGEST_TINY_TOKENS:
        here = prefill_without_hop(request, view, decode, option)
        if here is not None:
            option, reason = here, "tiny"
    prefill, link, decode_wait_s, kv_wait_s = option.instance, option.link, 0.0, 0.0
    if request.first_from_prefill:
        kv_wait_s = option.loaded_s - option.ttft_s
    if decode.decoding >= decode.decode_slots:
        decode_wait_s = slot_wait_s(decode, view, option.ttft_s + kv_wait_s)
    skip_tokens = kv_bytes = 0
    if prefill is not decode:
        if request.held and view.kv.can_skip:
            skip_tokens = request.attention_at(decode.name)
        inside = view.clusters[decode.cluster].kv or view.kv
        kv_bytes = option.kv_bytes if link else inside.bytes_to_move(request.num_tokens, skip_tokens)
    return Decision(
        _LOCAL if link is None else _OFFLOAD,
        prefill.name,
        decode.name,
        choice.uncached_tokens,
        request.num_tokens - option.reusable_tokens,
        skip_tokens,
        kv_bytes,
        reason,
        choice.threshold_tokens,
        option.ttft_s,
        option.cache_transfer,
        None if prefill is decode else choice.urgency_s,
        choice.is_bound,
        option.load_s,
        request.pools or None,
        hit_tokens(request, view, prefill.name, option.reusable_tokens, option.cache_transfer)
        if request.pools
        else None,
        decode_wait_s,
        kv_wait_s,
        request.num_tokens,
    )


def single_token(
    request: RoutingRequest, view: View, decoders: list[tuple[ClusterView, InstanceView]]
) -> Decision:
    """Nothing to transfer: the last token of a prompt is always computed where it is decoded."""
    options = [prefill_by(request, view, cluster, decode) for cluster, decode in decoders]
    option = min(
        options,
        key=lambda each: (
            max(each.ttft_s, slot_free_s(each.instance, each.cluster.slot_s)),
            load_of(each.instance),
        ),
    )
    threshold = view.threshold_tokens.get(option.cluster.name, math.inf)
    choice = Choice(option, request.num_tokens, threshold, "single-token")
    return decision_of(request, view, option.instance, choice)
