"""A real prefill engine dies in the middle of a transfer: the decode engine goes on from what has come."""

import json
import threading
from collections.abc import Iterator

import pytest

from prfaas.core.kv.hf_config import model_from_directory

from .stack import MODEL, PATIENCE_S, DemoAnswer, Stack, prompt, running, wait_until, write_deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

TOKENS, CHUNK_TOKENS = 6000, 1024
# Of KV, 6 KiB a token: seven seconds on this link.
BANDWIDTH = "40 Mbit/s"
# Of the models with states and windows: several seconds too.
BANDWIDTHS = {"qwen3-next": "10 Mbit/s", "gpt-oss": "20 Mbit/s"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model with full attention only, one engine that prefills elsewhere and one that decodes."""
    path = write_deployment(
        tmp_path_factory.mktemp("prfaas-test-killed"), bandwidth=BANDWIDTH, max_model_len=8192
    )
    document = json.loads(path.read_text())
    document["model"]["tiny"] = "qwen3"
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path)


@pytest.fixture(scope="module", params=["qwen3-next", "gpt-oss"])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The same with a model that has linear states, or windows; its prefill engine may be taken away."""
    path = write_deployment(
        tmp_path_factory.mktemp("prfaas-test-killed"), bandwidth=BANDWIDTHS[request.param], max_model_len=8192
    )
    document = json.loads(path.read_text())
    document["model"]["tiny"] = request.param
    document["clusters"][0] |= {"preemptible": True, "kills_per_hour": 3600}
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path)


def prompt_tokens(stack: Stack, source: str) -> float:
    """By where the decode engine has their KV from."""
    return stack.metric("home-decode-0", "vllm:prompt_tokens_by_source_total", f'source="{source}"')


def test_what_had_come_is_loaded_and_the_rest_computed(dense: Stack) -> None:
    kv_model = model_from_directory(dense.deployment.model.path, name=MODEL)
    ids = prompt(30, TOKENS)
    plain = dense.plain(ids, engine="home-decode-0")
    computed, loaded = (prompt_tokens(dense, source) for source in ("local_compute", "external_kv_transfer"))
    answers: list[DemoAnswer] = []
    client = threading.Thread(target=lambda: answers.append(dense.complete(ids)))
    client.start()
    third_bytes = kv_model.bytes_to_move(TOKENS - 1, 0) // 3
    wait_until(
        lambda: dense.kv_stats("home-decode-0")["received_bytes"] > third_bytes,
        PATIENCE_S,
        "a third of the KV has come",
    )
    dense.engines.kill("east-prefill-0")
    client.join(PATIENCE_S)
    assert not client.is_alive()
    (answer,) = answers
    dense.check_answer(answer, plain)
    assert (answer.route["prefill"], answer.route["reason"]) == ("home-decode-0", "kept")
    assert "fallback" in answer.route
    # When a third of all has come, so have all layers of the first chunk.
    kept_tokens = dense.metric("gateway", "prfaas_gateway_kept_tokens_total")
    assert CHUNK_TOKENS <= kept_tokens < TOKENS
    assert prompt_tokens(dense, "external_kv_transfer") - loaded == kept_tokens
    assert prompt_tokens(dense, "local_compute") - computed == TOKENS - kept_tokens
    assert dense.metric("home-decode-0", "vllm:prfaas_loads_resumed_total") == 1
    assert dense.metric("home-decode-0", "vllm:prfaas_digest_mismatches_total") == 0


def test_with_states_or_windows_it_goes_on_from_a_checkpoint(cut: Stack) -> None:
    ids = prompt(30, TOKENS)
    plain = cut.plain(ids, engine="home-decode-0")
    computed, loaded = (prompt_tokens(cut, source) for source in ("local_compute", "external_kv_transfer"))
    answers: list[DemoAnswer] = []
    client = threading.Thread(target=lambda: answers.append(cut.complete(ids)))
    client.start()
    half_bytes = model_from_directory(cut.deployment.model.path, name=MODEL).bytes_to_move(TOKENS - 1, 0) // 2

    def is_half_way() -> bool:
        stats = cut.kv_stats("home-decode-0")
        return bool(stats["checkpoints"] and stats["received_bytes"] > half_bytes)

    wait_until(is_half_way, PATIENCE_S, "half of the KV and a checkpoint have come")
    cut.engines.kill("east-prefill-0")
    client.join(PATIENCE_S)
    assert not client.is_alive()
    (answer,) = answers
    cut.check_answer(answer, plain)
    assert (answer.route["prefill"], answer.route["reason"]) == ("home-decode-0", "kept")
    kept_tokens = cut.metric("gateway", "prfaas_gateway_kept_tokens_total")
    assert CHUNK_TOKENS <= kept_tokens < TOKENS
    assert kept_tokens % 128 == 0
    assert prompt_tokens(cut, "external_kv_transfer") - loaded == kept_tokens
    assert prompt_tokens(cut, "local_compute") - computed == TOKENS - kept_tokens
    assert cut.metric("home-decode-0", "vllm:prfaas_loads_resumed_total") == 1
    assert cut.metric("home-decode-0", "vllm:prfaas_digest_mismatches_total") == 0
    stats = cut.kv_stats("home-decode-0")
    assert stats["staging_used_blocks"] == 0
