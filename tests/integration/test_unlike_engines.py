"""Real vLLM engines that keep the same KV in blocks of other sizes: the answers are those of equal engines."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.core.kv.hf_config import model_from_directory
from prfaas.serving.engines.preparation import ensure_model

from .stack import LOGITS, MODEL, Stack, prompt, write_deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

# Tokens of a block at the prefill engine, and at the decode engine, which has vLLM's own.
UNLIKE = {"gpt-oss": (32, 128)}


@pytest.fixture(scope="module", params=UNLIKE)
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As `stack`, with other blocks at the remote prefill."""
    model: str = request.param
    block_tokens, _ = UNLIKE[model]
    path = write_deployment(tmp_path_factory.mktemp(f"prfaas-unlike-{model}"), bandwidth="1 Gbit/s")
    document: dict[str, Any] = json.loads(path.read_text())
    document["model"]["tiny"] = model
    (east,) = (cluster for cluster in document["clusters"] if cluster["kind"] == "prfaas")
    retained = ["--prefix-cache-retention-interval", str(max(256, block_tokens))]
    east["extra_args"] = ["--block-size", str(block_tokens), *retained]
    path.write_text(json.dumps(document))
    stack = Stack(path)
    ensure_model(stack.deployment)
    with stack:
        yield stack


def test_answers_and_bytes_are_those_of_equal_engines(unlike: Stack) -> None:
    kv_model = model_from_directory(unlike.deployment.model.path, name=MODEL)
    ours, theirs = UNLIKE[unlike.deployment.model.tiny or ""]
    wire_tokens = min(ours, theirs)
    # Ends inside blocks of both, of one, and of none.
    for seed, tokens in enumerate((2600, 3075, 4097)):
        ids = prompt(900 + seed, tokens)
        answer = unlike.complete(ids, **LOGITS)
        assert (answer.route["route"], answer.route["prefill"]) == ("offload", "east-prefill-0")
        assert "fallback" not in answer.route
        assert int(answer.route["bytes"]) == kv_model.bytes_to_move(tokens - 1, 0, block_tokens=wire_tokens)
        unlike.check_answer(answer, unlike.reference(ids, engine="home-prefill-0"))
        unlike.wait_clean()
    assert unlike.metric("home-decode-0", "vllm:prfaas_loads_completed_total") == 3
    assert unlike.metric("home-decode-0", "vllm:prfaas_digest_mismatches_total") == 0
    assert unlike.state()["incompatible"] == []
