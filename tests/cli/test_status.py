"""`prfaas status` and `prfaas explain` against a server with the live plane's own state and real records."""

import asyncio
import copy
import json
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from rich.console import Console

from prfaas.cli import main as cli
from prfaas.cli.common import AdminAddress, CliError, fetch
from prfaas.cli.status_tables import _condition, _copies, tables
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.explanation import sentences
from prfaas.core.kv.layers import FullAttention
from prfaas.core.kv.model import KvModel
from prfaas.core.scheduling.decision import CacheTransfer, Decision, HitTokens, PoolHit, PrefixHit, Route
from prfaas.serving.control.members import Members
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.planning_inputs import kv_model_of
from prfaas.serving.control.pool_monitor import PoolMonitor, PoolReading
from prfaas.serving.gateway.request_log import RequestRecord, TransferredBytes
from prfaas.serving.gateway.told_requests import explain
from prfaas.serving.running_deployment import RunningDeployment

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"
REJECTION = "KV layout differs in 'block_tokens': home-decode-0/0 has '16', east-prefill-0/0 has '32'"
ID = "0c5f1f0a5fd14a3d9c2a5f2f8f6e4b1d"


# As a daemon tells it; one figure is no number.
DAEMON = {
    "store": {
        "epoch": 7,
        "engine_sessions": 3,
        "memory_bytes": 256 << 20,
        "used_bytes": 100 << 20,
        "ssd_bytes": 512 << 20,
        "memory_pages": {"0": 10, "1": 2},
        "ssd_pages": {"0": 20, "1": 4},
        "pinned_pages": 5,
        "stored_bytes": 700 << 20,
        "evicted_bytes": "many",
        "ssd_queued_bytes": 3 << 20,
        "ssd_state": "writable",
    },
    "copies": {"copied_bytes": 42 << 20},
}


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def state(deployment: Deployment) -> dict[str, Any]:
    """Of a plane that has routed a few requests, with one instance out of routing."""

    async def made() -> dict[str, Any]:
        plane = LivePlane(
            Members(RunningDeployment(deployment), b"k" * 32), CollectorRegistry(), kv_model_of(deployment)
        )
        try:
            for length in (100, 20_000, 30_000):
                plane.router.route(length, plane.prefixes.chains(range(length), "", ""))
                plane.observe(length, length)
            plane.health.suspect("home-prefill-0", "made to fail")
            plane.compatibility._rejected["east-prefill-0", 0] = {"home-decode-0": REJECTION}
            plane.compatibility._conclude()
            plane.drains.drain("home-decode-0", wanted=True)
            plane.part(PoolMonitor)._newest["home-pool"] = PoolReading(plane.cluster_state.clock(), DAEMON)
            told: dict[str, Any] = json.loads(json.dumps(plane.state()))
            return told
        finally:
            await plane.close()

    return asyncio.run(made())


def decision(**changed: Any) -> Decision:
    numbers: dict[str, Any] = {
        "route": Route.OFFLOAD,
        "prefill": "east-prefill-0",
        "decode": "home-decode-0",
        "uncached_tokens": 8000,
        "prefill_tokens": 7552,
        "skip_tokens": 512,
        "kv_bytes": 7488,
        "reason": "long",
        "threshold_tokens": 4000.0,
        "predicted_ttft_s": 1.5,
    }
    return Decision(**numbers | changed)


def record() -> RequestRecord:
    told = RequestRecord(
        ID, "completions", 1_700_000_000.0, 5.0, model="m", prompt_tokens=8064, answer_tokens=64
    )
    told.start(decision(), 8064).outcome = "http-500"
    local = decision(
        route=Route.LOCAL, prefill="home-prefill-0", reason="no-prfaas-instance", prefill_tokens=8000
    )
    attempt = told.start(local, 8064)
    attempt.outcome, attempt.moved = "done", TransferredBytes(2 << 20, 1 << 20)
    told.steps_s = {"read": 0.0002, "prefill": 1.1, "transfer": 1.2, "total": 3.0}
    told.notes.append((1.0, "home-decode-1 failed: died"))
    told.status, told.outcome, told.route_header = 200, "ok", "local; prefill=home-prefill-0"
    return told


