"""DeepSeek V4: caches of five kinds, of which none calls vLLM's hook, in pages of four sizes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.core.kv.told import read_told_layers
from prfaas.serving.engines.preparation import _has_avx_512

from .deepseek_v4 import write_folder
from .shimmed import with_shims
from .stack import Stack, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own, with Triton's interpreter"),
    pytest.mark.extended(
        "layers without the hook are in the producer's own tests, and in those of Kimi Linear"
    ),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes."""
    if not _has_avx_512():
        pytest.skip("vLLM packs experts on CPUs with AVX-512 alone")
    directory = tmp_path_factory.mktemp("prfaas-v4")
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=8192)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    document["model"] |= {"path": str(write_folder(directory / "model"))}
    del document["model"]["tiny"]
    # With prefix caching vLLM's kernels for CPUs were not tried; the last word counts.
    document["engine"]["extra_args"] += ["--load-format", "seeded", "--no-enable-prefix-caching"]
    document["engine"]["kv_cache_gib"] = 0.5
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("with_deepseek_v4"))


@pytest.mark.shows(model="deepseek-v4", interpreted=True)
def test_answers_are_those_of_a_plain_engine(v4: Stack) -> None:
    prompts = [prompt(890 + seed, tokens) for seed, tokens in enumerate((300, 700, 1000))]
    v4.check_offloaded(prompts, prefill=PREFILL, decode=DECODE)


def test_bytes_are_those_of_the_reader_and_what_the_engine_tells(v4: Stack) -> None:
    ids = prompt(900, 800)
    answer = v4.complete(ids)
    assert answer.route["prefill"] == PREFILL and "fallback" not in answer.route, v4.explain(answer)
    told = read_told_layers(v4.kv_stats(DECODE)["kv_layers"], "told", 1)
    moved = int(answer.route["bytes"])
    assert moved == v4.deployment.model.kv_model().bytes_to_move(len(ids) - 1, 0, 256)
    assert moved == told.bytes_to_move(len(ids) - 1, 0)
