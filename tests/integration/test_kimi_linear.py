"""The paper's architecture, Kimi Delta Attention and MLA: its classes for ROCm call vLLM's hook, NVIDIA's do not."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .kimi_linear import write_checkpoint
from .shimmed import with_shims
from .stack import Stack, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own, with Triton's interpreter"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"
HOOK_OFF = pytest.param(
    "off",
    marks=pytest.mark.extended("what leaves at the end of a step is chosen by layers, whatever the model"),
)


@pytest.fixture(scope="module", params=["on", HOOK_OFF])
def kimi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes; vLLM's hook is on or off."""
    directory = tmp_path_factory.mktemp(f"prfaas-kimi-{request.param}")
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=1024)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    document["model"] |= {"path": str(write_checkpoint(directory / "model"))}
    del document["model"]["tiny"]
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    shims = ["with_kimi_linear", *(["without_hook"] if request.param == "off" else [])]
    yield from running(path, with_shims(*shims))


def test_answers_are_those_of_a_plain_engine(kimi: Stack) -> None:
    # Of one block, less and more.
    prompts = [prompt(870 + seed, tokens) for seed, tokens in enumerate((41, 60, 300))]
    kimi.check_offloaded(prompts, prefill=PREFILL, decode=DECODE)
