"""Engines that draft tokens: on both sides, on one, with unlike numbers of drafts."""

from collections.abc import Iterator
from typing import Any

import pytest

from .stack import Stack, call, completion_body, prompt, running
from .with_drafter import ToldDrafts, equal_drafts, write_drafting

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own for each pair of drafters"),
    pytest.mark.extended("what travels between unlike drafters is in the layouts' own tests"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"
ACCEPTED, DRAFTED = (f"vllm:spec_decode_num_{what}_tokens_total" for what in ("accepted", "draft"))
# Of a chunk of 1,024 tokens, less and more: every step costs Triton's interpreter seconds.
PROMPTS = [(850, 600), (851, 1027), (852, 1281)]


@pytest.fixture
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, ToldDrafts]]:
    directory, told = tmp_path_factory.mktemp("prfaas-drafts"), tmp_path_factory.mktemp("told")
    path, env = write_drafting(directory, model="qwen3", prefill=3, decode=3, told=told)
    for stack in running(path, env):
        yield stack, ToldDrafts(told)


@pytest.mark.shows(model="qwen3", drafts="draft model at both ends")
def test_the_drafters_kv_moves_with_the_models(alike: tuple[Stack, ToldDrafts]) -> None:
    """The model drafts what it would say itself, so nearly all is accepted: with the KV of both it is.

    And it drafts what the decode engine does that has computed the prompt by itself.
    """
    stack, told = alike
    answers = offload(stack)
    moved = told.new()
    accepted, drafted = stack.metric(DECODE, ACCEPTED), stack.metric(DECODE, DRAFTED)
    print(f"{accepted:g} of {drafted:g} drafts accepted")
    # The first three of a request that was loaded are vLLM's placeholders. A tie is rounded this way or that.
    assert accepted >= 0.75 * (drafted - 3 * 3)
    for ids, _ in answers:
        call(stack.url(DECODE, "/v1/completions"), completion_body(ids, 24, cache_salt="plain"))
    equal = equal_drafts(moved, told.new())
    print(f"{sum(equal)} of {len(equal)} drafts equal")
    assert len(equal) >= len(PROMPTS) and sum(equal) >= 0.95 * len(equal)


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


@pytest.fixture
def of_two_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, ToldDrafts]]:
    directory, told = tmp_path_factory.mktemp("prfaas-two-modules"), tmp_path_factory.mktemp("told-by-two")
    path, env = write_drafting(directory, model="qwen3-next", prefill=2, decode=2, modules=2, told=told)
    for stack in running(path, env):
        yield stack, ToldDrafts(told)


@pytest.mark.shows(model="qwen3-next", drafts="two MTP modules at both ends", interpreted=True)
def test_of_two_modules_the_second_has_the_kv_of_the_prompt_too(
    of_two_modules: tuple[Stack, ToldDrafts],
) -> None:
    """What is drafted behind a moved prompt is what the decode engine drafts behind its own."""
    stack, told = of_two_modules
    answers = offload(stack)
    moved = told.new()
    assert all(len(drafts) == 2 for drafts in moved.values())
    for ids, _ in answers:
        call(stack.url(DECODE, "/v1/completions"), completion_body(ids, 24, cache_salt="plain"))
    equal = equal_drafts(moved, told.new())
    print(f"{sum(equal)} of {len(equal)} drafts equal")
    assert len(equal) >= len(PROMPTS) and sum(equal) >= 0.95 * len(equal)


# Hybrids draft with kernels of Triton only.
AT_HOME = [
    pytest.param("qwen3", marks=pytest.mark.shows(drafts="draft model, decode only")),
    pytest.param("qwen3-next", marks=pytest.mark.shows(drafts="MTP, decode only", interpreted=True)),
]


@pytest.fixture(params=AT_HOME)
def drafting_at_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-drafts-at-home")
    yield from running(*write_drafting(directory, model=request.param, prefill=0, decode=2))


@pytest.mark.shows(model="{drafting_at_home}")
def test_a_decode_engine_drafts_behind_prompts_of_one_that_does_not(drafting_at_home: Stack) -> None:
    stack = drafting_at_home
    answered = [(ids, answer.token_ids) for ids, answer in offload(stack)]
    stack.check_likely(*answered, engine=PREFILL)
    accepted, drafted = stack.metric(DECODE, ACCEPTED), stack.metric(DECODE, DRAFTED)
    print(f"{accepted:g} of {drafted:g} drafts accepted")
    assert drafted


@pytest.fixture
def drafting_away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-drafts-away")
    yield from running(*write_drafting(directory, model="qwen3-next", prefill=2, decode=0))


@pytest.mark.shows(model="qwen3-next", drafts="MTP, prefill only", interpreted=True)
def test_a_prompt_of_an_engine_that_drafts_is_worth_the_same(drafting_away: Stack) -> None:
    """The layers of an engine that drafts are in other groups, its states have more rows, and its chunks other ends."""
    stack = drafting_away
    answered = [(ids, answer.token_ids) for ids, answer in offload(stack)]
    stack.check_likely(*answered, engine=DECODE)


@pytest.fixture
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-unlike-drafts")
    yield from running(*write_drafting(directory, model="qwen3-next", prefill=1, decode=3))


@pytest.mark.shows(model="qwen3-next", drafts="MTP, 1 and 3 drafts", interpreted=True)
def test_no_turn_of_a_conversation_is_prefilled_twice(unlike: Stack) -> None:
    """A drafter starts from the model's hidden states, so vLLM computes the last block of a cached prefix anew."""
    stack = unlike
    ids = prompt(860, 1100)
    for turn in range(4):
        answer = stack.complete(ids)
        assert answer.route["prefill"] == PREFILL and "fallback" not in answer.route, (
            turn,
            stack.explain(answer),
        )
        stack.wait_clean()
        ids += [*answer.token_ids, *prompt(861 + turn, 600)]
    assert stack.metric(DECODE, "vllm:prfaas_loads_failed_total") == 0
