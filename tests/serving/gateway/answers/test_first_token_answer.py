"""The first token comes from the prefill: the answer is the same, whatever is asked for and whatever fails."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..stand_in import CACHED_TOKENS, Generated, generated
from ..ways.test_early_decode import until
from ..world import GATEWAY, World, route_of, running_world
from .test_decode_deaths import stream, text_of

InWorld = Callable[..., None]
# By default.
WANTED = replace(GATEWAY, first_token=None)
LONG = list(range(50, 250)) * 5
ASKED: dict[str, Any] = {"model": "stand-in", "prompt": LONG, "max_tokens": 9, "temperature": 0}
USAGE = {"prompt_tokens": 1000, "completion_tokens": 9, "total_tokens": 1009}
FIRST = 'prfaas_gateway_first_tokens_total{outcome="%s"}'


def whole(**fields: Any) -> Generated:
    body = ASKED | fields
    return generated(LONG, body, body["max_tokens"])


async def asked(world: World, **fields: Any) -> tuple[dict[str, str], list[Any]]:
    body = ASKED | {"stream": True, "stream_options": {"include_usage": True}} | fields
    async with world.client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        *parts, last = (await response.read()).split(b"\n\n")[:-1]
    assert last == b"data: [DONE]"
    return route_of(response), [orjson.loads(part[6:]) for part in parts]


def test_the_client_has_it_while_the_kv_is_on_its_way(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers, world.remote.trails = "ends", True
        fields = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
        async with world.client.post("/v1/completions", json=fields) as response:
            route = route_of(response)
            first = orjson.loads((await response.content.readuntil(b"\n\n"))[6:])
            assert first["choices"][0]["text"] == whole().pieces[0]
            assert (route["route"], route["prefill"], route["first_token"]) == (
                "offload",
                "remote",
                "prefill",
            )
            assert "bytes" not in route, "nobody knows yet"
            await until(lambda: world.decode.early == 1)
            assert world.decode.loaded == []
            world.remote.goes_on.set()
            raw = await response.read()
        events = [orjson.loads(part[6:]) for part in raw.split(b"\n\n")[:-2]]
        assert first["choices"][0]["text"] + text_of(events) == whole().text
        assert events[-1]["usage"] == USAGE
        assert {(e["id"], e["created"]) for e in (first, *events)} == {(first["id"], first["created"])}
        assert first["id"] == f"cmpl-{response.headers['X-Request-Id']}"
        (prefill,), (rest,) = world.remote.generated(), world.decode.generated()
        assert prefill.body["prompt"] == LONG and prefill.body["temperature"] == 0
        assert rest.body["prompt"] == [*LONG, whole().token_ids[0]] and rest.body["max_tokens"] == 8
        assert rest.body["kv_transfer_params"]["remote_prefill_cached_tokens"] == CACHED_TOKENS
        assert (world.decode.loaded, world.decode.lost) == ([len(LONG)], 0)
        assert await world.metric(FIRST % "prefill") == 1
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            told = await page.json()
        assert told["first_token"] == "prefill" and "first_token=prefill" in told["route"]
        assert [attempt["outcome"] for attempt in told["attempts"]] == ["done"]

    in_world(body, gateway_config=WANTED)


@pytest.mark.slow("waits for time limits of connections")
@pytest.mark.parametrize(
    ("fields", "is_early"),
    [
        ({"stream": True}, True),
        ({"stream": False}, False),
        ({"stream": True, "logprobs": 1}, False),
        ({"stream": True, "seed": 1, "temperature": 0.5}, False),
    ],
)
def test_routing_knows_which_clients_see_the_first_token_early(
    in_world: InWorld, fields: dict[str, Any], is_early: bool
) -> None:
    async def body(world: World) -> None:
        async with world.client.post("/v1/completions", json=ASKED | fields) as response:
            await response.read()
            assert response.status == 200
        assert world.plane.routed_early[0] is is_early

    in_world(body, gateway_config=WANTED)


def test_the_file_can_have_decode_engines_sample_all(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.client.post("/v1/completions", json=ASKED | {"stream": True}) as response:
            await response.read()
        assert not any(world.plane.routed_early)

    in_world(body)


@pytest.mark.parametrize("lead_s", [0.0, 1.0])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_every_form_of_the_answer_is_as_without_it(in_world: InWorld, chat: bool, lead_s: float) -> None:
    async def body(world: World) -> None:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        fields = dict(ASKED)
        if chat:
            del fields["prompt"]
            fields["messages"] = [{"role": "user", "content": "tell me " * 40}]
        _, events = await stream(world, path, fields | {"stream_options": {"include_usage": True}})
        del world.plane.observed[:]
        direct = await plain(world, path, fields)
        choice = direct["choices"][0]
        assert text_of(events) == (choice["message"]["content"] if chat else choice["text"])
        assert choice["finish_reason"] == events[-3]["choices"][0]["finish_reason"] == "length"
        assert events[-2]["usage"] == direct["usage"] and events.count(None) == 1
        assert events[0]["object"] == ("chat.completion.chunk" if chat else "text_completion")
        assert ["role" in e["choices"][0].get("delta", {}) for e in events[:2]] == [chat, False]
        assert await world.metric(FIRST % "prefill") == 1

    in_world(body, gateway_config=WANTED, decode_lead_s=lead_s)


async def plain(world: World, path: str, fields: dict[str, Any]) -> Any:
    """The decode engine's own answer."""
    async with world.client.post(f"http://127.0.0.1:{world.decode.http_port}{path}", json=fields) as response:
        return await response.json()


