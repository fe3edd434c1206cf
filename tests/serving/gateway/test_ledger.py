"""The ledger: one row for each routed request, bounded, without content; the holdout; what `worth` makes of rows."""

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs
from tests.ports import free_ports
from tests.serving.control.world import FILE
from typer.testing import CliRunner

from prfaas.cli.main import app
from prfaas.cli.running import check_gateway
from prfaas.core.deployment import LedgerConfig, load_deployment
from prfaas.core.ledger import COLUMNS
from prfaas.core.scheduling.decision import OtherWay
from prfaas.serving.control.planning_inputs import prefill_curves, view_of
from prfaas.serving.gateway import ledger as ledger_module
from prfaas.serving.gateway.ledger import Entries, Ledger
from prfaas.serving.gateway.request_log import TransferredBytes
from prfaas.serving.ledger_file import open_ledger
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import LedgerFileError
from prfaas.serving.worth import By, worth

from .records import record_of
from .world import GATEWAY, World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))


def rows_of(path: Path) -> list[dict[str, Any]]:
    connection = open_ledger(path, read_only=True)
    rows = [
        dict(zip(COLUMNS, row, strict=True))
        for row in connection.execute("SELECT * FROM requests ORDER BY at_s")
    ]
    connection.close()
    return rows


@pytest.mark.parametrize("holdout", [0.0, 1.0])
def test_each_request_has_a_row(in_world: InWorld, tmp_path: Path, holdout: float) -> None:
    file = tmp_path / "ledger.sqlite"

    async def body(world: World) -> None:
        for prompt in (LONG, SHORT):
            body = {"model": "stand-in", "prompt": prompt, "stream": True, "max_tokens": 4}
            async with world.client.post("/v1/completions", json=body, headers={"x-team": "a"}) as response:
                assert response.status == 200
                await response.read()
        # A refused one was never routed.
        response, _ = await world.post("/v1/completions", {"model": "none", "prompt": SHORT})
        assert response.status == 404

    config = replace(GATEWAY, ledger=LedgerConfig(file, holdout=holdout))
    in_world(body, live=True, gateway_config=config, tenant_header="x-team")
    long, short = rows_of(file)
    assert (short["route"], short["other_s"]) == ("local", None)
    assert long["prompt_tokens"] == 1000 and long["other_s"] > 0 and long["other_gpu_s"] > 0
    if holdout:
        assert (long["route"], long["reason"], long["held_out"]) == ("local", "holdout", 1)
        assert long["egress_bytes"] == 0
    else:
        assert (long["route"], long["held_out"]) == ("offload", 0)
        assert long["kv_bytes"] == long["egress_bytes"] > 0
    for row in (long, short):
        assert row["outcome"] == "ok" and 0 < row["first_token_s"] <= row["ttft_s"] <= row["total_s"]
        assert len(row["tenant"]) == 12
    # Neither prompts nor names of tenants.
    assert b"x-team" not in file.read_bytes() and json.dumps(LONG[:20]).encode() not in file.read_bytes()


def test_money_is_of_the_files_prices(tmp_path: Path) -> None:
    text = FILE.replace("bandwidth: 1 Gbit/s", "bandwidth: 1 Gbit/s, egress_per_gb: 0.5")
    text += "prices: {h200: 8, h20: 4}\n"
    for hardware in ("h200", "h20"):
        text = text.replace("hardware: synthetic", f"hardware: {hardware}\n    gpus_per_instance: 8", 1)
    (tmp_path / "deployment.yaml").write_text(text)
    deployment = load_deployment(tmp_path / "deployment.yaml", state_dir=tmp_path)
    entries = Entries(
        RunningDeployment(deployment), view_of(deployment, None, prefill_curves(deployment), 0.0)
    )
    record = record_of(prompt_tokens=30_000, uncached_tokens=30_000)
    attempt = record.attempts[0]
    attempt.decision = structs.replace(
        attempt.decision, prefill="far-0", decode="home-d0", other=OtherWay("home-p0", 30_000, 9.0)
    )
    attempt.moved = TransferredBytes(total_bytes=3 * 10**9, overlapped_bytes=10**9, spared_bytes=10**9)
    row = entries.of(record, 5.0)
    assert row is not None and row.other_gpu_s is not None
    assert (row.kv_bytes, row.hidden_bytes, row.egress_bytes) == (3 * 10**9, 10**9, 2 * 10**9)
    assert row.egress_cost == pytest.approx(2 * 0.5)
    assert row.gpu_cost == pytest.approx(row.gpu_s / 3600 * 8)
    assert row.other_gpu_cost == pytest.approx(row.other_gpu_s / 3600 * 4)
    assert 0 < row.gpu_s < row.other_gpu_s


