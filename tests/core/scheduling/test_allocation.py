"""Conversions of PD instances: to the planner's optimum, one at a time, and not for noise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PlanProblem, best_operation
from prfaas.core.planner.fixed_roles import rate_with_roles
from prfaas.core.scheduling.allocation import (
    Allocator,
    Conversion,
    PdInstance,
    PdLoad,
    StageLoad,
)
from prfaas.core.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.core.workload.lengths import LengthDistribution

from . import case_study
from .case_study import H20, H200, kv_bytes, observed
from .fluid import Fluid

# A sample is planned in a millisecond, the formula in ten.
SAMPLE = observed(np.random.default_rng(11), 20_000)
BUSY, IDLE = StageLoad(0.9), StageLoad(0.4)


def problem_of(lengths: LengthDistribution = SAMPLE, **numbers: float) -> PlanProblem:
    return case_study.problem_of(lengths, **numbers)  # type: ignore[arg-type]


def load(
    n_prefill: int,
    prefill: StageLoad = BUSY,
    decode: StageLoad = IDLE,
    count: int = 8,
    remote: StageLoad | None = None,
) -> PdLoad:
    instances = tuple(PdInstance(f"home{i}", i < n_prefill, i >= n_prefill, busy=-i) for i in range(count))
    return PdLoad("home", instances, prefill, decode, remote, 4)


def decided(allocator: Allocator, loads: PdLoad, problem: PlanProblem, times: int = 3) -> Conversion | None:
    for i in range(times):
        conversion = allocator.decide([loads], problem, 60.0 * i)
        if conversion is not None:
            return conversion
    return None


def test_converts_towards_the_optimum_when_it_was_seen_often_enough() -> None:
    """The paper's best split is 3 + 5."""
    problem, allocator = problem_of(), Allocator()
    loads = load(1)
    assert allocator.decide([loads], problem, 0) is None
    assert allocator.decide([loads], problem, 60) is None
    conversion = allocator.decide([loads], problem, 120)
    assert conversion is not None
    assert (conversion.cluster, conversion.to_role) == ("home", "prefill")
    assert conversion.instance == "home7"  # the least busy
    rates = [conversion.rate_before, conversion.rate_after, conversion.rate_best]
    assert rates == [pytest.approx(rate_with_roles(problem, {"home": n})) for n in (1, 2, 3)]


def test_decode_gets_instances_back() -> None:
    conversion = decided(Allocator(), load(6, prefill=IDLE, decode=BUSY), problem_of())
    assert conversion is not None and (conversion.to_role, conversion.instance) == ("decode", "home5")


