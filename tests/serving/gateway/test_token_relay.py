"""The prefill engine goes on decoding while the KV travels: the client has its tokens, and each of them once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv import model_from_config
from prfaas.serving.gateway import first_token_answer
from prfaas.serving.gateway.first_token import FirstTokenAsk, SampledTokens, begins_stop
from prfaas.serving.gateway.first_token_rules import reuses_any_prefix
from prfaas.serving.gateway.token_relay import TokenRelay

from .stand_in import CACHED_TOKENS, DENSE_CONFIG, HYBRID_CONFIG, StandInEngine, generated
from .test_decode_deaths import stream, text_of
from .test_early_decode import until
from .test_first_token_answer import ASKED, LONG, USAGE, WANTED, whole
from .world import World, deployment_of, route_of

InWorld = Callable[..., None]
RELAYS = replace(WANTED, relay_tokens=5)
STREAMED = ASKED | {"stream": True, "stream_options": {"include_usage": True}}


def relay_until(world: World, token: int) -> None:
    """The KV is complete once the prefill engine has made that token, the first of which is 0."""
    world.remote.lingers, world.remote.trails = "ends", True
    world.remote.sends_after, world.remote.chunk_s = token, 0.05


def in_one_of_three(
    folder: Path, in_world: InWorld, body: Callable[[World], Awaitable[None]], **options: Any
) -> None:
    """For what happens while a relay goes on: a machine that stops for a moment is past it."""
    for left in (2, 1, 0):
        (folder / "key").unlink(missing_ok=True)  # each world makes its own
        try:
            in_world(body, **options)
            return
        except (AssertionError, ValueError):
            if not left:
                raise


def test_tokens_come_while_the_kv_is_on_its_way(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        relay_until(world, 99)
        async with world.client.post("/v1/completions", json=STREAMED) as response:
            assert route_of(response)["first_token"] == "prefill"
            told = [orjson.loads((await response.content.readuntil(b"\n\n"))[6:]) for _ in range(4)]
            assert world.decode.generated() == [] and world.decode.loaded == []
            world.remote.goes_on.set()
            raw = await response.read()
        events = told + [orjson.loads(part[6:]) for part in raw.split(b"\n\n")[:-2]]
        assert text_of(events) == whole().text and events[-1]["usage"] == USAGE
        assert len({event["id"] for event in events}) == 1
        (prefill,), (rest,) = world.remote.generated(), world.decode.generated()
        assert (prefill.body["max_tokens"], prefill.body["stream"], prefill.body["prompt"]) == (6, True, LONG)
        sent = len(rest.body["prompt"]) - len(LONG)
        assert 4 <= sent <= 6 and rest.body["prompt"] == LONG + whole().token_ids[:sent]
        assert rest.body["max_tokens"] == 9 - sent
        assert rest.body["kv_transfer_params"]["remote_prefill_cached_tokens"] == CACHED_TOKENS
        assert (world.decode.loaded, world.decode.lost) == ([len(LONG)], 0)
        assert await world.metric("prfaas_gateway_relayed_tokens_total") == sent - 1
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            record = await page.json()
        assert (
            record["relayed_tokens"] == sent - 1 and record["attempts"][0]["cached_tokens"] == CACHED_TOKENS
        )
        assert record["attempts"][0]["relay"] == {
            "tokens": 5,
            "reason": "link-bound",
            "exposed_s": 2.0,
            "step_s": 0.05,
            "queue_s": 3.0,
        }

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


def test_the_decode_engine_is_asked_a_step_before_the_kv_is_there_and_no_sooner(in_world: InWorld) -> None:
    """However long before it is asked elsewhere: nobody would make tokens meanwhile."""

    async def body(world: World) -> None:
        world.plane.waits.step_s = 0.0
        relay_until(world, 3)
        _, events = await stream(world, "/v1/completions", STREAMED)
        assert text_of(events) == whole().text
        (rest,) = world.decode.generated()
        assert len(rest.body["prompt"]) - len(LONG) >= 3 and world.decode.early == 0

    in_world(body, gateway_config=RELAYS, decode_lead_s=1.0)


def test_it_ends_when_the_kv_is_there(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        relay_until(world, 2)
        world.remote.chunk_s = 0.2
        _, events = await stream(world, "/v1/completions", STREAMED)
        assert text_of(events) == whole().text
        (rest,) = world.decode.generated()
        assert len(rest.body["prompt"]) - len(LONG) <= 4
        # Nobody waits for what it would have made.
        await until(lambda: world.remote.cancelled == 1)
        assert await world.metric('prfaas_gateway_relays_total{outcome="handed-over"}') == 1

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


def test_after_the_last_relayed_token_the_kv_is_waited_for(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.lingers, world.remote.trails = "ends", True
        async with world.client.post("/v1/completions", json=STREAMED) as response:
            told = [orjson.loads((await response.content.readuntil(b"\n\n"))[6:]) for _ in range(6)]
            while await world.metric('prfaas_gateway_relays_total{outcome="limit"}') == 0:
                await asyncio.sleep(0.01)
            assert world.decode.generated() == []
            world.remote.goes_on.set()
            raw = await response.read()
        assert text_of(told + [orjson.loads(part[6:]) for part in raw.split(b"\n\n")[:-2]]) == whole().text
        (rest,) = world.decode.generated()
        assert len(rest.body["prompt"]) - len(LONG) == 6

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


RELAYS_MANY = replace(WANTED, relay_tokens=60)
MANY = STREAMED | {"max_tokens": 64}


def computed(world: World) -> list[tuple[int, bool]]:
    """Of each request to the decode engine: how many tokens of the answer its prompt has, and whether it loads KV."""
    return [
        (len(seen.body["prompt"]) - len(LONG), "prfaas" in seen.body["kv_transfer_params"])
        for seen in world.decode.generated()
    ]


def test_the_decode_engine_computes_what_was_relayed_while_the_relay_goes_on(
    in_world: InWorld, tmp_path: Path
) -> None:
    async def body(world: World) -> None:
        relay_until(world, 20)
        _, events = await stream(world, "/v1/completions", MANY)
        assert text_of(events) == generated(LONG, ASKED, 64).text
        assert events[-2]["usage"] == USAGE | {
            "prompt_tokens": len(LONG),
            "completion_tokens": 64,
            "total_tokens": len(LONG) + 64,
        }
        first, *_, last = asked = world.decode.generated()
        assert (first.body["max_tokens"], last.body["max_tokens"]) == (1, 64 - computed(world)[-1][0])
        assert all(
            seen.body["kv_transfer_params"]["remote_prefill_cached_tokens"] == CACHED_TOKENS for seen in asked
        )
        # Each has what the one before had, and more; the KV is loaded once.
        sent, loads = zip(*computed(world), strict=True)
        assert list(sent) == sorted(sent) and sent[0] >= 20
        assert loads == (True, *[False] * (len(loads) - 1)) and len(loads) <= 5
        assert (world.decode.loaded, world.decode.lost) == ([len(LONG)], 0)
        await world.settled()

    in_one_of_three(tmp_path, in_world, body, gateway_config=RELAYS_MANY, decode_lead_s=0.0, dense=True)


@pytest.mark.slow("waits for time limits of connections")
def test_tokens_are_held_back_for_the_pause_until_the_decode_engine_goes_on(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some of them when it is asked. With its first token all have left."""
    monkeypatch.setattr(first_token_answer, "_FIRST_PAUSE_S", 0.5)

    async def body(world: World) -> None:
        relay_until(world, 20)
        told: list[bytes] = []
        has_read: list[int] = []
        async with world.client.post("/v1/completions", json=MANY) as response:

            async def read() -> None:
                async for line in response.content:
                    told.extend([line] if line.startswith(b"data: {") else [])

            asked = world.decode._streamed

            async def count(*args: Any) -> Any:
                has_read.append(len(told))
                return await asked(*args)

            monkeypatch.setattr(world.decode, "_streamed", count)
            await read()
        ((sent, _),) = computed(world)
        # Eight by the pause; one or two may be on their way in any case.
        assert has_read[0] <= sent - 4
        events = [orjson.loads(line[6:]) for line in told]
        assert text_of(events) == generated(LONG, ASKED, 64).text

    in_one_of_three(tmp_path, in_world, body, gateway_config=RELAYS_MANY, decode_lead_s=0.0)


