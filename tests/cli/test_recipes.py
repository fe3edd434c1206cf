"""Recipes: each is planned, simulated and emitted, and the page has the numbers that `prfaas plan` gives.

    python -m tests.cli.test_recipes

prints the page's table.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from prfaas.api import simulate
from prfaas.cli import main as cli
from prfaas.core.deployment import load_deployment, load_planned
from prfaas.core.kv.published import published_models
from prfaas.core.planner import make_plan, problem_of
from prfaas.core.shipped import example_files
from prfaas.core.units import format_bits_per_s, format_bytes
from prfaas.lab.report.plan_bands import doubts

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in example_files("recipes").values()}
PROMPT_TOKENS = 32768


def row_of(path: Path) -> str:
    """A recipe's line of the page's table."""
    planned = load_planned(path)
    (link,) = planned.links
    result = make_plan(problem_of(planned))
    assert result.ratio_to_homogeneous is not None and result.equal_cost_ratio is not None
    (doubt,) = doubts(planned)
    found = re.search(r"worth it in (\d+) of (\d+) cases", doubt)
    assert found is not None
    cells = (
        f"`{path.stem}`",
        *(f"{each.gpus} {each.hardware.upper().replace('-3E', '-3e')}" for each in planned.clusters),
        format_bits_per_s(link.bandwidth_bits_per_s),
        format_bytes(planned.sent_over(link.name).kv_bytes(PROMPT_TOKENS)),
        f"{result.ratio_to_homogeneous:.2f} ×",
        f"{result.equal_cost_ratio:.2f} ×",
        f"{found[1]} of {found[2]}",
    )
    return f"| {' | '.join(cells)} |"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def sites(path: Path) -> list[str]:
    """The options of `prfaas init` that give every machine of a recipe another address."""
    machines: dict[str, list[str]] = {}
    for instance in load_deployment(path).instances:
        machines.setdefault(instance.cluster, []).append(instance.host)
    given = (
        f"{site}:{','.join(f'10.{s}.0.{n}' for n in range(1, len(set(hosts)) + 1))}"
        for s, (site, hosts) in enumerate(machines.items())
    )
    return [word for each in given for word in ("--site", each)]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", RECIPES)
def test_from_hosts_to_manifests(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("init", "--recipe", name, *sites(RECIPES[name]), "-o", tmp_path, "--json")
    assert run(monkeypatch, *asked) == 0
    said = json.loads(capsys.readouterr().out)
    deployment = load_deployment(said["file"])
    assert all(instance.host.startswith("10.") for instance in deployment.instances)
    assert deployment.gateway.host == deployment.gateway.admin.host == "10.1.0.1"
    assert "192.0.2." not in (text := Path(said["file"]).read_text()) and "198.51.100." not in text
    assert len(said["secrets"]) == 3
    assert run(monkeypatch, "emit", "kubernetes", said["file"], "-o", tmp_path / "k8s", "--json") == 0
    emitted = [Path(each) for each in json.loads(capsys.readouterr().out)["files"]]
    for each in emitted:
        if each.suffix == ".yaml":
            assert all(
                isinstance(document, dict) for document in yaml.load_all(each.read_text(), yaml.CSafeLoader)
            )
    names = {each.stem for each in emitted}
    assert {instance.name for instance in deployment.instances} | {"prfaas-gateway"} <= names


@pytest.mark.parametrize("name", RECIPES)
def test_a_short_simulation(name: str) -> None:
    planned = load_planned(RECIPES[name])
    result = simulate(planned, load=0.5, requests=60)
    assert len(result.ttft_s) > 0 and float(result.ttft_s.min()) > 0
    assert 0 < sum(result.offloaded) < len(result.offloaded)


@pytest.mark.slow("plans over the error bars of both sites")
@pytest.mark.parametrize("name", RECIPES)
def test_the_page_says_what_plan_says(name: str) -> None:
    assert row_of(RECIPES[name]) in (ROOT / "docs/guides/recipes.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_about_its_model(name: str) -> None:
    """Its name stands in the file, its model is published, and its times are estimated alike at both sites."""
    planned = load_planned(RECIPES[name])
    assert planned.name == name
    assert planned.kv_model.name in {each.kv_model.name for each in published_models()}
    sources = [each.profile.source for each in planned.clusters]
    assert all("Estimated, not measured: the roofline" in source for source in sources)
    # The profiles are beside it.
    named = yaml.safe_load(RECIPES[name].read_text())["clusters"]
    assert all((RECIPES[name].parent / each["profile"]).is_file() for each in named)


def test_without_hosts_it_is_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "gpt-oss-120b"
    assert run(monkeypatch, "init", "--recipe", name, "-o", tmp_path) == 0
    target = tmp_path / f"{name}.yaml"
    assert target.read_bytes() == RECIPES[name].read_bytes() and not (tmp_path / "home").exists()
    assert f"next: prfaas plan {target}" in capsys.readouterr().out
    assert sorted(each.name for each in (tmp_path / name).iterdir()) == ["h20.yaml", "h200.yaml"]
    # What is measured since stays.
    measured = tmp_path / name / "h20.yaml"
    measured.write_text(measured.read_text() + "# mine\n")
    target.unlink()
    assert run(monkeypatch, "init", "--recipe", name, "-o", tmp_path, "--model", "hub:me/mine") == 0
    assert measured.read_text().endswith("# mine\n")
    source = load_deployment(target).model.source
    assert source is not None and str(source) == "hub: me/mine"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--recipe", "gpt-9"), 'there is no recipe "gpt-9"; there are deepseek-v3.2, gpt-oss-120b'),
        (
            ("--recipe", "gpt-oss-120b", "--site", "east:10.0.0.1"),
            "has 2 machines there; write SITE:HOST,HOST",
        ),
        (("--recipe", "gpt-oss-120b", "--site", "west:10.0.0.1"), "has no such site, or it is given twice"),
        (("--recipe", "gpt-oss-120b", "--site", "east:10.0.0.1,10.0.0.2"), "has hosts at home, too"),
        (("--recipe", "gpt-oss-120b", "--site", "east:10.0.0.1,10.0.0.999"), "is no IPv4 address"),
        (("--recipe", "gpt-oss-120b", "--gateway", "10.0.0.1"), "--gateway does not go with --recipe"),
        (("--recipe", "gpt-oss-120b", "--model", "m"), '--model "m" is no absolute path'),
        (("--recipe", "gpt-oss-120b", "--model", "tiny:qwen3"), "these options make no deployment: model"),
    ],
)
def test_what_makes_no_file_is_one_sentence(
    args: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "init", *args, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("prfaas: ") and said in error and error.count("\n") == 1
    assert not list(tmp_path.glob("out/*.yaml"))


if __name__ == "__main__":
    for each in RECIPES.values():
        print(row_of(each))
