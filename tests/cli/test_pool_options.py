"""Pools in `prfaas plan` and `prfaas simulate`: the file's, or by options."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.cli import main as cli

EXAMPLES = Path(__file__).parents[2] / "examples"
PAPER = EXAMPLES / "paper.yaml"
BURST = EXAMPLES / "traces" / "mooncake_burst.jsonl.gz"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    assert run(monkeypatch, *args, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def pooled(tmp_path: Path) -> Path:
    """The case study with pools in its file, whose pages are of one rank: of eight copies they would hold less."""
    document = yaml.safe_load(PAPER.read_text())
    for cluster in document["clusters"]:
        del cluster["tensor_parallel"]
    document["clusters"][0]["pool"] = {"memory": "64 GiB", "ssd": "1 TiB"}
    document["clusters"][1]["pool"] = {"memory": "272 GiB"}
    document["pool"] = {"checkpoint_tokens": 8192, "eviction": "cost"}
    path = tmp_path / "pooled.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_plan_without_pools_says_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "pools" not in printed(monkeypatch, capsys, "plan", PAPER)


def test_a_plan_says_which_tiers_pay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = printed(monkeypatch, capsys, "plan", PAPER, "--pool", "272 GiB")["pools"]
    assert pools["worth"] is None
    tiers = {(tier["cluster"], tier["tier"]): tier for tier in pools["tiers"]}
    assert tiers.keys() == {
        (name, tier) for name in ("east", "home") for tier in ("memory", "other machines")
    }
    # 27,486 tokens of 17,280 B and a state of 173.9 MiB, in about 1.6 s.
    assert tiers["east", "memory"]["kv_bits_per_s"] == pytest.approx(3.33e9, rel=0.01)
    assert tiers["east", "memory"]["pays"]


def test_a_plan_with_a_trace(
    pooled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = printed(monkeypatch, capsys, "plan", pooled, "--trace", BURST, "--pool-rate", "ssd=1 Gbit/s")
    pools = plan["pools"]
    assert pools["clusters"]["east"]["memory_bytes"] == 64 << 30
    assert pools["clusters"]["home"]["eviction"] == "cost"
    assert pools["clusters"]["home"]["checkpoint_tokens"] == 8192
    worth = pools["worth"]
    assert worth["trace"] == BURST.name and 0.1 < worth["hit_ratio"] < 0.5
    # Less is left to compute. The whole plan is for the trace's prompts, not for the file's.
    assert 1.0 < worth["lambda_max_with"] / worth["lambda_max_without"] < 1 / (1 - worth["hit_ratio"])
    assert worth["lambda_max_without"] == plan["optimum"]["lambda_max"]
    assert worth["ttft_mean_with_s"] < worth["ttft_mean_without_s"]
    (ssd,) = (tier for tier in pools["tiers"] if tier["tier"] == "SSD")
    assert (ssd["cluster"], ssd["pays"], ssd["pays_from_tokens"]) == ("east", False, None)


def test_a_plan_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", PAPER, "--pool", "272 GiB") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Pools of each machine: east 272.0 GiB; home 272.0 GiB." in text
    assert "Give --trace FILE to see what they are worth." in text
    assert run(monkeypatch, "plan", PAPER, "--pool", "272 GiB", "--trace", BURST) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"of all prompt tokens ({BURST.name}, replayed through the pools of all machines):" in text


def test_a_simulation_says_whence_tokens_came(
    pooled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "simulate",
        pooled,
        "--trace",
        BURST,
        "--requests",
        2000,
        "--cache-memory",
        "4 GiB",
        "--policy",
        "paper",
    )
    found = printed(monkeypatch, capsys, *given)
    summary = found["policies"]["paper"]
    assert summary["hit_ratio_memory"] > 0.025
    assert summary["hit_ratio"] > summary["hit_ratio_memory"] + summary["hit_ratio_machine"]
    assert found["pools"]["east"]["ssd_bytes"] == 1 << 40

    without = printed(monkeypatch, capsys, *given, "--pool", 0)
    assert without["pools"] == {}
    assert "hit_ratio_memory" not in without["policies"]["paper"]
    assert without["policies"]["paper"]["hit_ratio"] < summary["hit_ratio"]

    assert run(monkeypatch, *given) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "pools: east: 64.0 GiB of memory and 1.0 TiB of SSD on every machine; home: 272.0 GiB" in text
    assert "from memory of pools" in text and "from SSD of pools" in text


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("plan", PAPER, "--pool", "much"), "--pool: "),
        (("plan", PAPER, "--pool-ssd", "1 TiB"), "need pools: give --pool"),
        (("plan", PAPER, "--pool", "1 GiB", "--pool-rate", "disk=1"), "memory, ssd, network"),
        (("plan", PAPER, "--pool", "1 GiB", "--pool-rate", "ssd=fast"), "--pool-rate ssd: "),
        (
            ("plan", PAPER, "--pool", "1 GiB", "--sweep", "links[0].bandwidth=1e9:1e10:2"),
            "--sweep goes without --pool",
        ),
        (("simulate", PAPER, "--pool-ssd", "1 TiB"), "need pools: give --pool"),
    ],
)
def test_what_makes_no_sense_is_refused(
    args: tuple[object, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *args) == 2
    assert why in " ".join(capsys.readouterr().err.split())
