"""The logits processor of the plain engine that the demo compares with."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402

from prfaas.serving.engines.vllm.reference import FORCED_TOKENS_ARG, LOGITS_PROCESSOR, ForcedFirstTokens  # noqa: E402
from prfaas.tools.demo import reference as demo_reference  # noqa: E402


def _processor() -> ForcedFirstTokens:
    return ForcedFirstTokens(None, torch.device("cpu"), False)


def test_forces_the_given_tokens_and_then_nothing() -> None:
    params = SamplingParams(extra_args={FORCED_TOKENS_ARG: [5, 2]})
    force = _processor().new_req_logits_processor(params)
    assert force is not None
    logits = torch.arange(8.0)
    assert force([], logits.clone()).argmax().item() == 5
    assert force([5], logits.clone()).argmax().item() == 2
    assert torch.equal(force([5, 2], logits.clone()), logits)


@pytest.mark.parametrize("extra_args", [None, {}, {FORCED_TOKENS_ARG: []}])
def test_leaves_other_requests_alone(extra_args: dict[str, object] | None) -> None:
    assert _processor().new_req_logits_processor(SamplingParams(extra_args=extra_args)) is None


@pytest.mark.parametrize("wrong", ["5", 5, [-1], [True], [1.5], ["a"]])
def test_refuses_what_is_no_list_of_ids(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be a list of token ids"):
        ForcedFirstTokens.validate_params(SamplingParams(extra_args={FORCED_TOKENS_ARG: wrong}))


def test_is_not_skipped_for_greedy_requests() -> None:
    assert not _processor().is_argmax_invariant()


def test_names_that_the_demo_uses_are_these() -> None:
    assert demo_reference._FORCED_TOKENS_ARG == FORCED_TOKENS_ARG
    assert demo_reference._LOGITS_PROCESSOR == LOGITS_PROCESSOR
    module, name = LOGITS_PROCESSOR.split(":")
    assert (ForcedFirstTokens.__module__, ForcedFirstTokens.__qualname__) == (module, name)
