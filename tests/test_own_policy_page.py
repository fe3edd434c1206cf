"""docs/guides/own-policy.md as written: its files, its commands and what they print.

Only the ports are others, so that it can run beside another deployment.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.ports import free_ports

from prfaas import api

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "own-policy.md"
LIMIT_S = 300.0

pytestmark = pytest.mark.docs


@dataclass(frozen=True)
class Fence:
    language: str
    file: str
    text: str


def fences(text: str) -> list[Fence]:
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    return [Fence(*each) for each in found]


@dataclass(frozen=True)
class Page:
    """The page's blocks in a folder with its files, and shells that run its commands."""

    folder: Path
    blocks: list[Fence]

    @property
    def shell(self) -> list[str]:
        return [each.text for each in self.blocks if each.language == "sh"]

    def printed_after(self, command: str) -> str | None:
        """What the page says that a command prints."""
        at = next(number for number, each in enumerate(self.blocks) if command in each.text)
        after = self.blocks[at + 1] if at + 1 < len(self.blocks) else None
        return after.text if after is not None and after.language == "text" else None

    def command(self, text: str) -> list[str]:
        return [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f'prfaas() {{ "{sys.executable}" -m prfaas.cli.main "$@"; }}\n{text}',
        ]

    @property
    def environment(self) -> dict[str, str]:
        # As after the page's `export PYTHONPATH=$PWD`, with the tree that is tested.
        paths = os.pathsep.join([str(self.folder), str(ROOT / "src")])
        return {**os.environ, "PYTHONPATH": paths, "PRFAAS_HOME": str(self.folder / "home")}

    def run(self, text: str) -> str:
        text = text.replace("export PYTHONPATH=$PWD\n", "")
        done = subprocess.run(
            self.command(text),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, (text, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout


@pytest.fixture
def page(tmp_path: Path) -> Page:
    text = PAGE.read_text()
    ports = sorted(set(re.findall(r"\b(?:19[12]\d\d|800[01])\b", text)))
    for port, free in zip(ports, free_ports(len(ports)), strict=True):
        text = re.sub(rf"\b{port}\b", str(free), text)
    found = Page(tmp_path, fences(text))
    for each in found.blocks:
        if each.file:
            (tmp_path / each.file).write_text(each.text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return found


def test_the_policy_has_30_lines(page: Page) -> None:
    assert len((page.folder / "frugal.py").read_text().splitlines()) <= 30


def test_what_a_way_knows_is_there() -> None:
    table = PAGE.read_text().partition("| of a way |")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    assert len(names) > 10
    assert [name for name in names if not hasattr(api.PrefillOption, name)] == []
    assert hasattr(api.RoutingRequest, "num_tokens")


@pytest.mark.slow("does all that the page says, each command a process")
def test_simulated(page: Page) -> None:
    listed, alone, compared = page.shell[:3]
    assert page.run(listed) == page.printed_after("prfaas policies frugal:Frugal\n")
    assert "cheapest" in page.run(alone)
    printed = page.run(compared)
    assert "frugal:Frugal: seconds_per_gb = 2" in printed and "least_ttft" in printed
    (code,) = [each.text for each in page.blocks if each.language == "python" and not each.file]
    (page.folder / "run.py").write_text(code)
    assert 0 < float(page.run(f'"{sys.executable}" run.py')) < 60


@contextmanager
def running(page: Page, command: str) -> Iterator[None]:
    with (page.folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            page.command(command.replace("prfaas up", f'exec "{sys.executable}" -m prfaas.cli.main up')),
            cwd=page.folder,
            env=page.environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("ready: "), (page.folder / "errors.txt").read_text()
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.slow("does all that the page says, each command a process")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the tiny model is written with torch")
def test_live(page: Page) -> None:
    up, *asked = page.shell[3:]
    assert up.startswith("prfaas up ") and len(asked) == 2
    with running(page, up):
        for command in asked:
            assert page.run(command).replace("\r\n", "\n") == page.printed_after(command), command


def test_the_entry_point_is_ours(page: Page) -> None:
    (package,) = [each.text for each in page.blocks if each.language == "toml"]
    assert '[project.entry-points."prfaas.policies"]' in package
    assert '[project.entry-points."prfaas.policies"]' in (ROOT / "pyproject.toml").read_text()
