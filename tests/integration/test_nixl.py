"""KV by vLLM's NIXL connector inside of the PD cluster, on real vLLM: the same tokens, and ours beside it."""

import importlib.util
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import free_ports

from .stack import (
    LOGITS,
    THRESHOLD_TOKENS,
    DemoAnswer,
    Stack,
    call,
    completion_body,
    prompt,
    running,
    write_deployment,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed"),
]

SHORT, LONG = THRESHOLD_TOKENS - 500, 3000


def with_nixl(directory: Path, *, pools: bool) -> Path:
    """As `stack`, with NIXL between the two engines of the PD cluster."""
    path = write_deployment(directory, bandwidth="200 Mbit/s", pools=pools)
    deployment = json.loads(path.read_text())
    deployment["engine"]["local_transfer"] = "nixl"
    home = next(each for each in deployment["clusters"] if each["name"] == "home")
    for instance, port in zip(home["instances"], free_ports(2), strict=True):
        instance["nixl_port"] = port
    path.write_text(json.dumps(deployment))
    return path


@pytest.fixture(scope="module")
def nixl_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from running(with_nixl(tmp_path_factory.mktemp("prfaas-nixl"), pools=False))


@pytest.mark.shows(model="qwen3-next", nixl=True)
def test_tokens_are_those_of_the_same_split(nixl_stack: Stack) -> None:
    """Of lengths before, at and after block ends; and again with a prefix that the decode engine holds."""
    draw = random.Random(4)
    for seed, tokens in enumerate((draw.randrange(300, 400), 512, 513, SHORT)):
        ids = prompt(800 + seed, tokens)
        answer = nixl_stack.complete(ids, **LOGITS)
        assert answer.route["route"] == "local" and "fallback" not in answer.route, answer.route
        assert (answer.route["prefill"], answer.route["decode"]) == ("home-prefill-0", "home-decode-0")
        assert answer.route["transfer"] == "nixl" and int(answer.route["bytes"]) > 0
        nixl_stack.check_answer(answer, nixl_stack.reference(ids))
        assert answer.body["usage"]["prompt_tokens"] == tokens
    told = nixl_stack.record(answer)
    assert told["transfer"]["by"] == "nixl" and told["attempts"][-1]["outcome"] == "done"
    nixl_stack.wait_clean()
    assert nixl_stack.metric("home-decode-0", "vllm:nixl_bytes_transferred_sum") > 0
    assert nixl_stack.metric("home-decode-0", "vllm:nixl_num_failed_transfers_total") == 0
    assert nixl_stack.metric("gateway", "prfaas_gateway_transfers_total", 'by="nixl"') == 4


def test_from_elsewhere_it_comes_our_way(nixl_stack: Stack) -> None:
    """The engines have another layout than usual, and so has the one of the other cluster."""
    ids = prompt(820, LONG)
    answer = nixl_stack.complete(ids, **LOGITS)
    assert answer.route["route"] == "offload" and "transfer" not in answer.route, answer.route
    assert "fallback" not in answer.route
    nixl_stack.check_answer(answer, nixl_stack.reference(ids))
    assert nixl_stack.metric("home-decode-0", "vllm:prfaas_loads_completed_total") == 1
    nixl_stack.wait_clean()


def test_an_address_in_a_request_is_never_connected_to(nixl_stack: Stack) -> None:
    """Also when who sends it has reached the engine past the gateway."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        params = {
            "do_remote_prefill": True,
            "remote_block_ids": [[1], [1], [1], [1]],
            "remote_engine_id": "e",
            "remote_request_id": "r",
            "remote_host": "127.0.0.1",
            "remote_port": trap.getsockname()[1],
            "tp_size": 1,
        }
        body = completion_body(prompt(830, 400), 8, kv_transfer_params=params)
        answer = call(nixl_stack.url("home-decode-0", "/v1/completions"), body)
        assert answer.status == 200 and len(answer.token_ids) == 8
        trap.settimeout(0.5)
        with pytest.raises(TimeoutError):
            trap.accept()
    nixl_stack.wait_clean()


def test_a_producer_that_dies_costs_a_prefill(nixl_stack: Stack) -> None:
    nixl_stack.engines.kill("home-prefill-0")
    ids = prompt(840, SHORT)
    answer = nixl_stack.complete(ids)
    assert answer.status == 200 and len(answer.token_ids) == 24
    assert answer.route["prefill"] == "home-decode-0"


PREFILL, DECODE = "home-prefill-0", "home-decode-0"


@pytest.mark.shows(model="qwen3-next", nixl=True, pool=True)
@pytest.mark.slow("engines of its own, started anew to find what the pool kept")
def test_a_pool_has_what_engines_lost_and_nixl_moves_all_of_it(tmp_path: Path) -> None:
    with Stack(with_nixl(tmp_path, pools=True)) as stack:
        # 512 tokens and 1,024 end where a state is kept, once an engine has met them a second time.
        begun = [prompt(860, 512), prompt(861, 1024)]
        for _ in range(2):
            for ids in begun:
                pulled(stack, [*ids, *prompt(862, 80)])
        stack.wait_clean()
        stack.engines.kill(PREFILL)
        stack.revive(PREFILL)
        # The decode engine holds these beginnings too: of less than half a prompt it leaves the rest to the other one.
        longer = [[*ids, *prompt(863, len(ids) + 100)] for ids in begun]
        answers = [pulled(stack, ids) for ids in longer]
        assert stack.metric(PREFILL, "vllm:prfaas_pool_hit_tokens_memory_total") == sum(map(len, begun))
        assert stack.metric(PREFILL, "vllm:prfaas_pool_loads_failed_total") == 0
        stack.wait_clean()
        for ids, answer in zip(longer, answers, strict=True):
            stack.check_likely((ids, answer.token_ids), engine=DECODE)


def pulled(stack: Stack, ids: list[int]) -> DemoAnswer:
    """The answer of the decode engine, which has read all of the prompt's KVCache by NIXL."""
    answer = stack.complete(ids, **LOGITS)
    assert (answer.route["prefill"], answer.route.get("transfer")) == (PREFILL, "nixl"), stack.explain(answer)
    return answer
