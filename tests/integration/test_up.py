"""`prfaas up` with a pool and a real engine: the pool is there first, comes back, and goes with the rest."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import free_ports

from prfaas.core.deployment import load_deployment

from .stack import PATIENCE_S, call, wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended("pools that come back are in `make test` without engines"),
    pytest.mark.slow("engines and pools are started, killed and started anew"),
    pytest.mark.timeout(900),
]


def written(directory: Path) -> Path:
    ports = free_ports(5)
    instance = {
        "name": "home-0",
        "roles": ["prefill", "decode"],
        "host": "127.0.0.1",
        "http_port": ports[0],
        "kv_port": ports[1],
    }
    pool = {"memory": "64 MiB", "ssd": "128 MiB", "kv_port": ports[2]}
    document = {
        "name": "up",
        "model": {"served_name": "tiny", "tiny": "qwen3-next", "max_model_len": 8192},
        "clusters": [
            {"name": "home", "kind": "pd", "hardware": "cpu", "pool": pool, "instances": [instance]}
        ],
        "gateway": {"host": "127.0.0.1", "port": ports[3], "admin": {"port": ports[4]}},
        "control": {"silence_s": 60},
        "engine": {"kv_cache_gib": 0.25, "staging": "16 MiB"},
        "pool": {"staging": "16 MiB"},
    }
    path = directory / "up.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_pool_comes_back_and_its_engine_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path)
    deployment = load_deployment(path)
    (node,) = deployment.pools
    told = tmp_path / "told.txt"
    with told.open("w") as errors:
        up = subprocess.Popen(
            [sys.executable, "-m", "prfaas.cli.main", "up", str(path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert up.stdout is not None
        assert up.stdout.readline().startswith("ready: "), told.read_text()
        assert "does not answer" not in told.read_text()
        pool_pid = child_of(up.pid, "prfaas.serving.pool")
        body = {"model": "tiny", "prompt": list(range(256)) * 4, "max_tokens": 4, "temperature": 0}
        url = f"{deployment.gateway.url}/v1/completions"
        first = call(url, body)
        assert first.status == 200
        os.kill(pool_pid, signal.SIGKILL)
        wait_until(lambda: "pool home-pool is ready again" in told.read_text(), PATIENCE_S, "it is back")
        assert "pool home-pool has ended (signal 9; see " in told.read_text()
        again = call(url, body)
        assert again.status == 200
        assert again.body["choices"][0]["text"] == first.body["choices"][0]["text"]
        pids = [child_of(up.pid, "prfaas.serving.pool"), child_of(up.pid, "vllm")]
        up.send_signal(signal.SIGTERM)
        assert up.wait(PATIENCE_S) == 0
    finally:
        up.kill()
        up.communicate()
    wait_until(lambda: all(map(is_gone, pids)), PATIENCE_S, "no process is left")
    assert not deployment.pool_socket(node).exists()


def child_of(pid: int, words: str) -> int:
    """The child whose command line has these words; what was started again is some thread's."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if words in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "):
                return int(child)
    raise AssertionError(f"no child of {pid} runs {words}")
