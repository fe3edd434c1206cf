"""What all policies share: the way from a request to its decision, and from a choice to what carries it out."""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct

from prfaas.core.scheduling.candidates import (
    LONGEST_TINY_TOKENS,
    BestCandidate,
    PrefillCandidate,
    PrefillCandidates,
    able_to_send,
    gives_first,
    kv_bytes_to,
    prefill_by,
    prefill_candidates,
    prefill_without_hop,
    streamed,
)
from prfaas.core.scheduling.decision import Decision, Route, RoutingRequest
from prfaas.core.scheduling.decoders import decode_choices, load_of, slot_free_s, slot_wait_s
from prfaas.core.scheduling.pd_candidate import (
    PdCandidate,
    let_caches_move,
    let_prefill_move,
    lone_pd_candidate,
    pd_candidate_of,
)
from prfaas.core.scheduling.preemption import with_time_left
from prfaas.core.scheduling.tiers import hit_tokens
from prfaas.core.scheduling.view import InstanceView, LinkView, View


class Choice(Struct):
    """What a policy wants in one PD cluster. The last three are as in `Decision`."""

    option: PrefillCandidate
    uncached_tokens: int
    threshold_tokens: float
    reason: str
    cache_stays: str = ""
    urgency_s: float | None = None
    is_bound: bool = False


_Choose = Callable[[RoutingRequest, View, PdCandidate], Choice]


class ChoosingPolicy:
    """Base of the policies that choose in every PD cluster what they would do there.

    PD clusters are compared by these, in this order: when what the policy would do there, if caches stayed where they
    are, has its first token, the wait for a decode slot included; the least load of the decode instance; the order of
    the view.
    """

    __slots__ = ()

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        if view.leaves_s:
            view = with_time_left(request, view)
        if request.num_tokens <= 1:
            return prefill_at_decode(request, view)
        choice: Choice | None = None
        pd = lone_pd_candidate(request, view)
        if pd is None:
            pd, choice = _soonest(request, view, self._choose)
        # Where caches may move, the policy is asked again.
        if choice is None or pd.sources:
            choice = self._choose(request, view, pd)
        self._line_up(request, view, choice)
        return decision_of(request, view, pd.decode, choice)

    def _choose(self, request: RoutingRequest, view: View, pd: PdCandidate) -> Choice:
        """What it would do in one PD cluster."""
        raise NotImplementedError

    def _line_up(self, request: RoutingRequest, view: View, choice: Choice) -> None:
        """Set the place in the line of what is done."""


def _soonest(request: RoutingRequest, view: View, choose: _Choose) -> tuple[PdCandidate, Choice | None]:
    """The PD cluster that is taken, and what the policy would do there if caches stayed; None: it was the only one."""
    decoders, everywhere = decode_choices(request, view), prefill_candidates(request, view)
    able = {cluster.name: able_to_send(request, view, decode, everywhere) for cluster, decode in decoders}
    candidates = [
        pd_candidate_of(request, view, cluster, decode, able[cluster.name]) for cluster, decode in decoders
    ]
    choice: Choice | None = None
    pd = candidates[0]
    if len(candidates) == 1:
        let_prefill_move(request, view, pd, able[pd.cluster.name].far)
    else:
        pd, choice = _compared(request, view, candidates, able, choose)
    let_caches_move(pd, able[pd.cluster.name])
    return pd, choice


def _compared(
    request: RoutingRequest,
    view: View,
    candidates: Sequence[PdCandidate],
    able: Mapping[str, PrefillCandidates],
    choose: _Choose,
) -> tuple[PdCandidate, Choice]:
    best = (math.inf, math.inf, len(candidates))
    choices: dict[int, Choice] = {}
    for least in sorted(
        (_least_s(request, pd, able[pd.cluster.name].far_s), load_of(pd.decode), place)
        for place, pd in enumerate(candidates)
    ):
        if least > best:
            break  # nor can any that comes later be better
        pd = candidates[least[2]]
        let_prefill_move(request, view, pd, able[pd.cluster.name].far)
        choices[least[2]] = choose(request, view, pd)
        best = min(best, (_delay_s(request, view, pd, choices[least[2]].option), *least[1:]))
    return candidates[best[2]], choices[best[2]]


def _delay_s(request: RoutingRequest, view: View, pd: PdCandidate, option: PrefillCandidate) -> float:
    """`PrefillCandidate.delay_s` with the wait for a decode slot, which a first token from the prefill is spared."""
    if option.instance is pd.decode:
        return max(option.ttft_s, slot_free_s(pd.decode, pd.cluster.slot_s)) + option.stall_s
    is_early = gives_first(request, view, option, option.link, option.kv_bytes)
    return _with_slot_s(pd, option.ttft_s, option.loaded_s, is_early=is_early) + option.stall_s


