"""Engines as child processes, with a small HTTP server in vLLM's place: what ends when, and what the user hears."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ports import free_ports

from prfaas.core.deployment import Deployment, Instance, load_deployment
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.child_processes import StartProgress
from prfaas.serving.engines.command import EngineCommand
from prfaas.serving.engines.preparation import port_problem
from prfaas.serving.engines.running import RunningEngines

# Answers /health, and has a child of its own as vLLM has; ends on SIGTERM unless told to be stubborn.
SERVER = """
import http.server, os, signal, subprocess, sys
if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

CRASH = "import sys; print('loading'); print('out of luck', file=sys.stderr); sys.exit(3)"


def serving(deployment: Deployment, instance: Instance) -> EngineCommand:
    return EngineCommand((sys.executable, "-c", SERVER, str(instance.http_port)), {})


def crashing(deployment: Deployment, instance: Instance) -> EngineCommand:
    if instance.has_role("decode"):
        return EngineCommand((sys.executable, "-c", CRASH), {})
    return serving(deployment, instance)


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    text = (Path(__file__).parents[3] / "examples" / "local.yaml").read_text()
    for old, new in zip(("18100", "18101", "18102", "18200", "18201", "18202"), free_ports(6), strict=True):
        text = text.replace(old, str(new))
    (tmp_path / "local.yaml").write_text(text)
    return load_deployment(tmp_path / "local.yaml", state_dir=tmp_path / "state")


@pytest.fixture
def started(deployment: Deployment) -> Iterator[Callable[..., RunningEngines]]:
    made: list[RunningEngines] = []

    def start(**options: object) -> RunningEngines:
        engines = RunningEngines(deployment, **({"command": serving} | options))  # type: ignore[arg-type]
        made.append(engines)
        engines.start()
        return engines

    yield start
    for engines in made:
        engines.stop(timeout_s=1)


def is_gone(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def child_of(engines: RunningEngines, name: str) -> int:
    return int(engines._group(name).log.tail(20).split()[1])


def test_engines_run_between_entry_and_exit(deployment: Deployment) -> None:
    steps: list[StartProgress] = []
    with RunningEngines(deployment, command=serving) as engines:
        engines.wait_ready(120, on_progress=steps.append)
        pids = [engines.pid(name) for name in engines.names]
        pids += [child_of(engines, name) for name in engines.names]
        assert all(engines.is_running(name) for name in engines.names)
        assert deployment.security.key_file.stat().st_mode & 0o777 == 0o600
    assert {step.name for step in steps if step.state == "ready"} == set(engines.names)
    assert all(is_gone(pid) for pid in pids)
    engines.stop()


def test_some_names_only(started: Callable[..., RunningEngines]) -> None:
    engines = started(names=["home-decode-0"])
    engines.wait_ready(120)
    assert not engines.is_running("east-prefill-0")
    with pytest.raises(EngineError, match="east-prefill-0 has not been started"):
        engines.pid("east-prefill-0")


def test_a_killed_engine_takes_its_children_along_and_can_come_back(
    started: Callable[..., RunningEngines],
) -> None:
    engines = started()
    engines.wait_ready(120)
    name = "east-prefill-0"
    pid, child = engines.pid(name), child_of(engines, name)
    engines.kill(name)
    assert is_gone(pid)
    assert is_gone(child)
    assert not engines.is_running(name)
    assert engines.exit_status(name) == -signal.SIGKILL
    assert engines.is_running("home-decode-0")
    engines.start(name)
    engines.wait_ready(120)
    assert engines.is_running(name)
    with pytest.raises(EngineError, match="runs already"):
        engines.start(name)


def test_an_engine_that_dies_is_named_with_the_end_of_its_log(started: Callable[..., RunningEngines]) -> None:
    engines = started(command=crashing)
    with pytest.raises(EngineError) as raised:
        engines.wait_ready(120)
    assert "engine home-decode-0 ended with exit code 3 before it was ready" in str(raised.value)
    assert "out of luck" in str(raised.value).splitlines()[1:]


def test_waiting_is_bounded(started: Callable[..., RunningEngines], deployment: Deployment) -> None:
    engines = started(
        command=lambda d, i: EngineCommand((sys.executable, "-c", "import time; time.sleep(600)"), {})
    )
    with pytest.raises(EngineError) as raised:
        engines.wait_ready(0.4)
    message = str(raised.value)
    assert "3 of 3 engines of deployment local to start, after 0.4 s" in message
    for name in engines.names:
        (line,) = (line for line in message.splitlines() if line.startswith(f"engine {name} "))
        assert f"does not answer {deployment.instance(name).url}/health" in line
        assert f"its log is {engines.log_path(name)} (empty so far)" in line


def test_a_stubborn_engine_is_killed_after_a_while(started: Callable[..., RunningEngines]) -> None:
    engines = started(names=["home-decode-0"], extra_env={"STUBBORN": "1"})
    engines.wait_ready(120)
    pid, child = engines.pid("home-decode-0"), child_of(engines, "home-decode-0")
    begin = time.monotonic()
    engines.stop(timeout_s=0.5)
    assert time.monotonic() - begin > 0.4
    assert is_gone(pid)
    assert is_gone(child)


def test_a_taken_port_is_named_before_anything_starts(deployment: Deployment) -> None:
    instance = deployment.instance("home-prefill-0")
    with socket.create_server(("127.0.0.1", instance.kv_port)):
        engines = RunningEngines(deployment, command=serving)
        with pytest.raises(
            EngineError, match=f"engine home-prefill-0 can't start: .*{instance.kv_port} is already in use"
        ):
            engines.start()
    assert not engines.is_running("east-prefill-0")


def test_engines_end_with_a_killed_parent(deployment: Deployment) -> None:
    parent_code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_running_engines import serving, child_of
from prfaas.core.deployment import load_deployment
from prfaas.serving.engines.running import RunningEngines
deployment = load_deployment({str(deployment.path)!r}, state_dir=Path({str(deployment.state_dir)!r}))
engines = RunningEngines(deployment, command=serving)
engines.start()
engines.wait_ready(120)
for name in engines.names:
    print(engines.pid(name), child_of(engines, name), flush=True)
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids: list[int] = []
        for line in parent.stdout:
            if line.strip() == "ready":
                break
            pids += [int(pid) for pid in line.split()]
        assert len(pids) == 6
        os.kill(parent.pid, signal.SIGKILL)
        assert all(is_gone(pid, within_s=120) for pid in pids)


def test_port_problems() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_problem("127.0.0.1", port) == f"127.0.0.1:{port} is already in use"
    assert port_problem("127.0.0.1", port) is None
    assert port_problem("192.0.2.1", port) == "192.0.2.1 is not an address of this machine"
