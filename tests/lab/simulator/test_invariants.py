"""Whatever happens: requests end once, queues and links add up, time goes on (checked after every event)."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import CaseStudy, chunk_of, outages
from tests.lab.simulator.invariants import Invariants

from prfaas.core.link.patience import late_after_s
from prfaas.core.scheduling.policy import POLICIES
from prfaas.core.units import GIB
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.traffic import IndependentTraffic, RequestChunk
from prfaas.lab.simulator.capacity import Constant
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

INSTANCES = [f"east-{k}" for k in range(4)] + [f"home-{k}" for k in range(8)]


def failures() -> st.SearchStrategy[list[Failure]]:
    what = st.sampled_from([*INSTANCES, "east->home"])
    times = st.floats(0, 60).flatmap(lambda at_s: st.tuples(st.just(at_s), st.floats(0, at_s)))
    made = st.builds(
        lambda name, at, lasts_s: Failure(name, at[0], lasts_s, at[1]), what, times, st.floats(0.1, 40)
    )
    return st.lists(made, max_size=4)


def conversations(seed: int, count: int) -> RequestChunk:
    """Turns of six conversations that all begin alike, about one a second."""
    rng = np.random.default_rng(seed)
    said = [2] * 6
    tokens, blocks = [], []
    for who in rng.integers(0, 6, count).tolist():
        said[who] += int(rng.integers(1, 30))
        tokens.append(512 * said[who] - int(rng.integers(0, 512)))
        blocks.append([0, 1, *range(1000 * (who + 1), 1000 * (who + 1) + said[who] - 2)])
    return chunk_of(np.cumsum(rng.exponential(1.0, count)).tolist(), tokens, [50] * count, blocks)


@pytest.fixture(scope="module")
def scenarios(case_study: CaseStudy) -> dict[str, Scenario]:
    return {policy: scenario_of(case_study.planned, policy=policy) for policy in POLICIES}


@pytest.mark.slow("simulates hours of traffic")
@settings(max_examples=40)
@given(
    st.sampled_from(POLICIES),
    failures(),
    st.integers(0, 1000),
    st.booleans(),
    st.sampled_from([None, 0.2, 100.0]),
    st.sampled_from([0, 8192]),
)
# A prefix on its way to an instance whose queue has become empty: its work waits all the same.
@example("paper", [Failure("east-0", 0.0, 3.0), Failure("east-0", 37.0, 1.0, 21.0)], 225, False, 0.2, 0)
def test_under_failures(
    scenarios: dict[str, Scenario],
    policy: str,
    failed: list[Failure],
    seed: int,
    has_caches: bool,
    pool_gib: float | None,
    chunk_tokens: int,
) -> None:
    caches = CacheOptions(200_000, 4096, 1000) if has_caches else None
    plain = scenarios[policy]
    chunk_tokens = chunk_tokens if pool_gib is None else 0
    clusters = tuple(
        replace(each, chunk_tokens=chunk_tokens, kv_block_tokens=1024) for each in plain.clusters
    )
    pools = {}
    if pool_gib is not None:
        options = PoolOptions(int(pool_gib * GIB), GIB, 4096, instances_per_machine=2)
        pools = {cluster.name: options for cluster in clusters}
    scenario = replace(plain, clusters=clusters, failures=failed, caches=caches, pools=pools)
    result = simulate(scenario, [conversations(seed, 60)], seed=seed, on_event=Invariants())
    assert not np.isnan(result.e2e_s).any()
    assert (result.ttft_s <= result.e2e_s).all()
    least_s = min(cluster.curve.seconds(1) for cluster in scenario.clusters)
    assert (result.ttft_s >= least_s * 0.999).all()


def test_a_dead_instances_work_is_done_elsewhere(case_study: CaseStudy) -> None:
    """One prompt is at work on the only PrfaaS instance that is up when that dies."""
    down = [Failure(f"east-{k}", 0.0, 1000.0) for k in (1, 2, 3)]
    scenario = scenario_of(
        case_study.planned,
        policy="paper",
        failures=[*down, Failure("east-0", 12.0, 1000.0)],
        adapts=False,
        allocation=False,
    )
    result = simulate(scenario, [chunk_of([10.0], [131_072])], warmup_share=0.0, on_event=Invariants())
    home = scenario.clusters[1].curve
    assert result.retries[0] == 1
    assert result.ttft_s[0] == pytest.approx(2.0 + home.seconds(131_072))


@pytest.mark.parametrize(("notice_s", "retries"), [(0.0, 1), (5.0, 0)])
def test_an_instance_with_notice_ends_what_it_has_and_gets_nothing_new(
    case_study: CaseStudy, notice_s: float, retries: int
) -> None:
    """The only PrfaaS instance that is up goes at 20 s; the second prompt comes 2 s before."""
    down = [Failure(f"east-{k}", 0.0, 1000.0) for k in (1, 2, 3)]
    scenario = scenario_of(
        case_study.planned,
        policy="paper",
        failures=[*down, Failure("east-0", 20.0, 30.0, notice_s)],
        adapts=False,
        allocation=False,
    )
    arrivals_s = [12.0, 18.0, 60.0]
    result = simulate(
        scenario, [chunk_of(arrivals_s, [131_072] * 3)], warmup_share=0.0, on_event=Invariants()
    )
    home, east = scenario.clusters[1].curve.seconds(131_072), scenario.clusters[0].curve.seconds(131_072)
    assert result.retries.tolist() == [0, retries, 0]
    assert result.offloaded.tolist() == [True, not notice_s, True]
    assert result.ttft_s[0] < east + 1
    assert result.ttft_s[1] == pytest.approx(home + (2.0 if not notice_s else 0.0))


def test_what_notice_would_cut_goes_to_a_neighbour_at_once(case_study: CaseStudy) -> None:
    """Two PrfaaS instances are up. One goes 1 s after its prefill has begun, the other has nothing to do."""
    down = [Failure(f"east-{k}", 0.0, 1000.0) for k in (2, 3)]
    east = scenario_of(case_study.planned).clusters[0].curve.seconds(131_072)
    scenario = scenario_of(
        case_study.planned,
        policy="paper",
        failures=[*down, Failure("east-0", 16.0, 30.0, 5.0)],
        adapts=False,
        allocation=False,
    )
    chunk = chunk_of([10.0, 10.5], [131_072] * 2)
    result = simulate(scenario, [chunk], warmup_share=0.0, on_event=Invariants())
    assert east > 6.0
    # East-1 has the second one already, and does the first one after it.
    assert result.retries.tolist() == [1, 0] and result.offloaded.tolist() == [True, True]
    assert result.ttft_s[0] == pytest.approx(0.5 + 2 * east, abs=0.5)
    short = chunk_of([10.0, 12.0], [131_072, 2000])
    for policy in ("paper", "tilted"):
        again = simulate(
            replace(scenario, policy=policy, threshold_tokens={"home": 1000.0}),
            [short],
            warmup_share=0.0,
            on_event=Invariants(),
        )
        assert again.retries.tolist() == [1, 0] and not np.isnan(again.ttft_s).any()


@pytest.mark.parametrize(
    ("times_s", "why"),
    [((-1.0, 1.0, 0.0), "0 s or later"), ((4.0, 1.0, 5.0), "0 s to 4 s before, not 5.0 s")],
)
def test_what_no_failure_can_be(times_s: tuple[float, float, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Failure("east-0", *times_s)


@pytest.mark.parametrize(("checkpoint_tokens", "hit_tokens"), [(None, 49_664), (4096, 0)])
def test_a_decode_instance_goes_on_from_what_came_to_it_only_without_states(
    case_study: CaseStudy, checkpoint_tokens: int | None, hit_tokens: int
) -> None:
    """The instance that computed a prompt is gone when the prompt comes again."""
    scenario = scenario_of(
        case_study.planned,
        policy="local_only",
        failures=[Failure("home-0", 50.0, 1000.0)],
        caches=CacheOptions(1_000_000, checkpoint_tokens),
        adapts=False,
        allocation=False,
    )
    blocks = list(range(97))
    twice = chunk_of([0.0, 100.0], [50_000, 50_000], [10, 10], [blocks, blocks])
    result = simulate(scenario, [twice], warmup_share=0.0, on_event=Invariants())
    assert result.hit_tokens.tolist() == [0, hit_tokens]


def test_an_answer_goes_on_where_its_instance_died(case_study: CaseStudy) -> None:
    """After the failure: prompt and what was written are prefilled again, then the rest is decoded."""
    alone = _alone(case_study, [Failure("home-3", 15.0, 1000.0)])
    result = simulate(alone, [chunk_of([0.0], [4000], [1000])], warmup_share=0.0, on_event=Invariants())
    curve = alone.clusters[0].curve
    first_s = curve.seconds(4000)
    written = round((15.0 - first_s) / 0.025)
    assert result.ttft_s[0] == pytest.approx(first_s)
    assert result.e2e_s[0] == pytest.approx(
        15.0 + curve.seconds(4000 + written) + 0.025 * (1000 - written), abs=0.05
    )


def test_a_link_that_stays_down_is_not_waited_for(case_study: CaseStudy) -> None:
    scenario = replace(
        scenario_of(case_study.planned, policy="offload_all", failures=[Failure("east->home", 1.0, 500.0)]),
        stall_limit_s=8.0,
    )
    result = simulate(scenario, [chunk_of([0.0], [131_072])], warmup_share=0.0, on_event=Invariants())
    home = scenario.clusters[1].curve
    assert result.retries[0] == 1
    assert 8.0 <= result.ttft_s[0] - home.seconds(131_072) <= 11.0


@pytest.mark.parametrize("grace_s", [30.0, math.inf])
def test_a_transfer_over_a_slow_link_is_given_up_when_it_is_late(
    case_study: CaseStudy, grace_s: float
) -> None:
    """A hundredth of the bandwidth: 131,072 tokens of KV take minutes, and the bandwidth as configured 0.2 s."""
    scenario = scenario_of(
        case_study.planned,
        policy="offload_all",
        links={"east->home": Constant(1e8)},
        transfer_grace_s=grace_s,
    )
    result = simulate(scenario, [chunk_of([0.0], [131_072])], warmup_share=0.0, on_event=Invariants())
    far, home = (cluster.curve.seconds(131_072) for cluster in scenario.clusters)
    kv_bytes = case_study.planned.kv_model.bytes_to_move(131_071)
    if grace_s < math.inf:
        late_s = late_after_s(kv_bytes, scenario.links[0].bandwidth_bits_per_s, grace_s)
        assert result.retries[0] == 1
        assert result.ttft_s[0] == pytest.approx(far + late_s + home)
    else:
        assert result.retries[0] == 0
        assert result.ttft_s[0] >= 8 * kv_bytes / 1e8


@pytest.mark.slow("simulates hours of traffic")
def test_random_outages_lose_nothing(case_study: CaseStudy) -> None:
    scenario = scenario_of(
        case_study.planned, policy="tilted", links={"east->home": outages(2e9, 30.0, 20.0)}
    )
    traffic = IndependentTraffic(Poisson(2.0), case_study.lengths, fixed(200.0))
    result = simulate(
        scenario, traffic.chunks(np.random.default_rng(1)), seed=1, requests=600, on_event=Invariants()
    )
    assert result.summary()["lost"] == 0
    assert result.retries.sum() > 0


def _alone(case_study: CaseStudy, failed: list[Failure]) -> Scenario:
    """The PD cluster by itself."""
    whole = scenario_of(case_study.planned, policy="local_only", adapts=False, allocation=False)
    return replace(whole, clusters=(whole.clusters[1],), links=(), failures=tuple(failed))