class _Entries:
    """Rows with nothing but their time."""

    def of(self, record: Any, total_s: float) -> Any:
        return _row(at_s=record.at_s)


def _row(**values: Any) -> Any:
    from prfaas.core.ledger import LedgerEntry

    blank: dict[str, Any] = dict.fromkeys(COLUMNS, 0) | {
        "outcome": "ok",
        "route": "local",
        "attempts": 1,
        **dict.fromkeys(("tenant", "prefill_cluster", "decode_cluster"), ""),
    }
    return LedgerEntry(**(blank | values))


def kept(file: Path, rows: list[Any]) -> sqlite3.Connection:
    connection = open_ledger(file)
    with connection:
        marks = ", ".join("?" * len(COLUMNS))
        connection.executemany(
            f"INSERT INTO requests VALUES ({marks})",
            [[getattr(row, name) for name in COLUMNS] for row in rows],
        )
    return connection


def test_old_rows_and_too_many_are_dropped(tmp_path: Path) -> None:
    file, lost = tmp_path / "ledger.sqlite", []
    old = time.time() - 3 * 86_400
    kept(file, [_row(at_s=old + number) for number in range(5)]).close()
    ledger = Ledger(LedgerConfig(file, days=2, requests=10), _Entries(), lost.append)  # type: ignore[arg-type]
    for number in range(30):
        record = record_of(prompt_tokens=10, uncached_tokens=10)
        record.at_s = time.time() + number
        ledger.add(record, 1.0)
    ledger.close()
    # What is dropped is looked at once a minute, at first with the first rows.
    rows = rows_of(file)
    assert len(rows) == 10 and min(row["at_s"] for row in rows) > old + 86_400
    assert not lost


def test_a_disk_that_stands_still_costs_rows_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_MOST_UNWRITTEN", 5)
    monkeypatch.setattr(ledger_module, "_WRITE_S", 3600.0)
    lost: list[int] = []
    ledger = Ledger(LedgerConfig(tmp_path / "ledger.sqlite"), _Entries(), lost.append)  # type: ignore[arg-type]
    for _ in range(8):
        ledger.add(record_of(prompt_tokens=10, uncached_tokens=10), 1.0)
    ledger.close()
    assert sum(lost) == 3


def test_what_is_no_ledger_is_refused_in_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be looked at" * 100)
    other = tmp_path / "other.sqlite"
    sqlite3.connect(other).execute("PRAGMA user_version=7").close()
    alike = tmp_path / "alike.sqlite"
    sqlite3.connect(alike).execute("PRAGMA user_version=1").close()
    for path, said in (
        (text, "can't be used as a ledger"),
        (other, "is no ledger of this release"),
        (alike, "no such table"),
        (tmp_path / "none", "unable to open"),
    ):
        with pytest.raises(LedgerFileError, match=said):
            open_ledger(path, read_only=True)
        result = CliRunner().invoke(app, ["worth", str(path)])
        assert result.exit_code != 0