def _least_s(request: RoutingRequest, pd: PdCandidate, far_s: float) -> float:
    """`_delay_s` of whatever a policy chooses there is no less: no KV arrives before it has been computed."""
    soonest_s = min(pd.local.ttft_s, far_s)
    return _with_slot_s(pd, soonest_s, soonest_s, is_early=request.first_from_prefill)


def _with_slot_s(pd: PdCandidate, ttft_s: float, loaded_s: float, *, is_early: bool) -> float:
    second_s = max(loaded_s, slot_free_s(pd.decode, pd.cluster.slot_s))
    return (ttft_s + second_s) / 2.0 if is_early else second_s


def cheapest_remote(
    request: RoutingRequest,
    view: View,
    decode: InstanceView,
    remotes: Sequence[tuple[BestCandidate, LinkView]],
    cost: Callable[[PrefillCandidate], float] = attrgetter("delay_s"),
) -> PrefillCandidate:
    """Of `remotes`, at least one, the prefill with the least `cost`, its KV streamed to `decode`; the soonest one."""
    chosen: PrefillCandidate | None = None
    least = math.inf
    for node, link in remotes:
        # The transfer makes none cheaper.
        if chosen is None or cost(node) < least:
            kv_bytes = kv_bytes_to(request, view, decode, link)
            option = streamed(request, node, link, view, kv_bytes)
            if chosen is None or cost(option) < least:
                chosen, least = option, cost(option)
    assert chosen is not None  # there is at least one
    return chosen


# Reading a member of an enum takes as long as a function call.
_LOCAL, _OFFLOAD = Route.LOCAL, Route.OFFLOAD


def decision_of(request: RoutingRequest, view: View, decode: InstanceView, choice: Choice) -> Decision:
    """The choice with everything that is needed to carry it out; without a hop that costs more than it spares."""
    option, reason = choice.option, choice.reason
    if request.num_tokens <= LONGEST_TINY_TOKENS:
        here = prefill_without_hop(request, view, decode, option)
        if here is not None:
            option, reason = here, "tiny"
    prefill, link = option.instance, option.link
    kv_wait_s = option.loaded_s - option.ttft_s if request.first_from_prefill else 0.0
    skip_tokens = kv_bytes = 0
    if prefill is not decode:
        if request.held and view.kv.can_skip:
            skip_tokens = request.attention_at(decode.name)
        inside = view.clusters[decode.cluster].kv or view.kv
        kv_bytes = option.kv_bytes if link else inside.bytes_to_move(request.num_tokens, skip_tokens)
    hit, decode_wait_s = None, 0.0
    if request.pools:
        hit = hit_tokens(request, view, prefill.name, option.reusable_tokens, option.cache_transfer)
    if decode.decoding >= decode.decode_slots:
        decode_wait_s = slot_wait_s(decode, view, option.ttft_s + kv_wait_s)
    return Decision(
        route=_LOCAL if link is None else _OFFLOAD,
        prefill=prefill.name,
        decode=decode.name,
        uncached_tokens=choice.uncached_tokens,
        prefill_tokens=request.num_tokens - option.reusable_tokens,
        skip_tokens=skip_tokens,
        kv_bytes=kv_bytes,
        reason=reason,
        threshold_tokens=choice.threshold_tokens,
        predicted_ttft_s=option.ttft_s,
        cache_transfer=option.cache_transfer,
        cache_stays=choice.cache_stays,
        urgency_s=None if prefill is decode else choice.urgency_s,
        is_bound=choice.is_bound,
        load_s=option.load_s,
        pools=request.pools or None,
        hit=hit,
        decode_wait_s=decode_wait_s,
        kv_wait_s=kv_wait_s,
        num_tokens=request.num_tokens,
    )


def prefill_at_decode(
    request: RoutingRequest, view: View, reason: str = "single-token", *, reuses: bool = True
) -> Decision:
    """Nothing is transferred: the last token of a prompt, and what can't be split, is computed where it is decoded.

    `reuses`: False: the engine computes what it holds of the prompt all the same. Raises NoDecodeInstanceError.
    """
    decoders = decode_choices(request, view)
    if not reuses:
        request = RoutingRequest(request.num_tokens)
    options = [prefill_by(request, view, cluster, decode) for cluster, decode in decoders]
    option = min(
        options,
        key=lambda each: (
            max(each.ttft_s, slot_free_s(each.instance, each.cluster.slot_s)),
            load_of(each.instance),
        ),
    )
    threshold = view.threshold_tokens.get(option.cluster.name, math.inf)
    choice = Choice(option, request.num_tokens - option.reusable_tokens, threshold, reason)
    return decision_of(request, view, option.instance, choice)
