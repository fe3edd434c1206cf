"""The live scheduler on real vLLM: where prefixes are, who may share them, what crosses the link."""

import concurrent.futures
import time
from collections.abc import Iterator

import pytest

from prfaas.core.kv.hf_config import model_from_directory
from prfaas.core.kv.model import KvModel
from prfaas.serving.engines.preparation import port_problem

from .stack import BLOCK_TOKENS, MODEL, PATIENCE_S, Stack, call, prompt, running, wait_until, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("waits until vLLM's events have come to the index"),
    pytest.mark.timeout(1800),
]

HITS = "vllm:prefix_cache_hits_total"


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-test-paper")
    yield from running(write_deployment(directory, bandwidth="1 Gbit/s", policy="tilted", staging="128 MiB"))


def kv_model(stack: Stack) -> KvModel:
    return model_from_directory(stack.deployment.model.path, name=MODEL)


def test_a_prompt_sent_twice_goes_where_its_prefix_is_and_only_the_increment_crosses(paper: Stack) -> None:
    first = prompt(101, 6000)
    one = paper.complete(first)
    assert (one.route["route"], one.route["prefill"]) == ("offload", "east-prefill-0")
    assert int(one.route["bytes"]) == kv_model(paper).bytes_to_move(5999, 0, block_tokens=BLOCK_TOKENS)
    paper.settle()
    hits = paper.metric("east-prefill-0", HITS)
    longer = first + prompt(102, 2500)
    two = paper.complete(longer)
    assert (two.route["route"], two.route["prefill"]) == ("offload", "east-prefill-0")
    skipped = 5999 // BLOCK_TOKENS * BLOCK_TOKENS
    assert int(two.route["cached"]) == skipped
    assert int(two.route["bytes"]) == kv_model(paper).bytes_to_move(
        len(longer) - 1, skipped, block_tokens=BLOCK_TOKENS
    )
    reused = paper.metric("east-prefill-0", HITS) - hits
    assert reused == len(longer) - paper.record(two)["attempts"][0]["prefill_tokens"] > 0
    paper.reference(
        first, 1, salt="twice", engine="home-decode-0"
    )  # so that the next one starts from a prefix too
    paper.check_answer(two, paper.reference(longer, salt="twice", engine="home-decode-0"))


@pytest.mark.parametrize(
    "count", [6, pytest.param(20, marks=pytest.mark.extended("the same with more prompts"))]
)
def test_a_shared_prefix_is_found_at_the_length_that_vllm_reuses(paper: Stack, count: int) -> None:
    """Prompts that share 8K tokens: what the index promised is what the engine reports as cached."""
    shared = prompt(110 + count, 8192)
    promised, reused = [], []
    for index in range(count):
        ids = shared + prompt(120 + index, 2100 + 37 * index)
        paper.settle()
        hits = paper.metric("east-prefill-0", HITS)
        answer = paper.complete(ids, 2)
        assert (answer.route["route"], answer.route["prefill"]) == ("offload", "east-prefill-0"), answer.route
        promised.append(len(ids) - paper.record(answer)["attempts"][0]["prefill_tokens"])
        reused.append(paper.metric("east-prefill-0", HITS) - hits)
    assert promised == reused
    assert promised[0] == 0
    assert set(promised[2:]) == {8192}


def test_tenants_share_nothing(paper: Stack) -> None:
    ids = prompt(150, 4000)
    one = paper.complete(ids, tenant="a")
    paper.settle()
    again = paper.complete(ids + prompt(151, 2100), tenant="a")
    paper.settle()
    hits = {name: paper.metric(name, HITS) for name in ("east-prefill-0", "home-decode-0")}
    other = paper.complete(ids + prompt(152, 2100), tenant="b")
    nobody = paper.complete(ids + prompt(153, 2100))
    assert int(again.route["cached"]) > 3000
    assert int(again.route["bytes"]) < int(one.route["bytes"])
    for answer in (other, nobody):
        assert int(answer.route["cached"]) == 0
        assert int(answer.route["uncached"]) == len(ids) + 2100
    assert {name: paper.metric(name, HITS) for name in hits} == hits


