"""`prfaas demo` for the kinds of KVCache that the other tests don't serve end to end."""

import json
import subprocess
import sys

import pytest

from .stack import write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("a whole demo: four engines"),
    pytest.mark.timeout(3600),
]


OTHERS = pytest.mark.extended("each kind of cache is in `make test` without the demo")


@pytest.mark.shows(model="{model}")
@pytest.mark.parametrize(
    "model",
    ["qwen3-next", *(pytest.param(model, marks=OTHERS) for model in ("gpt-oss", "mimo-v2-flash", "qwen3"))],
)
def test_the_demo_succeeds_with_every_kind_of_cache(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The folder's name is the deployment's, and part of the path of a pool's socket, which must be short.
    directory = tmp_path_factory.mktemp("demo")
    deployment = write_deployment(directory, bandwidth="200 Mbit/s", staging="256 MiB", pools=True)
    result = directory / "demo.json"
    demo = subprocess.run(
        [
            sys.executable,
            "-m",
            "prfaas.cli.main",
            "demo",
            str(deployment),
            "--model",
            model,
            "--act",
            "exactness",
            "--json",
            str(result),
        ],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    outcome = json.loads(result.read_text())
    assert outcome["all_equal"]
    assert outcome["all_bytes_explained"]
    assert {request["route"] for request in outcome["requests"]} == {"local", "offload"}
    # Whatever the machine and the model: the line is chosen so that long prompts are worth sending.
    assert all(
        (request["route"] == "offload") == (request["prompt_tokens"] > 2000)
        for request in outcome["requests"]
    )
    assert outcome["line"]["bandwidth_bits_per_s"] > 0
    assert all(request["answer"] for request in outcome["requests"])
    assert outcome["burst"] is None
