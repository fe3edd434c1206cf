"""docs/guides/own-question.md as written, with the policy of own-policy.md; and the notebook, cell after cell.

A kernel runs a notebook's cells in its module `__main__`. So does this, in a process of its own without Jupyter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.test_own_policy_page import LIMIT_S, PAGE, ROOT, Page, fences

QUESTION = ROOT / "docs" / "guides" / "own-question.md"
NOTEBOOK = ROOT / "examples" / "notebooks" / "own_question.ipynb"

pytestmark = pytest.mark.docs


@pytest.fixture
def page(tmp_path: Path) -> Page:
    pytest.importorskip("pandas")
    (policy,) = [each for each in fences(PAGE.read_text()) if each.file == "frugal.py"]
    found = Page(tmp_path, fences(QUESTION.read_text()))
    for each in [policy, *found.blocks]:
        if each.file:
            (tmp_path / each.file).write_text(each.text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return found


@pytest.mark.slow("does all that the page says, each command a process")
def test_from_an_own_trace_to_an_answer(page: Page) -> None:
    exported, simulated, answered, compared = page.shell
    assert exported == "export PYTHONPATH=$PWD\n"
    printed = page.run(simulated)
    assert "frugal:Frugal" in printed and "tilted" in printed
    python = f'python() {{ "{sys.executable}" "$@"; }}\n'
    answer = page.run(python + answered)
    for word in ("ttft_p90_s", "gigabytes", "frugal:Frugal", "contracts", "chat"):
        assert word in answer
    assert "of requests wait longer" in page.run(python + compared)
    (code,) = [each.text for each in page.blocks if each.language == "python" and not each.file]
    (page.folder / "run.py").write_text(code)
    assert "mean" in page.run(f'"{sys.executable}" run.py')


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    document = json.loads(notebook.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    return [*document["cells"]]


def test_the_notebook_is_kept_without_what_it_printed() -> None:
    cells = cells_of(NOTEBOOK)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


RUN = """
import json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"))
assert counted.seconds_per_gb.nunique() == len(PRICES)
assert answer.gigabytes[4] < answer.gigabytes[0], answer
assert answer.ttft_p90_s[4] > answer.ttft_p90_s[0], answer
assert len(axes.lines) == len(kinds)
"""


@pytest.mark.extended("what the page above does, cell after cell")
def test_the_notebook_runs_and_plots(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    (tmp_path / "run.py").write_text(RUN)
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "run.py", str(NOTEBOOK)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ttft_p90_s" in done.stdout
    assert (tmp_path / "answer.png").stat().st_size > 10_000
    records = pandas.read_csv(tmp_path / "records.csv.gz")
    assert len(records) == 4 * 3000 and records.ttft_s.notna().all()
