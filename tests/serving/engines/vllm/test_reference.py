"""The logits processor of the plain engine that the demo compares with."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns  # noqa: E402

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


def test_the_runner_of_gpus_forces_the_rows_of_the_same_places() -> None:
    """Rows of a batch in any order, two of one request (what it drafts), one of another that is left alone."""
    (found,) = _load_v2_logitsprocs_by_fqcns([LOGITS_PROCESSOR])
    lengths = torch.zeros(8, dtype=torch.int32).numpy()
    lengths[[3, 6]] = 100, 7
    processor = found(None, SimpleNamespace(prompt_len=SimpleNamespace(np=lengths)))
    assert processor.add_request(3, SamplingParams(extra_args={FORCED_TOKENS_ARG: [5, 2]}))
    assert not processor.add_request(6, SamplingParams())
    logits = torch.arange(8.0).repeat(4, 1)

    def rows(slots: list[int], positions: list[int]) -> list[int]:
        context = SimpleNamespace(
            expanded_idx_mapping=torch.tensor(slots),
            idx_mapping_np=torch.tensor(sorted(set(slots))).numpy(),
            pos=torch.tensor(positions),
        )
        return [int(each) for each in processor.apply(logits.clone()[: len(slots)], context).argmax(-1)]

    # The last token of the prompt is at place 99, and what follows it is the first of the answer.
    assert rows([6, 3, 3, 3], [6, 99, 100, 101]) == [7, 5, 2, 7]
    # The end of a chunk in the middle of the prompt.
    assert rows([3], [97]) == [7]
    # Another request takes the slot.
    assert not processor.add_request(3, SamplingParams())
    assert rows([3], [99]) == [7]


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