def test_a_prefix_moves_to_the_cluster_that_computes(paper: Stack) -> None:
    """The PD cluster holds 5K tokens; the rest is over the threshold, so PrfaaS computes it from them."""
    held = prompt(160, 5121)
    for end in (1600, 3200, 4800, 5121):  # each step is short enough to stay at home
        local = paper.complete(held[:end])
        paper.settle()
        assert local.route["route"] == "local", local.route
    ids = held + prompt(161, 2600)
    paper.settle()
    answer = paper.complete(ids)
    assert (answer.route["route"], answer.route["prefill"]) == ("offload", "east-prefill-0")
    explained = paper.record(answer)
    assert explained["cache_transfer"] is not None, explained
    assert explained["cache_transfer"]["outcome"] == "done", explained
    assert explained["cache_transfer"]["bytes"] > 0
    # The prefill was split at another token than any plain engine's.
    paper.check_likely((ids, answer.token_ids))
    paper.wait_clean()


def test_a_cleared_cache_is_forgotten(paper: Stack) -> None:
    paper.complete(prompt(170, 3000))
    paper.settle()
    assert paper.blocks_known("east-prefill-0") > 0
    call(paper.url("east-prefill-0", "/reset_prefix_cache"), {})
    # vLLM publishes with the next step. Blocks of full attention, and a state for each of three groups.
    paper.complete(prompt(171, 2100), 1)
    wait_until(lambda: paper.blocks_known("east-prefill-0") <= 8 + 3 * 3, PATIENCE_S, "the index follows")


def test_a_decode_engine_that_dies_while_answering_costs_no_answer(paper: Stack) -> None:
    """Runs last. It was the only one that decodes, so the prefill instance takes the request, until it is back."""
    ids = prompt(180, 300)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(paper.complete, ids, 400)
        wait_until(
            lambda: paper.metric("home-decode-0", "vllm:num_requests_running") > 0, PATIENCE_S, "it decodes"
        )
        paper.engines.kill("home-decode-0")
        answer = pending.result(PATIENCE_S)
    assert answer.status == 200, answer.body
    assert len(answer.token_ids) == 400
    assert answer.route["decode"] == "home-prefill-0"
    # Another engine computed the prompt again, and in one piece.
    paper.check_likely((ids, answer.token_ids))
    # Its processes give their ports back as they die.
    home = paper.deployment.instance("home-decode-0")
    wait_until(lambda: port_problem(home.host, home.kv_port) is None, PATIENCE_S, "its port is free")
    paper.engines.start("home-decode-0")
    paper.engines.wait_ready()
    wait_until(
        lambda: paper.complete(prompt(181, 300), 2).route["decode"] == "home-decode-0",
        PATIENCE_S,
        "it is used again",
    )


def test_a_short_prompt_does_not_wait_behind_long_ones(paper: Stack) -> None:
    """Sixteen prompts for two prefill instances at once, then a short one: it is not the last to begin.

    How far a short one moves forward follows from what others have waited, so eight wait before.
    """
    with concurrent.futures.ThreadPoolExecutor(17) as pool:
        list(pool.map(lambda index: paper.complete(prompt(172 + index, 1900), 2), range(8)))
        long = [prompt(180 + index, 1900) for index in range(16)]
        answers = [pool.submit(paper.complete, ids, 2) for ids in long]
        deadline_s = time.monotonic() + PATIENCE_S
        while _waiting(paper) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        short = pool.submit(paper.complete, prompt(200, 300), 2)
        turns_s = [paper.record(each.result(timeout=PATIENCE_S))["steps_s"]["turn"] for each in answers]
        short_s = paper.record(short.result(timeout=PATIENCE_S))["steps_s"]["turn"]
    assert short_s < max(turns_s)
    assert _waiting(paper) == 0


def _waiting(stack: Stack) -> int:
    """Prefills of the PD cluster that no instance has been given yet."""
    return int(stack.state()["clusters"]["home"]["waiting_prefills"])