@pytest.mark.parametrize("how", ["own", "stop", "token"])
def test_an_answer_that_ends_with_it_is_not_decoded(in_world: InWorld, how: str) -> None:
    async def body(world: World) -> None:
        first = whole().pieces[0]
        fields: dict[str, Any] = {"stop": [first]} if how == "stop" else {}
        if how == "token":
            fields["stop_token_ids"] = [whole().token_ids[0]]
        world.remote.end = first if how == "own" else None
        world.remote.lingers, world.remote.trails = "ends", True
        _, events = await asked(world, **fields)
        choice = events[0]["choices"][0]
        reason = {"own": None, "stop": first, "token": whole().token_ids[0]}[how]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", reason)
        assert events[-1]["usage"]["completion_tokens"] == 1
        # Only whether it would take the fields was it asked, if at all.
        assert [seen for seen in world.decode.generated() if seen.body["prompt"] != LONG[:2]] == []
        world.remote.goes_on.set()

    in_world(body, gateway_config=WANTED)


@pytest.mark.parametrize("how", ["no-text", "stop-spans"])
def test_what_the_client_must_not_have_alone_is_asked_for_again(in_world: InWorld, how: str) -> None:
    async def body(world: World) -> None:
        first = whole().pieces[0]
        fields = {"stop": [first + "#"]} if how == "stop-spans" else {}
        for engine in world.engines:
            engine.blank = first if how == "no-text" else ""
        route, events = await asked(world, **fields)
        expected = generated(LONG, ASKED | fields, 9, blank=first if how == "no-text" else "")
        assert text_of(events) == expected.text
        assert (route["route"], route["prefill"]) == ("offload", "remote") and "first_token" not in route
        assert [len(seen.body["prompt"]) for seen in world.remote.generated()] == [1000, 999]
        assert await world.metric(FIRST % how) == 1

    in_world(body, gateway_config=WANTED)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0.5, "seed": 3}, "parameters"),
        ({"logprobs": 1}, "parameters"),
        ({"presence_penalty": 0.5}, "parameters"),
        ({"logit_bias": {"1": 1}}, "parameters"),
        ({"n": 2, "temperature": 0.5}, "parameters"),
        ({"return_token_ids": True}, "parameters"),
        ({"max_tokens": 1}, "one-token"),
        ({"stream": False, "stream_options": None}, "not-streamed"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "parameters"),
    ],
    ids=str,
)
def test_other_requests_go_the_other_way(in_world: InWorld, fields: dict[str, Any], reason: str) -> None:
    async def body(world: World) -> None:
        body = ASKED | {"stream": True} | fields
        async with world.client.post("/v1/completions", json=body) as response:
            route = route_of(response)
            assert response.status == 200 and await response.read()
        assert route["route"] == "offload" and "first_token" not in route
        (prefill,) = world.remote.generated()
        assert prefill.body["prompt"] == LONG[:-1] and "logprobs" not in prefill.body
        assert await world.metric(FIRST % reason) == 1

    in_world(body, gateway_config=WANTED)


