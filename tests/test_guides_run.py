"""Guides whose commands need a running deployment, or none: each command as it is written, one after the other.

Guides with files or programs of their own have tests of their own beside this one.
"""

import json
import re
import shlex
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.guides.page import ROOT, Guide
from tests.ports import free_ports
from tests.test_docs_commands import commands_in
from tests.test_two_datacenters_page import running, shell, typed

__all__ = ["shell"]

pytestmark = pytest.mark.docs

# What people do with a deployment that runs, all on one. Pools need real engines: tests/integration/test_pool.py.
LIVE = ("operate", "change-live", "watch", "worth", "several-gateways", "preemptible")
# Those that go on, or need what is not here: a reason each.
NOT_HERE = {
    "--watch": "goes on",
    "prfaas up": "has been done",
    "gateway-0.sqlite": "of two gateways: tests/cli/test_worth.py",
    "study spot": "takes minutes: tests/lab/studies",
}
# Pages that need nothing but the checkout.
ALONE = ("install", "monitoring", "recipes", "measure-a-profile", "../tutorial/3-first-simulation")
ALONE_NOT_HERE = {
    "profile http": "measures an engine: tests/tools/profiling",
    "--beside": "its config comes with another package",
    "qwen3-next-80b/config.json": "a folder of the reader's: tests/cli/test_profile_estimate.py",
    "prfaas up": "below, and in tests/test_clients_page.py",
    "prfaas demo": "tests/integration/test_demo.py",
}
# Pages whose commands another test does.
ELSEWHERE = {
    "before-you-buy": "tests/test_before_you_buy.py",
    "clients": "tests/test_clients_page.py",
    "console": "tests/test_console_pictures.py",
    "first-hour-on-gpus": "tests/test_first_hour_page.py",
    "own-policy": "tests/test_own_policy_page.py",
    "own-question": "tests/test_own_question.py",
    "pool": "tests/integration/test_pool.py",
    "rollout": "tests/serving/engines/test_rollout.py",
    "several-machines": "tests/serving/engines/test_several_gateways.py",
    "studies": "tests/lab/studies/test_runs.py",
    "synthetic-engines": "tests/test_clients_page.py",
    "two-datacenters": "tests/test_two_datacenters_page.py",
    "../tutorial/1-first-request": "tests/integration/test_up.py",
}


def written(page: str, not_here: dict[str, str]) -> list[str]:
    """The commands of a page's shell blocks, as they are."""
    text = Guide.read(page).text
    fenced = re.findall(r"^\s*```(?:sh|console)[^\n]*\n(.*?)^\s*```\s*$", text, re.MULTILINE | re.DOTALL)
    fences = "".join(f"```sh\n{each}```\n" for each in fenced)
    found = [shlex.join(["prfaas", *words]) for words in commands_in(fences)]
    return [each for each in found if not any(part in each for part in not_here)]


def test_no_page_has_commands_that_nobody_runs() -> None:
    pages = [path.stem for path in (ROOT / "docs/guides").glob("*.md")]
    pages += [f"../tutorial/{path.stem}" for path in (ROOT / "docs/tutorial").glob("*.md")]
    assert {page for page in pages if written(page, {})} == {*LIVE, *ALONE, *ELSEWHERE}
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).is_file()] == []


@pytest.mark.extended("starts what the pages talk of; each of their commands has tests of its own")
def test_what_people_do_with_a_deployment_that_runs(shell: Path) -> None:
    deployment, url = deployed(shell)
    commands = {page: written(page, NOT_HERE) for page in LIVE}
    assert all(commands.values())
    with running(f"prfaas up {deployment}", shell) as ready:
        assert ready == f"ready: {url}/v1\n"
        asked = ask(url)
        for each in (each for page in LIVE for each in commands[page]):
            command = re.sub(r"\b[0-9a-f]{32}\b|REQUEST_ID", asked, each.replace("/etc/prfaas/", ""))
            assert typed(command, shell) or "drain" in command, command


@pytest.mark.extended("each command is a process; each has tests of its own")
@pytest.mark.parametrize("page", ALONE)
def test_what_needs_no_deployment(page: str, shell: Path) -> None:
    deployed(shell)
    for command in written(page, ALONE_NOT_HERE):
        typed(command, shell)


def deployed(folder: Path) -> tuple[Path, str]:
    """A deployment of stand-ins with the names that the pages use, and its gateway's address."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples/synthetic.yaml").read_text())
    free = iter(free_ports(20))
    names = {"east": {"east-0": "prefill", "east-1": "prefill"}}
    names["home"] = {"home-prefill-0": "prefill", "home-decode-0": "decode", "home-1": "decode"}
    document["clusters"] = [
        cluster | {"name": name, "instances": instances(names[name], free)}
        for name, cluster in zip(names, (document["clusters"][0], document["clusters"][2]), strict=True)
    ]
    document["clusters"][0]["preemptible"] = True
    document["links"] = [{"source": "east", "target": "home", "bandwidth": "1 Gbit/s"}]
    (port, admin) = (next(free), next(free))
    document["gateway"] = {"port": port, "admin": {"port": admin}, "ledger": {"file": "ledger.sqlite"}}
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(document))
    return path, f"http://127.0.0.1:{port}"


def instances(roles: dict[str, str], free: Any) -> list[dict[str, Any]]:
    return [
        {"name": name, "roles": [role], "host": "127.0.0.1", "http_port": next(free), "kv_port": next(free)}
        for name, role in roles.items()
    ]


def ask(url: str) -> str:
    """One request, so that there is something to tell of; its id."""
    body = json.dumps({"model": "qwen3-next-tiny", "prompt": "one " * 500, "max_tokens": 4}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        told: str = answer.headers["x-request-id"]
    return told
