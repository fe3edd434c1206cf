"""KVCache between ends of different tensor_parallel: every byte once, as fast as it is mapped."""

from dataclasses import replace

import pytest
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants

from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.published import published_model
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate

TOKENS = 50_000


def test_what_crosses_is_not_what_ranks_hold(case_study: CaseStudy) -> None:
    """A model whose ranks hold twice what one would: between unlike ends half of it crosses."""
    once = case_study.planned.kv_model
    held = replace(once, groups=once.groups * 2)
    moved = {}
    for wire_model in (None, once):
        planned = replace(case_study.planned, kv_model=held, wire_model=wire_model)
        scenario = scenario_of(planned, policy="offload_all", adapts=False, allocation=False)
        result = simulate(scenario, [chunk_of([0.0], [TOKENS])], warmup_share=0.0, on_event=Invariants())
        moved[wire_model] = result.link_bytes[0]
    assert moved == {None: held.bytes_to_move(TOKENS - 1), once: once.bytes_to_move(TOKENS - 1)}


def test_a_link_of_a_narrower_dtype_carries_less(case_study: CaseStudy) -> None:
    plain = case_study.planned
    narrow = published_model(plain.kv_model.name).kept_in(CacheDtypes("fp8"))
    planned = replace(plain, link_models={plain.links[0].name: narrow})
    scenario = scenario_of(planned, policy="offload_all", adapts=False, allocation=False)
    result = simulate(scenario, [chunk_of([0.0], [TOKENS])], warmup_share=0.0, on_event=Invariants())
    assert result.link_bytes[0] == narrow.bytes_to_move(TOKENS - 1) < plain.kv_model.bytes_to_move(TOKENS - 1)


@pytest.mark.parametrize(("ranks", "is_slower"), [((8, 4), True), ((8, 8), False)])
def test_mapping_takes_time_between_unlike_ends_alone(
    case_study: CaseStudy, ranks: tuple[int, int], is_slower: bool
) -> None:
    plain = case_study.planned
    clusters = tuple(
        replace(each, tensor_parallel=count) for each, count in zip(plain.clusters, ranks, strict=True)
    )
    links = tuple(replace(link, mapping_bits_per_s=1e9) for link in plain.links)
    times_s = []
    for planned in (plain, replace(plain, clusters=clusters, links=links)):
        scenario = scenario_of(planned, policy="offload_all", adapts=False, allocation=False)
        result = simulate(scenario, [chunk_of([0.0], [TOKENS])], warmup_share=0.0, on_event=Invariants())
        times_s.append(result.ttft_s[0])
    mapped_s = 8 * plain.kv_model.bytes_to_move(TOKENS - 1) / 1e9 + 0.063
    assert times_s[1] == pytest.approx(mapped_s if is_slower else times_s[0])
