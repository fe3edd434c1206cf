"""Our short-term routing: the threshold tilted by backlogs, each weighed with the work the request would add."""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from prfaas.core.scheduling.cache_transfers import own_uncached_tokens, uncached_tokens, with_cache
from prfaas.core.scheduling.candidates import PrefillCandidate, gives_first
from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.decoders import slot_free_s
from prfaas.core.scheduling.link_choice import AbundanceMarks, is_stale, unpriced
from prfaas.core.scheduling.parameters import Bounds
from prfaas.core.scheduling.pd_candidate import PdCandidate
from prfaas.core.scheduling.prefill_order import place_in_line_s
from prfaas.core.scheduling.routing import Choice, ChoosingPolicy, cheapest_remote
from prfaas.core.scheduling.view import View

_LEAST_S = 1e-3
# Tokens of the threshold that an infinite one counts as where backlogs are against the PD cluster.
_NEVER = 32_768.0
# Of the tokens to compute: what a cached prefix must spare for a prefill to wait for the instance that holds it.
_MUCH = 0.1


@dataclass(frozen=True, slots=True)
class Tilted(ChoosingPolicy):
    """The paper's threshold, tilted by backlogs; of the prefills that wait, short ones go first.

    Offload when

        T_pd(t) · (u − t) / max(u, t) + β · Δ > 0   with   Δ = w_pd − (w_far · T_far + q · X) / T_pd

    t: the threshold; u: the uncached length, both as in `paper`; T_pd(t): a prefill of t tokens in the PD cluster.
    T_pd, T_far: what this prefill would take on either side, each with its own cache. w: until it could start,
    w_far with the transfer that it does not hide, half of it where the first token does not wait for it; w_pd,
    where all instances of the PD cluster decode, until one has a slot. q: the link's queue in seconds, which is the
    price of its bandwidth; X: seconds of the link that this KV takes. Solved for u it is a threshold:

        t' = t · max(0, 1 − β · Δ / T_pd(t))   where Δ > 0
        t' = t / (1 + β · Δ / T_pd(t))         where Δ < 0; infinite where the divisor is not above 0

    An infinite threshold counts as one of 32,768 tokens where Δ > 0, so that a backlog of the PD cluster moves it, too.
    β = 0 is the paper's policy without its adjustments. For β > 0 the sum times T_pd is a drift and a penalty: the
    change of the squared backlogs of prefill pools and links by a request (backlog × work added), and at most
    T_pd(t) per second of work for leaving the threshold. Growing backlogs outweigh that, so queues stay bounded
    under every load that some rule could carry, whatever the threshold (Tassiulas and Ephremides 1992; Neely
    2010). While facts of a link are stale the tilt can only make offloading rarer. While a link is congested t' is
    1 + c times as high, c being 0 to 1: what the network's own queues and losses say before any of ours is long.

    The prefill waits for whichever instance of its cluster is free first, in the order of `place_in_line_s`: short ones
    move forward and long ones back, by seconds that follow from what prefills wait there and from `fairness`. A prompt
    of which one instance holds much more than the others waits for that one.
    """

    name: ClassVar[str] = "tilted"
    beta: Annotated[float, Bounds("how much backlogs weigh; 0: the threshold alone", least=0)] = 1.0
    fairness: Annotated[
        float,
        Bounds(
            "order of waiting prefills; 1: of arrival, less: short ones first and long ones later",
            least=0,
            most=1,
        ),
    ] = 0.5
    abundance: AbundanceMarks = field(default_factory=AbundanceMarks)

    def _line_up(self, request: RoutingRequest, view: View, choice: Choice) -> None:
        option = choice.option
        choice.urgency_s = place_in_line_s(view.now_s, option.prefill_s, option.cluster.waits, self.fairness)
        choice.is_bound = option.cache_transfer is not None or _is_held_best(request, option)

    def _choose(self, request: RoutingRequest, view: View, pd: PdCandidate) -> Choice:
        threshold = adjusted = pd.threshold_tokens
        uncached = uncached_tokens(request, view, pd, self.abundance)
        local, local_stays = with_cache(request, view, pd, pd.local, self.abundance)
        far: PrefillCandidate | None = None
        early = False
        if pd.remotes:
            far = cheapest_remote(request, view, pd.decode, pd.remotes, _added_work)
            far, far_stays = with_cache(request, view, pd, far, self.abundance)
            early = gives_first(request, view, far, far.link, far.kv_bytes)
            done_s = far.delay_s if early else far.ttft_s
            tilt_s = self.beta * self._ahead_s(local, far, done_s, pd, view)
            if tilt_s > 0.0 or threshold < math.inf:
                at = threshold if threshold < math.inf else _NEVER
                adjusted = _tilted(at, tilt_s / max(pd.cluster.prefill_s(at), _LEAST_S))
            if far.link is not None and far.link.congestion:
                adjusted *= 1.0 + far.link.congestion
            if uncached > adjusted:
                reason = "long" if uncached > threshold else "busy-pd"
                return Choice(far, uncached, adjusted, reason, cache_stays=far_stays)
            if threshold == math.inf:
                adjusted = threshold
            short_by_cache = own_uncached_tokens(request, pd) > adjusted
            if short_by_cache and (local.cache_transfer is None or far.delay_s <= local.delay_s):
                # The cache that makes it short does not come here, or is done sooner where it is.
                return Choice(far, uncached, adjusted, "cached-there", cache_stays=far_stays)
        reason = pd.reason_to_stay(long=uncached > threshold)
        is_busy = reason == "busy-prfaas"
        if is_busy and far is not None and uncached <= self._idle_threshold(local, far, pd, early):
            reason = "slow-link"
        elif far is not None and not pd.local_reason and uncached > unpriced(adjusted, pd.remotes):
            reason = "congested-link"
        return Choice(local, uncached, adjusted, reason, cache_stays=local_stays)

    def _idle_threshold(
        self, local: PrefillCandidate, far: PrefillCandidate, pd: PdCandidate, first_from_prefill: bool
    ) -> float:
        """The threshold if nothing waited anywhere: only the transfer that no prefill hides tilts it then."""
        unhidden_s = max(far.link_s - far.prefill_s, 0.0)
        if first_from_prefill:
            unhidden_s /= 2.0  # the first token does not wait for it: `PrefillCandidate.delay_s`
        unhidden_s += far.link.rtt_s if far.link is not None else 0.0
        tilt_s = -self.beta * unhidden_s * far.prefill_s / (local.prefill_s or _LEAST_S)
        return _tilted(pd.threshold_tokens, tilt_s / max(pd.cluster.prefill_s(pd.threshold_tokens), _LEAST_S))

    def _ahead_s(
        self, local: PrefillCandidate, far: PrefillCandidate, done_s: float, pd: PdCandidate, view: View
    ) -> float:
        near_s = local.start_s
        if pd.local_reason == "no-prefill-instance":
            # It would take the time that answers wait for.
            near_s = max(near_s, slot_free_s(pd.decode, pd.cluster.slot_s))
        work = (done_s - far.prefill_s) * far.prefill_s + far.link_wait_s * far.link_s
        ahead_s = near_s - work / (local.prefill_s or _LEAST_S)
        if ahead_s > 0.0 and far.link is not None and is_stale(far.link, view):
            return 0.0
        return ahead_s


def _added_work(far: PrefillCandidate) -> float:
    """Backlog times work as in the tilt, the request's own work counted as backlog."""
    return far.delay_s * far.prefill_s + far.link_wait_s * far.link_s


def _is_held_best(request: RoutingRequest, option: PrefillCandidate) -> bool:
    """Whether every other instance of the cluster would have to compute a tenth more."""
    num_tokens, reusable = request.num_tokens, option.reusable_tokens
    if reusable <= _MUCH * num_tokens:
        return False
    for each in option.cluster.instances:
        # One that holds nothing of it would compute the whole prompt, and that was compared with above.
        if each.name in request.held and each.prefills and each is not option.instance:
            elsewhere = request.reusable_at(each.name)
            if reusable - elsewhere <= _MUCH * (num_tokens - elsewhere):
                return False
    return True


def _tilted(threshold: float, tilt: float) -> float:
    if tilt >= 0.0:
        return threshold * max(1.0 - tilt, 0.0)
    return threshold / (1.0 + tilt) if tilt > -1.0 else math.inf
