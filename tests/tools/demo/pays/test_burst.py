"""The two example deployments differ in their clusters alone, and the burst is the same for everybody, every time."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.deployment import load_planned
from prfaas.core.kv.dtypes import DEFAULT_DTYPES
from prfaas.core.kv.hf_config import model_from_directory
from prfaas.core.kv.published import published_model
from prfaas.core.latency.files import load_profile
from prfaas.core.planner import best_operation, problem_of
from prfaas.tools.demo.pays.burst import Burst, Side
from prfaas.tools.demo.pays.run import WITH_PRFAAS, WITHOUT

EXAMPLES = Path(__file__).parents[4] / "examples"
TOKENS, KV_SHARE = 8, 480


@pytest.fixture(scope="module")
def sides() -> tuple[Side, Side]:
    return Side.of_file(EXAMPLES / WITH_PRFAAS), Side.of_file(EXAMPLES / WITHOUT)


def test_as_many_machines_and_all_else_alike(sides: tuple[Side, Side]) -> None:
    one, other = (side.deployment for side in sides)
    assert len(one.instances) == len(other.instances)
    alike = ("model", "engine", "transfer", "control", "slo")
    assert [getattr(one, field) for field in alike] == [getattr(other, field) for field in alike]
    ports = [port for each in (*one.instances, *other.instances) for port in (each.http_port, each.kv_port)]
    assert len(set(ports)) == len(ports)
    (home,) = one.pd_clusters
    (alone,) = other.pd_clusters
    assert (home.profile, home.speedup) == (alone.profile, alone.speedup)
    assert sides[0].fleet == "4 H200 + 8 H20" and sides[1].fleet == "12 H20"
    assert sides[0].planned.workload == sides[1].planned.workload


def test_roles_and_threshold_are_the_planners(sides: tuple[Side, Side]) -> None:
    for side in sides:
        (roles,) = side.operation.roles
        assert side.prefill_instances == {"home": roles.prefill}
    threshold_tokens = sides[0].operation.threshold_tokens
    assert sides[0].deployment.routing.threshold_tokens == pytest.approx(threshold_tokens, rel=0.001)


def test_it_is_the_papers_case_but_faster(sides: tuple[Side, Side]) -> None:
    paper = best_operation(problem_of(load_planned(EXAMPLES / "paper.yaml")))
    side = sides[0]
    assert side.operation.lambda_max == pytest.approx(side.speedup * paper.lambda_max, rel=0.001)
    (link,), (papers,) = side.operation.links, paper.links
    assert link.utilisation == pytest.approx(papers.utilisation, rel=0.01)


@given(tokens=st.integers(16, 16384))
def test_profiles_and_kvcache_are_the_papers_at_an_eighth_of_the_length(tokens: int) -> None:
    for name in ("h200", "h20"):
        own = load_profile(f"stand-in/{name}.yaml", relative_to=EXAMPLES)
        papers = load_profile(f"internal-1t-{name}", relative_to=EXAMPLES)
        assert own.prefill_s(tokens) == pytest.approx(papers.prefill_s(TOKENS * tokens), rel=1e-6)
    own_model = model_from_directory(EXAMPLES / "stand-in", name="internal-1t")
    papers_model = published_model("internal-1t").kept_in(DEFAULT_DTYPES)
    smaller = papers_model.bytes_to_move(TOKENS * tokens) / own_model.bytes_to_move(tokens)
    assert smaller == pytest.approx(KV_SHARE, rel=0.005)


def test_the_same_requests_every_time(sides: tuple[Side, Side]) -> None:
    burst, again = Burst.of(*sides, 50), Burst.of(*sides, 50)
    requests = burst.requests()
    assert [asdict(each) for each in requests] == [asdict(each) for each in again.requests()]
    assert len(requests) == 50
    arrivals = [each.arrival_s for each in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0
    assert {each.output_tokens for each in requests} == {128}
    # More of them begin alike.
    assert Burst.of(*sides, 60).requests()[:50] == requests


def test_no_two_prompts_share_a_block(sides: tuple[Side, Side]) -> None:
    blocks = [block for each in Burst.of(*sides, 50).requests() for block in each.block_ids]
    assert len(set(blocks)) == len(blocks)


def test_the_side_without_prfaas_keeps_up(sides: tuple[Side, Side]) -> None:
    burst = Burst.of(*sides, 50)
    assert burst.traffic.mean_per_s == pytest.approx(burst.load * sides[1].operation.lambda_max)
    slower = replace(sides[1], planned=sides[0].planned)
    assert Burst.of(sides[0], slower, 50).traffic.mean_per_s > burst.traffic.mean_per_s
