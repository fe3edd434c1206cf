"""The short way to the candidate of the only PD cluster, against the general one."""

import pytest
from hypothesis import assume, given

from prfaas.core.scheduling.candidates import prefill_candidates
from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.decoders import decode_choices
from prfaas.core.scheduling.pd_candidate import let_prefill_move, lone_pd_candidate, pd_candidate_of
from prfaas.core.scheduling.view import NoDecodeInstanceError, View

from .views import cases


@given(cases(cached=False, max_pd=1))
def test_it_is_the_same_candidate_or_none(case: tuple[View, RoutingRequest]) -> None:
    view, request = case
    assume(request.num_tokens > 1)  # for others it is not asked
    lone = lone_pd_candidate(request, view)
    try:
        ((cluster, decode),) = decode_choices(request, view)
    except NoDecodeInstanceError:
        assert lone is None
        return
    prefill = prefill_candidates(request, view)
    general = pd_candidate_of(request, view, cluster, decode, prefill)
    let_prefill_move(request, view, general, prefill.far)
    if lone is None:
        # Out of the ordinary: somebody is avoided or kept apart, nobody well decodes or prefills, or one does both.
        assert (
            view.avoid
            or view.blocked
            or general.local_reason
            or general.local.instance is decode
            or decode.prefills
            or not (decode.decodes and decode.healthy and not decode.draining)
        )
    else:
        assert lone == general


@pytest.mark.slow("a property over many random systems")
@given(cases(cached=False, max_pd=2))
def test_it_is_for_one_pd_cluster_only(case: tuple[View, RoutingRequest]) -> None:
    view, request = case
    if sum(cluster.kind == "pd" for cluster in view.clusters.values()) > 1:
        assert lone_pd_candidate(request, view) is None
