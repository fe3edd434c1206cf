"""The client has the prefill's first token while the KV is on its way."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import PAPER, CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants

from prfaas.core.deployment import load_planned
from prfaas.core.kv.layers import FullAttention
from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.policy import POLICIES, Policy
from prfaas.core.scheduling.view import View
from prfaas.core.units import GIB
from prfaas.lab.simulator.capacity import Constant
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Overheads, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate
from prfaas.lab.simulator.world import World

TOKENS, ANSWER = 50_000, 20
STEP_S = 0.025


def scenario(case_study: CaseStudy, policy: str = "offload_all", **options: object) -> Scenario:
    return scenario_of(
        case_study.planned,
        **{"policy": policy, "adapts": False, "allocation": False, "first_token": "prefill", **options},  # type: ignore[arg-type]
    )


def run(shown: Scenario, answers: list[int] | None = None, tokens: int = TOKENS) -> Result:
    answers = answers or [ANSWER]
    arrivals_s = [0.01 * number for number in range(len(answers))]
    chunk = chunk_of(arrivals_s, [tokens] * len(answers), answers)
    return simulate(shown, [chunk], warmup_share=0.0, on_event=Invariants())


def decided_by_decode(shown: Scenario) -> Scenario:
    return replace(shown, first_token="decode")


def test_an_answer_by_hand(case_study: CaseStudy) -> None:
    """1 Gbit/s: the KV of 49,999 tokens takes 8.3 s, the prefill 2.8 s."""
    shown = scenario(case_study, links={"east->home": Constant(1e9)})
    result = run(shown)
    far = shown.clusters[0].curve.seconds(TOKENS)
    kv_s = 8 * case_study.planned.kv_model.bytes_to_move(TOKENS - 1) / 1e9
    assert result.second_token_s is not None
    assert result.ttft_s[0] == pytest.approx(far + 0.063)
    step_s = shown.clusters[1].decode_step_s(1)  # type: ignore[misc]
    arrived_s = kv_s + 0.063
    assert result.second_token_s[0] == pytest.approx(arrived_s + step_s)
    assert result.e2e_s[0] == pytest.approx(arrived_s + (ANSWER - 1) * step_s)
    assert result.tpot_s[0] == pytest.approx((result.e2e_s[0] - result.ttft_s[0]) / (ANSWER - 1))
    usual = run(decided_by_decode(shown))
    assert usual.second_token_s is None and usual.ttft_s[0] == pytest.approx(arrived_s)
    assert usual.link_bytes.tolist() == result.link_bytes.tolist()
    assert "second_token_s" in result.table() and "second_token_s" not in usual.table()
    assert result.summary()["second_token_p90_s"] == pytest.approx(result.second_token_s[0])
    assert not any("second" in name for name in usual.summary())


def test_overheads_come_with_it_and_the_decode_step_does_not(case_study: CaseStudy) -> None:
    shown = scenario(case_study, overheads=Overheads(0.5, 0.25, first_step=True))
    result = run(shown)
    far = shown.clusters[0].curve.seconds(TOKENS)
    assert result.ttft_s[0] == pytest.approx(far + 0.063 + 0.75)


def test_inside_a_cluster_it_waits_for_no_slot(case_study: CaseStudy) -> None:
    """One decode instance of one slot: the second answer waits for the first one."""
    whole = scenario(case_study, "local_only")
    home = replace(whole.clusters[1], instances=3, prefill_instances=2, decode_slots=1)
    shown = replace(whole, clusters=(home,), links=())
    result, usual = run(shown, [400, 10]), run(decided_by_decode(shown), [400, 10])
    service_s = home.curve.seconds(TOKENS)
    assert result.ttft_s == pytest.approx([service_s] * 2)
    assert usual.ttft_s[1] > service_s + 5.0
    assert result.second_token_s is not None and result.second_token_s[1] > service_s + 5.0


@pytest.mark.parametrize("rtt_s", [0.0, 0.063])
def test_an_answer_of_one_token_is_over_with_its_prefill(case_study: CaseStudy, rtt_s: float) -> None:
    """Its KV is given up, and leaves the link to others."""
    plain = scenario(case_study, links={"east->home": Constant(1e9)})
    shown = replace(plain, links=tuple(replace(link, rtt_s=rtt_s) for link in plain.links))
    result = run(shown, [1, ANSWER])
    assert (
        result.e2e_s[0] == result.ttft_s[0] == pytest.approx(shown.clusters[0].curve.seconds(TOKENS) + rtt_s)
    )
    assert result.second_token_s is not None and np.isnan(result.second_token_s[0])
    assert result.link_bytes[0] == 0 and result.link_bytes[1] > 0
    both = run(shown, [2, ANSWER])
    assert result.e2e_s[1] < both.e2e_s[1] - 1.0


def test_without_a_link_in_the_way_nothing_is_odd(case_study: CaseStudy) -> None:
    """KV and token are there at the same moment, whichever event comes first."""
    plain = scenario(case_study, links={"east->home": Constant(1e15)})
    hybrid = plain.kv_model
    shown = replace(
        plain,
        kv_model=replace(
            hybrid, groups=tuple(each for each in hybrid.groups if isinstance(each, FullAttention))
        ),
        links=tuple(replace(link, rtt_s=0.0, bandwidth_bits_per_s=1e15) for link in plain.links),
    )
    result = simulate(shown, [chunk_of([0.0, 9.0], [TOKENS] * 2, [1, 5])], warmup_share=0.0)
    service_s = shown.clusters[0].curve.seconds(TOKENS)
    assert result.ttft_s == pytest.approx([service_s] * 2)
    assert result.e2e_s == pytest.approx([service_s, service_s + 4 * shown.clusters[1].decode_step_s(1)])  # type: ignore[misc]


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["static_threshold", "offload_all", "local_only"]),
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(200, 60_000), st.integers(2, 300)), min_size=1, max_size=25
    ),
    st.sampled_from([2e8, 2e9, 1e11]),
    st.booleans(),
)
@pytest.mark.slow("simulates thousands of requests")
def test_every_token_is_as_soon_and_all_bytes_and_tokens_are_the_same(
    case_study: CaseStudy,
    policy: str,
    requests: list[tuple[float, int, int]],
    bits_per_s: float,
    first_step: bool,
) -> None:
    """The same routes: by length alone, one link."""
    params = {"threshold_tokens": 9000.0} if policy == "static_threshold" else {}
    shown = scenario(
        case_study,
        policy,
        params=params,
        links={"east->home": Constant(bits_per_s)},
        overheads=Overheads(first_step=first_step),
    )
    gaps_s, tokens, answers = zip(*requests, strict=True)
    chunk = chunk_of(np.cumsum(gaps_s).tolist(), list(tokens), list(answers))
    soon, usual = (
        simulate(each, [chunk], warmup_share=0.0, on_event=Invariants())
        for each in (shown, decided_by_decode(shown))
    )
    assert soon.link_bytes.tolist() == usual.link_bytes.tolist()
    assert soon.output_tokens.tolist() == usual.output_tokens.tolist() == list(answers)
    assert soon.hit_tokens.tolist() == usual.hit_tokens.tolist()
    assert (soon.ttft_s <= usual.ttft_s + 1e-9).all()
    assert soon.second_token_s is not None
    assert (soon.ttft_s < soon.second_token_s).all() and (soon.second_token_s <= soon.e2e_s + 1e-9).all()


@pytest.mark.slow("simulates hours of traffic")
@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.builds(
            Failure,
            st.sampled_from(["east-0", "east-1", "home-0", "home-5", "east->home"]),
            st.floats(0, 40),
            st.floats(0.1, 40),
        ),
        max_size=4,
    ),
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
)
def test_under_failures(
    case_study: CaseStudy, policy: str, failed: list[Failure], seed: int, has_caches: bool, has_pools: bool
) -> None:
    rng = np.random.default_rng(seed)
    plain = scenario(case_study, policy, links={"east->home": Constant(3e9)})
    pools = {"home": PoolOptions(GIB, GIB, 4096, instances_per_machine=2)} if has_pools else {}
    caches = CacheOptions(200_000, 4096, 1000) if has_caches else None
    shown = replace(plain, failures=failed, caches=caches, pools=pools)
    answers = rng.integers(1, 60, 40).tolist()
    chunk = chunk_of(
        np.cumsum(rng.exponential(0.7, 40)).tolist(), rng.integers(50, 40_000, 40).tolist(), answers
    )
    result = simulate(shown, [chunk], seed=seed, on_event=Invariants())
    assert not np.isnan(result.e2e_s).any()
    assert (result.ttft_s <= result.e2e_s + 1e-9).all()
    assert result.second_token_s is not None
    assert (np.isnan(result.second_token_s) == (result.output_tokens == 1)).all()


class Watched:
    """What a policy is asked."""

    name = "watched"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.asked: list[bool] = []

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        self.asked.append(request.first_from_prefill)
        return self.policy.decide(request, view)


@pytest.mark.parametrize("has_pools", [False, True])
@pytest.mark.parametrize("first_token", ["decode", "prefill"])
def test_policies_are_asked_as_live(case_study: CaseStudy, first_token: str, has_pools: bool) -> None:
    pools = {"home": PoolOptions(GIB, GIB, 4096)} if has_pools else {}
    shown = scenario(case_study, first_token=first_token, pools=pools)
    world = World(shown, np.random.default_rng(1), 512)
    watched = world.policy = Watched(world.policy)  # type: ignore[assignment]
    world.columns.grow(1)
    world.arrive(0, TOKENS, ANSWER, list(range(97)))
    assert watched.asked == [first_token == "prefill"]


def test_the_file_says_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PAPER.read_text() + "gateway: {first_token: prefill}\n")
    planned = load_planned(path)
    assert (planned.first_token, load_planned(PAPER).first_token) == ("prefill", "decode")
    assert scenario_of(planned).first_token == "prefill"
    assert scenario_of(planned, first_token="decode").first_token == "decode"
