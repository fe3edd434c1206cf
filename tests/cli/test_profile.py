"""`prfaas profile` as a user types it, against a stand-in server."""

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli import main as cli
from prfaas.core.latency.files import load_profile

FAST = ("--repeats", "1", "--warmups", "0", "--context", "32")


def _stand_in() -> Any:
    # By path: tests/cli is no package, so that its neighbour can't be imported by name.
    path = Path(__file__).parents[1] / "tools" / "profiling" / "stand_in_engine.py"
    spec = spec_from_file_location("stand_in_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server() -> Iterator[Any]:
    stand_in = _stand_in()
    with stand_in.running(stand_in.StandInEngine(max_num_seqs=2, max_model_len=600)) as engine:
        yield engine


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "profile", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.slow("measures an engine in real time")
def test_writes_a_profile(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    args = (
        server.url,
        *FAST,
        "--batches",
        "2,1,3",
        "--hardware",
        "cpu",
        "--gpus",
        2,
        "--out",
        out,
    )
    assert run(monkeypatch, *args) == 0
    captured = capsys.readouterr()
    profile = load_profile(out)
    # Powers of two, and the longest prompt that leaves room for an answer.
    assert [x for x, _ in profile.prefill.points] == [128, 256, 512, 599]
    assert profile.decode is not None
    assert [batch for batch, _ in profile.decode.curve.points] == [1, 2]
    assert profile.decode.context_tokens == 32
    assert (profile.name, profile.model) == ("stand-in-cpu", "org/stand-in")
    assert (profile.hardware, profile.gpus_per_instance) == ("cpu", 2)
    assert server.url in profile.source
    assert "3 requests were never decoded together" in captured.err
    assert "prefill of 599 tokens (4 of 7)" in captured.err
    assert f"profile: {out}" in captured.out


def test_without_a_file_the_profile_is_printed(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, server.url + "/v1", *FAST, "--lengths", "64,32", "--batches", "none") == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    profile = load_profile(path)
    assert profile.range_tokens == (32, 64)
    assert profile.decode is None


def test_json_has_every_measurement(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (
        server.url,
        "--repeats",
        3,
        "--warmups",
        1,
        "--context",
        16,
        "--lengths",
        "32,64",
        "--batches",
        "1",
    )
    assert run(monkeypatch, *args, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [len(each["seconds"]) for each in document["prefill"]] == [3, 3]
    assert document["prefill"][0]["median_s"] == sorted(document["prefill"][0]["seconds"])[1]
    assert document["decode"][0]["batch"] == 1


def test_mistakes_are_one_sentence(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, message in (
        (("http://127.0.0.1:1",), "http://127.0.0.1:1 can't be reached"),
        (("localhost",), '"localhost" is no URL; write for example'),
        ((server.url, "--lengths", "64"), "--lengths: give at least two"),
        ((server.url, "--lengths", "64,x"), "--lengths: must be whole numbers above 0"),
        ((server.url, "--batches", "0,1"), "--batches: must be whole numbers above 0"),
        ((server.url, "--lengths", "64,600"), "the longest that can be measured is 599"),
        ((server.url, "--context", "590"), "a context of 590 tokens leaves no room"),
        ((server.url, "--model", "other"), 'doesn\'t serve "other"'),
        ((server.url, "--out", tmp_path / "no" / "p.yaml"), "--out: there is no directory"),
    ):
        assert run(monkeypatch, *args) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1].startswith("prfaas: ")
        assert message in captured.err.splitlines()[-1]
