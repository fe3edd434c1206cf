"""`prfaas profile --estimate` as a user types it."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from prfaas.cli import main as cli
from prfaas.core.latency.files import load_profile
from prfaas.core.units import format_s

MODELS = yaml.load(
    (Path(__file__).parents[1] / "core" / "latency" / "public_models.yaml").read_text(), yaml.CSafeLoader
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "minimax-m2.5" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(MODELS["minimax-m2.5"]["config"]))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "profile", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_profile_on_stdout(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--estimate", "--model", config, "--gpu", "h20", "--tp", 8)
    assert run(monkeypatch, *args) == 0
    captured = capsys.readouterr()
    path = tmp_path / "printed.yaml"
    path.write_text(captured.out)
    profile = load_profile(path)
    assert (profile.name, profile.hardware, profile.gpus_per_instance) == ("minimax-m2.5-h20", "h20", 8)
    assert profile.decode is not None
    assert profile.decode.evidence.origin == profile.evidence.origin == "estimated"
    assert "the roofline of prfaas" in profile.source and captured.err == ""


def test_a_file_and_error_bars_beside_a_measured_profile(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "h200.yaml"
    base = ("--estimate", "--model", config.parent, "--gpu", "h200", "--tp", 8)
    args = (*base, "--out", out, "--beside", "minimax-m2.5-h200", "--name", "mine")
    assert run(monkeypatch, *args) == 0
    captured = capsys.readouterr()
    assert load_profile(out).name == "mine"
    for title in ("minimax-m2.5: prefill", "decode step after 8192 tokens", "error bar", "over estimated"):
        assert title in captured.out
    tokens, seconds = load_profile(out).prefill.points[3]
    band = load_profile(out).evidence.band
    assert band is not None
    bar = f"{format_s(band[0] * seconds)} – {format_s(band[1] * seconds)}"
    assert any(
        line.split()[0] == f"{tokens:.0f}" and bar in line
        for line in captured.out.splitlines()
        if line.strip()
    )
    assert f"profile: {out}" in captured.out


def test_json_has_the_same(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--estimate", "--model", config, "--gpu", "h200", "--tp", 8,
            "--json", "--lengths", "1024,32768",
            "--batches", "4,8", "--context", 4096, "--beside", "minimax-m2.5-h200")  # fmt: skip
    assert run(monkeypatch, *args) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["at"] for row in document["prefill"]] == [1024, 32768]
    assert (document["context_tokens"], document["beside"]) == (4096, "minimax-m2.5-h200")
    short = document["prefill"][0]
    assert short["measured_s"] == 0.4211
    assert short["low_s"] == pytest.approx(0.55 * short["estimated_s"])
    assert [row["at"] for row in document["decode"]] == [4, 8]
    assert run(monkeypatch, *args[:10], "--batches", "none") == 0
    assert "decode" not in json.loads(capsys.readouterr().out)


def test_mistakes_are_one_sentence(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--estimate", "--model", config, "--gpu", "h200")
    for args, message in (
        ((), "give the URL of a server to measure, or --estimate with --model and --gpu"),
        (("--estimate", "--model", config), "--estimate needs --model NAME"),
        (("--estimate", "--gpu", "h200"), "--estimate needs --model NAME"),
        (("http://127.0.0.1:9", *base), "--estimate asks no server; leave http://127.0.0.1:9 out"),
        (("http://127.0.0.1:9", "--gpu", "h200"), "--gpu goes with --estimate"),
        (("http://127.0.0.1:9", "--kv-dtype", "fp8"), "--kv-dtype goes with --estimate"),
        ((*base, "--kv-dtype", "int4"), "--kv-dtype: must be one of auto, bf16"),
        (("http://127.0.0.1:9", "--beside", "x"), "--beside goes with --estimate"),
        ((*base, "--beside", "nobodys"), 'there is no profile "nobodys"'),
        ((*base, "--weights", "int3"), "--weights: must be one of bf16, fp8"),
        ((*base, "--tp", "3"), "can't be divided among 3 ranks"),
        (base, "minimax-m2.5 (fp8 weights) needs 229 GB on each of 1 h200"),
        (("--estimate", "--model", config, "--gpu", "h3000", "--tp", 8), 'there is no GPU "h3000"'),
        (("--estimate", "--model", tmp_path, "--gpu", "h200"), "there is no such file"),
    ):
        assert run(monkeypatch, *args) == 2, args
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1].startswith("prfaas: ")
        assert message in captured.err.splitlines()[-1], (args, captured.err)
