"""Models whose attention modules do not call vLLM's hook: their KV leaves at the end of each step."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .shimmed import with_shims
from .stack import Stack, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own for each model"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"
EXTENDED = pytest.mark.extended("what leaves at the end of a step is chosen by layers, whatever the model")
MODELS = [
    "qwen3-next",
    *(pytest.param(name, marks=EXTENDED) for name in ("qwen3", "gpt-oss", "mimo-v2-flash")),
]


@pytest.fixture(scope="module", params=MODELS)
def hookless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes."""
    path = write_deployment(tmp_path_factory.mktemp(f"prfaas-hookless-{request.param}"), bandwidth="1 Gbit/s")
    document: dict[str, Any] = json.loads(path.read_text())
    document["model"]["tiny"] = request.param
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("without_hook"))


@pytest.mark.shows(model="{hookless}", what="vLLM's hook off")
def test_answers_are_those_of_a_plain_engine(hookless: Stack) -> None:
    # Of three chunks, and of five with a last one that ends at a block's end.
    prompts = [prompt(800 + seed, tokens) for seed, tokens in enumerate((2600, 3075, 4097))]
    hookless.check_offloaded(prompts, prefill=PREFILL, decode=DECODE)
