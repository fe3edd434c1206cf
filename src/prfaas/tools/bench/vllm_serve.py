"""`vllm bench serve` against a deployment's gateway."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prfaas.core.deployment import Deployment

_RESULT = "result.json"
_STDERR = 2
# What `vllm bench serve` runs. The command itself looks for a package named vllm, which builds for CPUs don't have.
_PROGRAM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser("vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
"""


class LoadTestError(Exception):
    """vLLM's tool failed; its own message is on stderr."""


def load_test_command(deployment: Deployment, options: Sequence[str], folder: Path) -> list[str]:
    """The command line.

    Args:
        deployment: Its gateway is asked, for its model, with its tokenizer.
        options: The user's, after ours, so that they win.
        folder: Where the tool is to write its result.
    """
    return [
        *(sys.executable, "-c", _PROGRAM),
        *("--base-url", deployment.gateway.url),
        *("--model", deployment.model.served_name),
        *("--tokenizer", str(deployment.model.path)),
        *options,
        *("--save-result", "--result-dir", str(folder), "--result-filename", _RESULT),
    ]


def run_load_test(deployment: Deployment, options: Sequence[str]) -> dict[str, Any]:
    """Run it to its end, and give what it found. Its own text goes to stderr.

    Raises:
        LoadTestError: vLLM isn't there, the tool failed, or wrote no result.
    """
    if importlib.util.find_spec("vllm") is None:
        raise LoadTestError(
            "vLLM is not installed in this environment, and `prfaas bench` runs its load test"
        )
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as name:
        folder = Path(name)
        command = load_test_command(deployment, options, folder)
        done = subprocess.run(command, stdout=_STDERR, check=False)
        if done.returncode != 0:
            raise LoadTestError(
                f"`vllm bench serve` ended with exit code {done.returncode}; it says why above"
            )
        try:
            result = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoadTestError(f"`vllm bench serve` wrote no result ({error})") from error
    if not isinstance(result, dict):
        raise LoadTestError("`vllm bench serve` wrote a result that is no JSON object")
    return result
