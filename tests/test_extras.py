"""An extra promises that its modules run with its packages and no others; and a command without its extra says so.

Every other installed package is hidden from a new process. `make test-extras` does the same in real environments.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from prfaas.cli.common import PLAN_COMMANDS
from prfaas.cli.main import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "prfaas"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLES = ROOT / "examples"

# Imports every module of some packages, with all packages hidden that are not named.
IMPORT_ALL = """
import importlib, pkgutil, sys
allowed, wanted = set(sys.argv[1].split()), sys.argv[2].split()
class Hidden:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
def tree(name):
    module = importlib.import_module(name)
    for each in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
        if not each.name.endswith("__main__"):
            tree(each.name)
for name in wanted:
    tree(name)
"""

PROMISED = {
    # All commands, and what of them works without an extra.
    "": (
        "prfaas.api prfaas.cli.main prfaas.cli.init_draft prfaas.cli.status_tables prfaas.core.deployment "
        "prfaas.core.kv prfaas.core.route_header prfaas.tools.emit"
    ),
    "engine": (
        "prfaas.core.deployment prfaas.core.kv prfaas.serving.transport prfaas.serving.engines.preparation "
        "prfaas.serving.engines.running prfaas.serving.engines.command prfaas.serving.engines.process_group "
        "prfaas.serving.pool.client prfaas.cli.fetching"
    ),
    "gateway": (
        "prfaas.core prfaas.serving.transport prfaas.serving.live prfaas.serving.gateway prfaas.serving.control "
        "prfaas.serving.engines.synthetic prfaas.serving.pool prfaas.tools.demo "
        "prfaas.tools.doctor prfaas.tools.monitoring prfaas.tools.replay prfaas.cli.running prfaas.cli.site_share "
        "prfaas.cli.fetching"
    ),
    "plan": (
        "prfaas.core prfaas.lab prfaas.tools.profiling prfaas.cli.simulate_inputs prfaas.cli.profile_estimate"
    ),
    "trace": "prfaas.serving.tracing.queue prfaas.serving.tracing.collector",
}
DOES = {
    "gateway": "from prfaas.core.latency.service_curve import ServiceCurve; ServiceCurve().add(100, 0.1, 0.0)",
    "plan": (
        "from prfaas import api; paper = api.load_planned(api.example_path('paper')); api.plan(paper); "
        "api.simulate(paper, requests=300).summary(); import prfaas.lab.report.plan_sweep"
    ),
}


def _packages(extra: str) -> set[str]:
    """Names of the base dependencies and of those of an extra, as pyproject.toml has them."""
    listed = PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, [])
    return {_name(requirement) for requirement in listed}


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _with_their_own(packages: set[str]) -> set[str]:
    """Packages and all that they require."""
    todo, seen = list(packages), set[str]()
    while todo:
        package = todo.pop()
        if package in seen:
            continue
        seen.add(package)
        try:
            required = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [_name(each) for each in required if "extra ==" not in each]
    return seen


@cache
def _owners() -> Mapping[str, list[str]]:
    """The installed packages that a name is imported from. To ask takes a quarter of a second."""
    return importlib.metadata.packages_distributions()


def _modules(packages: set[str]) -> set[str]:
    """Names that installed packages are imported by."""
    return {module for module, names in _owners().items() if packages & {_name(each) for each in names}}


@cache
def _allowed(extra: str) -> str:
    return " ".join({"prfaas", *_modules(_with_their_own(_packages(extra)))})


def _run(extra: str, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_ALL + code, _allowed(extra), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow("each extra in a process of its own")
@pytest.mark.parametrize("extra", PROMISED)
def test_an_extra_is_enough_for_what_it_promises(extra: str) -> None:
    done = _run(extra, DOES.get(extra, ""), PROMISED[extra])
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("folders", "extra", "besides"),
    [
        (
            [
                *("serving/gateway", "serving/control", "serving/transport", "serving/pool"),
                "serving/engines/synthetic",
            ],
            "gateway",
            set(),
        ),
        (["tools/demo", "tools/doctor.py", "tools/monitoring", "tools/replay"], "gateway", set()),
        (["lab", "core/planner"], "plan", {"pandas"}),  # the extra "records"
        (["tools/profiling"], "plan", set()),
        (["serving/engines/vllm"], "engine", {"vllm", "torch", "setproctitle"}),  # vLLM brings the others
        (["serving/tracing"], "trace", set()),
    ],
)
def test_what_is_imported_late_is_in_the_extra_too(folders: list[str], extra: str, besides: set[str]) -> None:
    allowed = _modules(_packages(extra)) | besides | {"prfaas", "__future__"} | sys.stdlib_module_names
    for folder in folders:
        files = sorted((SOURCE / folder).rglob("*.py")) or [SOURCE / folder]

        for file in files:
            for module in _imported(ast.parse(file.read_text())):
                assert module in allowed, f"{file}: {module}"


def _imported(node: ast.AST) -> list[str]:
    """Top-level names of all modules that are imported when the program runs."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0]]
    return [name for child in ast.iter_child_nodes(node) for name in _imported(child)]


