"""The guide of two datacenters, done as it says: its trial runs, and its commands write what it names."""

import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from tests.guides.page import ROOT, Guide
from tests.ports import free_ports

from prfaas.core.deployment import load_deployment

PAGE = Guide.read("two-datacenters")
READY_S = 600.0

pytestmark = pytest.mark.docs


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to type commands in, with `prfaas` on the path and the repository's examples beside."""
    tools = tmp_path / "bin"
    tools.mkdir()
    program = tools / "prfaas"
    code = "import sys; sys.argv[0] = 'prfaas'; from prfaas.cli.main import main; main()"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def typed(command: str, folder: Path) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def running(command: str, folder: Path) -> Iterator[str]:
    """A command that goes on; the line that says it is ready."""
    with subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("a"),
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            deadline = time.monotonic() + READY_S
            while not select.select([process.stdout], [], [], 1.0)[0]:
                assert process.poll() is None, (folder / "stderr").read_text()
                assert time.monotonic() < deadline, f"{command} was not ready in {READY_S} s"
            yield process.stdout.readline()
            process.terminate()
            assert process.wait(60) == 0, (folder / "stderr").read_text()
        finally:
            process.kill()


def with_free_ports(path: Path) -> None:
    """The guide's ports may be taken where tests run."""
    text = path.read_text()
    fields = yaml.safe_load(text)
    instances = [each for cluster in fields["clusters"] for each in cluster["instances"]]
    free = iter(free_ports(2 * len(instances) + 2))
    for instance in instances:
        for field in ("http_port", "kv_port"):
            text = text.replace(f"{field}: {instance[field]}", f"{field}: {next(free)}", 1)
    text = text.replace("port: 8000", f"port: {next(free)}\n  admin: {{port: {next(free)}}}")
    path.write_text(text)


@pytest.mark.extended("starts what the page says; each of its commands has tests of its own")
def test_the_trial(shell: Path) -> None:
    init, up_east, up_home, doctor, *emits = PAGE.commands("1. Try it on one machine")
    assert [each.split()[:2] for each in (init, up_east, up_home, doctor)] == [
        ["prfaas", "init"],
        ["prfaas", "up"],
        ["prfaas", "up"],
        ["prfaas", "doctor"],
    ]
    assert "next: prfaas up trial.yaml" in typed(init, shell)
    with_free_ports(shell / "trial.yaml")
    gateway = load_deployment(shell / "trial.yaml").gateway
    with running(up_east, shell) as east:
        assert east == "ready: site east without gateway\n"
        with running(up_home, shell) as home:
            assert home == f"ready: {gateway.url}/v1\n"
            said = typed(doctor, shell)
            assert "problem" not in said
            assert re.search(r"disaggregation: .*east", said)
    for emit in emits:
        assert emit.split()[1] == "emit"
        assert typed(emit, shell)


def test_the_files_of_a_real_one(shell: Path) -> None:
    (init,) = PAGE.commands("2. Write the file")
    typed(init, shell)
    deployment = load_deployment(shell / "llm.yaml")
    for name in re.findall(r"\| `([\w/-]+)` \|$", PAGE.section("2. Write the file"), re.MULTILINE):
        assert (deployment.home / name).exists()
    (emit,) = PAGE.commands("3. Emit")
    typed(emit, shell)
    for folder in re.findall(r"`(machines/[\w./]+)`", PAGE.section("3. Emit")):
        assert (shell / folder).is_dir()
    typed(PAGE.commands("With Compose")[0], shell)
    assert (shell / "compose/home/gateway/compose.yaml").is_file()
    shown = re.search(r"(?ms)^```\n(port .*?)^```", PAGE.section("5. Open the ports"))
    assert shown is not None
    assert (shell / "machines/east/192.0.2.10/ports.txt").read_text() == shown[1]
    units = {path.stem for path in shell.rglob("machines/**/*.service")}
    assert set(re.findall(r"prfaas-(?:engine|gateway)[\w-]*", PAGE.text)) - {"prfaas-engine"} <= units


def test_the_manifests(shell: Path) -> None:
    (emit,) = PAGE.commands("With Kubernetes")
    typed(emit, shell)
    kinds = {
        each["kind"]
        for path in (shell / "kubernetes").rglob("*.yaml")
        for each in yaml.load_all(path.read_text(), yaml.CSafeLoader)
    }
    table = re.findall(r"^\| ([A-Z]\w+(?: and \w+)?) \|", PAGE.section("With Kubernetes"), re.MULTILINE)
    assert {kind for row in table for kind in row.split(" and ")} <= kinds
    for path in re.findall(r"(kubernetes/[\w./-]+)", PAGE.section("With Kubernetes")):
        assert (shell / path).exists()
    given = re.search(r"(?ms)^```yaml\n(.*?)^```", PAGE.section("With Kubernetes"))
    assert given is not None
    example = yaml.safe_load((ROOT / "examples/two-datacenters.yaml").read_text())
    assert yaml.safe_load(given[1])["containers"]["networks"] == example["containers"]["networks"]
