"""Data-parallel groups in a simulation: ranks fail together and take their steps together."""

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants
from tests.lab.simulator.test_invariants import conversations

from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import TruncatedLogNormal
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.capacity import Slowdown
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate


def scenario(case_study: CaseStudy, group_ranks: int, **options: object) -> Scenario:
    """Of the PD cluster two instances prefill and two decode; none is offloaded."""
    home = case_study.planned.clusters[1]
    planned = replace(
        case_study.planned,
        clusters=(case_study.planned.clusters[0], replace(home, instance_count=4, group_ranks=group_ranks)),
    )
    return scenario_of(
        planned,
        **{  # type: ignore[arg-type]
            "policy": "local_only",
            "roles": {"home": 2},
            "adapts": False,
            "allocation": False,
            **options,
        },
    )


def run(shown: Scenario, arrivals_s: list[float], tokens: list[int], answers: list[int]) -> Result:
    return simulate(shown, [chunk_of(arrivals_s, tokens, answers)], warmup_share=0.0, on_event=Invariants())


def test_a_rank_s_failure_is_its_group_s(case_study: CaseStudy) -> None:
    failed = [Failure("home-2", 30.0, 500.0)]
    arrivals_s, tokens, answers = [0.0, 0.1], [4096, 4096], [4096, 4096]
    alone, group = (
        run(scenario(case_study, ranks, failures=failed), arrivals_s, tokens, answers) for ranks in (1, 2)
    )
    # Of two decode instances one goes on undisturbed; of a group both answers are broken off.
    usual = run(scenario(case_study, 2), arrivals_s, tokens, answers)
    assert sum(a > u + 0.1 for a, u in zip(alone.e2e_s, usual.e2e_s, strict=True)) == 1
    assert all(g > u + 0.1 for g, u in zip(group.e2e_s, usual.e2e_s, strict=True))


def test_a_prefill_of_one_rank_lengthens_the_steps_of_all(case_study: CaseStudy) -> None:
    def answer_s(ranks: int) -> float:
        # Nobody else prefills: the second prompt is computed where it is decoded.
        shown = scenario(case_study, ranks, roles={"home": 0}, mixed_tokens=2048)
        first = run(shown, [0.0, 20.0], [2048, 100_000], [4096, 2])
        return float(first.e2e_s[0])

    assert answer_s(4) > answer_s(1) + 1.0


def test_roles_move_by_whole_groups(case_study: CaseStudy) -> None:
    home = case_study.planned.clusters[1]
    planned = replace(
        case_study.planned, clusters=(case_study.planned.clusters[0], replace(home, group_ranks=2))
    )
    traffic = IndependentTraffic(Poisson(1.8), TruncatedLogNormal(8.0, 0.5, 128, 32_768), fixed(2500.0))
    result = simulate(
        scenario_of(planned, policy="paper"), traffic.chunks(np.random.default_rng(2)), requests=2000
    )
    assert result.changes["conversions"]
    counts = set(result.series["prefill_instances_home"])
    assert len(counts) > 1 and all(count % 2 == 0 for count in counts)


def test_prefill_instances_are_whole_groups(case_study: CaseStudy) -> None:
    with pytest.raises(ValueError, match="not whole groups"):
        scenario(case_study, 2, roles={"home": 1})


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["paper", "tilted"])
def test_all_step_models_at_once(case_study: CaseStudy, policy: str, first_token: str) -> None:
    """Groups, shared and mixed steps, contexts, a slowdown, first tokens, failures with notice, caches."""
    shown = scenario(
        case_study,
        2,
        policy=policy,
        first_token=first_token,
        chunk_tokens=8192,
        kv_block_tokens=512,
        mixed_tokens=512,
        slowdown=Slowdown(((0.0, 1.0), (20.0, 2.0), (60.0, 1.0))),
        caches=CacheOptions(600_000, 8192, 4096),
        failures=[
            Failure("home-0", 40.0, 20.0, 10.0),
            Failure("home-2", 70.0, 20.0),
            Failure("east-1", 30.0, 30.0, 5.0),
        ],
    )
    east, home = shown.clusters
    shown = replace(shown, clusters=(east, replace(home, context_s=2e-8)))
    result = simulate(shown, [conversations(1, 80)], seed=1, warmup_share=0.0, on_event=Invariants())
    assert result.retries.any() and not np.isnan(result.e2e_s).any()
