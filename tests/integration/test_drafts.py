"""Engines that draft tokens: on both sides, on one, with unlike numbers of drafts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.deployment import load_deployment

from .shimmed import with_shims
from .stack import Stack, prompt, running, write_deployment
from .with_drafter import write_checkpoint

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own for each pair of drafters"),
    pytest.mark.extended("what travels between unlike drafters is in the layouts' own tests"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"
ACCEPTED, DRAFTED = (f"vllm:spec_decode_num_{what}_tokens_total" for what in ("accepted", "draft"))
PROMPTS = [(850, 2600), (851, 3075), (852, 4097)]


def drafting(directory: Path, *, model: str, prefill: int, decode: int) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes, with so many drafts each.

    The tiny Qwen3 drafts for itself, as a draft model; Qwen3-Next has a layer for it. An engine that drafts takes no
    processors of logits, so only one that does not can be made to say what another has said.
    """
    path = write_deployment(directory, bandwidth="1 Gbit/s")
    document: dict[str, Any] = json.loads(path.read_text())
    document["clusters"][1]["instances"].pop(0)
    plain_args, document["engine"]["extra_args"] = document["engine"]["extra_args"], []
    drafts: dict[str, Any] = {"method": "mtp"}
    env = {}
    if model == "qwen3":
        document["model"]["tiny"] = model
        path.write_text(json.dumps(document))
        drafts = {"method": "draft_model", "model": str(load_deployment(path).model.folder)}
    else:
        document["model"] |= {"path": str(write_checkpoint(directory))}
        del document["model"]["tiny"]
        # Hybrids draft with kernels of Triton only.
        env = with_shims("with_triton")
        if not prefill or not decode:
            # The runner that takes our processor of logits.
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    for cluster, count in zip(document["clusters"], (prefill, decode), strict=True):
        option = json.dumps(drafts | {"num_speculative_tokens": count})
        cluster["extra_args"] = ["--speculative-config", option] if count else plain_args
    path.write_text(json.dumps(document))
    yield from running(path, env)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from drafting(tmp_path_factory.mktemp("prfaas-drafts"), model="qwen3", prefill=3, decode=3)


def test_the_drafters_kv_moves_with_the_models(alike: Stack) -> None:
    """The model drafts what it would say itself, so nearly all is accepted: with the KV of both it is."""
    stack = alike
    offload(stack)
    accepted, drafted = stack.metric(DECODE, ACCEPTED), stack.metric(DECODE, DRAFTED)
    print(f"{accepted:g} of {drafted:g} drafts accepted")
    # The first three of a request that was loaded are vLLM's placeholders. A tie is rounded this way or that.
    assert accepted >= 0.75 * (drafted - 3 * 3)


def offload(stack: Stack) -> list[tuple[list[int], Any]]:
    """Long prompts with their answers, all of which were loaded."""
    answers = []
    before = stack.metric(DECODE, "vllm:prfaas_loads_completed_total")
    for seed, tokens in PROMPTS:
        ids = prompt(seed, tokens)
        answer = stack.complete(ids)
        assert answer.route["prefill"] == PREFILL and "fallback" not in answer.route, stack.explain(answer)
        stack.wait_clean()
        answers.append((ids, answer))
    assert stack.metric(DECODE, "vllm:prfaas_loads_completed_total") == before + len(PROMPTS)
    assert stack.metric(DECODE, "vllm:prfaas_loads_failed_total") == 0
    return answers


@pytest.fixture(scope="module", params=["qwen3", "qwen3-next"])
def drafting_at_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-drafts-at-home")
    yield from drafting(directory, model=request.param, prefill=0, decode=2)


def test_a_decode_engine_drafts_behind_prompts_of_one_that_does_not(drafting_at_home: Stack) -> None:
    stack = drafting_at_home
    answered = [(ids, answer.token_ids) for ids, answer in offload(stack)]
    stack.check_likely(*answered, engine=PREFILL)
    accepted, drafted = stack.metric(DECODE, ACCEPTED), stack.metric(DECODE, DRAFTED)
    print(f"{accepted:g} of {drafted:g} drafts accepted")
    assert drafted


@pytest.fixture(scope="module")
def drafting_away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-drafts-away")
    yield from drafting(directory, model="qwen3-next", prefill=2, decode=0)


def test_a_prompt_of_an_engine_that_drafts_is_worth_the_same(drafting_away: Stack) -> None:
    """The layers of an engine that drafts are in other groups, its states have more rows, and its chunks other ends."""
    stack = drafting_away
    answered = [(ids, answer.token_ids) for ids, answer in offload(stack)]
    stack.check_likely(*answered, engine=DECODE)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-unlike-drafts")
    yield from drafting(directory, model="qwen3-next", prefill=1, decode=3)


def test_no_turn_of_a_conversation_is_prefilled_twice(unlike: Stack) -> None:
    """A drafter starts from the model's hidden states, so vLLM computes the last block of a cached prefix anew."""
    stack = unlike
    ids = prompt(860, 3000)
    for turn in range(4):
        answer = stack.complete(ids)
        assert answer.route["prefill"] == PREFILL and "fallback" not in answer.route, (
            turn,
            stack.explain(answer),
        )
        stack.wait_clean()
        ids += [*answer.token_ids, *prompt(861 + turn, 2600)]
    assert stack.metric(DECODE, "vllm:prfaas_loads_failed_total") == 0
