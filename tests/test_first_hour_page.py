"""docs/guides/first-hour-on-gpus.md from its file to the first offloaded request; engines and ssh are stand-ins."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.guides.page import Guide
from tests.ports import free_ports
from tests.test_two_datacenters_page import running, shell, typed

from prfaas.core.deployment import load_deployment

__all__ = ["shell"]
PAGE = Guide.read("first-hour-on-gpus")
FAR, HOME = "192.0.2.10", "198.51.100.10"
# What the page has of a machine with GPUs, and what stands for it.
STAND_INS = {
    "hub:openai/gpt-oss-20b": "tiny:qwen3-next",
    "gpt-oss-20b": "qwen3-next",
    ":h200:": ":synthetic:",
    ":h20:": ":synthetic:",
    # A byte is a token of the tiny model.
    "* 1500": "* 500",
}

pytestmark = pytest.mark.docs


def stood_in(command: str) -> str:
    for real, stand_in in STAND_INS.items():
        command = command.replace(real, stand_in)
    return command


def on_loopback(path: Path) -> None:
    """Secrets are made for hosts elsewhere; here both are one machine, whose ports may be taken."""
    text = path.read_text().replace(FAR, "127.0.0.1").replace(HOME, "127.0.0.1")
    free = iter(free_ports(6))
    path.write_text(re.sub(r"port: 8\d{3}\b", lambda _: f"port: {next(free)}", text))


@pytest.fixture
def machines(shell: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The own folders of a person on `home` and on `east`, to which `ssh` goes."""
    home, east = shell, shell.parent / "east"
    east.mkdir()
    tools = shell.parent / "bin"
    there = shlex.quote(str(east))
    programs = {
        "ssh": f'shift; cd {there} && exec "$@"',
        # The last argument is HOST:PATH.
        "scp": f'shift; for last; do :; done; while [ $# -gt 1 ]; do cp -p "$1" {there}/"${{last#*:}}"; shift; done',
    }
    for name, script in programs.items():
        (tools / name).write_text(f"#!/bin/sh\nset -e\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.delenv("PRFAAS_HOME")
    monkeypatch.setenv("HOME", str(home))
    return home, east


def test_the_file_is_as_the_page_has_it(machines: tuple[Path, Path]) -> None:
    """With the real hardware and hosts; the hub's model alone can't be had here."""
    home, _ = machines
    (init,) = PAGE.commands("3. Write the file")
    typed(init.replace("hub:openai/gpt-oss-20b", "tiny:gpt-oss"), home)
    deployment = load_deployment(home / "hour.yaml")
    assert [each.host for each in deployment.instances] == [FAR, HOME]
    assert {each.http_port for each in deployment.instances} == {8100}
    assert {each.kv_port for each in deployment.instances} == {8200}
    assert deployment.gateway.port == 8000


@pytest.mark.extended("starts what the page says; each of its commands has tests of its own")
def test_from_the_file_to_the_first_offloaded_request(
    machines: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, east = machines
    (init,) = PAGE.commands("3. Write the file")
    typed(stood_in(init), home)
    on_loopback(home / "hour.yaml")
    typed("prfaas certs hour.yaml --rotate", home)
    for command in PAGE.commands("4. Give `east` its part"):
        typed(command, home)
    made, given = (each / ".cache/prfaas/hour/certificates" for each in (home, east))
    assert not (given / "ca.key").exists()
    # On loopback a deployment is taken for that of one machine, which has these too.
    for name in ("gateway.pem", "tools.pem"):
        shutil.copy(made / name, given)
    up_east, up_home = PAGE.commands("5. Start")
    doctor, body, curl, explain = PAGE.commands("6. The first offloaded request")[:4]
    gateway = load_deployment(home / "hour.yaml").gateway
    monkeypatch.setenv("HOME", str(east))
    with running(up_east, east) as told_by_east:
        monkeypatch.setenv("HOME", str(home))
        assert told_by_east.startswith("ready: ")
        with running(up_home, home) as told:
            assert told.startswith("ready: ")
            said = typed(doctor, home)
            assert "problem" not in said and re.search(r"disaggregation: .*east", said)
            typed(stood_in(body), home)
            answer = typed(curl.replace(":8000", f":{gateway.port}"), home)
            head, _, content = answer.replace("\r", "").partition("\n\n")
            assert re.search(r"(?mi)^x-prfaas-route: offload", head), head
            assert json.loads(content)["usage"]["completion_tokens"] > 0
            request_id = re.search(r"(?mi)^x-request-id: (\S+)", head)
            assert request_id is not None
            assert "east" in typed(explain.replace("REQUEST_ID", request_id[1]), home)
