"""KV by vLLM's NIXL connector inside of the PD cluster, on real vLLM: the same tokens, and ours beside it."""

import importlib.util
import json
import random
import socket
from collections.abc import Iterator

import pytest
from tests.ports import free_ports

from .stack import LOGITS, THRESHOLD_TOKENS, Stack, call, completion_body, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed"),
]

SHORT, LONG = THRESHOLD_TOKENS - 500, 3000


@pytest.fixture(scope="module")
def nixl_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As `stack`, with NIXL between the two engines of the PD cluster."""
    path = write_deployment(tmp_path_factory.mktemp("prfaas-nixl"), bandwidth="200 Mbit/s")
    deployment = json.loads(path.read_text())
    deployment["engine"]["local_transfer"] = "nixl"
    home = next(each for each in deployment["clusters"] if each["name"] == "home")
    for instance, port in zip(home["instances"], free_ports(2), strict=True):
        instance["nixl_port"] = port
    path.write_text(json.dumps(deployment))
    yield from running(path)


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
