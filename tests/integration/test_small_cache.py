"""Engines whose KV cache is too small for the load: waiting, preemption, and the same right answers."""

import concurrent.futures
from collections.abc import Iterator

import pytest

from .stack import Stack, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended("preemptions are in `make test` with a pool, which is told more of them"),
    pytest.mark.slow("hundreds of tokens of several answers, each computed again by a plain engine"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-test-small")
    path = write_deployment(
        directory,
        bandwidth="400 Mbit/s",
        extra_args=["--num-gpu-blocks-override", "40"],
        max_model_len=6400,
    )
    yield from running(path)


# Those of three prompts that decode together need more blocks than there are.
ANSWER_TOKENS = 600


def test_preempted_decodes_recompute_and_answer_right(small: Stack) -> None:
    """A preempted request's transfer is used up: it is prefilled again locally, and nobody asks for it twice."""
    jobs, answers = [], []
    # Where prefills take longer than answers, four requests don't meet at the decode engine: then more come.
    for count in (4, 8, 16):
        more = [prompt(5000 + len(jobs) + i, 2300) for i in range(count)]
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            answers += list(pool.map(lambda ids: small.complete(ids, max_tokens=ANSWER_TOKENS), more))
        jobs += more
        if small.metric("home-decode-0", "vllm:num_preemptions_total") > 0:
            break
    else:
        raise AssertionError("nothing was preempted")
    for answer in answers:
        assert answer.status == 200, answer.body
        assert len(answer.token_ids) == ANSWER_TOKENS
    # After a preemption the split of the prompt is another one. A step for two answers takes no longer than for one.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pairs = zip(jobs, (answer.token_ids for answer in answers), strict=True)
        list(pool.map(small.check_likely, pairs))
    small.wait_clean()


def test_more_prefills_than_blocks_wait_for_their_turn(small: Stack) -> None:
    """Blocks stay held until the other side has acknowledged; the next prefill gets them then."""
    jobs = [prompt(6000 + i, 6000) for i in range(5)]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda ids: small.complete(ids, max_tokens=4), jobs))
    for answer in answers:
        assert answer.status == 200, answer.body
        assert answer.route["route"] == "offload"
    small.check_likely(*((ids, answer.token_ids) for ids, answer in zip(jobs, answers, strict=True)))
    small.wait_clean()