def test_it_is_refused_before_engines_are_started(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be looked at" * 100)
    port, admin_port = free_ports(2)
    gateway = f"gateway: {{port: {port}, admin: {{port: {admin_port}}}, ledger: {{file: {text}}}}}\n"
    path = tmp_path / "deployment.yaml"
    path.write_text(FILE + gateway)
    with pytest.raises(LedgerFileError, match="can't be used as a ledger"):
        check_gateway(load_deployment(path, state_dir=tmp_path))


OFFLOADED = {
    "route": "offload",
    "prefill_cluster": "east",
    "decode_cluster": "home",
    "prompt_tokens": 30_000,
    "predicted_s": 1.0,
    "other_s": 4.0,
    "first_token_s": 2.0,
    "gpu_s": 8.0,
    "other_gpu_s": 32.0,
    "gpu_cost": 3.0,
    "other_gpu_cost": 5.0,
    "egress_bytes": 100,
    "egress_cost": 0.5,
}


def test_worth_adds_up(tmp_path: Path) -> None:
    hour = 3600.0
    rows = [
        *(_row(at_s=hour * number, **OFFLOADED) for number in range(4)),
        _row(at_s=9 * hour, **(OFFLOADED | {"outcome": "engine_error", "first_token_s": None})),
        _row(at_s=hour, predicted_s=1.0, first_token_s=1.5, prompt_tokens=10, decode_cluster="home"),
        # It was sent twice: no error of the prediction.
        _row(at_s=hour, predicted_s=1.0, first_token_s=9.0, prompt_tokens=10, attempts=2),
    ]
    ledger = kept(tmp_path / "a.sqlite", rows)
    (total,) = worth([ledger])
    assert (total.requests, total.offloaded, total.timed) == (7, 5, 4)
    assert total.saved_share == pytest.approx(0.5)
    assert (total.gpu_s_moved, total.gpu_s_spent) == (160.0, 40.0)
    assert total.net == pytest.approx(5 * (5.0 - 3.0 - 0.5))
    assert total.bias == (pytest.approx(0.5), pytest.approx(1.0))
    assert total.marginal_s() is None
    assert [each.key.strip() for each in worth([ledger], "length")] == ["0 to 1K", "16K to 64K"]
    assert {each.key: each.requests for each in worth([ledger], "link")} == {"east->home": 5, "stays": 2}
    # Of two gateways together, whatever they are put together by.
    other = kept(tmp_path / "b.sqlite", rows[:2])
    for by in get_args(By):
        assert sum(each.requests for each in worth([ledger, other], by)) == 9
    assert sum(each.requests for each in worth([ledger], since_s=8 * hour)) == 1


def test_the_holdout_says_what_one_more_is_worth(tmp_path: Path) -> None:
    rows = [_row(at_s=1.0, **(OFFLOADED | {"first_token_s": 2.0 + (n % 3) / 10})) for n in range(60)]
    rows += [
        _row(at_s=1.0, held_out=1, first_token_s=3.0 + (n % 3) / 10, predicted_s=3.0, other_s=1.0)
        for n in range(30)
    ]
    (total,) = worth([kept(tmp_path / "a.sqlite", rows)])
    marginal = total.marginal_s()
    assert marginal is not None
    assert marginal[0] == pytest.approx(1.0)
    # The standard deviation of 0, 0.1, 0.2 is 0.0816.
    assert marginal[1] == pytest.approx(1.96 * (0.0816**2 / 59 + 0.0816**2 / 29) ** 0.5, rel=0.01)


def test_the_command(tmp_path: Path) -> None:
    file, table = tmp_path / "a.sqlite", tmp_path / "rows.csv"
    kept(file, [_row(at_s=time.time(), **OFFLOADED) for _ in range(3)]).close()
    result = CliRunner().invoke(app, ["worth", str(file), "--csv", str(table)])
    assert result.exit_code == 0, result.output
    assert "3 of 3 requests were offloaded." in result.output
    assert "50% sooner" in result.output and "net +4.50" in result.output
    assert "16K to 64K" in result.output
    assert len(table.read_text().splitlines()) == 4
    document = json.loads(CliRunner().invoke(app, ["worth", str(file), "--json"]).output)
    assert document["all"][0]["saved_share"] == pytest.approx(0.5)
