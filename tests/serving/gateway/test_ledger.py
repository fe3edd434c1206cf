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
from prometheus_client import CollectorRegistry
from tests.ports import free_ports
from tests.serving.control.world import FILE
from typer.testing import CliRunner

from prfaas.cli.main import app
from prfaas.cli.running import check_gateway
from prfaas.core.deployment import ExperimentConfig, LedgerConfig, load_deployment
from prfaas.core.ledger import COLUMNS, VERSION
from prfaas.core.scheduling.decision import OtherWay
from prfaas.serving import ledger_file
from prfaas.serving.control.experiment import Experiment
from prfaas.serving.control.planning_inputs import prefill_curves, view_of
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request_log import TransferredBytes
from prfaas.serving.gateway.told_requests import LedgerEntries
from prfaas.serving.gateway.ways.kv_transfer import EgressBill
from prfaas.serving.ledger_file import Ledger, open_ledger
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import LedgerFileError
from prfaas.serving.worth import By, effects, worth

from .records import ledger_row, record_of
from .world import GATEWAY, World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))


def test_the_first_ledger_of_a_deployment_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "home" / "name" / "ledger.sqlite"
    with pytest.raises(LedgerFileError):
        open_ledger(path, read_only=True)
    open_ledger(path).close()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerFileError, match="can't be used"):
        open_ledger(tmp_path / "file" / "ledger.sqlite")


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
    running = RunningDeployment(deployment)
    view = view_of(deployment, None, prefill_curves(deployment), 0.0)
    entries = LedgerEntries(running, view, Experiment(running, b"secret"))
    bill = EgressBill(running, Metrics(CollectorRegistry()))
    record = record_of(prompt_tokens=30_000, uncached_tokens=30_000)
    attempt = record.attempts[0]
    attempt.decision = structs.replace(
        attempt.decision, prefill="far-0", decode="home-d0", other=OtherWay("home-p0", 30_000, 9.0)
    )
    attempt.moved = TransferredBytes(total_bytes=3 * 10**9, overlapped_bytes=10**9, spared_bytes=10**9)
    bill.add(record, "far", "home", attempt.moved.sent_bytes)
    # Inside a cluster nothing is paid.
    bill.add(record, "home", "home", 10**9)
    row = entries.of(record, 5.0)
    assert row is not None and row.other_gpu_s is not None
    assert (row.kv_bytes, row.hidden_bytes, row.egress_bytes) == (3 * 10**9, 10**9, 2 * 10**9)
    assert row.egress_cost == pytest.approx(2 * 0.5)
    assert row.gpu_cost == pytest.approx(row.gpu_s / 3600 * 8)
    assert row.other_gpu_cost == pytest.approx(row.other_gpu_s / 3600 * 4)
    assert 0 < row.gpu_s < row.other_gpu_s


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
    kept(file, [ledger_row(at_s=old + number) for number in range(5)]).close()
    ledger = Ledger(LedgerConfig(file, days=2, requests=10), lost.append)
    for number in range(30):
        ledger.add(ledger_row(at_s=time.time() + number))
    ledger.close()
    # What is dropped is looked at once a minute, at first with the first rows.
    rows = rows_of(file)
    assert len(rows) == 10 and min(row["at_s"] for row in rows) > old + 86_400
    assert not lost


def test_a_disk_that_stands_still_costs_rows_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "_MOST_UNWRITTEN", 5)
    monkeypatch.setattr(ledger_file, "_WRITE_S", 3600.0)
    lost: list[int] = []
    ledger = Ledger(LedgerConfig(tmp_path / "ledger.sqlite"), lost.append)
    for _ in range(8):
        ledger.add(ledger_row(at_s=time.time()))
    ledger.close()
    assert sum(lost) == 3