MAIN = "sys.argv = ['prfaas', *sys.argv[3:]]\nimport prfaas.cli.main as m\nm.main()\n"


@pytest.mark.parametrize(
    "words", [["--help"], ["models"], ["models", "kimi-k2", "--json"], ["init", "--list"], ["plan", "--help"]]
)
def test_commands_of_the_base_installation(words: list[str]) -> None:
    done = _run("", MAIN, "", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.slow("each extra in a process of its own")
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["plan", str(EXAMPLES / "paper.yaml")], "plan"),
        (["simulate", str(EXAMPLES / "paper.yaml")], "plan"),
        (["policies"], "plan"),
        (["study", "burst"], "plan"),
        (["reproduce"], "plan"),
        (["bandwidth", "ring-2.5-1t", "--gpus", "512", "--length", "32768"], "plan"),
        (["profile", "http://127.0.0.1:9"], "plan"),
        (["doctor", str(EXAMPLES / "local.yaml")], "gateway"),
        (["demo"], "gateway"),
        (["pool", str(EXAMPLES / "local.yaml"), "home-pool"], "gateway"),
        (["certs", str(EXAMPLES / "local.yaml")], "gateway"),
        (["replay", "http://127.0.0.1:9", "--trace", "x.csv"], "gateway"),
    ],
)
def test_a_missing_extra_is_one_sentence(words: list[str], extra: str) -> None:
    done = _run("", MAIN, "", *words)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    owner = {"plan": "the planner's", "gateway": "the gateway's"}[extra]
    assert sentence.startswith(f"prfaas: `prfaas {words[0]}` needs {owner} packages (")
    assert sentence.endswith(f": pip install '.[{extra}]' in a checkout of prfaas")


WITHOUT_TRACES = """
from prfaas.cli.common import sentence
from prfaas.cli.running import check_tracing
from prfaas.core.deployment import TracingConfig
try:
    check_tracing(TracingConfig("http://127.0.0.1:9/v1/traces"))
except ModuleNotFoundError as error:
    print(sentence(error, "serve"))
"""


def test_traces_without_opentelemetry_are_one_sentence() -> None:
    done = _run("gateway", WITHOUT_TRACES, "")
    assert (done.returncode, done.stderr) == (0, "")
    (sentence,) = done.stdout.splitlines()
    assert sentence.startswith(
        "gateway.tracing needs OpenTelemetry's packages: pip install '.[trace]' in a checkout"
    )


def test_no_sentence_takes_prfaas_for_published() -> None:
    """Until a release is, an index does not know prfaas: sentences in the source take the words of `core.extras`."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *EXAMPLES.rglob("*.ipynb")]
    texts = {place: place.read_text() for place in (*SOURCE.rglob("*.py"), *pages)}
    published = re.compile(r"pip install\s+['\"\\]*prfaas\b")
    assert [str(place) for place, text in texts.items() if published.search(text)] == []
    by_hand = re.compile(r"pip install ['\"]?\.\[")
    own = SOURCE / "core" / "extras.py"
    assert [
        str(place)
        for place in texts
        if place.suffix == ".py" and place != own and by_hand.search(texts[place])
    ] == []


def test_extras_that_pages_name_exist() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for names in re.findall(r"'\.\[([\w,-]+)\]'", page.read_text()):
            assert set(names.split(",")) <= set(PROJECT["optional-dependencies"]), page


def test_the_commands_that_need_an_extra_are_commands() -> None:
    known = {(each.name or each.callback.__name__) for each in app.registered_commands if each.callback}
    known |= {group.name for group in app.registered_groups if group.name}
    assert set(PLAN_COMMANDS) <= known


def test_all_is_all() -> None:
    """But for NIXL, which is large, and for one kind of machine."""
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(re.findall(r"\w+", everything)[1:]) == set(extras) - {"all", "dev", "nixl"}
