"""The console's answers: the page and its policy, histories, requests, the scenario, and who may change something."""

import asyncio
import json
import re
import shlex
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from prfaas.cli import main as cli
from prfaas.core.byte_ring import RingEntry
from prfaas.core.deployment import AdminConfig, GatewayConfig, LedgerConfig, Routing, load_deployment
from prfaas.core.workload.requests import read_requests
from prfaas.serving.console.history import StateHistory
from prfaas.serving.gateway import console
from prfaas.serving.gateway.told_requests import scenario_of

from .records import record_of
from .world import World

EXAMPLE = Path(__file__).parents[3] / "examples" / "synthetic.yaml"
InWorld = Callable[..., None]
TOKEN = "a-token-of-operators"
SHORT, LONG = [7] * 40, [9] * 400


def with_token(folder: Path, **more: Any) -> dict[str, Any]:
    """What makes a world ask for the token."""
    file = folder / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return {"gateway_config": GatewayConfig("127.0.0.1", 0, AdminConfig("127.0.0.1", 0, file))} | more


def bearer(world: World) -> dict[str, str]:
    """The token's header, and the origin of the operators' own page."""
    return {"Authorization": f"Bearer {TOKEN}", "Origin": origin_of(world)}


def origin_of(world: World) -> str:
    return str(world.admin._base_url).rstrip("/")


async def read(world: World, path: str, status: int = 200, **options: Any) -> Any:
    async with world.admin.get(path, **options) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def first_frame(world: World) -> None:
    for _ in range(200):
        if (await read(world, "/prfaas/history"))["frames"]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("no frame was taken")


