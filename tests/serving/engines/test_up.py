"""`prfaas up` with stand-in engines as real processes: what ends is started again, a signal drains, nothing stays."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from synthetic_world import MODEL, random_ids, write_deployment

from prfaas.core.deployment import Deployment

LIMIT_S = 60.0


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return write_deployment(tmp_path)


class Up:
    """A running `prfaas up`."""

    def __init__(self, deployment: Deployment, process: "subprocess.Popen[str]", errors: Path) -> None:
        self.deployment = deployment
        self.process = process
        self._errors = errors

    def told(self) -> str:
        return self._errors.read_text()

    def await_true(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)

    def children(self) -> dict[int, str]:
        """Pid → command line, of the processes that it started itself."""
        pid = self.process.pid
        found = {}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        return found

    def engine_pids(self) -> list[int]:
        return [pid for pid, command in self.children().items() if "engines.synthetic" in command]

    def post(self, **fields: object) -> http.client.HTTPResponse:
        gateway = self.deployment.gateway
        connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=LIMIT_S)
        body = {"model": MODEL, "prompt": random_ids(300, 1), "max_tokens": 4, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def cached_tokens(self, prompt: list[int]) -> int:
        usage = json.load(self.post(prompt=prompt))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def running_up(deployment: Deployment, *options: str) -> Iterator[Up]:
    home = deployment.path.parent
    errors = home / "errors.txt"
    command = [sys.executable, "-m", "prfaas.cli.main", "up", str(deployment.path), *options]
    with errors.open("w") as told:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env={**os.environ, "PRFAAS_HOME": str(home)},
        )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("ready: "), errors.read_text()
        yield Up(deployment, process, errors)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_serve(deployment: Deployment, most_descriptors: int) -> Iterator[Up]:
    """`prfaas serve` without engines, in a process that may have only so many file descriptors."""
    home = deployment.path.parent
    errors = home / "errors.txt"
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({most_descriptors},) * 2)\n"
        "from prfaas.cli.main import main; main()"
    )
    with errors.open("w") as told:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", str(deployment.path)],
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env={**os.environ, "PRFAAS_HOME": str(home)},
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready: "), errors.read_text()
        yield Up(deployment, process, errors)
    finally:
        process.kill()
        process.communicate()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow("starts a whole deployment, and waits until it has ended")
def test_a_gateway_does_not_run_out_of_descriptors(deployment: Deployment) -> None:
    address = (deployment.gateway.host, deployment.gateway.port)
    # 64 and 8 per engine are reserved, which leaves 34.
    with running_serve(deployment, 154) as serve, ExitStack() as clients:
        assert "file descriptors: 154 at most" in serve.told()
        assert b"does not answer" in serve.post().read()
        for _ in range(40):
            # Clients whose bodies do not come are sent away as idle ones are: they keep nobody out.
            client = clients.enter_context(socket.create_connection(address))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)
        assert b"does not answer" in serve.post().read()
        # More than it can have: it must neither spin nor end.
        for _ in range(160):
            with suppress(OSError):
                clients.enter_context(socket.create_connection(address))
        before_s = cpu_s(serve.process.pid)
        time.sleep(2)
        assert cpu_s(serve.process.pid) - before_s < 1
        clients.close()
        serve.await_true(lambda: b"does not answer" in serve.post().read())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow("starts a whole deployment, and waits until it has ended")
def test_engines_that_are_killed_come_back_and_serve(deployment: Deployment) -> None:
    with running_up(deployment, "--restarts", "2") as up:
        assert "open files: " in up.told()
        (engines,) = up.engine_pids()
        assert up.post().status == 200
        cached = [up.cached_tokens(random_ids(15_000, 3)) for _ in range(2)]
        assert cached[0] == 0 and cached[1] > 14_000
        os.kill(engines, signal.SIGKILL)
        up.await_true(lambda: f"engine {deployment.instances[0].name} is ready again" in up.told())
        assert "(signal 9; see " in up.told() and "restart 1 of 2 in 1 s" in up.told()
        assert up.engine_pids() != [engines]
        up.await_true(lambda: up.post().status == 200)
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(LIMIT_S) == 0
        assert is_gone(engines)


@pytest.mark.slow("starts a whole deployment, and waits until it has ended")
def test_sigterm_lets_streams_end_and_a_second_one_does_not(deployment: Deployment) -> None:
    with running_up(deployment, "--drain-timeout", "50") as up:
        stream = up.post(stream=True, max_tokens=400)
        assert stream.status == 200 and stream.readline().startswith(b"data: ")
        up.process.send_signal(signal.SIGTERM)
        up.await_true(lambda: "draining: 1 request is open" in up.told())
        refused = up.post()
        assert (refused.status, refused.getheader("Retry-After")) == (503, "5")
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert up.process.wait(LIMIT_S) == 0
    with running_up(deployment, "--drain-timeout", "50") as up:
        stream = up.post(stream=True, max_tokens=15_000)
        stream.readline()
        up.process.send_signal(signal.SIGTERM)
        up.await_true(lambda: "draining: 1 request is open" in up.told())
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(LIMIT_S) == 0
        with pytest.raises(http.client.IncompleteRead):
            stream.read()


@pytest.mark.slow("starts a whole deployment, and waits until it has ended")
def test_what_does_not_end_in_time_is_cut(deployment: Deployment) -> None:
    with running_up(deployment, "--drain-timeout", "0.3") as up:
        stream = up.post(stream=True, max_tokens=15_000)
        stream.readline()
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(LIMIT_S) == 0
        assert "requests cut after 0.3 s: 1" in up.told()


@pytest.mark.slow("starts a whole deployment, and waits until it has ended")
def test_nothing_is_left_when_up_is_killed(deployment: Deployment) -> None:
    with running_up(deployment) as up:
        pids = list(up.children())
        assert len(pids) == 2
        up.process.kill()
        up.process.wait(LIMIT_S)
        up.await_true(lambda: all(map(is_gone, pids)))
