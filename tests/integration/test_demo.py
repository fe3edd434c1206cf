"""`prfaas demo` for the kinds of KVCache that the other tests don't serve end to end."""

import json
import subprocess
import sys

import pytest

from .stack import write_deployment

# Of models with sliding windows everything crosses: engines count no prefix without its windows as held.
CAN_SKIP = {"qwen3-next", "qwen3"}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("a whole demo: four engines, with --restart all of them once more"),
    pytest.mark.timeout(3600),
]


RESTARTED = pytest.mark.extended("engines that start anew before a pool are in `make test` without the demo")


@pytest.mark.shows(model="{model}", pool="{restarts}")
@pytest.mark.parametrize(
    ("model", "restarts"),
    [("qwen3-next", False), pytest.param("gpt-oss", True, marks=RESTARTED)],
)
def test_the_demo_succeeds(model: str, restarts: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
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
            *(["--restart"] if restarts else []),
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
    second = outcome["second_act"]
    if not restarts:
        assert second is None
        return
    assert second["all_equal"]
    assert second["all_bytes_explained"]
    if model in CAN_SKIP:
        # What is left are states, tails of prompts, and prompts that no boundary ends in.
        assert second["crossed_bytes"] < second["first_crossed_bytes"] / 4
    for request in second["requests"]:
        assert request["prompt_tokens"] < 2000 or request["pool_tokens"] > request["prompt_tokens"] / 4