def page(told: RequestRecord, deployment: Deployment) -> dict[str, Any]:
    model = KvModel("m", (FullAttention(layers=1, kv_heads=2, head_size_k=64, head_size_v=64),))
    shown: dict[str, Any] = json.loads(json.dumps(explain(told, deployment, model), allow_nan=False))
    return shown


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return load_deployment(EXAMPLE, state_dir=tmp_path)


asked: list[tuple[str, str]] = []
"""What was to be drained or undrained."""

bearers: list[str | None] = []


@pytest.fixture
def url(deployment: Deployment) -> Iterator[str]:
    pages: dict[str, Any] = {
        "/prfaas/state": state(deployment),
        f"/prfaas/requests/{ID}": page(record(), deployment),
    }

    asked.clear()

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            bearers.append(self.headers["Authorization"])
            found = pages.get(self.path)
            body = json.dumps(found or {"error": {"message": f"No page {self.path}."}}).encode()
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            _, _, _, name, what = self.path.split("/")
            asked.append((name, what))
            told = {"drain": None, "healthy": True, "in_flight": 2}
            if what == "drain":
                told["drain"] = "draining" if len(asked) < 3 else "drained"
            body = json.dumps(told).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_status_shows_all_there_is(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status", url) == 0
    shown = capsys.readouterr().out
    for word in (
        "local",
        "prfaas-east (prfaas)",
        "home (pd)",
        "threshold: 2,000 tokens",
        "east-prefill-0",
        "3 requests",
        "drained",
    ):
        assert word in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["home-prefill-0", "prefill", "down"] in [row[:3] for row in rows]
    assert "home-prefill-0 is out of routing: made to fail" in " ".join(shown.split())
    apart = f"east-prefill-0 sends nothing to home-decode-0 until one of them restarts: {REJECTION}"
    assert apart in " ".join(shown.split())
    for word in ("prfaas-east->home", "60 Mbit/s", "offload", "long", "67%", "33%"):
        assert word in shown


def test_status_says_who_leads_and_what_is_wrong(deployment: Deployment) -> None:
    told = state(deployment)
    fleet = {
        "name": "a",
        "leader": "b",
        "connected": True,
        "problem": None,
        "silent_s": 0.0,
        "members": {"a": {"same_file": True}, "b": {"same_file": True}},
        "unwritten_drains": [],
    }

    def shown(**changed: object) -> list[str]:
        out = Console(file=StringIO(), width=170)
        out.print(tables(told | {"fleet": fleet | changed}))
        return [line.strip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]

    assert told["fleet"] is None
    assert shown()[1] == "gateway a of a, b; b leads"
    assert not any("fleet" in line or "runs another" in line for line in shown())
    gone = shown(connected=False, problem="etcd does not answer: refused", silent_s=12.0)
    assert "no member of the fleet for 12 s (goes on by what it knows): etcd does not answer: refused" in gone
    assert shown(leader=None, members={"a": {"same_file": True}})[1] == "gateway a of a; nobody leads"
    other = shown(members={"a": {"same_file": True}, "b": {"same_file": False}}, unwritten_drains=["x"])
    assert "gateway b runs another deployment file than a" in other
    assert "the other gateways do not know yet whether x drains" in other


def test_status_shows_pools(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status", url) == 0
    lines = capsys.readouterr().out.splitlines()
    home = next(line for line in lines if line.strip().startswith("home-pool"))
    for words in (
        "up",
        "100.0 MiB",
        "256.0 MiB",
        "512.0 MiB",
        "3.0 MiB",
        "42.0 MiB",
        " 5 ",
        " 3 ",
    ):
        assert words in home
    assert "down" in next(line for line in lines if line.strip().startswith("prfaas-east-pool"))
    assert run(monkeypatch, "status", url, "--json") == 0
    pool = json.loads(capsys.readouterr().out)["pools"]["home-pool"]
    assert pool["daemon"]["pages"] == {"memory": {"0": 10, "1": 2}, "ssd": {"0": 20, "1": 4}}
    assert pool["daemon"]["evicted_bytes"] == 0


def test_explain_says_what_each_tier_held(deployment: Deployment) -> None:
    told = RequestRecord(ID, "completions", 0.0, 0.0, prompt_tokens=8064)
    hits = {
        "home-pool": PoolHit(PrefixHit(0, 4096), PrefixHit(0, 4096)),
        "prfaas-east-pool": PoolHit(PrefixHit(7168, 7424), PrefixHit(4096, 5000)),
    }
    loads = decision(pools=hits, hit=HitTokens(1024, 3976, 2168, 0), load_s=0.025, prefill_tokens=896)
    told.start(loads, 8064).cached_tokens = 7168
    moved = CacheTransfer("prfaas-east-pool", 7168, 0, 5, from_pool=True)
    told.start(decision(pools=hits, hit=HitTokens(0, 0, 0, 7168), cache_transfer=moved), 8064)
    told.prefix_outcome, told.prefix_moved = "done", TransferredBytes(1 << 20, 0)
    text = "\n".join(sentences(page(told, deployment)))
    for words in (
        "Of the pools home-pool held 4,096 tokens, all of them in memory; "
        "prfaas-east-pool held 7,424 tokens, 5,000 of them in memory.",
        "east-prefill-0 was to find 1,024 in its own blocks, 3,976 in the memory of its machine's pool, 2,168 on the "
        "pool's SSD; loading them from the pool was to take 25 ms.",
        "By its own word it reused 7,168.",
        "was to find 7,168 after the cached prefix had moved.",
        "A cached prefix moved first from pool to pool (prfaas-east-pool): 1.0 MiB.",
    ):
        assert words in text


def test_drain_waits_until_the_work_has_ended(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    assert run(monkeypatch, "drain", "home-decode-0", url) == 0
    assert capsys.readouterr().out == "home-decode-0 is draining, 2 requests open\n"
    assert run(monkeypatch, "drain", "home-decode-0", url, "--wait", "0") == 1
    capsys.readouterr()
    assert run(monkeypatch, "drain", "home-decode-0", url, "--wait", "60") == 0
    assert capsys.readouterr().out == "home-decode-0 is drained\n"
    assert run(monkeypatch, "undrain", "home-decode-0", url) == 0
    assert capsys.readouterr().out == "home-decode-0 takes part again\n"
    assert asked == [("home-decode-0", "drain")] * 3 + [("home-decode-0", "undrain")]


def test_operators_show_their_token(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    port = url.rpartition(":")[2]
    text = EXAMPLE.read_text().replace(
        "port: 8000", f"port: 8000\n  admin: {{port: {port}, token_file: {tmp_path}/token}}"
    )
    (tmp_path / "d.yaml").write_text(text)
    bearers.clear()
    assert run(monkeypatch, "status", tmp_path / "d.yaml") == 0
    assert run(monkeypatch, "explain", ID, url, "--token-file", tmp_path / "token") == 0
    assert run(monkeypatch, "status", url) == 0
    assert bearers == ["Bearer 0123456789abcdef"] * 2 + [None]


def test_status_as_json_is_the_gateways_own(
    url: str, deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status", url + "/v1/", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clusters"]["home"]["instances"]["home-prefill-0"]["healthy"] is False
    assert told["routes"].keys() == {"local", "offload"}


def test_status_watches_until_interrupted(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    assert run(monkeypatch, "status", url, "--watch", "--json") == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 3
    slept.clear()
    assert run(monkeypatch, "status", url, "--watch") == 0
    assert "east-prefill-0" in capsys.readouterr().out


def test_explain_says_it_in_plain_words(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "explain", ID, url) == 0
    text = capsys.readouterr().out
    for words in (
        "was answered with status 200 after 3 s; its prompt has 8,064 tokens, its answer 64.",
        "1. offload: east-prefill-0 prefills, home-decode-0 decodes (reason: long); this failed: http-500.",
        "The PD cluster would have had to prefill 8,000 tokens: more than its threshold of 4,000.",
        "home held 64 and prfaas-east held 512",
        "Predicted time to first token: 1.5 s.",
        "2. local: home-prefill-0 prefills, home-decode-0 decodes (reason: no-prfaas-instance).",
        "2.0 MiB of KVCache moved, 50% of it during the prefill; 256.0 KiB more were there already.",
        "prefill 1.1 s, prefill until the last byte of KVCache 1.2 s, all of it 3 s",
        "After 1 s: home-decode-1 failed: died.",
    ):
        assert words in text
    assert run(monkeypatch, "explain", ID, url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["attempts"][0]["skip_tokens"] == 512


def test_other_ways_are_told_too(deployment: Deployment) -> None:
    direct = RequestRecord(ID, "chat", 0.0, 0.0, direct_reason="media", outcome="cancelled")
    text = "\n".join(sentences(page(direct, deployment)))
    assert "trace" not in text
    direct.trace_id = "5" * 32
    text = "\n".join(sentences(page(direct, deployment)))
    assert f"Its trace: {direct.trace_id}" in text
    assert (
        "was left by its client" in text
        and "could not be split (media)" in text
        and "No KVCache moved" in text
    )
    own = RequestRecord(ID, "chat", 0.0, 0.0, prompt_tokens=9000)
    numbers = {"prefill": "home-decode-0", "threshold_tokens": math.inf, "predicted_ttft_s": math.nan}
    wanted = structs.replace(decision(**numbers), cache_transfer=CacheTransfer("home-decode-0", 5, 0, 5))
    own.start(wanted, 9000).outcome = "done"
    own.prefix_outcome = "staging"
    text = "\n".join(sentences(page(own, deployment)))
    assert "home-decode-0 prefills by itself and decodes" in text and "it offloads nothing" in text
    assert "did not (staging)" in text and "Predicted" not in text
    own.prefix_outcome, own.prefix_moved = "done", TransferredBytes(1 << 20, 0)
    assert "A cached prefix moved first: 1.0 MiB." in "\n".join(sentences(page(own, deployment)))


def test_the_wait_for_a_decode_slot_is_told(deployment: Deployment) -> None:
    record = RequestRecord(ID, "chat", 0.0, 0.0, prompt_tokens=5000)
    record.start(decision(decode_wait_s=2.5), 5000).outcome = "done"
    record.start(decision(), 5000).outcome = "done"
    record.start(decision(decode_wait_s=0.5, kv_wait_s=2.0), 5000).outcome = "done"
    lines = [line for line in sentences(page(record, deployment)) if "first token" in line]
    assert lines == [
        "   Predicted time to first token: 1.5 s, and then 2.5 s until home-decode-0 has a decode slot.",
        "   Predicted time to first token: 1.5 s.",
        "   Predicted time to first token: 1.5 s, from the prefill; 2 s more until home-decode-0 has the KVCache, and "
        "then 500 ms until home-decode-0 has a decode slot.",
    ]


def test_why_a_cached_prefix_stays_is_told(deployment: Deployment) -> None:
    record = RequestRecord(ID, "chat", 0.0, 0.0, prompt_tokens=5000)
    record.start(decision(cache_stays="slower"), 5000).outcome = "done"
    text = "\n".join(sentences(page(record, deployment)))
    assert "did not move there first: moving it takes longer than the prefill that it spares." in text


def test_the_link_s_part_in_a_decision_is_told(deployment: Deployment) -> None:
    record = RequestRecord(ID, "chat", 0.0, 0.0, prompt_tokens=5000)
    stays = decision(
        route=Route.LOCAL, prefill="home-prefill-0", reason="congested-link", uncached_tokens=5000
    )
    record.start(structs.replace(stays, threshold_tokens=8000.0), 5000).outcome = "done"
    text = "\n".join(sentences(page(record, deployment)))
    assert (
        "not more than its threshold of 8,000. Without the link's congestion it would have been offloaded."
        in text
    )


def test_what_is_not_worth_its_bytes_is_told(deployment: Deployment) -> None:
    record = RequestRecord(ID, "chat", 0.0, 0.0, prompt_tokens=5000)
    stays = decision(route=Route.LOCAL, prefill="home-prefill-0", reason="egress-price", uncached_tokens=5000)
    record.start(stays, 5000).outcome = "done"
    text = "\n".join(sentences(page(record, deployment)))
    assert "more than its threshold of 4,000. The bytes that it would have sent cost more than" in text


@pytest.mark.parametrize(
    ("condition", "up", "shown"),
    [("clear", True, "up"), ("congested", True, "up, congested"), ("unheard", False, "down, unheard")],
)
def test_a_link_s_condition_is_shown_where_it_is_unusual(condition: str, up: bool, shown: str) -> None:
    assert str(_condition({"up": up, "condition": condition})) == shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("status", "http://127.0.0.1:9"), "no gateway answers at http://127.0.0.1:9"),
        (("status", "nowhere.yaml"), "nowhere.yaml"),
        (("explain", "x", "nowhere.yaml"), "nowhere.yaml"),
        (("status", "http://nobody:port"), "no gateway answers"),
    ],
)
def test_mistakes_are_one_sentence(
    args: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *args) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("prfaas: ") and words in captured.err


def test_what_the_gateway_says_is_passed_on(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "explain", "a/../b?c", url) == 2
    assert capsys.readouterr().err == "prfaas: No page /prfaas/requests/a%2F..%2Fb%3Fc.\n"


@pytest.mark.parametrize("command", ["status", "explain", "drain", "undrain"])
def test_help_has_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: prfaas {command}" in text


def test_copies_of_hot_prefixes() -> None:
    told = state(load_deployment(EXAMPLE))
    assert not list(_copies(told))
    told["rebalancing"] |= {"copied": 3, "copied_bytes": 5 << 20}
    (line,) = _copies(told)
    assert str(line) == "hot prefixes: 3 copied between pools, 5.0 MiB"


def printed(told: dict[str, Any]) -> str:
    out = StringIO()
    Console(file=out, width=220).print(tables(told))
    return out.getvalue()


def test_what_egress_has_cost_is_shown_where_it_has_a_price(deployment: Deployment) -> None:
    free = state(deployment)
    assert {link["egress_cost"] for link in free["links"].values()} == {0.0}
    assert " cost " not in printed(free)
    priced = copy.deepcopy(free)
    (link,) = priced["links"].values()
    link |= {"egress_per_gb": 0.02, "egress_cost": 12.3456}
    assert " cost " in printed(priced) and "12.35" in printed(priced)


def test_the_state_counts_what_links_have_carried(deployment: Deployment) -> None:
    prices = replace(deployment, links=tuple(replace(link, egress_per_gb=0.5) for link in deployment.links))

    async def made() -> dict[str, Any]:
        plane = LivePlane(
            Members(RunningDeployment(prices), b"k" * 32), CollectorRegistry(), kv_model_of(prices)
        )
        try:
            for meter in (link.meter for link in plane.links.by_pair.values()):
                meter.carried_bytes = 3 * 10**9
            return plane.state()
        finally:
            await plane.close()

    (link,) = asyncio.run(made())["links"].values()
    assert (link["egress_per_gb"], link["egress_cost"]) == (0.5, 1.5)


def test_the_operators_token_goes_to_nobody_else() -> None:
    """A server that redirects would be handed it, and could have this machine ask whom it likes."""
    asked: list[str] = []

    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Redirects) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with pytest.raises(CliError, match="answered 302; is it a prfaas gateway"):
                fetch(AdminAddress(f"http://127.0.0.1:{server.server_port}", "secret"), "/prfaas/state")
        finally:
            server.shutdown()
            serving.join()
    assert asked == ["/prfaas/state"]
