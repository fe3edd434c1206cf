"""`prfaas bandwidth` against the paper's section 2."""

import json
import sys
from pathlib import Path

import pytest

from prfaas.cli import main as cli


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "bandwidth", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("model", "gbit_per_s"), [("minimax-m2.5", 3800), ("qwen3-235b", 2100), ("ring-2.5-1t", 170)]
)
def test_512_gpus_at_32k(
    model: str, gbit_per_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, model, "--gpus", 512, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    # The paper rounds to two digits.
    assert document["egress_bits_per_s"] == pytest.approx(gbit_per_s * 1e9, rel=0.03)
    assert document["instances"] == 64
    assert document["mean_tokens"] == 32768


def test_an_fp8_cache_needs_half(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dense = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    for model in ("minimax-m2.5", tmp_path / "config.json", tmp_path):
        rates = []
        for dtype in ("bf16", "fp8"):
            options = ("--gpus", 512, "--profile", "minimax-m2.5-h200", "--kv-dtype", dtype, "--json")
            assert run(monkeypatch, model, *options) == 0
            rates.append(json.loads(capsys.readouterr().out)["egress_bits_per_s"])
        assert 2 * rates[1] == pytest.approx(rates[0])


def test_the_case_study(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    long_prompts = ("internal-1t", "--gpus", 32, "--lognormal", "9.9,1,19400,131072")
    assert run(monkeypatch, *long_prompts, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mean_tokens"] == pytest.approx(45_046, abs=1)
    assert document["egress_at_mean_bits_per_s"] == pytest.approx(12.4e9, rel=0.01)
    assert document["egress_bits_per_s"] == pytest.approx(12.1e9, rel=0.01)
    assert run(monkeypatch, *long_prompts) == 0
    text = capsys.readouterr().out
    assert "fill 12.15 Gbit/s." in text
    assert "12.42 Gbit/s (the paper's approximation)" in text


def test_a_trace_and_another_models_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.000000+00:00,1024,10\n2024-05-10 00:00:01.000000+00:00,8192,10\n"
    )
    assert (
        run(monkeypatch, "kimi-k2", "--gpus", 8, "--profile", "internal-1t-h200", "--trace", trace, "--json")
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    expected = (1024 + 8192) * 70_272 * 8 / (0.44 + 0.72)
    assert document["egress_bits_per_s"] == pytest.approx(expected)
    assert (document["model"], document["profile_model"]) == ("kimi-k2", "internal-1t")
    assert run(monkeypatch, "kimi-k2", "--gpus", 8, "--profile", "internal-1t-h200") == 0
    assert "was measured with internal-1t" in capsys.readouterr().err


def test_mistakes_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, message in (
        (
            ("kimi-k2", "--gpus", 8),
            "--model kimi-k2: its config.json is needed",
        ),
        (("internal-1t", "--gpus", 3), "3 GPUs are less than one instance of 8"),
        (("internal-1t", "--gpus", 8, "--length", 200_000), "for 128 to 131072 tokens, not for 200000"),
        (("internal-1t", "--gpus", 8, "--lognormal", "9,1"), "must be four numbers MU,SIGMA,LOW,HIGH"),
        (("internal-1t", "--gpus", 8, "--lognormal", "9,-1,128,256"), "sigma above 0"),
        (("internal-1t", "--gpus", 8, "--lognormal", "9,1,128,256", "--length", 3), "give only one of"),
        (("internal", "--gpus", 8), 'no published model "internal"'),
        (("internal-1t", "--gpus", 8, "--trace", "gone.csv"), "gone.csv"),
    ):
        assert run(monkeypatch, *args) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("prfaas: ")
        assert captured.err.count("\n") == 1
        assert message in captured.err