@pytest.mark.parametrize(
    ("loads", "why"),
    [
        (load(3), "the planner has nothing better"),
        (load(1, prefill=IDLE, decode=BUSY), "decode is the busier side"),
        (load(1, prefill=StageLoad(0.6), decode=StageLoad(0.58)), "no side leads"),
        (load(1, prefill=StageLoad(0.2), decode=StageLoad(0.1)), "nobody is busy"),
        (
            load(1, prefill=StageLoad(1.0, 50), decode=StageLoad(0.99)),
            "decode is full, whatever waits before",
        ),
        (load(6, prefill=IDLE, decode=BUSY, remote=StageLoad(1.0, 30)), "PrfaaS is busier still"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stays_when(loads: PdLoad, why: str) -> None:
    assert decided(Allocator(), loads, problem_of(), 10) is None


def test_a_queue_counts_as_full() -> None:
    waiting = load(1, prefill=StageLoad(0.5, waiting=3), decode=StageLoad(0.6))
    conversion = decided(Allocator(), waiting, problem_of())
    assert conversion is not None and conversion.to_role == "prefill"
    full = load(6, prefill=StageLoad(1.0, 90), decode=StageLoad(0.97, 100))
    conversion = decided(Allocator(), full, problem_of())
    assert conversion is not None and conversion.to_role == "decode"


def test_an_evaluation_that_disagrees_starts_the_count_again() -> None:
    problem, allocator = problem_of(), Allocator()
    for i, loads in enumerate([load(1), load(1), load(1, prefill=IDLE), load(1), load(1)]):
        assert allocator.decide([loads], problem, 60.0 * i) is None
    assert allocator.decide([load(1)], problem, 300) is not None


def test_cool_down() -> None:
    problem, allocator = problem_of(), Allocator(cool_down_s=1000)
    assert decided(allocator, load(1), problem) is not None
    for i in range(3, 18):
        assert allocator.decide([load(1)], problem, 60.0 * i) is None
    assert allocator.decide([load(1)], problem, 1130) is not None


def test_never_two_at_once() -> None:
    problem, allocator = problem_of(), Allocator(cool_down_s=0)
    loads = load(1)
    draining = replace(loads, instances=(replace(loads.instances[0], draining=True), *loads.instances[1:]))
    assert decided(allocator, draining, problem, 10) is None
    assert decided(allocator, loads, problem) is not None


def test_only_healthy_instances_and_one_of_each_role_stays() -> None:
    loads = load(1)
    # 7, the least busy, is down.
    ill = replace(loads, instances=(*loads.instances[:7], replace(loads.instances[7], healthy=False)))
    conversion = decided(Allocator(), ill, problem_of(pd=7))
    assert conversion is not None and conversion.instance == "home6"
    # Everything should decode (nothing local is worth its prefill), but one must prefill.
    problem = problem_of(prfaas=40)
    assert best_operation(problem).n_prefill == 0
    assert decided(Allocator(), load(1, prefill=IDLE, decode=BUSY), problem, 10) is None
    assert decided(Allocator(), load(2, prefill=IDLE, decode=BUSY), problem, 10) is not None
    pair = load(1, count=2)
    assert decided(Allocator(), pair, problem_of(pd=2), 10) is None


def test_ties_go_by_name() -> None:
    loads = load(1)
    equal = replace(loads, instances=tuple(replace(i, busy=0.0) for i in reversed(loads.instances)))
    conversion = decided(Allocator(), equal, problem_of())
    assert conversion is not None and conversion.instance == "home1"


def test_clusters_that_cannot_be_divided_or_counted_stay() -> None:
    loads = load(1)
    both = replace(loads, instances=(*loads.instances[:7], replace(loads.instances[7], prefills=True)))
    assert decided(Allocator(), both, problem_of(), 10) is None
    assert decided(Allocator(), loads, problem_of(pd=7), 10) is None
    assert decided(Allocator(), load(0), problem_of(), 10) is None


@pytest.mark.parametrize("start", [1, 3, 6, 9, 11])
@pytest.mark.parametrize(
    "mix",
    [
        {"pd": 12},
        {"pd": 12, "output_tokens": 300},
        {"pd": 12, "output_tokens": 3000},
        {"pd": 12, "bits_per_s": 3e9},
        {"pd": 12, "prfaas": 0},
    ],
    ids=str,
)
@pytest.mark.slow("an hour of decisions from each start")
def test_converges_from_any_start_and_then_rests(start: int, mix: dict[str, int]) -> None:
    """At 90 % of what the best roles could do, with utilisations known to ±2 %."""
    problem = problem_of(**mix)
    best = best_operation(problem)
    fluid = Fluid(problem, {"home": start}, 0.9 * best.lambda_max, noise=0.02, seed=start)
    found = fluid.run(Allocator(), 60)
    assert abs(fluid.prefill["home"] - best.n_prefill) <= 1
    assert len(found) <= abs(start - best.n_prefill)
    assert rate_with_roles(problem, fluid.prefill) >= 0.9 * best.lambda_max
    assert fluid.run(Allocator(), 20) == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.slow("an hour of decisions for each seed")
def test_noise_does_not_make_it_flap(seed: int, off: int) -> None:
    """Every evaluation sees another sample of 1,000 lengths and utilisations off by ±10 %."""
    rng = np.random.default_rng(seed)
    best = best_operation(problem_of(pd=12))
    fluid = Fluid(
        problem_of(pd=12), {"home": best.n_prefill + off}, 0.95 * best.lambda_max, noise=0.1, seed=seed
    )
    allocator, found = Allocator(), []
    for i in range(60):
        loads = fluid.step(60)
        fluid.waiting.clear()
        conversion = allocator.decide(loads, problem_of(observed(rng, 1000), pd=12), 60.0 * i)
        if conversion is not None:
            fluid.convert(conversion)
            found.append(conversion)
    assert len(found) <= abs(off)


def test_follows_a_mix_that_shifts_and_comes_back() -> None:
    short, long = problem_of(pd=12), problem_of(pd=12, output_tokens=3000)
    targets = [best_operation(problem).n_prefill for problem in (short, long)]
    assert targets[0] >= targets[1] + 2
    fluid, allocator = Fluid(short, {"home": targets[0]}, 3.0, noise=0.02), Allocator()
    now_s = 0.0
    for problem, target in ((long, targets[1]), (short, targets[0])):
        fluid.problem, fluid.rate = problem, 0.95 * best_operation(problem).lambda_max
        fluid.waiting.clear()
        for _ in range(60):
            conversion = allocator.decide(fluid.step(60), problem, now_s)
            now_s += 60
            if conversion is not None:
                fluid.convert(conversion)
        assert abs(fluid.prefill["home"] - target) <= 1


def test_a_step_that_costs_something_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several clusters the way to better roles can lead through worse ones."""
    rates = {1: 1.0, 2: 0.9, 3: 2.0}
    monkeypatch.setattr(
        "prfaas.core.scheduling.allocation.rate_with_roles",
        lambda problem, roles: rates[roles["home"]],
    )
    assert decided(Allocator(), load(1), problem_of(), 10) is None
    rates[2] = 1.0
    assert decided(Allocator(), load(1), problem_of(), 10) is not None


def several(output_tokens: float = 1024) -> PlanProblem:
    far, near = ServiceCurve.of_profile(H200), ServiceCurve.of_profile(H20)
    return problem_now(
        [
            ClusterFacts("east", "prfaas", 4, far),
            ClusterFacts("home", "pd", 8, near, 20, 0.025),
            ClusterFacts("away", "pd", 6, near, 20, 0.025),
        ],
        [LinkFacts("east", "home", 100e9), LinkFacts("east", "away", 20e9)],
        SAMPLE,
        output_tokens,
        kv_bytes,
    )


@pytest.mark.slow("a property over many random systems")
@pytest.mark.parametrize("start", [(1, 1), (7, 4)])
def test_several_pd_clusters(start: tuple[int, int]) -> None:
    problem = several()
    best = best_operation(problem)
    fluid = Fluid(problem, {"home": start[0], "away": start[1]}, 0.9 * best.lambda_max, noise=0.01)
    fluid.run(Allocator(persist=2), 25)
    assert abs(sum(fluid.prefill.values()) - best.n_prefill) <= 2
    assert rate_with_roles(problem, fluid.prefill) >= 0.93 * best.lambda_max


@pytest.mark.parametrize("prefills", [0, 6], ids=["none prefills", "all do both"])
def test_a_cluster_that_cannot_be_divided_stops_no_other(prefills: int) -> None:
    allocator, problem = Allocator(persist=1), several()
    undivided = PdLoad(
        "away", tuple(PdInstance(f"away{i}", i < prefills, True) for i in range(6)), BUSY, BUSY
    )
    found = allocator.decide([undivided, load(1)], problem, 0.0)
    assert found is not None and (found.cluster, found.to_role) == ("home", "prefill")


stages = st.builds(StageLoad, st.floats(0, 1), st.floats(0, 100))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=10
    ),
    st.lists(st.tuples(stages, stages), min_size=1, max_size=12),
    st.sampled_from([200, 1024, 4000]),
)
def test_whatever_is_measured_capacity_is_never_overcommitted(
    instances: list[tuple[bool, bool, bool, int]],
    measured: list[tuple[StageLoad, StageLoad]],
    output_tokens: int,
) -> None:
    """Every conversion takes a healthy instance of one role that its cluster can spare, and none comes too soon."""
    board = [
        PdInstance(f"home{i}", prefills, not prefills, healthy, draining and healthy, busy)
        for i, (prefills, healthy, draining, busy) in enumerate(instances)
    ]
    allocator, last = Allocator(persist=1, cool_down_s=90, margin=0.01), -1000.0
    for i, (prefill, decode) in enumerate(measured):
        healthy = [instance for instance in board if instance.healthy]
        problem = problem_of(pd=max(len(healthy), 1), output_tokens=output_tokens)
        conversion = allocator.decide([PdLoad("home", tuple(board), prefill, decode)], problem, 60.0 * i)
        if conversion is None:
            continue
        assert 60 * i - last >= 90
        assert not any(instance.draining for instance in board)
        last = 60.0 * i
        (index,) = (k for k, instance in enumerate(board) if instance.name == conversion.instance)
        taken = board[index]
        assert taken.healthy and taken.prefills is not (conversion.to_role == "prefill")
        assert conversion.rate_after >= conversion.rate_before * 0.99
        assert conversion.rate_best >= conversion.rate_before
        board[index] = replace(taken, prefills=not taken.prefills, decodes=not taken.decodes)
        assert any(i.prefills and i.healthy for i in board) and any(i.decodes and i.healthy for i in board)
