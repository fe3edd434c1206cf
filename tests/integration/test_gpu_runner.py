"""The model runner that vLLM takes on GPUs, with its Triton kernels interpreted: the whole chain behind it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .shimmed import with_shims
from .stack import Stack, prompt, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own for each model, whose kernels run in numpy"),
    pytest.mark.extended("the connector is the same behind both runners, and `make test` has the other one"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"


@pytest.fixture(scope="module", params=["qwen3", "qwen3-next", "gpt-oss", "mimo-v2-flash"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes."""
    path = write_deployment(tmp_path_factory.mktemp(f"prfaas-runner-{request.param}"), bandwidth="1 Gbit/s")
    document: dict[str, Any] = json.loads(path.read_text())
    document["model"]["tiny"] = request.param
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("with_triton", "with_async_scheduling"))


@pytest.mark.shows(model="{chain}", interpreted=True, what="model runner of GPUs")
def test_answers_are_those_of_a_plain_engine(chain: Stack) -> None:
    # Of three chunks, and of five with a last one that ends at a block's end.
    prompts = [prompt(870 + seed, tokens) for seed, tokens in enumerate((2600, 3075, 4097))]
    chain.check_offloaded(prompts, prefill=PREFILL, decode=DECODE)
    for name in (PREFILL, DECODE):
        log = chain.engines.log_path(name).read_text()
        assert "Using V2 Model Runner" in log and "schedules a step ahead" in log
