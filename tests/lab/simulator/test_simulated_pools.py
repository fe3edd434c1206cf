"""Pools in a simulated deployment: whence instances load, what that takes, and who else can read it."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants

from prfaas.core.units import BITS_PER_BYTE, GIB
from prfaas.lab.simulator.control_loops import HotCopies
from prfaas.lab.simulator.machine_pool import MachinePool, PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate
from prfaas.lab.simulator.world import World

BLOCK = 512
LONG = 100 * BLOCK
A = list(range(100))


def scenario(case_study: CaseStudy, pools: Mapping[str, PoolOptions], **changes: object) -> Scenario:
    return scenario_of(
        case_study.planned,
        **{"policy": "local_only", "adapts": False, "allocation": False, "pools": pools, **changes},  # type: ignore[arg-type]
    )


def run(
    shown: Scenario, arrivals_s: Sequence[float], tokens: Sequence[int], blocks: Sequence[Sequence[int]]
) -> Result:
    return simulate(
        shown, [chunk_of(arrivals_s, tokens, None, blocks)], warmup_share=0.0, on_event=Invariants()
    )


def seconds(shown: Scenario, tokens: int, cluster: int = 1) -> float:
    return shown.clusters[cluster].curve.seconds(tokens)


def test_a_prefix_is_loaded_then_the_rest_is_computed(case_study: CaseStudy) -> None:
    shown = scenario(case_study, {"home": PoolOptions(272 * GIB, instances_per_machine=8)})
    result = run(shown, [0.0, 100.0], [LONG, LONG + 500], [A, [*A, 1000]])

    model = shown.kv_model
    load_s = BITS_PER_BYTE * (LONG * model.token_bytes + model.fixed_bytes) / 64e9
    assert result.ttft_s[1] == pytest.approx(load_s + seconds(shown, 500))
    assert result.hit_tokens.tolist() == [0, LONG]
    assert result.tier_tokens["memory"].tolist() == [0, LONG]
    summary = result.summary()
    assert summary["hit_ratio_memory"] == summary["hit_ratio"] == pytest.approx(LONG / (2 * LONG + 500))
    assert summary["hit_ratio_ssd"] == summary["hit_ratio_machine"] == summary["hit_ratio_cluster"] == 0.0


def test_the_engines_own_blocks_are_not_loaded(case_study: CaseStudy) -> None:
    caches = CacheOptions.of_memory(case_study.planned.kv_model, 16 * GIB)
    shown = scenario(case_study, {"home": PoolOptions(272 * GIB, instances_per_machine=8)}, caches=caches)
    result = run(shown, [0.0, 100.0], [LONG, LONG + 500], [A, [*A, 1000]])

    assert result.hit_tokens[1] == LONG
    assert not result.tier_tokens["memory"].any()
    assert result.ttft_s[1] == pytest.approx(seconds(shown, 500))


def test_two_loads_of_one_machine_take_turns(case_study: CaseStudy) -> None:
    slow = PoolOptions(272 * GIB, memory_bits_per_s=20e9, instances_per_machine=8)
    shown = scenario(case_study, {"home": slow})
    blocks = [A, [*A, 1000], [*A, 2000]]
    result = run(shown, [0.0, 100.0, 100.0], [LONG, LONG + 500, LONG + 500], blocks)

    model = shown.kv_model
    load_s = BITS_PER_BYTE * (LONG * model.token_bytes + model.fixed_bytes) / 20e9
    assert result.ttft_s[1] == pytest.approx(load_s + seconds(shown, 500))
    assert result.ttft_s[2] == pytest.approx(2 * load_s + seconds(shown, 500))


def test_what_takes_longer_to_load_than_to_compute_is_computed(case_study: CaseStudy) -> None:
    crawling = PoolOptions(272 * GIB, memory_bits_per_s=1e8, instances_per_machine=8)
    shown = scenario(case_study, {"home": crawling})
    result = run(shown, [0.0, 100.0], [LONG, LONG + 500], [A, [*A, 1000]])

    assert not result.hit_tokens.any()
    assert result.ttft_s[1] == pytest.approx(seconds(shown, LONG + 500))


def test_ssd_serves_what_left_memory(case_study: CaseStudy) -> None:
    model = case_study.planned.kv_model
    room = LONG * model.token_bytes + model.fixed_bytes
    options = PoolOptions(room, 1000 * GIB, checkpoint_tokens=0, instances_per_machine=8)
    shown = scenario(case_study, {"home": options})
    others = list(range(500, 600))
    result = run(shown, [0.0, 100.0, 200.0], [LONG, LONG, LONG + 500], [A, others, [*A, 1000]])

    assert result.hit_tokens[2] == LONG
    assert result.tier_tokens["ssd"][2] > 0.9 * LONG
    assert result.tier_tokens["memory"][2] + result.tier_tokens["ssd"][2] == LONG
    in_memory_bits = BITS_PER_BYTE * result.tier_tokens["memory"][2] * model.token_bytes
    bits = BITS_PER_BYTE * (LONG * model.token_bytes + model.fixed_bytes)
    assert result.ttft_s[2] == pytest.approx(
        (bits - in_memory_bits) / 12e9 + bits / 64e9 + seconds(shown, 500)
    )


def test_another_machine_of_the_cluster_is_read(case_study: CaseStudy) -> None:
    fast = PoolOptions(272 * GIB, network_bits_per_s=400e9)
    shown = scenario(case_study, {"home": fast}, roles={"home": 2})
    more = 120 * BLOCK
    blocks = [A, [*A, *range(1000, 1120)], [*A, *range(2000, 2120)]]
    result = run(shown, [0.0, 100.0, 100.0], [LONG, LONG + more, LONG + more], blocks)

    # Less than half is held: the decode instance, which holds it too, does not prefill it. The one that computed it is
    # at work on the second prompt when the third comes.
    assert result.tier_tokens["memory"].tolist() == [0, LONG, 0]
    assert result.tier_tokens["machine"].tolist() == [0, 0, LONG]
    model = shown.kv_model
    moved_bits = BITS_PER_BYTE * (LONG * model.token_bytes + model.fixed_bytes)
    rest_s = shown.clusters[1].curve.after_prefix_s(more, LONG)
    assert result.ttft_s[2] == pytest.approx(moved_bits / 400e9 + moved_bits / 64e9 + rest_s)


def test_a_pool_outlives_its_engines(case_study: CaseStudy) -> None:
    caches = CacheOptions.of_memory(case_study.planned.kv_model, 16 * GIB)
    failures = [Failure(f"home-{number}", 50.0, 10.0) for number in range(8)]
    for pools, expected in (({}, 0), ({"home": PoolOptions(272 * GIB, instances_per_machine=8)}, LONG)):
        shown = scenario(case_study, pools, caches=caches, failures=failures)
        result = run(shown, [0.0, 100.0], [LONG, LONG + 500], [A, [*A, 1000]])
        assert result.hit_tokens[1] == expected


def test_the_decode_sides_pool_spares_the_link(case_study: CaseStudy) -> None:
    pools = {name: PoolOptions(272 * GIB, instances_per_machine=8) for name in ("home", "east")}
    arguments = ([0.0, 100.0], [LONG, LONG + 500], [A, [*A, 1000]])
    without = run(scenario(case_study, {}, policy="offload_all"), *arguments)
    behind = run(scenario(case_study, pools, policy="offload_all"), *arguments)

    model = case_study.planned.kv_model
    assert without.link_bytes[1] == pytest.approx((LONG + 499) * model.token_bytes + model.fixed_bytes)
    assert behind.link_bytes[1] == pytest.approx(499 * model.token_bytes + model.fixed_bytes)
    assert behind.hit_tokens[1] == LONG


def test_pools_are_the_files_unless_others_are_given(case_study: CaseStudy) -> None:
    assert not scenario_of(case_study.planned).pools
    with pytest.raises(ValueError, match='cluster "west" has a pool and is not there'):
        scenario(case_study, {"west": PoolOptions(GIB)})


def test_without_room_they_change_nothing(case_study: CaseStudy) -> None:
    blocks = [A, [*A, 1000], list(range(300, 340))]
    arguments = ([0.0, 1.0, 2.0], [LONG, LONG + 500, 40 * BLOCK], blocks)
    without = run(scenario(case_study, {}, policy="paper"), *arguments)
    empty = run(scenario(case_study, {"home": PoolOptions(0)}, policy="paper"), *arguments)

    assert not without.tier_tokens
    assert "hit_ratio_memory" not in without.summary()
    np.testing.assert_array_equal(without.ttft_s, empty.ttft_s)
    np.testing.assert_array_equal(without.link_bytes, empty.link_bytes)


def held_at_home(world: World) -> int:
    assert world.pools is not None
    hit = world.pools.request(0, LONG + 100, [*A, 3000], {}).pools.get("home-pool")
    return 0 if hit is None else hit.every_tier.reusable_tokens


def test_a_prefix_that_a_cluster_often_lacks_is_copied_there(case_study: CaseStudy) -> None:
    """Six ask for it at once, before the first of them has computed it."""
    pools = {name: PoolOptions(272 * GIB, instances_per_machine=8) for name in ("home", "east")}
    world = World(scenario(case_study, pools), np.random.default_rng(0), BLOCK)
    copies = HotCopies(world, BLOCK)
    assert world.pools is not None
    world.pools.keep("east-pool", A, LONG)
    world.columns.grow(8)
    for number in range(6):
        world.arrive(number, LONG + 100, 10, [*A, 1000 + number])
    world.events.run(59.0)
    assert held_at_home(world) == LONG
    # What the six left there is gone.
    at_home = world.pools._machines["home-pool"]
    at_home.pool = MachinePool(pools["home"], world.scenario.kv_model, BLOCK)
    assert held_at_home(world) == 0
    world.events.run(70.0)
    assert held_at_home(world) == LONG

    (copy,) = copies.changes()["prefix_copies"]
    assert (copy["source"], copy["target"], copy["tokens"]) == ("east", "home", LONG)
    assert world.links["east", "home"].fluid.sent_bits == BITS_PER_BYTE * copy["bytes"]