def test_the_page_loads_nothing_from_elsewhere(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.admin.get("/console") as page:
            policy, text = page.headers["Content-Security-Policy"], await page.text()
            assert page.status == 200 and page.content_type == "text/html"
        # Who types the address alone comes to it.
        async with world.admin.get("/") as led:
            assert (led.url.path, await led.text()) == ("/console", text)
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        asked, seen = re.findall(r'(?:href|src)="(/[^"]+)"', text), set()
        while asked:
            path = asked.pop()
            seen.add(path)
            async with world.admin.get(path) as file:
                content = await file.text()
                assert file.status == 200, path
                assert file.headers["X-Content-Type-Options"] == "nosniff"
            asked += [p for p in re.findall(r"from '(/[^']+)'", content) if p not in seen]
            if "vendor" not in path and not path.endswith(".svg"):
                assert "http:" not in content and "https:" not in content, path
        assert {"/console/app.js", "/console/console.css", "/console/vendor/htm-preact.js"} <= seen

    in_world(body)


@pytest.mark.parametrize(
    "path",
    [
        "/console/nothing.js",
        "/console/../console.py",
        "/console/%2e%2e/admin.py",
        "/console/",
        "/console/vendor",
    ],
)
def test_only_files_of_the_page_are_given_out(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        async with world.admin.get(path) as file:
            assert file.status == 404

    in_world(body)


def test_without_the_token_there_is_a_page_but_no_number(in_world: InWorld, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        for path in ("/console", "/console/app.js"):
            async with world.admin.get(path) as page:
                assert page.status == 200
        for path in (
            "/prfaas/console",
            "/prfaas/history",
            "/prfaas/events",
            "/prfaas/requests",
            "/prfaas/scenario",
            "/consoles",
        ):
            async with world.admin.get(path) as page:
                assert page.status == 401, path
        async with world.admin.get("/console", headers={"Host": "evil.example"}) as page:
            assert page.status == 403
        world.admin.headers["Authorization"] = f"Bearer {TOKEN}"
        assert (await read(world, "/prfaas/console"))["may_change"] is True

    in_world(body, **with_token(tmp_path))


def test_only_the_console_itself_may_change_something(in_world: InWorld, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        path, headers = "/prfaas/instances/spare/drain", bearer(world)
        port = origin_of(world).rpartition(":")[2]
        for origin in ("http://evil.example", f"http://localhost:{port}", "null", origin_of(world) + ".evil"):
            async with world.admin.post(path, headers=headers | {"Origin": origin}) as answer:
                assert answer.status == 403, origin
        async with world.admin.post(path, headers={"Origin": headers["Origin"]}) as answer:
            assert answer.status == 401
        assert world.plane.drained == []
        async with world.admin.post(path, headers=headers) as answer:
            assert answer.status == 200
        assert world.plane.drained == [("spare", True)]
        world.admin.headers["Authorization"] = headers["Authorization"]

    in_world(body, spare=True, **with_token(tmp_path))


def test_without_a_token_file_the_console_changes_nothing(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert (await read(world, "/prfaas/console"))["may_change"] is False
        for path in ("/prfaas/instances/spare/drain", "/prfaas/clusters/pd/threshold"):
            async with world.admin.post(
                path, json={"tokens": 1}, headers={"Origin": origin_of(world)}
            ) as answer:
                assert answer.status == 403
                assert "gateway.admin.token_file" in (await answer.json())["error"]["message"]
        assert world.plane.drained == []

    in_world(body, spare=True)


def test_requests_are_listed_newest_first(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert await read(world, "/prfaas/requests") == {"requests": []}
        await world.complete(SHORT)
        await world.complete(LONG, max_tokens=4)
        newest, oldest = (await read(world, "/prfaas/requests"))["requests"]
        assert (newest["route"], newest["prefill"], newest["prompt_tokens"]) == ("offload", "remote", 400)
        assert (oldest["route"], oldest["prompt_tokens"], oldest["outcome"]) == ("local", 40, "ok")
        assert newest["at_s"] >= oldest["at_s"] and newest["waits_for"] is None
        assert (await read(world, "/prfaas/requests?limit=1"))["requests"] == [newest]
        told = await read(world, f"/prfaas/requests/{newest['request_id']}")
        assert told["text"][0].startswith(f"Request {newest['request_id']}")
        steps = newest["steps"]
        order = ["read", "tokenize", "decide", "turn", "prefill"]
        begins = [steps[step]["after_s"] for step in order]
        assert begins == sorted(begins) and begins[0] == 0
        assert steps["prefill"]["after_s"] == pytest.approx(steps["transfer"]["after_s"])
        assert steps["prefill"]["after_s"] >= steps["turn"]["after_s"] + steps["turn"]["took_s"] - 1e-6
        for step in order:
            assert steps[step]["after_s"] + steps[step]["took_s"] <= steps["total"]["took_s"] + 1e-6

    in_world(body)


def test_a_request_under_way_says_what_it_waits_for(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        asked = asyncio.create_task(world.complete(LONG))
        waits = None
        while not asked.done():
            for request in (await read(world, "/prfaas/requests"))["requests"]:
                waits = waits or request["waits_for"]
        await asked
        assert waits in ("prefill", "prefill_instance", "decode", "tokens")

    in_world(body)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("requests?limit=0", "limit"),
        ("requests?limit=1001", "limit"),
        ("requests?limit=-1", "limit"),
        ("requests?limit=x", "limit"),
        ("requests?limit=%C2%B2", "limit"),
        ("history?step=0", "step"),
        ("history?after=" + "9" * 30, "after"),
        ("events?after=soon", "after"),
    ],
)
def test_numbers_that_make_no_sense(in_world: InWorld, query: str, field: str) -> None:
    async def body(world: World) -> None:
        error = (await read(world, f"/prfaas/{query}", 400))["error"]
        assert error["param"] == field and error["message"].startswith(field)

    in_world(body)


@pytest.mark.slow("waits for time limits of connections")
def test_frames_come_as_events_and_go_on_where_they_stopped(in_world: InWorld) -> None:
    async def frames(answer: aiohttp.ClientResponse, count: int) -> list[int]:
        numbers = []
        async with asyncio.timeout(20):
            while len(numbers) < count:
                event = (await answer.content.readuntil(b"\n\n")).decode().splitlines()
                assert event[1] == "event: frame"
                frame = json.loads(event[2].removeprefix("data: "))
                assert event[0] == f"id: {frame['number']}"
                assert frame["clusters"]["pd"]["instances"]["decode"]["role"] == "decode"
                numbers.append(frame["number"])
        return numbers

    async def body(world: World) -> None:
        await first_frame(world)
        async with world.admin.get("/prfaas/events?after=0") as answer:
            assert answer.content_type == "text/event-stream"
            assert await frames(answer, 2) == [1, 2]
        async with world.admin.get("/prfaas/events", headers={"Last-Event-ID": "1"}) as answer:
            assert await frames(answer, 2) == [2, 3]
        # Of a gateway that ran before: it would never come.
        async with world.admin.get("/prfaas/events", headers={"Last-Event-ID": "5000"}) as answer:
            assert (await frames(answer, 1))[0] < 20

    in_world(body)


def test_streams_of_events_are_limited_and_given_back(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await first_frame(world)
        streams = [await world.admin.get("/prfaas/events?after=0") for _ in range(16)]
        assert "close a console" in (await read(world, "/prfaas/events", 503))["error"]["message"]
        for stream in streams:
            stream.close()
        for _ in range(200):
            async with world.admin.get("/prfaas/events?after=0") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.02)
        raise AssertionError("no stream was given back")

    in_world(body)


def test_a_stream_that_nobody_reads_is_given_back(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow(_history: StateHistory, _after: int) -> AsyncIterator[RingEntry]:
        while True:
            yield RingEntry(1, b" " * (8 << 20))

    monkeypatch.setattr(console, "_SLOWEST_S", 0.2)
    monkeypatch.setattr(StateHistory, "follow", follow)

    async def body(world: World) -> None:
        async with world.admin.get("/prfaas/events") as stream:
            assert stream.status == 200
            await asyncio.sleep(1.0)
            with pytest.raises(aiohttp.ClientError):
                async with asyncio.timeout(20):
                    await stream.read()

    in_world(body)


def test_a_threshold_is_held_and_searched_again(in_world: InWorld, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.admin.headers["Authorization"] = f"Bearer {TOKEN}"
        path = "/prfaas/clusters/pd/threshold"
        async with world.admin.post(path, json={"tokens": 77}) as answer:
            assert answer.status == 409
            assert "static_threshold" in (await answer.json())["error"]["message"]
        assert world.live is not None
        deployment = world.live.members.running.current
        object.__setattr__(deployment, "routing", Routing("paper", 100))
        async with world.admin.post(path, json={"tokens": 77}) as answer:
            assert await answer.json() == {"threshold_tokens": 77.0, "threshold_held": True}
        assert world.live.cluster_state.view.threshold_tokens["pd"] == 77.0
        async with world.admin.post(path, json={"tokens": None}) as answer:
            assert (await answer.json())["threshold_held"] is False

    in_world(body, live=True, **with_token(tmp_path))


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("far", b'{"tokens": 5}', 404),
        ("pd", b"no json", 400),
        ("pd", b"[]", 400),
        ("pd", b"{}", 400),
        ("pd", b'{"tokens": 0}', 400),
        ("pd", b'{"tokens": true}', 400),
        ("pd", b'{"tokens": "8192"}', 400),
        ("pd", b'{"tokens": NaN}', 400),
        ("pd", b'{"tokens": 1e12}', 400),
        ("pd", b"[" * 100_000, 400),
        ("pd", b'{"tokens": 5}', 409),
    ],
)
def test_thresholds_that_can_not_be_set(in_world: InWorld, path: str, data: bytes, status: int) -> None:
    async def body(world: World) -> None:
        async with world.admin.post(f"/prfaas/clusters/{path}/threshold", data=data) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"].endswith(".")

    in_world(body)


def test_the_scenario_is_a_trace_that_the_simulator_reads(
    in_world: InWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        assert "nothing to simulate" in (await read(world, "/prfaas/scenario", 409))["error"]["message"]
        for prompt in (SHORT, LONG * 3, LONG * 3):
            await world.complete(prompt, max_tokens=5)
        threads: list[int] = []

        def noted(*parts: Any) -> Any:
            threads.append(threading.get_ident())
            return scenario_of(*parts)

        monkeypatch.setattr(console, "scenario_of", noted)
        scenario = await read(world, "/prfaas/scenario")
        # Requests go on meanwhile.
        assert threads and threading.get_ident() not in threads
        file = tmp_path / scenario["trace_name"]
        file.write_text(scenario["trace"])
        requests = read_requests(file).requests
        assert [request.input_tokens for request in requests] == [40, 1200, 1200]
        assert scenario["command"].startswith(
            "prfaas simulate test.yaml --trace scenario.jsonl --requests 3 --rate "
        )
        # What the last one found in a cache it finds again.
        first, second = requests[1].block_ids, requests[2].block_ids
        assert len(first) == len(second) == 5 and not set(first) & set(second[4:])

    in_world(body)


LINK = {"source": "east", "target": "tokyo", "configured_bits_per_s": 2e9, "up": True}
NOW: dict[str, Any] = {
    "clusters": {
        "tokyo": {
            "threshold_tokens": 9000.0,
            "instances": {"tokyo-decode-0": {"healthy": False, "drain": None}},
        },
        "osaka": {"threshold_tokens": 7000.0, "instances": {}},
    },
    "links": {
        "a": LINK | {"capacity_bits_per_s": 8e8},
        "b": LINK | {"capacity_bits_per_s": 1.98e9, "target": "osaka"},
        "c": LINK | {"capacity_bits_per_s": 2e9, "up": False},
    },
    "roles": {"conversions": [{}], "last_evaluation": {}},
}


@pytest.mark.parametrize("configured_tokens", [None, 4000])
def test_a_scenario_says_what_is_different_now(configured_tokens: int | None) -> None:
    """Links, thresholds and roles of the moment, and what the command can't say."""
    deployment = replace(load_deployment(EXAMPLE), routing=Routing("tilted", configured_tokens))
    record = record_of(prompt_tokens=1000, uncached_tokens=300)
    scenario = scenario_of([record, replace(record, at_s=record.at_s + 10)], NOW, deployment)
    assert scenario is not None
    link, *threshold = scenario["changes"]
    assert link == "links[east->tokyo].bandwidth=800000000"
    assert threshold == ([] if configured_tokens is None else ["routing.threshold_tokens=7000"])
    assert ("tokyo 9,000, osaka 7,000" in " ".join(scenario["notes"])) is (configured_tokens is None)
    assert "--rate 0.1" in scenario["command"] and f"--set '{link}'" in scenario["command"]
    assert len(scenario["notes"]) == 4
    rows = [json.loads(line) for line in scenario["trace"].splitlines()]
    assert [row["arrival_s"] for row in rows] == [0.0, 10.0]
    shared = [a == b for a, b in zip(rows[0]["block_ids"], rows[1]["block_ids"], strict=True)]
    assert shared == [True, True, False, False]
    assert scenario_of([], NOW, deployment) is None


def test_the_command_of_a_scenario_simulates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = yaml.safe_load(EXAMPLE.with_name("paper.yaml").read_text())
    del told["workload"]
    link = LINK | {name: told["links"][0][name] for name in ("source", "target")}
    record = record_of(prompt_tokens=9000, uncached_tokens=5000)
    records = [replace(record, at_s=record.at_s + 0.5 * number) for number in range(40)]
    now = {"clusters": {}, "links": {"a": link | {"capacity_bits_per_s": 1e9}}}
    deployment = replace(load_deployment(EXAMPLE), path=tmp_path / "live.yaml")
    scenario = scenario_of(records, now, deployment)
    assert scenario is not None and len(scenario["changes"]) == 1
    deployment.path.write_text(f"{yaml.safe_dump(told)}\n{scenario['workload']}\n")
    (tmp_path / scenario["trace_name"]).write_text(scenario["trace"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [*shlex.split(scenario["command"]), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert ended.value.code in (0, None), shown.err
    assert json.loads(shown.out)


def test_a_history_is_made_of_any_state() -> None:
    """The loop of a gateway must not end because of a state that tells little."""

    async def main() -> None:
        history = StateHistory(lambda: {"clusters": {}})
        assert history.take()["alarms"][0]["kind"] == "no-decode"

    asyncio.run(main())


def test_what_offloading_was_worth_comes_from_the_ledger(in_world: InWorld, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        assert (await read(world, "/prfaas/console"))["keeps_ledger"]
        for prompt in (SHORT, LONG):
            await world.post("/v1/completions", {"model": "stand-in", "prompt": prompt, "max_tokens": 2})
        async with asyncio.timeout(20):
            while not (told := await read(world, "/prfaas/worth?by=link&hours=1"))["all"]:
                await asyncio.sleep(0.05)
        assert sum(row["requests"] for row in told["rows"]) == told["all"][0]["requests"]
        assert told["sentences"][0].endswith("requests were offloaded.")
        for wrong, why in (
            ("by=moon", "by must be one of hour, hour-of-day"),
            ("hours=-1", "whole number from 0"),
        ):
            assert why in (await read(world, f"/prfaas/worth?{wrong}", 400))["error"]["message"]
        (tmp_path / "ledger.sqlite").unlink()
        gone = await read(world, "/prfaas/worth", 409)
        assert "can't be used as a ledger" in gone["error"]["message"]

    config = GatewayConfig(
        "127.0.0.1", 0, AdminConfig("127.0.0.1", 0), ledger=LedgerConfig(tmp_path / "ledger.sqlite")
    )
    in_world(body, live=True, gateway_config=config)


def test_without_a_ledger_nothing_is_worth_anything(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert not (await read(world, "/prfaas/console"))["keeps_ledger"]
        assert "gateway.ledger" in (await read(world, "/prfaas/worth", 409))["error"]["message"]

    in_world(body)
