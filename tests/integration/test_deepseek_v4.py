"""DeepSeek V4: caches of five kinds, of which none calls vLLM's hook.

prfaas does not know how large its KVCache is, so its file is refused before any engine starts. The deployment here has
another model, and its engines are made to serve this one.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.engines.command import EngineCommand, vllm_command
from prfaas.serving.engines.preparation import ensure_model
from prfaas.serving.engines.running import RunningEngines

from .deepseek_v4 import write_folder
from .shimmed import with_shims
from .stack import ENGINE_ENV, TEMPLATES, Stack, prompt, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own, with Triton's interpreter"),
    pytest.mark.extended(
        "layers without the hook are in the producer's own tests, and in those of Kimi Linear"
    ),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"


class ServingAnother(Stack):
    """Its engines serve the model in a folder, whatever the deployment file says."""

    def __init__(self, path: Path, folder: Path) -> None:
        super().__init__(path)
        ensure_model(self.deployment)
        self.engines = RunningEngines(
            self.deployment,
            extra_env={**ENGINE_ENV, **with_shims("with_deepseek_v4")},
            command=lambda deployment, instance: _command(deployment, instance, folder),
            templates=TEMPLATES,
        )


def _command(deployment: Deployment, instance: Instance, folder: Path) -> EngineCommand:
    command = vllm_command(deployment, instance)
    argv = list(command.argv)
    argv[argv.index("--model") + 1] = str(folder)
    # The last word counts. With prefix caching vLLM's kernels for CPUs were not tried.
    return replace(command, argv=(*argv, "--load-format", "seeded", "--no-enable-prefix-caching"))


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes."""
    directory = tmp_path_factory.mktemp("prfaas-v4")
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=8192)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    document["model"]["tiny"] = "qwen3"
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    with ServingAnother(path, write_folder(directory / "model")) as stack:
        yield stack


def test_answers_are_those_of_a_plain_engine(v4: Stack) -> None:
    prompts = [prompt(890 + seed, tokens) for seed, tokens in enumerate((300, 700, 1000))]
    v4.check_offloaded(prompts, prefill=PREFILL, decode=DECODE)
