"""A running `prfaas up` takes its file on again under load: engines come and go, and nobody else is restarted."""

import http.client
import io
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from synthetic_world import MODEL, random_ids, write_deployment
from test_up import Up, running_up
from tests.ports import free_ports

from prfaas.cli.main import main
from prfaas.core.deployment import Deployment, Instance, load_deployment


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return write_deployment(tmp_path)


class Load:
    """Streams requests of two lengths, some at a time, until it is ended; keeps what went wrong."""

    def __init__(self, deployment: Deployment, threads: int = 4) -> None:
        self._gateway = deployment.gateway
        self._ending = threading.Event()
        self.answered = 0
        self.failures: list[str] = []
        self.requests: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        number = seed
        while not self._ending.is_set():
            number += 4
            try:
                self._one(number)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failures.append(repr(error))

    def _one(self, number: int) -> None:
        connection = http.client.HTTPConnection(self._gateway.host, self._gateway.port, timeout=60)
        prompt = random_ids(3000 if number % 3 == 0 else 300, number)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        self.requests.append(str(response.getheader("X-Request-Id")))
        if response.status != 200 or "[DONE]" not in text or '"error"' in text:
            self.failures.append(f"{response.status}: {text[-300:]}")
        self.answered += 1

    def more(self, count: int = 8) -> None:
        """Return when so many more have been answered."""
        until, deadline = self.answered + count, time.monotonic() + 60
        while self.answered < until:
            assert time.monotonic() < deadline, self.failures
            time.sleep(0.02)

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()