@pytest.mark.parametrize("why", ["linear states", "others wait"])
def test_an_engine_that_may_not_have_it_any_more_is_asked_once(in_world: InWorld, why: str) -> None:
    async def body(world: World) -> None:
        world.plane.waits.calm = why != "others wait"
        relay_until(world, 20)
        _, events = await stream(world, "/v1/completions", MANY)
        assert text_of(events) == generated(LONG, ASKED, 64).text
        assert [loads for _, loads in computed(world)] == [True]

    in_world(body, gateway_config=RELAYS_MANY, decode_lead_s=0.0, dense=why != "linear states")


def test_which_engines_go_on_anywhere_in_what_they_have_computed(tmp_path: Path) -> None:
    dense, hybrid = (model_from_config(config, name="m") for config in (DENSE_CONFIG, HYBRID_CONFIG))
    names = ("remote", "local", "decode")
    engines = {name: StandInEngine(name, tmp_path, b"key") for name in names}
    deployment = deployment_of(tmp_path, engines, tmp_path)
    assert reuses_any_prefix(deployment, dense)
    assert not reuses_any_prefix(deployment, hybrid) and not reuses_any_prefix(deployment, None)
    without = replace(deployment.engine, extra_args=("--no-enable-prefix-caching",))
    assert not reuses_any_prefix(replace(deployment, engine=without), dense)


