"""The file's machines with models that nobody measured on all of them."""

from dataclasses import replace

import pytest
from studies._other_models import other_models

from prfaas.core.planner import best_operation, problem_of
from prfaas.lab.studies import StudyContext


def test_there_are_dense_and_hybrid_ones(context: StudyContext) -> None:
    kinds = {name: fleet.model.is_hybrid for name, fleet in other_models(context).items()}
    assert kinds == {
        "internal-1t": True,
        "kimi-linear": True,
        "mimo-v2-flash": True,
        "minimax-m2.5": False,
        "qwen3-235b": False,
        "qwen3.5-397b": True,
        "ring-2.5-1t": True,
    }


def test_unknown_hardware_is_slower_by_as_much_as_with_the_files_model(context: StudyContext) -> None:
    fleets = other_models(context)
    own_fast, own_slow = (cluster.profile for cluster in context.planned.clusters)
    fast, slow = (cluster.profile for cluster in fleets["ring-2.5-1t"].context.planned.clusters)
    assert fleets["ring-2.5-1t"].label == "ring-2.5-1t*" and fleets["minimax-m2.5"].label == "minimax-m2.5"
    assert slow.hardware == own_slow.hardware and slow.range_tokens == context.range_tokens
    for tokens in (128.0, 3000.0, 50_000.0, 131_072.0):
        ratio = own_slow.prefill_s(tokens) / own_fast.prefill_s(tokens)
        assert slow.prefill_s(tokens) / fast.prefill_s(tokens) == pytest.approx(ratio, rel=0.01)
    # 25 over 20.8 ms.
    assert slow.decode_step_s(8) / fast.decode_step_s(8) == pytest.approx(25 / 20.8)


def test_the_files_own_model_is_the_file(context: StudyContext) -> None:
    own = other_models(context)["internal-1t"]
    assert own.context is context and not own.is_assumed
    assert own.alone.links == () and own.alone.pd_clusters[0].instance_count == 16
    assert best_operation(problem_of(own.alone)).lambda_max == pytest.approx(own.baseline.point.lambda_max)


def test_without_prices_as_many_gpus_are_the_rival(context: StudyContext) -> None:
    planned = replace(context.planned, prices={})
    free = replace(context, planned=planned, problem=problem_of(planned))
    assert other_models(free)["internal-1t"].alone.pd_clusters[0].instance_count == 12
