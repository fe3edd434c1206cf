"""`prfaas status` on a terminal: nothing is cut, what is left out is named, and a gateway may restart meanwhile."""

import asyncio
import copy
import json
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.text import Text

from prfaas.cli import main as cli
from prfaas.cli.common import CliError
from prfaas.cli.status_tables import StatusColumn, StatusPage, StatusTable, tables
from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.serving.control.members import Members
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.planning_inputs import kv_model_of
from prfaas.serving.running_deployment import RunningDeployment

EXAMPLES = Path(__file__).parents[2] / "examples"
SUSPICION = "no answer to /health for 2.5 s: the connection was refused by the machine at 127.0.0.1"


def is_started(path: Path) -> bool:
    """Whether an example is for more than planning."""
    try:
        load_deployment(path)
    except DeploymentError:
        return False
    return True


STARTED = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if is_started(path))


def quiet_state(name: str, home: Path) -> dict[str, Any]:
    """Of a plane that nothing has happened to."""
    deployment = load_deployment(EXAMPLES / f"{name}.yaml", state_dir=home)

    async def made() -> dict[str, Any]:
        plane = LivePlane(
            Members(RunningDeployment(deployment), b"k" * 32), CollectorRegistry(), kv_model_of(deployment)
        )
        try:
            told: dict[str, Any] = json.loads(json.dumps(plane.state()))
            return told
        finally:
            await plane.close()

    return asyncio.run(made())


def busy_state(name: str, home: Path) -> dict[str, Any]:
    """The same with figures as wide as a busy deployment has, and its last instance out of routing."""
    state = quiet_state(name, home)
    for cluster in state["clusters"].values():
        for instance in cluster["instances"].values():
            instance |= {"in_flight": 123, "queue": 45, "busy_s": 12.34, "blocks": 1_234_567, "age_s": 0.123}
            instance |= {"drain": "draining", "decoding": instance["decode_slots"], "decode_wait_s": 1.23}
            instance["engine"] = {"kv_usage": 1.0, "hit_rate": 0.876}
    instance |= {"healthy": False, "suspicion": SUSPICION}
    for link in state["links"].values():
        link |= {"egress_bits_per_s": 59.87e6, "capacity_bits_per_s": 123.4e6, "configured_bits_per_s": 2e9}
        link |= {
            "utilisation": 0.98,
            "queued_bytes": 123 << 20,
            "drain_s": 12.3,
            "transfers": 123,
            "age_s": 0.123,
        }
        link |= {"condition": "congested", "up": True, "rtt_s": 0.123, "retransmit_ratio": 0.0123}
        link |= {"egress_per_gb": 0.02, "egress_cost": 1234.5}
    state["routes"] = {"offload": {"long": 123_456}, "local": {"no-prfaas-instance": 7}}
    state["thresholds"]["history"] = [
        {
            "cluster": "home",
            "tokens": 4321.0,
            "reason": "length",
            "rate_before": 1,
            "rate_after": 2,
            "age_s": 5.0,
        }
    ]
    return state


