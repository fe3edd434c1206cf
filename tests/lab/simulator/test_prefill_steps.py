"""Prompts that are computed together, in one step."""

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy, chunk_of

from prfaas.core.scheduling import POLICIES
from prfaas.lab.simulator import PoolOptions, Result, Scenario, scenario_of, simulate

SHORT = 500


def scenario(case_study: CaseStudy, step_tokens: int, **options: object) -> Scenario:
    return scenario_of(
        case_study.planned,
        **{  # type: ignore[arg-type]
            "policy": "local_only",
            "roles": {"home": 1},
            "adapts": False,
            "allocation": False,
            "prefill_step_tokens": step_tokens,
            **options,
        },
    )


def run(shown: Scenario, tokens: list[int]) -> Result:
    """The first prompt finds an idle instance, the others come while it is computed."""
    arrivals_s = [0.0, *(0.01 + 0.001 * number for number in range(len(tokens) - 1))]
    return simulate(shown, [chunk_of(arrivals_s, tokens)], warmup_share=0.0, debug=True)


def ends_s(result: Result) -> list[float]:
    return [float(end_s) for end_s in result.arrival_s + result.ttft_s]


def test_what_waits_is_computed_together(case_study: CaseStudy) -> None:
    shown = scenario(case_study, 8192)
    seconds = shown.clusters[1].curve.seconds
    together_s = min(seconds(3 * SHORT), 3 * seconds(SHORT))
    assert together_s < 3 * seconds(SHORT)
    ends = ends_s(run(shown, [SHORT] * 4))
    assert ends == pytest.approx([seconds(SHORT)] + [seconds(SHORT) + together_s] * 3)


def test_one_after_another_unless_asked(case_study: CaseStudy) -> None:
    shown = scenario(case_study, 0)
    ends = ends_s(run(shown, [SHORT] * 4))
    assert ends == pytest.approx([shown.clusters[1].curve.seconds(SHORT) * number for number in (1, 2, 3, 4)])


def test_what_does_not_fit_waits_for_the_next_step(case_study: CaseStudy) -> None:
    shown = scenario(case_study, 2 * SHORT)
    seconds = shown.clusters[1].curve.seconds
    ends = ends_s(run(shown, [SHORT, SHORT, SHORT, 3 * SHORT, SHORT]))
    first, second = seconds(SHORT), min(seconds(2 * SHORT), 2 * seconds(SHORT))
    long = first + second + seconds(3 * SHORT)  # longer than a step may be: alone
    assert ends == pytest.approx([first, first + second, first + second, long, long + seconds(SHORT)])


def test_instances_are_busy_for_the_steps_alone(case_study: CaseStudy) -> None:
    shown = scenario(case_study, 8192)
    result = run(shown, [SHORT] * 5)
    used = result.series["prefill_utilisation_home"]
    assert np.all(used <= 1 + 1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_invariants_hold_with_every_policy(case_study: CaseStudy, policy: str) -> None:
    params = {"threshold_tokens": 20_000.0} if policy == "static_threshold" else {}
    shown = scenario(case_study, 40_000, policy=policy, params=params, roles=None)
    chunks = case_study.poisson(1.1 * case_study.optimum.lambda_max, seed=3)
    result = simulate(shown, chunks, requests=250, debug=True)
    assert not np.isnan(result.e2e_s).any()


def test_other_ways_to_share_are_refused(case_study: CaseStudy) -> None:
    with pytest.raises(ValueError, match="prompts share steps"):
        scenario(case_study, 8192, prefill_concurrency=2)
    with pytest.raises(ValueError, match="prompts share steps"):
        scenario(case_study, 8192, pools={"home": PoolOptions(1 << 30)})


def test_decode_steps_grow_with_the_context_where_asked(case_study: CaseStudy) -> None:
    """A single answer of 1000 tokens after a prompt of 100,000."""
    shown = scenario(case_study, 0, decode_context_s=2e-8)
    cluster = shown.clusters[1]
    assert cluster.decode_step_s is not None
    chunk = chunk_of([0.0], [100_000], [1000])
    result = simulate(shown, [chunk], warmup_share=0.0)
    steps_s = 1000 * (cluster.decode_step_s(1) + 2e-8 * (100_500 - cluster.measured_context_tokens))
    assert result.e2e_s[0] - result.ttft_s[0] == pytest.approx(steps_s, rel=1e-9)
    plain = simulate(scenario(case_study, 0), [chunk], warmup_share=0.0)
    assert plain.e2e_s[0] - plain.ttft_s[0] == pytest.approx(1000 * cluster.decode_step_s(1))
    with pytest.raises(ValueError, match="0 s or more longer"):
        scenario(case_study, 0, decode_context_s=-1.0)