@dataclass
class Said:
    """What a command has said, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def prfaas(up: Up, *words: str) -> Said:
    """A command, without a process of its own: to start it takes longer than what it does."""
    with (
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(io.StringIO()) as stdout,
        redirect_stderr(io.StringIO()) as stderr,
    ):
        patched.setenv("PRFAAS_HOME", str(up.deployment.path.parent))
        patched.setattr(sys, "argv", ["prfaas", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return Said(int(ended.value.code or 0), stdout.getvalue(), stderr.getvalue())


def engine_pids(up: Up) -> set[int]:
    """Of all engines that `prfaas up` has started, in whichever of its threads."""
    found = set()
    for children in Path(f"/proc/{up.process.pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if b"engines.synthetic" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found


def page(up: Up, path: str) -> dict[str, Any]:
    admin = up.deployment.gateway.admin
    connection = http.client.HTTPConnection(admin.host, admin.port, timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    found: dict[str, Any] = json.load(response)
    assert response.status == 200, found
    return found


def state(up: Up) -> dict[str, Any]:
    return page(up, "/prfaas/state")


def instances(up: Up) -> dict[str, dict[str, Any]]:
    return {
        name: instance
        for cluster in state(up)["clusters"].values()
        for name, instance in cluster["instances"].items()
    }


def edit(up: Up, change: Callable[[dict[str, Any]], object]) -> str:
    """Change the file; returns what it was."""
    before = up.deployment.path.read_text()
    document = json.loads(before)
    change(document)
    up.deployment.path.write_text(json.dumps(document))
    return before


def home(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["clusters"][1]["instances"]
    return found


def add_home_2(document: dict[str, Any]) -> None:
    http_port, kv_port = free_ports(2)
    home(document).append(
        {
            "name": "home-2",
            "roles": ["decode"],
            "host": "127.0.0.1",
            "http_port": http_port,
            "kv_port": kv_port,
        }
    )


@pytest.mark.slow("starts a whole deployment, which changes under load")
def test_engines_come_and_go_under_load_and_nobody_is_restarted(deployment: Deployment) -> None:
    with running_up(deployment) as up:
        load = Load(deployment)
        try:
            load.more()
            pids = engine_pids(up)
            # 1. An engine joins: it is started, and gets work once it answers.
            edit(up, add_home_2)
            said = prfaas(up, "reload", str(deployment.path))
            assert said.returncode == 0, said.stderr
            assert said.stdout.startswith("instance home-2 joins home (decode, 127.0.0.1:")
            up.await_true(lambda: instances(up)["home-2"]["healthy"])
            up.await_true(lambda: instances(up)["home-2"]["blocks"] > 0)
            # Everybody knows it, without a restart.
            up.await_true(lambda: state(up)["applied"]["rosters_behind"] == [])
            assert pids < engine_pids(up)

            # 2. A link and a policy's parameter change.
            def widen(document: dict[str, Any]) -> None:
                document["links"][0]["bandwidth"] = "2 Gbit/s"
                document["routing"] = {"policy": "paper", "threshold_tokens": 1000}

            edit(up, widen)
            checked = prfaas(up, "reload", str(deployment.path), "--check", "--json")
            assert checked.returncode == 0 and not json.loads(checked.stdout)["applied"]
            assert state(up)["links"]["far->home"]["configured_bits_per_s"] == 4e9
            assert prfaas(up, "reload", str(deployment.path)).returncode == 0
            told = state(up)
            assert told["links"]["far->home"]["configured_bits_per_s"] == 2e9
            assert told["policy"] == "paper"
            # It is where the search goes on from.
            assert (1000, "configured") in [
                (entry["tokens"], entry["reason"]) for entry in told["thresholds"]["history"]
            ]
            load.more()
            # 3. An engine leaves: by a signal this time.
            edit(up, lambda document: home(document).pop(1))
            up.process.send_signal(signal.SIGHUP)
            up.await_true(lambda: "reloaded: instance home-0 leaves home" in up.told())
            up.await_true(lambda: "home-0" not in instances(up))
            up.await_true(lambda: "engine home-0 has left the deployment file and was ended" in up.told())
            load.more()
            up.await_true(lambda: state(up)["applied"]["rosters_behind"] == [])
            assert pids <= engine_pids(up), "an engine was restarted"
        finally:
            load.end()
        assert load.failures == []
        # What went to an engine that has left can still be explained.
        explained = [page(up, f"/prfaas/requests/{request}") for request in load.requests]
        assert any(attempt["decode"] == "home-0" for told in explained for attempt in told["attempts"])
        assert "has ended (" not in up.told(), "an engine was restarted"


@pytest.mark.extended("engines that come and go under load are in `make test`")
@pytest.mark.slow("starts a whole deployment, which changes under load")
def test_a_cluster_and_links_are_added_under_load_and_nobody_is_restarted(deployment: Deployment) -> None:
    http_port, kv_port = free_ports(2)

    def add_west(document: dict[str, Any]) -> None:
        west = json.loads(json.dumps(document["clusters"][0]))
        west["name"], west["instances"] = "west", west["instances"][:1]
        west["instances"][0].update(name="west-0", http_port=http_port, kv_port=kv_port)
        document["clusters"].append(west)
        document["links"].append({"source": "west", "target": "home", "bandwidth": "4 Gbit/s"})
        # Engines of `other` have no certificates.
        document["links"].append(
            {"source": "far", "target": "other", "bandwidth": "4 Gbit/s", "encryption": False}
        )

    with running_up(deployment) as up:
        load = Load(deployment)
        try:
            load.more()
            pids = engine_pids(up)
            edit(up, add_west)
            said = prfaas(up, "reload", str(deployment.path))
            assert said.returncode == 0, said.stderr
            assert said.stdout.splitlines() == [
                "cluster west is added, with west-0",
                "link west->home is added, 4 Gbit/s",
                "link far->other is added, 4 Gbit/s",
                "applied",
            ]
            up.await_true(lambda: instances(up)["west-0"]["healthy"])
            up.await_true(lambda: all(link["up"] for link in state(up)["links"].values()))
            up.await_true(lambda: state(up)["applied"]["rosters_behind"] == [])
            order(up, "drain", "far-0", "far-1", "other-0")
            load.more()
            seen = len(load.requests)
            up.await_true(lambda: offloaded(up, load.requests[seen:], "west-0", "home"))
            # The other way round: over the link that joins two clusters that were there.
            order(up, "undrain", "far-0", "far-1", "other-0")
            order(up, "drain", "home-0", "home-1")
            load.more()
            seen = len(load.requests)
            up.await_true(lambda: offloaded(up, load.requests[seen:], "far-", "other"))
            assert pids <= engine_pids(up), "an engine was restarted"
        finally:
            load.end()
        assert load.failures == []
        edit(up, lambda document: document["links"].pop())
        refused = prfaas(up, "reload", str(deployment.path))
        assert refused.returncode == 2
        assert "link far->other is removed, which can't change while everything runs: start" in refused.stderr


def order(up: Up, command: str, *names: str) -> None:
    """`prfaas drain` or `undrain` of these."""
    for name in names:
        said = prfaas(up, command, name, str(up.deployment.path))
        assert said.returncode == 0, said.stderr


def offloaded(up: Up, requests: "list[str]", prefill: str, decode: str) -> bool:
    """Whether one of these was prefilled there, and decoded in that cluster with the KV that came."""
    told = [page(up, f"/prfaas/requests/{request}") for request in requests]
    return any(
        attempt["prefill"].startswith(prefill) and attempt["decode"].startswith(decode)
        for each in told
        if each["transfer"]["bytes"] > 0
        for attempt in each["attempts"]
    )


@pytest.mark.slow("starts a whole deployment, which changes under load")
def test_a_bad_file_leaves_everything_as_it_was(deployment: Deployment) -> None:
    with running_up(deployment) as up:
        before = state(up)["applied"]
        good = edit(up, lambda document: document["model"].update(served_name="other"))
        refused = prfaas(up, "reload", str(deployment.path))
        assert refused.returncode == 2 and refused.stdout == ""
        assert refused.stderr.startswith("prfaas: nothing was changed: model.served_name is now")
        assert len(refused.stderr.splitlines()) == 1
        checked = prfaas(up, "reload", str(deployment.path), "--check")
        assert checked.returncode == 2 and "model.served_name" in checked.stdout
        up.deployment.path.write_text(good.replace('"pd"', '"pp"'))
        up.process.send_signal(signal.SIGHUP)
        up.await_true(lambda: "not reloaded: " in up.told())
        assert "deployment.yaml:1: clusters[1].kind" in up.told()
        # A port that is taken refuses the whole file.
        up.deployment.path.write_text(good)
        with socket.create_server(("127.0.0.1", 0)) as taken:

            def add_taken(document: dict[str, Any]) -> None:
                add_home_2(document)
                home(document)[-1]["kv_port"] = taken.getsockname()[1]
                document["gateway"]["shadow"] = 0.5

            edit(up, add_taken)
            refused = prfaas(up, "reload", str(deployment.path))
            assert refused.returncode == 2 and "is already in use" in refused.stderr
        up.deployment.path.write_text(good)
        other = deployment.path.parent / "other.yaml"
        other.write_text(good.replace("4 Gbit/s", "5 Gbit/s"))
        mine = prfaas(up, "reload", str(other))
        assert mine.returncode == 2 and "is another file than yours" in mine.stderr
        assert state(up)["applied"] == before
        same = prfaas(up, "reload", str(deployment.path))
        assert (same.returncode, same.stdout) == (0, "nothing changes\n")


def answers(instance: Instance) -> bool:
    try:
        with socket.create_connection((instance.host, instance.http_port), timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.slow("starts a whole deployment, which changes under load")
def test_a_site_without_the_gateway_starts_what_the_file_adds_and_ends_nothing(
    deployment: Deployment,
) -> None:
    with running_up(deployment, "--site", "far") as up:
        pids = engine_pids(up)

        def change(document: dict[str, Any]) -> None:
            http_port, kv_port = free_ports(2)
            far = document["clusters"][0]["instances"]
            left = far.pop(0)
            far.append({**left, "name": "far-9", "http_port": http_port, "kv_port": kv_port})
            # Of another site.
            add_home_2(document)

        edit(up, change)
        changed = load_deployment(deployment.path, state_dir=deployment.state_dir)
        gone = deployment.clusters[0].instances[0]
        up.process.send_signal(signal.SIGHUP)
        up.await_true(lambda: f"reloaded: instance {gone.name} leaves far" in up.told())
        up.await_true(lambda: f"engine {gone.name} is not in the file any more; it goes on" in up.told())
        up.await_true(lambda: answers(changed.instance("far-9")))
        assert answers(gone)
        assert not answers(changed.instance("home-2"))
        assert pids < engine_pids(up)
        up.deployment.path.write_text("no deployment")
        up.process.send_signal(signal.SIGHUP)
        up.await_true(lambda: "not reloaded: " in up.told())
        assert answers(gone) and answers(changed.instance("far-9"))
