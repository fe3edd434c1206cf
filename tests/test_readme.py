"""README.md: two screens, commands that work as they are written, and figures that commands and pages agree with.

What takes minutes (`make demo`, benches) is only asked whether it knows its options; tests/integration runs the demo.
"""

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from prfaas.cli.main import app
from prfaas.core.deployment import load_planned
from prfaas.core.planner import best_operation, problem_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "explanation" / "results.md").read_text(encoding="utf-8")

MAX_WORDS = 900
# A narrow window on a laptop.
SCREEN_LINES = 40

_FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:make|pip|prfaas|python|python3) [^`]+)`")


def seen(text: str) -> str:
    """What a reader sees of a page: no comments, no targets of links, no pictures, no rules of tables."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^```\w*$", "", text, flags=re.MULTILINE)


def word_count(text: str) -> int:
    """Words with a letter or a digit in them; those of commands count."""
    return sum(any(each.isalnum() for each in word) for word in seen(text).split())


def commands(text: str) -> list[str]:
    """Every command of a page, once, in order: lines of its sh fences, and what it names in backticks."""
    fenced = [line for block in _FENCE.findall(text) for line in block.splitlines()]
    bare = [re.sub(r"\s+#.*", "", line).strip() for line in fenced if line.strip()]
    parts = [part.strip() for line in bare for part in line.split("&&")]
    return list(dict.fromkeys([*parts, *_INLINE.findall(re.sub(r"(?ms)^```.*?^```$", "", text))]))


COMMANDS = commands(README)


def of_kind(*beginnings: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(beginnings)]


def printed(command: str) -> str:
    """What a command of ours prints, run in this process as it is written."""
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_it_has_two_screens() -> None:
    assert word_count(README) <= MAX_WORDS


def test_how_to_begin_is_on_the_first_screen() -> None:
    first = "\n".join(README.splitlines()[:SCREEN_LINES])
    for wanted in ("make demo", "pip install '.[plan]'", "prfaas plan", "![", "has not run on a GPU"):
        assert wanted in first


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    assert of_kind("make ", "pip install ", "prfaas ", "python bench/", "python3 -m venv ", ". ") == COMMANDS
    assert len(of_kind("make ")) >= 4
    assert len(of_kind("python bench/")) >= 2


@pytest.mark.parametrize("command", of_kind("make "))
def test_make_knows_the_target(command: str) -> None:
    target, *given = shlex.split(command)[1:]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
    for assignment in given:
        name, _, value = assignment.partition("=")
        assert f"$({name})" in makefile
        if name == "DEMO_ARGS":
            known = printed("prfaas demo --help")
            assert [word for word in value.split() if word.startswith("-") and word not in known] == []


@pytest.mark.parametrize("command", of_kind("prfaas "))
def test_our_commands_run_as_they_are_written(command: str) -> None:
    assert printed(command).strip()


@pytest.mark.parametrize("command", of_kind("python bench/"))
def test_benches_know_their_options(command: str) -> None:
    _, script, *words = shlex.split(command)
    told = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert [word for word in words if word.startswith("--") and word not in told.stdout] == []


@pytest.mark.parametrize("command", commands(RESULTS))
def test_the_commands_of_the_results_are_there(command: str) -> None:
    """Without a process for each: options of benches stand in their source, or in the files beside it."""
    program, name, *words = shlex.split(command)
    if program != "python":
        assert program in ("make", "prfaas")
        return
    beside = [ROOT / name, *(ROOT / "bench").glob(f"{Path(name).stem}_*.py")]
    source = "".join(path.read_text() for path in beside)
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


@pytest.mark.parametrize("command", of_kind("pip install "))
def test_what_pip_installs_is_an_extra_that_can_be_had(command: str) -> None:
    """Its packages exist in versions that it allows: those that are installed here."""
    (found,) = re.findall(r"pip install '\.\[(\w+)\]'", command)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"][found]
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), requirement


def test_the_environment_is_made_as_it_is_written(tmp_path: Path) -> None:
    (make,) = of_kind("python3 -m venv ")
    (enter,) = of_kind(". ")
    # pip itself is not asked for: it takes seconds.
    line = f"{make} --without-pip && {enter} && command -v python"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(tmp_path / "build" / "plan" / "bin" / "python"), done.stderr


def figures(pattern: str, text: str = README) -> tuple[str, ...]:
    """The numbers at the only place of a page that a pattern matches."""
    (found,) = re.findall(pattern, " ".join(text.split()))
    return found if isinstance(found, tuple) else (found,)


def test_the_figures_of_the_plans_are_those_that_the_planner_prints() -> None:
    paper = json.loads(printed("prfaas plan examples/paper.yaml --json"))
    throughput = f"{paper['optimum']['lambda_max']:.4g}"
    ratio, at_equal_cost = f"{paper['ratio_to_homogeneous']:.2f}", f"{paper['equal_cost_ratio']:.2f}"
    egress = paper["egress_break_even_per_gb"]
    dense = f"{json.loads(printed('prfaas plan examples/dense.yaml --json'))['ratio_to_homogeneous']:.2f}"

    row = r"\| planned \| ([\d.]+) requests/s, ([\d.]+) ×; ([\d.]+) × at equal cost \|"
    assert figures(row) == (throughput, ratio, at_equal_cost)
    assert figures(r"\*\*([\d.]+) × and ([\d.]+) × are a model's\*\*") == (ratio, at_equal_cost)
    assert figures(r"the same with a dense model \| planned \| ([\d.]+) × \|") == (dense,)
    assert figures(r"the planner says ([\d.]+) ×, not worth it") == (dense,)
    assert figures(r"Egress above ([\d.]+) per GB\*\*") == (f"{egress:.1g}",)
    assert figures(r"the planner says ([\d.]+) \(\[what it counts") == (f"{egress:.3g}",)

    assert figures(r"the paper's case, requests/s \| ([\d.]+) ", RESULTS) == (throughput,)
    assert figures(r"against 96 H20 \| ([\d.]+) ×", RESULTS) == (ratio,)
    assert figures(r"at equal cost \| ([\d.]+) ×", RESULTS) == (at_equal_cost,)
    assert figures(r"egress pays up to, per GB \| ([\d.]+) ", RESULTS) == (f"{egress:.3g}",)
    assert figures(r"a dense model on the same machines \| ([\d.]+) ×", RESULTS) == (dense,)

    text = printed("prfaas plan examples/paper.yaml")
    for told in (throughput, f"{ratio} ×", f"{at_equal_cost} ×", f"{egress:.3g}"):
        assert told in text


def test_the_price_of_copies_is_what_the_planner_would_print() -> None:
    """The paper's model on eight ranks crosses once; if each rank were sent its latent, the line would carry eight."""
    planned = load_planned("examples/paper.yaml")
    assert {cluster.tensor_parallel for cluster in planned.clusters} == {8}
    optima = [
        best_operation(problem_of(replace(planned, wire_model=sent))) for sent in (None, planned.sent_model)
    ]
    gbit_per_s = tuple(f"{each.egress_bits_per_s / 1e9:.1f}" for each in optima)
    assert planned.kv_model.token_bytes == 8 * planned.sent_model.token_bytes
    assert figures(r"would carry ([\d.]+) Gbit/s in place of ([\d.]+)\.", RESULTS) == gbit_per_s


def test_checks_are_counted_as_reproduce_counts_them() -> None:
    numbers = json.loads(printed("prfaas reproduce --json"))["numbers"]
    checks = [each for each in numbers if each["kind"] == "check"]
    counted = (len(numbers), len(checks), sum(not each["is_off"] for each in checks))
    given = figures(r"computes (\d+)\. (\d+) of them are independent checks, of which (\d+) agree within 1 %")
    assert tuple(map(int, given)) == counted
    given = figures(r"its independent checks \| (\d+) of (\d+) within", RESULTS)
    assert tuple(map(int, given)) == (counted[2], counted[1])


def page(name: str) -> str:
    return (ROOT / "docs" / "explanation" / name).read_text(encoding="utf-8").replace("−", "-")


def test_fidelity_is_told_as_its_tables_have_it() -> None:
    """Means of the TTFT by load: of the hybrid's table, and of the dense model's, which has a column more."""
    live, dense = page("fidelity.md").split("### With a dense model")[:2]
    of_hybrid = re.findall(r"^\|[^|]*\| (0\.\d) \| \d+ \| ([-+][\d.]+) % \|", live, re.MULTILINE)
    of_dense = re.findall(
        r"^\|[^|]*\| (0\.\d) \| \d+ \| [-+][\d.]+ % \| ([-+][\d.]+) % \|", dense, re.MULTILINE
    )
    assert (len(of_hybrid), len(of_dense)) == (12, 6)

    def span(rows: list[tuple[str, str]], *loads: str) -> tuple[str, str]:
        errors = [float(error) for load, error in rows if load in loads]
        return f"{min(errors):+.0f}", f"{max(errors):+.0f}"

    low = span(of_hybrid + of_dense, "0.3", "0.5")
    readme, results = README.replace("−", "-"), RESULTS.replace("−", "-")
    number = r"([-+]\d+)"
    assert figures(rf"mean TTFT: {number} to {number} % up to half", readme) == low
    told = figures(
        rf"At 0\.8 it is {number} to {number} % with a dense model, and {number} to {number} %", readme
    )
    assert told == (*span(of_dense, "0.8"), *span(of_hybrid, "0.8"))
    assert figures(rf"0\.3 and 0\.5 of the capacity \| {number} to {number} %", results) == low
    assert figures(rf"at 0\.8, hybrid model \| {number} to {number} %", results) == span(of_hybrid, "0.8")
    assert figures(rf"at 0\.8, dense model \| {number} to {number} %", results) == span(of_dense, "0.8")
    for load in ("0.3", "0.5", "0.8"):
        row = rf"\| {re.escape(load)} \| {number} to {number} % \| {number} to {number} % \|"
        assert figures(row, page("fidelity.md")) == (*span(of_hybrid, load), *span(of_dense, load))


def test_all_runs_of_the_falsification_are_counted() -> None:
    rows = re.findall(
        r"^\| (?:hybrid|dense), .*\| (\d+) of (\d+) \|$", page("falsification.md"), re.MULTILINE
    )
    met, phases = (str(sum(int(row[place]) for row in rows)) for place in (0, 1))
    assert figures(r"Together that is (\d+) of (\d+) phases", page("falsification.md")) == (met, phases)
    assert figures(r"(\d+) of (\d+) phases within 15 %", RESULTS) == (met, phases)


def test_the_policies_are_compared_as_the_table_of_fairness_has_it() -> None:
    cells = re.search(r"^\| 0\.5, the default \|(.*)\|$", page("scheduling.md"), re.MULTILINE)
    assert cells is not None
    mean, _, p99, *_, long_p99 = re.findall(r"(\d\.\d\d) \(", cells[1])
    readme = README.replace("−", "-")
    told = figures(r"mean TTFT ([-+]\d+) %, P99 of the longest tenth ([-+]\d+) %", readme)
    assert told == tuple(f"{float(each) - 1:+.0%}"[:-1] for each in (mean, long_p99))
    assert figures(r"nine deployments at six loads \| ([\d.]+) \(", RESULTS) == (mean,)
    assert figures(r"the longest tenth \| ([\d.]+) \(.*?; ([\d.]+) \(", RESULTS) == (p99, long_p99)


def test_words_are_counted_as_a_reader_would() -> None:
    shown = "# One two\n\n![no words](x.svg)\n[three](y.md) <!-- no words -->– four\n| a | b |\n|---|---|\n"
    assert word_count(shown + "```sh\nls -l\n```\n") == 8
    typed = "```sh\nmake demo  # not this\npython3 -m venv x && . x/bin/activate\n```\n"
    assert commands(typed + "say `prfaas plan x`, `--model y`\n") == [
        "make demo",
        "python3 -m venv x",
        ". x/bin/activate",
        "prfaas plan x",
    ]