def shown(page: StatusPage, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(page)
    return out.getvalue()


@pytest.mark.parametrize("name", STARTED)
@pytest.mark.parametrize("make", [quiet_state, busy_state])
def test_80_columns_cut_nothing(
    name: str, make: Callable[[str, Path], dict[str, Any]], tmp_path: Path
) -> None:
    state = make(name, tmp_path)
    text = shown(tables(state), 80)
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "…" not in text
    for cluster in state["clusters"].values():
        for instance, facts in cluster["instances"].items():
            (line,) = [each for each in lines if each.split()[:2] == [instance, facts["role"]]]
            assert f" {facts['in_flight']} " in line
            if facts["decode_slots"]:
                assert f"{facts['decoding']}/{facts['decode_slots']}" in line
    for link in state["links"]:
        # A long name folds; none of it is lost.
        assert link[:8] in text
    of_links = ("carries", "queued", "done in") if state["links"] else ()
    for heading in ("wait", "decoding", "KV used", *of_links, "requests", "share"):
        assert heading in text


def test_every_example_that_can_be_started_was_shown() -> None:
    assert {"local", "local-wide", "synthetic"} <= set(STARTED)


def test_what_is_wrong_stands_above_the_tables(tmp_path: Path) -> None:
    words = " ".join(shown(tables(busy_state("local", tmp_path)), 80).split())
    out = f"home-decode-0 is out of routing: {SUSPICION}"
    assert out in words and words.index(out) < words.index("prfaas-east (prfaas)")
    assert "prfaas-east->home carries 123.4 Mbit/s at most; the file says 2 Gbit/s" in words


def test_what_is_left_out_is_named_and_a_wide_terminal_has_it(tmp_path: Path) -> None:
    state = busy_state("local", tmp_path)
    narrow, wide = shown(tables(state), 80), shown(tables(state), 170)
    assert "Not shown here: columns blocks" in narrow and "1,234,567" not in narrow
    assert "Not shown" not in wide and "1,234,567" in wide and "4,321" in wide


CELL = st.text("abc", max_size=12).map(Text)
ROW = st.tuples(st.text("abc->", min_size=1, max_size=40).map(Text), CELL, CELL, CELL)
COLUMN = st.builds(StatusColumn, st.text("xyz", min_size=1, max_size=12), st.booleans(), st.integers(0, 9))
TABLE = st.builds(
    StatusTable,
    st.just("title"),
    st.tuples(st.just(StatusColumn("name", is_number=False)), COLUMN, COLUMN, COLUMN),
    st.lists(ROW, min_size=1, max_size=12).map(tuple),
)


@pytest.mark.slow("runs commands one after the other")
@given(TABLE, st.integers(60, 120))
@settings(max_examples=50)
def test_every_table_fits_and_keeps_its_first_column(table: StatusTable, width: int) -> None:
    lines = [line.rstrip() for line in shown(StatusPage((), (table,), ()), width).splitlines()]
    assert max(map(len, lines)) <= width
    fitted = table.within(width)
    assert fitted.columns[0] == table.columns[0] and len(fitted.rows) == len(table.rows)
    kept = [column.rank for column in fitted.columns]
    hidden = [column.rank for column in table.columns if column not in fitted.columns]
    assert all(rank and rank >= max(kept) for rank in hidden)


def test_a_long_name_folds_and_loses_nothing() -> None:
    name = "".join(chr(97 + place % 26) for place in range(100))
    columns = (StatusColumn("name", is_number=False), StatusColumn("open"))
    table = StatusTable("title", columns, ((Text(name), Text("7")),))
    _, _, _, _, *rows = shown(StatusPage((), (table,), ()), 60).splitlines()
    assert "".join(row.split()[0] for row in rows) == name


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def restarting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that answers, is gone for two seconds, and comes back without its counters."""
    before = quiet_state("local", tmp_path) | {"up_s": 1000.0}
    after = copy.deepcopy(before) | {"up_s": 0.5}
    gone = CliError("no gateway answers at http://127.0.0.1:8001")
    answers: Iterator[Any] = iter([before, gone, gone, after, after])

    def fetch(*_: object) -> Any:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("prfaas.cli.status.fetch", fetch)
    monkeypatch.setattr("time.sleep", lambda _: None)


def test_watching_goes_on_when_the_gateway_restarts(
    restarting: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status", "http://127.0.0.1:8001", "--watch", "--json") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["up_s"] for line in out.splitlines()] == [1000.0, 0.5, 0.5]
    lost, back = err.splitlines()
    assert lost.startswith("the gateway does not answer; asking again every second (no gateway answers at")
    assert back == "the gateway was started again: its counters begin at 0"


def test_a_screen_keeps_what_was_told_and_says_that_it_is_old(
    restarting: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=80, height=40)
    monkeypatch.setattr("prfaas.cli.status.console", lambda _columns: screen)
    assert run(monkeypatch, "status", "http://127.0.0.1:8001", "--watch") == 0
    text = screen.file.getvalue()
    assert text.count("The gateway has not answered for") == 2
    assert text.count("east-prefill-0") == 5
    assert capsys.readouterr().err == ""


def test_a_gateway_that_never_answered_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status", "http://127.0.0.1:9", "--watch") == 2
    assert "no gateway answers at http://127.0.0.1:9" in capsys.readouterr().err