def test_what_is_no_ledger_is_refused_in_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be looked at" * 100)
    other = tmp_path / "other.sqlite"
    sqlite3.connect(other).execute("PRAGMA user_version=7").close()
    alike = tmp_path / "alike.sqlite"
    sqlite3.connect(alike).execute(f"PRAGMA user_version={VERSION}").close()
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
        *(ledger_row(at_s=hour * number, **OFFLOADED) for number in range(4)),
        ledger_row(at_s=9 * hour, **(OFFLOADED | {"outcome": "engine_error", "first_token_s": None})),
        ledger_row(at_s=hour, predicted_s=1.0, first_token_s=1.5, prompt_tokens=10, decode_cluster="home"),
        # It was sent twice: no error of the prediction.
        ledger_row(at_s=hour, predicted_s=1.0, first_token_s=9.0, prompt_tokens=10, attempts=2),
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
    rows = [ledger_row(at_s=1.0, **(OFFLOADED | {"first_token_s": 2.0 + (n % 3) / 10})) for n in range(60)]
    rows += [
        ledger_row(at_s=1.0, held_out=1, first_token_s=3.0 + (n % 3) / 10, predicted_s=3.0, other_s=1.0)
        for n in range(30)
    ]
    (total,) = worth([kept(tmp_path / "a.sqlite", rows)])
    marginal = total.marginal_s()
    assert marginal is not None
    assert marginal[0] == pytest.approx(1.0)
    # The standard deviation of 0, 0.1, 0.2 is 0.0816.
    assert marginal[1] == pytest.approx(1.96 * (0.0816**2 / 59 + 0.0816**2 / 29) ** 0.5, rel=0.01)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    kept(file, [ledger_row(at_s=time.time(), **OFFLOADED) for _ in range(3)]).close()
    result = CliRunner().invoke(app, ["worth", str(file)])
    assert result.exit_code == 0, result.output
    assert "3 of 3 requests were offloaded." in result.output
    assert "50% sooner" in result.output and "net +4.50" in result.output
    assert "16K to 64K" in result.output
    document = json.loads(CliRunner().invoke(app, ["worth", str(file), "--json"]).output)
    assert document["all"][0]["saved_share"] == pytest.approx(0.5)


def test_slices_of_an_experiment_are_routed_and_kept_apart(in_world: InWorld, tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"

    async def body(world: World) -> None:
        assert world.live is not None
        told: list[str] = []
        # A slice is over soon; each request lies in whichever is now.
        while len(set(told)) < 2 and len(told) < 200:
            now = world.live.experiment.state(0.0)["experiment"]
            assert now["against"] == "local_only" and now["ended"] is None
            told.append(now["arm"])
            body = {"model": "stand-in", "prompt": LONG, "stream": True, "max_tokens": 1}
            async with world.client.post("/v1/completions", json=body) as response:
                await response.read()

    experiment = ExperimentConfig(slice_s=0.3, washout_s=0.0)
    config = replace(GATEWAY, ledger=LedgerConfig(file), experiment=experiment)
    in_world(body, live=True, gateway_config=config)
    rows = rows_of(file)
    assert {row["arm"] for row in rows} == {"as-is", "local_only"}
    # A request that was decided at the seam of two may be named by the next one.
    assert sum((row["route"] == "offload") != (row["arm"] == "as-is") for row in rows) <= 2
    assert len({(row["slice"], row["arm"]) for row in rows}) == len({row["slice"] for row in rows})


def slices_of(pairs: range, saved_s: float, against: str = "local_only") -> list[Any]:
    return [
        ledger_row(
            at_s=1e9 + pair, slice=2 * pair + half, arm=arm, ttft_s=ttft_s + pair % 3 / 10, first_token_s=1.0
        )
        for pair in pairs
        for half, (arm, ttft_s) in enumerate((("as-is", 1.0), (against, 1.0 + saved_s)))
        for _ in range(8)
    ]


def test_an_experiment_says_what_it_is_worth(tmp_path: Path) -> None:
    washout = [
        ledger_row(at_s=1e9, slice=2 * pair, arm="as-is", ttft_s=99.0, washout=True) for pair in range(6)
    ]
    failed = [ledger_row(at_s=1e9, slice=2, arm="local_only", ttft_s=99.0, outcome="engine_error")]
    rows = slices_of(range(6), 0.5) + washout + failed
    # One gateway of two has half of each slice.
    ledgers = [kept(tmp_path / f"{half}.sqlite", rows[half::2]) for half in range(2)]
    assert worth(ledgers)[0].requests == len(rows)
    (against, found), *others = effects(ledgers).items()
    assert (against, found.pairs, others) == ("local_only", 6, [])
    assert found.saved_s == pytest.approx(0.5) and found.half_s == pytest.approx(0.0, abs=1e-9)
    assert found.as_is_s == pytest.approx(1.1)
    # Another one, later in the same ledger, has pairs of its own.
    later = kept(tmp_path / "later.sqlite", slices_of(range(10, 14), -0.2, "threshold 8000"))
    both = effects([*ledgers, later])
    assert {name: round(each.saved_s, 9) for name, each in both.items()} == {
        "local_only": 0.5,
        "threshold 8000": -0.2,
    }
    assert effects([later], since_s=1e9 + 12) == {}


def test_worth_tells_of_an_experiment(tmp_path: Path) -> None:
    kept(tmp_path / "a.sqlite", slices_of(range(6), 0.5)).close()
    told = CliRunner().invoke(app, ["worth", str(tmp_path / "a.sqlite"), "--hours", "0"])
    assert "against local_only: first tokens come 0.5 ±" in told.stdout
    document = json.loads(
        CliRunner().invoke(app, ["worth", str(tmp_path / "a.sqlite"), "--hours", "0", "--json"]).stdout
    )
    assert document["experiments"]["local_only"]["pairs"] == 6
