"""`prfaas models` as a user types it."""

import json
import sys
from pathlib import Path

import pytest

from prfaas.cli import main as cli

DENSE = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SPARSE = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_lists_the_published_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "models") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "7 MLA + 20 KDA" in rows["kimi-linear"]
    assert "23 Mamba2" in rows["nemotron-3-nano"]
    assert rows["internal-1t"].split()[-4:] == ["190.8", "308.9", "713.9", "2,333.9"]


def test_json_has_every_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "models", "--json") == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert len(listed) == 20
    step = listed["step-3.5-flash"]
    assert (step["layers"], step["bytes_per_token"], step["window_bytes"]) == (45, 49_152, 69_206_016)
    assert step["kv_bytes"]["131072"] == 131072 * 49_152 + 69_206_016
    assert [group["kind"] for group in step["groups"]] == ["full", "SWA-512"]
    assert any(source["assumed"] for source in step["sources"])


def test_one_model_on_several_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "models", "ring-2.5-1t", "--tensor-parallel", 8, "--json") == 0
    rank = json.loads(capsys.readouterr().out)
    assert (rank["tensor_parallel"], rank["bytes_per_token"]) == (8, 11_520)
    assert rank["fixed_state_bytes"] == 293_601_280 // 8
    assert run(monkeypatch, "models", "ring-2.5-1t", "--tensor-parallel", 8) == 0
    assert "on each of 8 ranks" in capsys.readouterr().out


def test_sources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "models", "ring-2.5-1t", "--json") == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert any(each["assumed"] and "num_attention_heads" in " ".join(each["fields"]) for each in sources)


def test_a_users_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps(DENSE))
    for place in (path, path.parent):
        assert run(monkeypatch, "models", place, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["name"], document["cached_layers"]) == ("mine", 2)
        assert document["bytes_per_token"] == 2 * 4 * 2 * 16 * 2
    assert run(monkeypatch, "models", path, "--kv-dtype", "fp8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 2 * 4 * 2 * 16


def test_published_models_in_other_dtypes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []
    for options in ((), ("--kv-dtype", "fp8"), ("--kv-dtype", "fp32"), ("--state-dtype", "bf16")):
        assert run(monkeypatch, "models", "internal-1t", *options, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        sizes.append((found["bytes_per_token"], found["groups"][1]["recurrent_bytes"]))
    (token, state), *others = sizes
    assert others == [(token // 2, state), (token * 2, state), (token, state // 2)]
    assert run(monkeypatch, "models", "--kv-dtype", "fp8", "--json") == 0
    listed = capsys.readouterr()
    found = {each["name"]: each for each in json.loads(listed.out)}
    assert found["internal-1t"]["bytes_per_token"] == token // 2
    assert "deepseek-v4-flash" not in found
    assert "deepseek-v4-flash is left out: the fp8 cache of this model" in " ".join(listed.err.split())


def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**DENSE, "model_type": "brand_new"}))
    for args, message in (
        (("kimi-q2",), 'no published model "kimi-q2"; did you mean "kimi-k2"?'),
        ((path,), f'{path}: the KVCache of model_type "brand_new" is not known, and it has no layer_types'),
        ((tmp_path / "gone.json",), "gone.json: there is no such file; name the directory of"),
        (("kimi-k2", "--kv-dtype", "fp8_ds_mla"), 'not of model_type "kimi_k2"'),
        (("kimi-k2", "--state-dtype", "fp8"), '--state-dtype: must be one of fp32, bf16, fp16, not "fp8"'),
        (("minimax-m2.5", "--tensor-parallel", 3), "8 KV heads can't be divided among 3 ranks"),
        (("--tensor-parallel", 3), "can't be divided among 3 ranks; name one model"),
    ):
        assert run(monkeypatch, "models", *args) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("prfaas: ")
        assert captured.err.count("\n") == 1
        assert message in captured.err
    path.write_text(json.dumps(DENSE))
    assert run(monkeypatch, "models", path, "--kv-dtype", "int4") == 2
    said = capsys.readouterr().err
    assert (
        '--kv-dtype: must be one of auto, bf16, fp16, fp32, fp8, fp8_e4m3, fp8_e5m2, fp8_ds_mla, not "int4"'
        in said
    )


def test_the_layout_of_an_fp8_cache_of_sparse_mla_must_be_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SPARSE))
    assert run(monkeypatch, "models", path, "--kv-dtype", "fp8") == 2
    assert "two layouts; say fp8_ds_mla" in " ".join(capsys.readouterr().err.split())
    for dtype, latent_bytes in (("fp8_ds_mla", 656), ("fp8_e4m3", 576)):
        assert run(monkeypatch, "models", path, "--kv-dtype", dtype, "--json") == 0
        assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 2 * (latent_bytes + 132)


def test_chunked_attention_has_a_kind_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**DENSE, "model_type": "llama4_text", "num_hidden_layers": 4}))
    assert run(monkeypatch, "models", path, "--json") == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert [(group["kind"], group["layers"]) for group in groups] == [("full", 1), ("chunk-8192", 3)]
