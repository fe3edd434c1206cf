"""Real vLLM engines that are divided among unlike numbers of ranks: a prompt computed on two is decoded on one."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.ports import free_ports

from prfaas.core.kv.hf_config import model_from_directory
from prfaas.serving.engines.preparation import ensure_model

from .stack import LOGITS, MODEL, Stack, prompt, write_deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

# The model, and the ranks of the remote prefill and of the decode engine.
UNLIKE = {
    "qwen3-2-to-1": ("qwen3", 2, 1),
    "qwen3-1-to-2": ("qwen3", 1, 2),
    "next-2-to-1": ("qwen3-next", 2, 1),
    "next-1-to-2": ("qwen3-next", 1, 2),
}


def two_ports() -> int:
    """The first of two neighbours that are free: rank 1 listens at the second."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port + 1))
            return port


@pytest.fixture(scope="module", params=UNLIKE)
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As `stack`, with other ranks at the remote prefill or the decode engine."""
    model, *sizes = UNLIKE[request.param]
    path = write_deployment(tmp_path_factory.mktemp(f"prfaas-{request.param}"), bandwidth="1 Gbit/s")
    document: dict[str, Any] = json.loads(path.read_text())
    document["model"]["tiny"] = model
    ranks = dict(zip(("east-prefill-0", "home-decode-0"), sizes, strict=True))
    for cluster in document["clusters"]:
        for instance in cluster["instances"]:
            if ranks.get(instance["name"], 1) > 1:
                instance |= {"tensor_parallel": 2, "kv_port": two_ports()}
    path.write_text(json.dumps(document))
    stack = Stack(path)
    ensure_model(stack.deployment)
    with stack:
        yield stack


def test_answers_are_those_of_a_plain_engine(unlike: Stack) -> None:
    kv_model = model_from_directory(unlike.deployment.model.path, name=MODEL)
    block_tokens = 256 if unlike.deployment.model.tiny == "qwen3-next" else 1
    answered = []
    for seed, tokens in enumerate((2600, 3075)):
        ids = prompt(970 + seed, tokens)
        answer = unlike.complete(ids, **LOGITS)
        assert (answer.route["route"], answer.route["prefill"]) == ("offload", "east-prefill-0")
        assert "fallback" not in answer.route
        # Every byte once, up to the engine's blocks.
        least = kv_model.bytes_to_move(tokens - 1)
        assert least <= int(answer.route["bytes"]) <= 1.1 * least + kv_model.bytes_to_move(block_tokens)
        answered.append((ids, answer.token_ids))
        unlike.wait_clean()
    unlike.check_likely(*answered)
    assert unlike.metric("home-decode-0", "vllm:prfaas_loads_failed_total") == 0
    assert unlike.metric("home-decode-0", "vllm:prfaas_digest_mismatches_total") == 0
    assert unlike.state()["incompatible"] == []
