"""docs/guides/clients.md as written, against synthetic engines: its programs print what the page says.

Only the ports are others, so that it can run beside another deployment.
"""

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.ports import free_ports
from tests.test_own_policy_page import ROOT, Page, fences

PAGE = ROOT / "docs" / "guides" / "clients.md"
SYNTHETIC = ROOT / "examples" / "synthetic.yaml"
READY_S = 300
PROGRAMS = ("sync.py", "stream.py", "responses.py")

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page beside a running deployment: its example, with other ports."""
    folder = tmp_path_factory.mktemp("clients")
    text, deployment = PAGE.read_text(), SYNTHETIC.read_text()
    ports = sorted(set(re.findall(r"\b(?:19[12]\d\d|8000)\b", deployment)))
    admin, *free = free_ports(len(ports) + 1)
    for port, other in zip(ports, free, strict=True):
        deployment = re.sub(rf"\b{port}\b", str(other), deployment)
        text = re.sub(rf"\b{port}\b", str(other), text)
    text = re.sub(r"\b8001\b", str(admin), text)
    (folder / "examples").mkdir()
    deployment = deployment.replace("route_header: full", f"route_header: full\n  admin: {{port: {admin}}}")
    (folder / "examples" / "synthetic.yaml").write_text(deployment)
    found = Page(folder, fences(text.replace("~/.cache/prfaas", str(folder / "home"))))
    for each in found.blocks:
        if each.file:
            (folder / each.file).write_text(each.text)
    (started, *_) = found.shell
    errors = folder / "errors.txt"
    with (
        errors.open("w") as told,
        subprocess.Popen(
            # In the shell's place, so that the signal below reaches it.
            found.command(started.replace("prfaas up", f"exec {sys.executable} -m prfaas.cli.main up")),
            cwd=folder,
            env=found.environment,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: "), errors.read_text()
            yield found
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()


@pytest.mark.extended("programs of a page, to stand-ins; tests with engines use the same SDKs")
@pytest.mark.timeout(READY_S + 300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_print_what_the_page_says(page: Page, program: str) -> None:
    at = next(number for number, each in enumerate(page.blocks) if each.file == program)
    assert page.run(f'"{sys.executable}" {program}') == page.blocks[at + 1].text


@pytest.mark.extended("programs of a page, to stand-ins; tests with engines use the same SDKs")
@pytest.mark.timeout(READY_S + 900)
def test_vllm_s_load_test_and_our_counters(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    # To import vLLM alone takes a busy machine minutes.
    monkeypatch.setattr("tests.test_own_policy_page.LIMIT_S", 600.0)
    load, counters = (next(each for each in page.shell if word in each) for word in ("vllm.bench", "curl"))
    # Before the first request there is no line to find.
    unfiltered = counters.partition(" | ")[0]
    before = ended(page, unfiltered)
    printed = page.run(load.replace("python -c", f'"{sys.executable}" -c'))
    assert re.search(r"^Successful requests: +20 *$", printed, re.MULTILINE), printed
    after = ended(page, counters)
    # What the gateway answers itself, a list of models for example, has no route.
    assert sum(after.get(route, 0) - before.get(route, 0) for route in ("local", "offload")) == 20
    assert after["offload"] > before.get("offload", 0)
    listed = re.findall(r"^\| `(prfaas_gateway_\w+)`", PAGE.read_text(), re.MULTILINE)
    told = re.findall(r"^# TYPE (\w+)", page.run(unfiltered), re.MULTILINE)
    assert len(listed) == 6 and set(listed) <= set(told)


def ended(page: Page, counters: str) -> dict[str, int]:
    """Requests of each route, as the page's command prints them."""
    found: dict[str, int] = {}
    for route, count in re.findall(
        r'^prfaas_gateway_requests_total\{.*route="(\w+)".*\} ([\d.]+)$', page.run(counters), re.MULTILINE
    ):
        found[route] = found.get(route, 0) + int(float(count))
    return found


def test_the_page_has_an_output_for_every_program() -> None:
    blocks = fences(PAGE.read_text())
    programs = [number for number, each in enumerate(blocks) if each.file]
    assert tuple(blocks[number].file for number in programs) == PROGRAMS
    assert all(blocks[number + 1].language == "text" for number in programs)