@pytest.mark.parametrize("dies", ["before-headers", "http-500"])
def test_a_decode_engine_that_dies_while_it_computes_costs_no_token(in_world: InWorld, dies: str) -> None:
    async def body(world: World) -> None:
        relay_until(world, 20)
        world.decode.dies = dies
        _, events = await stream(world, "/v1/completions", MANY)
        assert text_of(events) == generated(LONG, ASKED, 64).text
        assert events[-2]["usage"]["completion_tokens"] == 64
        await world.settled()

    in_world(body, gateway_config=RELAYS_MANY, decode_lead_s=0.0, dense=True, spare=True)


@pytest.mark.slow("waits for time limits of connections")
def test_an_answer_that_ends_while_relayed_tokens_are_computed_ends_that(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        relay_until(world, 20)
        world.decode.chunk_s = 30.0
        _, events = await stream(world, "/v1/completions", MANY | {"max_tokens": 40})
        assert text_of(events) == generated(LONG, ASKED, 40).text
        assert await world.metric('prfaas_gateway_relays_total{outcome="ended"}') == 1
        await until(lambda: world.decode.cancelled == 1)
        await world.settled()

    in_world(body, gateway_config=RELAYS_MANY, decode_lead_s=0.0, dense=True)


@pytest.mark.parametrize("how", ["length", "own", "stop", "stop-included", "token", "both"])
def test_an_answer_that_ends_meanwhile_needs_no_kv(in_world: InWorld, how: str) -> None:
    async def body(world: World) -> None:
        relay_until(world, 99)
        fields: dict[str, Any] = {}
        text = whole().text
        if how == "length":
            fields["max_tokens"] = 4
        elif how.startswith("stop"):
            fields |= {"stop": [text[2:4]], "include_stop_str_in_output": how == "stop-included"}
        elif how == "token":
            fields |= {"stop_token_ids": [whole().token_ids[3]], "stop": ["never"]}
        elif how == "both":
            # The token's text is the end of the stop string. By itself the prefill engine would say that this ended it.
            fields |= {"stop_token_ids": [whole().token_ids[3]], "stop": [text[2:4]]}
        else:
            world.remote.end = world.decode.end = text[3]
        expected = generated(LONG, ASKED | fields, fields.get("max_tokens", 9), world.remote.end)
        assert len(expected.token_ids) <= 4
        _, events = await stream(world, "/v1/completions", STREAMED | fields)
        last = [event for event in events if event and event["choices"]][-1]["choices"][0]
        assert text_of(events) == expected.text
        assert (last["finish_reason"], last["stop_reason"]) == (expected.reason, expected.stop_reason)
        assert events[-2]["usage"]["completion_tokens"] == len(expected.token_ids)
        # Only whether it would take the fields was it asked, if at all.
        assert [seen for seen in world.decode.generated() if seen.body["prompt"] != LONG[:2]] == []
        assert await world.metric('prfaas_gateway_relays_total{outcome="ended"}') == 1

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


def test_a_first_token_without_a_text_needs_no_second_prefill(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        relay_until(world, 99)
        for engine in world.engines:
            engine.blank = whole().pieces[0]
        _, events = await stream(world, "/v1/completions", STREAMED)
        assert text_of(events) == generated(LONG, ASKED, 9, blank=whole().pieces[0]).text
        (prefill,) = world.remote.generated()
        assert prefill.body["prompt"] == LONG

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


def test_where_it_does_not_pay_the_prefill_samples_one_token(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.plane.waits.reason = "busy-prefill"
        _, events = await stream(world, "/v1/completions", STREAMED)
        assert text_of(events) == whole().text
        (prefill,) = world.remote.generated()
        assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
        assert await world.metric('prfaas_gateway_relays_total{outcome="busy-prefill"}') == 1

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


def test_an_answer_in_one_piece_is_not_relayed(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        response, answer = await world.post("/v1/completions", ASKED)
        assert response.status == 200 and answer["choices"][0]["text"] == whole().text
        assert world.remote.generated()[0].body["max_tokens"] == 1
        assert await world.metric("prfaas_gateway_relays_total") == 0

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


@pytest.mark.parametrize("dies", ["mid-stream", "mid-event", "error-event", "early-end"])
@pytest.mark.parametrize("kv", ["ends", "aborts"])
def test_a_prefill_engine_that_dies_meanwhile_costs_no_token(in_world: InWorld, dies: str, kv: str) -> None:
    async def body(world: World) -> None:
        relay_until(world, 99)
        world.remote.lingers, world.remote.dies, world.remote.dies_after = kv, dies, 3
        _, events = await stream(world, "/v1/completions", STREAMED)
        assert text_of(events) == whole().text and events[-2]["usage"]["completion_tokens"] == 9
        assert await world.metric("prfaas_gateway_fallbacks_total") == (kv == "aborts")
        assert await world.metric("prfaas_gateway_relayed_tokens_total") == 2

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_decode_engine_that_dies_after_it_costs_no_token(in_world: InWorld, chat: bool) -> None:
    async def body(world: World) -> None:
        relay_until(world, 3)
        world.decode.dies, world.decode.dies_after = "mid-stream", 2
        fields = STREAMED
        path, ids = "/v1/completions", LONG
        if chat:
            fields = {name: value for name, value in STREAMED.items() if name != "prompt"}
            fields["messages"] = [{"role": "user", "content": "tell me " * 40}]
            path, ids = "/v1/chat/completions", world.decode._ids(fields)
        _, events = await stream(world, path, fields)
        assert text_of(events) == generated(ids, ASKED, 9).text
        assert events[-2]["usage"]["completion_tokens"] == 9 and events.count(None) == 1
        assert world.spare is not None
        (dead,), (rest,) = world.decode.generated(), world.spare.generated()
        assert len(rest.body["prompt"]) == len(dead.body["prompt"]) + 2 > len(ids) + 3

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0, spare=True)


def test_a_client_that_leaves_ends_it(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        relay_until(world, 99)
        world.remote.chunk_s = 0.5
        async with world.client.post("/v1/completions", json=STREAMED) as response:
            await response.content.readuntil(b"\n\n")
        await until(lambda: world.busy == 0 and world.remote.cancelled == 1)
        world.remote.goes_on.set()
        await world.settled()
        assert world.plane.suspected == []

    in_world(body, gateway_config=RELAYS, decode_lead_s=0.0)


class Answer:
    """An engine's stream of which every event comes by itself."""

    status = 200

    def __init__(self, events: list[bytes]) -> None:
        self._events = events
        self.closed = False

    async def readany(self) -> bytes:
        return self._events.pop(0) if self._events else b""

    def close(self) -> None:
        self.closed = True


def event(ids: list[int], text: str, reason: str | None = None, stop_reason: Any = None) -> bytes:
    choice = {"text": text, "finish_reason": reason, "stop_reason": stop_reason}
    choice["logprobs"] = {"tokens": [f"token_id:{number}" for number in ids]}
    return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"


def relayed(events: list[bytes], ask: FirstTokenAsk) -> tuple[list[SampledTokens], bool]:
    async def read() -> tuple[list[SampledTokens], bool]:
        relay, told = TokenRelay(Answer(events), "east", ask), []  # type: ignore[arg-type]
        while (tokens := await relay.next()) is not None:
            told.append(tokens)
        return told, relay.failed

    return asyncio.run(read())


TEXTS = st.sampled_from(["", "a", "b", "ab", "ba", "\ufffd", "a\ufffd"])


@given(
    st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
def test_text_and_tokens_end_together_wherever_it_is_cut(pieces: list[list[str]], stops: list[str]) -> None:
    ask = FirstTokenAsk({}, tuple(stops), 1000, 100)
    texts = [text for joined in pieces for text in joined]
    events, number = [], 0
    for joined in pieces:
        events.append(event(list(range(number, number + len(joined))), "".join(joined)))
        number += len(joined)
    told, failed = relayed([*events, b"data: [DONE]\n\n"], ask)
    ids = [token for tokens in told for token in tokens.token_ids]
    assert ids == list(range(len(ids))) and not failed
    assert "".join(tokens.text for tokens in told) == "".join(texts[: len(ids)])
    cut = 0
    for tokens in told:
        cut += len(tokens.token_ids)
        # Neither within a character nor within a stop string.
        assert texts[cut - 1] and "\ufffd" not in texts[cut - 1]
        assert not begins_stop("".join(texts[:cut]), tuple(stops))


@pytest.mark.parametrize(
    "last",
    [
        event([3], "c", "abort"),
        b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n',
        b'data: {"choices": [{"text": "c", "logprobs": null, "finish_reason": null}]}\n\n',
        b"data: not JSON\n\n",
        b"",
    ],
)
def test_what_is_no_token_ends_it(last: bytes) -> None:
    told, failed = relayed([event([1], "a"), event([2], "b"), last], FirstTokenAsk({}, (), 100, 10))
    assert [(tokens.token_ids, tokens.text) for tokens in told] == [((1,), "a"), ((2,), "b")] and failed


@pytest.mark.parametrize(
    ("end", "ids", "text"),
    [
        (event([3], "x", "stop", "bx"), (2, 3), ""),
        (event([3, 4], "xb", "stop", "xb"), (2, 3, 4), "b"),
        (event([3], "!", "stop", 3), (2, 3), "b"),
        (event([3], "", "stop"), (2, 3), "b"),
        (event([3], "c", "length"), (2, 3), "bc"),
    ],
)
def test_the_client_reads_nothing_of_what_stopped_the_answer(
    end: bytes, ids: tuple[int, ...], text: str
) -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}}\n\n'
    ask = FirstTokenAsk({}, ("bx", "xb"), 11, 10)
    told, failed = relayed([event([1], "a"), event([2], "b"), end, usage, b"data: [DONE]\n\n"], ask)
    assert not failed and told[0] == SampledTokens((1,), "a")
    assert (told[-1].token_ids, told[-1].text) == (ids, text)
    assert told[-1].finish_reason is not None and told[-1].prompt_details == {"cached_tokens": 7}


def test_a_stop_token_whose_text_ends_a_stop_string_is_what_ended_the_answer() -> None:
    """As by an engine that hides both: it never reads the token's text, so it finds no string."""
    ask = FirstTokenAsk({"stop_token_ids": [9, 3]}, ("bx",), 11, 10)
    end = event([3], "x", "stop", "bx")
    told, failed = relayed([event([1], "a"), event([2], "b"), end, b"data: [DONE]\n\n"], ask)
    assert told == [SampledTokens((1,), "a"), SampledTokens((2, 3), "b", "stop", 3)] and not failed


@pytest.mark.parametrize("stop_reason", [3, "b!"])
def test_which_text_a_stop_token_has_is_not_guessed(stop_reason: int | str) -> None:
    ask = FirstTokenAsk({"stop_token_ids": [3]}, ("zz", "b!"), 100, 10)
    events = [event([1], "a"), event([2, 3], "b!", "stop", stop_reason), b"data: [DONE]\n\n"]
    told, failed = relayed(events, ask)
    assert told == [SampledTokens((1,), "a")] and not failed
