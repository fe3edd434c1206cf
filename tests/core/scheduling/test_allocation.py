"""Conversions of PD instances: to shorter TTFTs or the planner's optimum, one at a time, and not for noise."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PlanProblem, best_operation
from prfaas.core.planner.fixed_roles import rate_with_roles
from prfaas.core.planner.role_latency import QueueingModel, latency_with_roles
from prfaas.core.scheduling.allocation import (
    Allocator,
    Conversion,
    PdInstance,
    PdLoad,
    StageLoad,
)
from prfaas.core.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.core.scheduling.role_choice import ExpectedLoad
from prfaas.core.workload import LengthDistribution

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


def expects(rate_per_s: float, **queues: object) -> ExpectedLoad:
    return ExpectedLoad(rate_per_s, QueueingModel(**queues))  # type: ignore[arg-type]


CALM = StageLoad(0.6)
# The case study carries 3.2 requests per second with 3 + 5, by E[T(L)]; answers are all as long.
AT_90 = expects(2.93, answer_variation=0.0)


def decisions(
    allocator: Allocator, loads: PdLoad, problem: PlanProblem, expected: ExpectedLoad, times: int = 3
) -> list[Conversion | None]:
    return [allocator.decide([loads], problem, 60.0 * i, expected) for i in range(times)]


def predicted_ttfts(conversion: Conversion) -> tuple[float, float]:
    """With the best roles and with the present ones, as the reason tells operators."""
    found = re.match(r"mean TTFT (\S+) s in place of (\S+) s at", conversion.reason)
    assert found is not None
    return float(found[1]), float(found[2])


def first(
    allocator: Allocator, loads: PdLoad, problem: PlanProblem, expected: ExpectedLoad, start_s: float = 0.0
) -> Conversion | None:
    """The first conversion within an hour and a half."""
    for i in range(90):
        found = allocator.decide([loads], problem, start_s + 60.0 * i, expected)
        if found is not None:
            return found
    return None


def test_below_capacity_the_shorter_ttft_decides() -> None:
    """3 + 5 carries most; first come, first served, 4 + 4 waits less at 0.9 of it."""
    allocator = Allocator()
    conversion = first(allocator, load(3, CALM, CALM), problem_of(), AT_90)
    # A tenth is worth a drain only where it lasts.
    assert conversion is not None
    assert (conversion.to_role, conversion.instance) == ("prefill", "home7")
    assert conversion.rate_after < conversion.rate_before
    best_s, before_s = predicted_ttfts(conversion)
    assert best_s < 0.9 * before_s
    assert "2.93 req/s (measured): 3 prefill, best 4" in conversion.reason
    outlook = allocator.outlook
    assert outlook is not None and outlook.best is not None and outlook.now is not None
    assert (outlook.aim, outlook.now.prefill, outlook.best.prefill) == ("latency", {"home": 3}, {"home": 4})


def test_short_prefills_first_wait_less_and_need_no_fourth() -> None:
    expected = expects(2.93, answer_variation=0.0, is_shortest_first=True)
    assert first(Allocator(), load(3, CALM, CALM), problem_of(), expected) is None


def test_where_nothing_waits_nothing_moves() -> None:
    """At a third of the capacity the best roles are hardly better: a drain is not worth it, nor what it gives up."""
    for n_prefill in (2, 3):
        allocator = Allocator()
        found = decisions(allocator, load(n_prefill, IDLE, IDLE), problem_of(), expects(1.0), 40)
        assert found == [None] * 40
        outlook = allocator.outlook
        assert outlook is not None and outlook.aim == "latency" and outlook.best is not None
        # With one instance TTFTs are shorter still, since more goes to the faster cluster, but it carries a fifth less.
        assert outlook.best.prefill["home"] > 1


def test_roles_that_cannot_carry_it_change_before_anything_is_full() -> None:
    """What is measured is calm: more is foreseen than 7 + 1 can decode."""
    expected = replace(expects(1.5), is_forecast=True)
    (*_, found) = decisions(Allocator(), load(7, StageLoad(0.3), CALM), problem_of(), expected)
    assert found is not None and found.to_role == "decode"
    best_s, before_s = predicted_ttfts(found)
    assert before_s > 9 * best_s and "(forecast)" in found.reason


@pytest.mark.parametrize("rate", [3.2, 3.5, 9.0])
def test_above_the_margin_throughput_decides(rate: float) -> None:
    """Then both the planner and what is measured have to say so, as without any prediction."""
    problem = problem_of()
    allocator = Allocator()
    assert decisions(allocator, load(4, CALM, CALM), problem, expects(rate), 5) == [None] * 5
    assert allocator.outlook is not None and allocator.outlook.aim == "throughput"
    (*_, found) = decisions(Allocator(), load(6, IDLE, BUSY), problem, expects(rate))
    assert found is not None and found.to_role == "decode" and "TTFT" not in found.reason


def test_a_full_side_gives_nothing_away() -> None:
    """Whatever is predicted: where decode is full by what is measured, no decode instance goes."""
    assert first(Allocator(), load(3, CALM, StageLoad(0.97, 10)), problem_of(), AT_90) is None
    assert first(Allocator(), load(7, StageLoad(1.0, 30), CALM), problem_of(), expects(1.5)) is None


def test_taking_back_needs_more() -> None:
    """What is a reason to go from 4 + 4 to 3 + 5 is none for who has just come from there."""
    problem = problem_of()
    back = expects(2.95, answer_variation=0.2, is_shortest_first=True)
    three, four = (latency_with_roles(problem, {"home": n}, 2.95, back.queues) for n in (3, 4))
    assert four.utilisation <= 0.95 and 0.75 < three.ttft_s / four.ttft_s < 0.9
    found = first(Allocator(), load(4, CALM, CALM), problem, back)
    assert found is not None and found.to_role == "decode"
    allocator = Allocator()
    assert first(allocator, load(3, CALM, CALM), problem, AT_90) is not None
    assert first(allocator, load(4, CALM, CALM), problem, back, 6000.0) is None
    # Much better is reason enough.
    over = expects(3.05, answer_variation=0.5, is_shortest_first=True)
    found = first(allocator, load(4, CALM, CALM), problem, over, 12_000.0)
    assert found is not None and found.to_role == "decode"


def test_one_sample_decides_nothing_and_an_overload_at_once() -> None:
    """Predictions are averaged, but roles that cannot carry the traffic are left within `persist` evaluations."""
    problem, allocator = problem_of(), Allocator()
    calm, wild = expects(1.6, answer_variation=0.0), expects(2.93, answer_variation=0.0)
    for i in range(60):
        assert allocator.decide([load(3, CALM, CALM)], problem, 60.0 * i, wild if i % 8 < 3 else calm) is None
    short = problem_of(output_tokens=3000)
    last = [allocator.decide([load(3, CALM, CALM)], short, 3600.0 + 60 * i, expects(1.5)) for i in range(3)]
    assert last[2] is not None and last[2].to_role == "decode"


@pytest.mark.slow("hundreds of evaluations")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load_share", [0.6, 0.8, 0.9])
def test_at_a_constant_load_it_does_not_flap(load_share: float, seed: int) -> None:
    """Six hours; every evaluation sees another sample of 1,500 lengths and a rate off by 3 %."""
    rng = np.random.default_rng(seed)
    count, allocator = 3, Allocator()
    moves: list[str] = []
    for i in range(360):
        rate = load_share * 3.26 * (1 + 0.03 * rng.standard_normal())
        problem = problem_of(observed(rng, 1500))
        used = StageLoad(min(0.9, load_share + 0.03 * rng.standard_normal()))
        found = allocator.decide([load(count, used, used)], problem, 60.0 * i, expects(rate))
        if found is not None:
            count += 1 if found.to_role == "prefill" else -1
            moves.append(found.to_role)
    assert len(moves) <= 2 and len(set(moves)) <= 1


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=10
    ),
    st.lists(st.tuples(stages, stages, st.floats(0, 6), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([200, 1024, 4000]),
)
def test_whatever_is_expected_each_role_keeps_an_instance(
    instances: list[tuple[bool, bool, bool, int]],
    seen: list[tuple[StageLoad, StageLoad, float, bool]],
    output_tokens: int,
) -> None:
    """Only healthy ones go, one at a time, never while one drains, and never to longer TTFTs."""
    board = [
        PdInstance(f"home{i}", prefills, not prefills, healthy, draining and healthy, busy)
        for i, (prefills, healthy, draining, busy) in enumerate(instances)
    ]
    allocator, last = Allocator(persist=1, cool_down_s=90), -1000.0
    for i, (prefill, decode, rate, is_short) in enumerate(seen):
        healthy = [instance for instance in board if instance.healthy]
        problem = problem_of(SAMPLE, pd=max(len(healthy), 1), output_tokens=output_tokens)
        loads, expected = (
            PdLoad("home", tuple(board), prefill, decode),
            expects(rate, is_shortest_first=is_short),
        )
        conversion = allocator.decide([loads], problem, 60.0 * i, expected)
        if conversion is None:
            continue
        assert 60 * i - last >= 90
        assert not any(instance.draining for instance in board)
        last = 60.0 * i
        (index,) = (k for k, instance in enumerate(board) if instance.name == conversion.instance)
        taken = board[index]
        assert taken.healthy and taken.prefills is not (conversion.to_role == "prefill")
        if "TTFT" in conversion.reason:
            best_s, before_s = predicted_ttfts(conversion)
            outlook = allocator.outlook
            assert outlook is not None and outlook.now is not None
            assert best_s < before_s or outlook.now.utilisation > allocator.limit
        board[index] = replace(taken, prefills=not taken.prefills, decodes=not taken.decodes)
        assert any(i.prefills and i.healthy for i in board) and any(i.decodes and i.healthy for i in board)


@pytest.mark.slow("a property over many random systems")
def test_several_pd_clusters_for_latency() -> None:
    """Each evaluation looks one instance around; the TTFT only falls, and both clusters end with both roles."""
    problem = several()
    fluid = Fluid(problem, {"home": 6, "away": 2}, 1.0, noise=0.01)
    allocator, found = Allocator(persist=1), []
    for i in range(12):
        conversion = allocator.decide(fluid.step(60), problem, 600.0 * i, expects(2.2))
        if conversion is not None:
            fluid.convert(conversion)
            assert allocator.outlook is not None and allocator.outlook.now is not None
            found.append(allocator.outlook.now.ttft_s)
    assert found == sorted(found, reverse=True)
    assert all(1 <= fluid.prefill[pd.name] < pd.instances for pd in problem.pd)
    last = latency_with_roles(problem, fluid.prefill, 2.2, QueueingModel())
    assert last.ttft_s < math.inf and last.utilisation <= 0.95
