"""Engines that are forks of one process: whose children they are, what they share, and that nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ports import free_ports

from prfaas.core.deployment import Deployment, Instance, load_deployment
from prfaas.serving.engines import EngineError, template
from prfaas.serving.engines.command import EngineCommand
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.template import EngineTemplates

READY_S = 40.0
ROOT = Path(__file__).parents[3]
LIGHT = "tests.serving.engines.light_template"

# As in test_running_engines.py; its first line tells of its child, and what it has of the template; its second one what
# it alone was given.
SERVER = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
print("child", child.pid, os.environ.get("MARK"), sys.argv[1:], os.read(0, 1), __name__, end=" ")
print("prfaas.serving.engines.vllm.template" in sys.modules)
print(os.environ.get("OTEL_RESOURCE_ATTRIBUTES"), flush=True)
if "crash" in sys.argv:
    sys.exit(3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    text = (ROOT / "examples" / "local.yaml").read_text()
    for old, new in zip(("18100", "18101", "18102", "18200", "18201", "18202"), free_ports(6), strict=True):
        text = text.replace(old, str(new))
    (tmp_path / "local.yaml").write_text(text)
    (tmp_path / "forked_engine.py").write_text(SERVER)
    return load_deployment(tmp_path / "local.yaml", state_dir=tmp_path / "state")


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_MODULE", LIGHT)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(children())
    yield
    deadline = time.monotonic() + 30
    while set(children()) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(children()) - before == set(), "a child is left, or has not been waited for"


def children(pid: int | None = None) -> list[int]:
    tasks = Path(f"/proc/{pid or os.getpid()}/task")
    found: list[int] = []
    for task in tasks.iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def forked(deployment: Deployment, instance: Instance, *words: str, **env: str) -> EngineCommand:
    paths = os.pathsep.join([str(deployment.path.parent), str(ROOT), *sys.path])
    argv = (sys.executable, "-m", "forked_engine", str(instance.http_port), *words)
    return EngineCommand(argv, {"PYTHONPATH": paths, **env}, is_forkable=True)


def told(engines: RunningEngines, name: str) -> list[str]:
    return engines._group(name).log.tail(20).splitlines()[0].split()


def mark_of(engines: RunningEngines, name: str) -> str:
    return told(engines, name)[2]


def is_gone(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return True
        time.sleep(0.02)
    return False


def test_all_are_forks_of_one_and_children_of_this_process(deployment: Deployment) -> None:
    with RunningEngines(deployment, command=forked) as engines:
        engines.wait_ready(READY_S)
        pids = [engines.pid(name) for name in engines.names]
        assert len(set(pids)) == 3
        assert set(pids) <= set(children())
        assert [os.getsid(pid) for pid in pids] == pids
        marks = {mark_of(engines, name) for name in engines.names}
        assert len(marks) == 1
        assert marks != {"None"}
        for instance in deployment.instances:
            ports = f"['{instance.http_port}'] b'' __main__ True"
            assert " ".join(told(engines, instance.name)[3:]) == ports
        # Whoever has imported for all of them is needed no longer.
        assert not any(LIGHT in line for line in map(command_line, children()) if "forked_engine" not in line)
        below = [int(told(engines, name)[1]) for name in engines.names]
    assert all(map(is_gone, [*pids, *below]))


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_a_killed_engine_takes_its_children_along_and_can_come_back(deployment: Deployment) -> None:
    with RunningEngines(deployment, command=forked) as engines:
        engines.wait_ready(READY_S)
        name = "east-prefill-0"
        pid, child, mark = engines.pid(name), int(told(engines, name)[1]), mark_of(engines, name)
        engines.kill(name)
        assert is_gone(pid)
        assert is_gone(child)
        assert engines.exit_status(name) == -signal.SIGKILL
        assert engines.is_running("home-decode-0")
        engines.restart([name])
        engines.wait_ready(READY_S)
        assert engines.pid(name) != pid
        assert mark_of(engines, name) != mark


def test_who_only_asks_for_health_gets_them_too(deployment: Deployment) -> None:
    """As the supervisor does."""
    with RunningEngines(deployment, command=forked) as engines:
        deadline = time.monotonic() + READY_S
        while not all(map(engines.answers, engines.names)):
            assert all(map(engines.is_running, engines.names))
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_templates_that_are_kept_give_later_engines_too(deployment: Deployment) -> None:
    marks = set()
    with EngineTemplates() as templates:
        for names in (["home-decode-0"], ["home-decode-0", "east-prefill-0"]):
            with RunningEngines(deployment, names, command=forked, templates=templates) as engines:
                engines.wait_ready(READY_S)
                marks |= {mark_of(engines, name) for name in names}
    assert len(marks) == 1


def test_another_environment_needs_another_template(deployment: Deployment) -> None:
    def command(deployment: Deployment, instance: Instance) -> EngineCommand:
        return forked(deployment, instance, WHERE=instance.cluster)

    with RunningEngines(deployment, command=command) as engines:
        engines.wait_ready(READY_S)
        marks = {name: mark_of(engines, name) for name in engines.names}
    assert marks["home-decode-0"] == marks["home-prefill-0"] != marks["east-prefill-0"]


def test_what_nothing_reads_while_modules_are_imported_needs_no_other_template(
    deployment: Deployment,
) -> None:
    def command(deployment: Deployment, instance: Instance) -> EngineCommand:
        return forked(deployment, instance, OTEL_RESOURCE_ATTRIBUTES=instance.name)

    marks = set()
    with EngineTemplates() as templates:
        with RunningEngines(deployment, command=command, templates=templates) as engines:
            engines.wait_ready(READY_S)
            marks |= {mark_of(engines, name) for name in engines.names}
            assert {engines._group(name).log.tail(20).splitlines()[1] for name in engines.names} == set(
                engines.names
            )
        # Nor has a later engine anything of an earlier one's.
        with RunningEngines(deployment, ["home-decode-0"], command=forked, templates=templates) as engines:
            engines.wait_ready(READY_S)
            marks.add(mark_of(engines, "home-decode-0"))
            assert engines._group("home-decode-0").log.tail(20).splitlines()[1] == "None"
    assert len(marks) == 1


def test_with_threads_every_engine_is_a_new_interpreter(deployment: Deployment) -> None:
    def command(deployment: Deployment, instance: Instance) -> EngineCommand:
        return forked(deployment, instance, THREADED="1", OTEL_RESOURCE_ATTRIBUTES=instance.name)

    with RunningEngines(deployment, command=command) as engines:
        engines.wait_ready(READY_S)
        assert {told(engines, name)[-1] for name in engines.names} == {"False"}
        assert {engines._group(name).log.tail(20).splitlines()[1] for name in engines.names} == set(
            engines.names
        )


def test_an_engine_that_ends_is_named_with_the_end_of_its_log(deployment: Deployment) -> None:
    def command(deployment: Deployment, instance: Instance) -> EngineCommand:
        return forked(deployment, instance, *(["crash"] if instance.has_role("decode") else []))

    with (
        RunningEngines(deployment, command=command) as engines,
        pytest.raises(EngineError, match=r"home-decode-0 ended with exit code 3 before") as error,
    ):
        engines.wait_ready(READY_S)
    assert "child" in str(error.value)


def test_a_template_that_fails_says_why(deployment: Deployment) -> None:
    def command(deployment: Deployment, instance: Instance) -> EngineCommand:
        return forked(deployment, instance, BROKEN="1")

    with (
        RunningEngines(deployment, command=command) as engines,
        pytest.raises(EngineError, match=r"ended with exit code 1 before") as error,
    ):
        engines.wait_ready(READY_S)
    assert "template.log" in str(error.value)
    assert "vLLM is of no use here" in str(error.value)


@pytest.mark.parametrize("end", [RunningEngines.stop, lambda engines: engines.kill("home-decode-0")])
def test_engines_that_are_not_there_yet_can_be_ended(
    deployment: Deployment, end: Callable[[RunningEngines], None]
) -> None:
    def command(deployment: Deployment, instance: Instance) -> EngineCommand:
        return forked(deployment, instance, SLOW="1")

    with RunningEngines(deployment, ["home-decode-0"], command=command) as engines:
        pid = engines.pid("home-decode-0")
        assert engines.is_running("home-decode-0")
        end(engines)
        assert is_gone(pid)
        assert not engines.is_running("home-decode-0")


@pytest.mark.parametrize("ends_first", ["template", "engines"])
def test_forks_that_nobody_takes_over_end(deployment: Deployment, ends_first: str) -> None:
    """They have reported, and are not told to go: neither runs its program."""
    engines = RunningEngines(deployment, command=forked)
    engines.start()
    (busy,) = engines._templates._templates
    deadline = time.monotonic() + READY_S
    while len(busy._read_reports()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = list(busy._read_reports().values())
    assert len(pids) == 3
    busy.group.kill()
    assert all(map(is_gone, pids))
    if ends_first == "template":
        busy.close()
    engines.stop()
    logs = [(deployment.logs_dir / f"{name}.log").read_text() for name in engines.names]
    assert not any("child" in log for log in logs)


OWNER = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.serving.engines import test_template as t
t.template._MODULE = t.LIGHT
deployment = t.load_deployment(Path({file!r}), state_dir=Path({state!r}))
engines = t.RunningEngines(deployment, ["home-decode-0"], command=t.forked)
engines.start()
engines.wait_ready(t.READY_S)
print(engines.pid("home-decode-0"), t.told(engines, "home-decode-0")[1], flush=True)
time.sleep(600)
"""


def test_engines_end_when_their_owner_is_killed(deployment: Deployment) -> None:
    code = OWNER.format(
        paths=[str(ROOT), *sys.path], file=str(deployment.path), state=str(deployment.state_dir)
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        owner.kill()
        owner.communicate()
    assert all(map(is_gone, pids))
