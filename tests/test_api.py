"""The library: its examples are true, its names are there, and importing it costs little."""

import ast
import doctest
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from prfaas import api
from prfaas.cli import main as cli

PAPER = api.example_path("paper")


def test_the_examples_of_the_docstrings() -> None:
    failed, tried = doctest.testmod(api, extraglobs={name: getattr(api, name) for name in api.__all__})
    assert tried > 8
    assert failed == 0


def test_every_name_is_there_and_no_other() -> None:
    assert sorted(set(api.__all__)) == sorted(api.__all__) == sorted(dir(api))
    for name in api.__all__:
        assert getattr(api, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulation'"):
        api.simulation  # type: ignore[attr-defined]  # noqa: B018


def test_types_are_known_where_names_are_imported_late() -> None:
    # What a type checker sees (TYPE_CHECKING) and what is found when the program runs must be the same.
    tree = ast.parse(Path(api.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == api._MODULE_OF
    assert resources.files("prfaas").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("prfaas", ["typing"]), ("prfaas.api", ["numpy", "pydantic", "yaml", "typer", "asyncio"])],
)
def test_importing_it_imports_nothing_heavy(module: str, unwanted: list[str]) -> None:
    code = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & set(unwanted)


def test_a_plan_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(["plan", str(PAPER), "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    # What is left when something is gone is the command's own.
    assert len(told.pop("survival")) == 5
    assert json.loads(json.dumps(api.plan(str(PAPER)).to_json())) == told


def test_a_simulation_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(
        ["simulate", str(PAPER), "--load", "0.8", "--requests", "800", "--seed", "3", "--json"],
        standalone_mode=False,
    )
    (told,) = json.loads(capsys.readouterr().out)["policies"].values()
    result = api.simulate(api.load_planned(PAPER), load=0.8, requests=800, seed=3)
    assert json.loads(json.dumps(result.summary())) == told
    again = api.simulate(PAPER, load=0.8, requests=800, seed=3)
    assert np.array_equal(result.ttft_s, again.ttft_s)


def test_its_other_worlds_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    worlds: list[tuple[list[str], dict[str, object]]] = [
        (["--bursts"], {"bursts": True}),
        (["--diurnal", "0.8/300"], {"diurnal": (0.8, 300.0)}),
        (["--bandwidth-steps", "east->home@60=3 Gbit/s"], {"bandwidth_steps": [("east->home", 60.0, 3e9)]}),
    ]
    for words, wanted in worlds:
        cli.app(["simulate", str(PAPER), "--duration", "300", *words, "--json"], standalone_mode=False)
        (told,) = json.loads(capsys.readouterr().out)["policies"].values()
        result = api.simulate(PAPER, duration_s=300.0, **wanted)  # type: ignore[arg-type]
        assert json.loads(json.dumps(result.summary())) == told


def test_a_simulated_trace_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text("at,in,out\n" + "".join(f"{n * n},{900 * n + 200},{n}\n" for n in range(30)))
    words = ["simulate", str(PAPER), "--trace", str(trace), "--columns", "arrival_ms=at,input=in,output=out"]
    cli.app([*words, "--requests", "200", "--seed", "2", "--json"], standalone_mode=False)
    (told,) = json.loads(capsys.readouterr().out)["policies"].values()
    columns = {"arrival_ms": "at", "input": "in", "output": "out"}
    result = api.simulate(PAPER, trace=str(trace), columns=columns, requests=200, seed=2)
    assert json.loads(json.dumps(result.summary())) == told
    burst = api.example_path("traces/mooncake_burst.jsonl.gz")
    hits = [
        api.simulate(PAPER, trace=burst, cache_bytes=size, requests=400).summary()["hit_ratio"]
        for size in (0, None)
    ]
    assert 0 == hits[0] < hits[1]


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"load": 0.5, "requests_per_s": 1.0}, "not both"),
        ({"load": -1.0}, "above 0"),
        ({"requests_per_s": float("inf")}, "above 0"),
        ({"policy": "best"}, 'no policy "best"'),
        ({"requests": 5, "duration_s": 5.0}, "give requests or duration_s, not both"),
        ({"bursts": True, "diurnal": (0.5, 60.0)}, "not both"),
        (
            {"bursts": True, "trace": str(api.example_path("traces/mooncake_burst.jsonl.gz"))},
            "a trace has its own",
        ),
        ({"bandwidth_steps": [("home->east", 5.0, 1e9)]}, 'there is no link "home->east"'),
        ({"trace": "none.csv"}, "none.csv: there is no such trace"),
        ({"trace": "none.csv", "columns": {"input": "a"}}, "named as arrival=COLUMN,"),
    ],
)
def test_what_can_not_be_simulated(wanted: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        api.simulate(PAPER, **wanted)  # type: ignore[arg-type]


def test_a_kv_model_by_name_file_and_directory(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    by_directory, by_file = api.kv_model(tmp_path), api.kv_model(str(tmp_path / "config.json"))
    assert by_directory == by_file
    assert by_file.token_bytes == 2 * 2 * (8 + 8) * 2
    assert api.kv_model(tmp_path, kv_cache_dtype="fp8").token_bytes == by_file.token_bytes // 2
    assert api.kv_model("kimi-k2").name == "kimi-k2"
    with pytest.raises(api.ConfigError, match="no published model"):
        api.kv_model("nothing")


def test_policies_by_name() -> None:
    assert {api.policy_named(name, **_needed(name)).name for name in api.POLICIES} == set(api.POLICIES)


def test_a_policy_with_parameters_simulated() -> None:
    paper = api.load_planned(api.example_path("paper"))
    means = [
        api.simulate(paper, policy=policy, params=params, requests=500, load=0.8).summary()["ttft_mean_s"]
        for policy, params in (("paper", None), ("paper", {"queue_mark": 0.5}), ("paper", {"queue_mark": 9}))
    ]
    assert means[0] == means[1] != means[2]
    with pytest.raises(api.PolicyError, match="queue_mark"):
        api.simulate(paper, policy="paper", params={"queue_mark": 0}, requests=10)


def _needed(policy: str) -> dict[str, object]:
    return {"threshold_tokens": 4000.0} if policy == "static_threshold" else {}


def test_examples_by_name() -> None:
    assert {"local.yaml", "paper.yaml"} <= set(api.example_files())
    assert api.example_path("local") == api.example_path("local.yaml")
    with pytest.raises(FileNotFoundError, match=r"there are dense, .*paper"):
        api.example_path("nothing")
