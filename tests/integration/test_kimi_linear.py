"""The paper's architecture, Kimi Delta Attention and MLA: its classes for ROCm call vLLM's hook, NVIDIA's do not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import neighbours

from .kimi_linear import write_checkpoint
from .shimmed import with_shims
from .stack import Stack, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own, with Triton's interpreter"),
    pytest.mark.timeout(1800),
]

BLOCK_TOKENS = 128
PREFILL, DECODE = "east-prefill-0", "home-decode-0"
HOOK_OFF = pytest.param(
    "off",
    marks=pytest.mark.extended("what leaves at the end of a step is chosen by layers, whatever the model"),
)


# Of one block, less and more.
PROMPTS = (41, 60, 300)


def serving(directory: Path, *, hook: bool = True, ranks: tuple[int, int] = (1, 1)) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes, of so many tensor-parallel ranks."""
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=1024)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    if " amx_tile" not in Path("/proc/cpuinfo").read_text():
        # vLLM caches no prefixes with MLA then, and refuses the block size that it had chosen for them.
        document["engine"]["extra_args"] += ["--no-enable-prefix-caching"]
        document["engine"]["prefix_cache_retention_tokens"] = 1024
    # Of the experts of several ranks, vLLM's class for ROCm takes packed weights alone.
    experts = max(ranks) == 1
    document["model"] |= {"path": str(write_checkpoint(directory / "model", experts=experts))}
    del document["model"]["tiny"]
    document["clusters"][1]["instances"].pop(0)
    for cluster, count in zip(document["clusters"], ranks, strict=True):
        if count > 1:
            cluster["instances"][0] |= {"tensor_parallel": count, "kv_port": neighbours(count)}
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("with_kimi_linear", *([] if hook else ["without_hook"])))


@pytest.fixture(scope="module", params=["on", HOOK_OFF])
def kimi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """vLLM's hook is on or off."""
    directory = tmp_path_factory.mktemp(f"prfaas-kimi-{request.param}")
    yield from serving(directory, hook=request.param == "on")


@pytest.mark.shows(model="kimi-linear", interpreted=True, what="vLLM's hook {kimi}")
def test_answers_are_those_of_a_plain_engine(kimi: Stack) -> None:
    prompts = [prompt(870 + seed, tokens) for seed, tokens in enumerate(PROMPTS)]
    kimi.check_offloaded(prompts, prefill=PREFILL, decode=DECODE)


@pytest.fixture(scope="module", params=[(2, 2), (1, 2), (2, 1)], ids="{0[0]}-to-{0[1]}".format)
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from serving(tmp_path_factory.mktemp("prfaas-ranked-kimi"), ranks=request.param)


@pytest.mark.shows(model="kimi-linear", prefill="TP {ranked[0]}", decode="TP {ranked[1]}", interpreted=True)
@pytest.mark.extended("which rank sends a latent is decided in units")
def test_latents_of_several_ranks_cross_once(ranked: Stack) -> None:
    """All ranks keep the same of MLA; states are divided among them."""
    model = ranked.deployment.model.kv_model()
    prompts = [prompt(880 + seed, tokens) for seed, tokens in enumerate(PROMPTS)]
    for ids in prompts:
        answer = ranked.complete(ids)
        assert answer.route["prefill"] == PREFILL and "fallback" not in answer.route, ranked.explain(answer)
        assert int(answer.route["bytes"]) == model.bytes_to_move(len(ids) - 1, 0, BLOCK_TOKENS)
        ranked.wait_clean()
        ranked.check_likely((ids, answer.token_ids), engine=DECODE)
    assert ranked.metric(DECODE, "vllm:prfaas_loads_failed_total") == 0