def test_without_the_setting_nothing_changes(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        route, _ = await asked(world)
        assert "first_token" not in route and world.remote.generated()[0].body["prompt"] == LONG[:-1]
        assert await world.metric("prfaas_gateway_first_tokens_total") == 0

    in_world(body)


def test_kv_that_does_not_come_costs_a_prefill_and_no_token(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers, world.remote.trails = "aborts", True
        world.remote.goes_on.set()
        _, events = await asked(world)
        assert text_of(events) == whole().text
        assert await world.metric("prfaas_gateway_fallbacks_total") == 1

    in_world(body, gateway_config=WANTED)


def test_a_client_that_leaves_after_it_leaves_nothing_behind(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers, world.remote.trails = "ends", True
        async with world.client.post("/v1/completions", json=ASKED | {"stream": True}) as response:
            await response.content.readuntil(b"\n\n")
        await until(lambda: world.busy == 0)
        world.remote.goes_on.set()
        await world.settled()
        assert world.plane.suspected == []

    in_world(body, gateway_config=WANTED)


def test_no_engine_that_can_go_on_is_told_as_an_error(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.dies = "http-500"
        _, events = await stream(world, "/v1/completions", ASKED)
        assert events[0]["choices"][0]["text"] == whole().pieces[0] and events[-1]["error"]["code"] == 502

    in_world(body, gateway_config=WANTED)


FAULTS = (
    "none",
    "prefill-fails",
    "kv-aborts",
    "leaves",
    "before-headers",
    "http-500",
    "mid-stream",
    "error-event",
)


@dataclass(frozen=True)
class Case:
    """One request, and what fails."""

    chat: bool
    streams: bool
    prompt: int
    fields: dict[str, Any]
    fault: str
    dies_after: int
    end: str | None
    blank: str
    joins: int
    sends_after: int


CHARACTERS = st.sampled_from("0123456789abcdef")
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8), "temperature": st.sampled_from([0, 0.7])},
    optional={
        "stop": st.lists(st.text("0123456789abcdef", min_size=1, max_size=2), max_size=4),
        "stop_token_ids": st.lists(st.integers(15, 27), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "top_p": st.just(0.9),
        "seed": st.integers(0, 9),
        "presence_penalty": st.sampled_from([0, 0.5]),
    },
)
CASES = st.builds(
    Case,
    chat=st.booleans(),
    streams=st.booleans(),
    prompt=st.integers(0, 10_000),
    fields=SAMPLING.filter(lambda fields: fields.get("min_tokens", 0) <= fields["max_tokens"]),
    fault=st.sampled_from(FAULTS),
    dies_after=st.integers(0, 3),
    end=st.none() | CHARACTERS,
    blank=st.just("") | CHARACTERS,
    joins=st.sampled_from([1, 1, 1, 2, 3]),
    sends_after=st.integers(0, 9),
)


async def check(world: World, case: Case) -> None:
    """The answer is the one that a single engine gives by itself."""
    assert world.spare is not None
    # An engine that goes on after a fault knows the text, and not tokens that have none.
    blank = "" if case.fault in ("mid-stream", "error-event") else case.blank
    for engine in world.engines:
        engine.end, engine.blank, engine.joins = case.end, blank, case.joins
    world.remote.fails = 500 if case.fault == "prefill-fails" else None
    # The KV comes, or fails to, with a token of the prefill engine's stream, if that goes on for so long.
    world.remote.goes_on.clear()
    world.remote.lingers, world.remote.trails = ("aborts" if case.fault == "kv-aborts" else "ends"), True
    world.remote.sends_after = case.sends_after
    world.decode.dies = case.fault if case.fault in FAULTS[4:] else None
    world.decode.dies_after = case.dies_after
    body = {"model": "stand-in", **case.fields}
    if case.chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"{case.prompt} " * 40}]
    else:
        path, body["prompt"] = "/v1/completions", [40 + (case.prompt + i * i) % 200 for i in range(300)]
    ids = world.spare._ids(body)
    expected = generated(ids, body, body["max_tokens"], case.end, blank)
    if case.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if case.fault == "leaves":
        async with world.client.post(path, json=body) as response:
            await response.content.readany()
        return
    if case.streams:
        _, events = await stream(world, path, body)
        # A fault may end a stream of a request that no other engine can continue: then the client is told.
        if events[-1] is not None and "error" in events[-1]:
            assert case.fault in FAULTS[6:] and not resumes(case.fields)
            assert expected.text.startswith(text_of(events[:-1]))
            return
        choices = [event["choices"][0] for event in events if event and event["choices"]]
        text, choice, usage = text_of(events), choices[-1], events[-2]["usage"]
        assert (
            events.count(None) == 1
            and [c["finish_reason"] for c in choices[:-1]].count(None) == len(choices) - 1
        )
        assert len({event["id"] for event in events if event}) == 1
    else:
        response, answer = await world.post(path, body)
        assert response.status == 200, answer
        choice, usage = answer["choices"][0], answer["usage"]
        text = choice["message"]["content"] if case.chat else choice["text"]
    assert text == expected.text
    assert (choice["finish_reason"], choice.get("stop_reason")) == (expected.reason, expected.stop_reason)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(expected.token_ids))


def resumes(fields: dict[str, Any]) -> bool:
    return not fields.get("presence_penalty") and (fields.get("seed") is None or fields["temperature"] == 0)


@pytest.mark.slow("waits for time limits of connections")
@settings(deadline=None, max_examples=12)
@given(st.lists(CASES, min_size=6, max_size=10), st.sampled_from([0.0, 1.0]))
def test_no_token_is_lost_doubled_or_different(cases: list[Case], lead_s: float) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with (
                asyncio.timeout(240),
                running_world(Path(home), spare=True, gateway_config=WANTED, decode_lead_s=lead_s) as world,
            ):
                world.remote.chunk_s = 0.001
                for case in cases:
                    await check(world, case)
                await world.settled()

    asyncio.run(main())
