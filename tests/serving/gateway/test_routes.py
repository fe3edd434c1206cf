"""Requests end to end through the gateway, with stand-in engines and the real transport."""

import asyncio
import platform
from collections.abc import Callable

import pytest

from prfaas import __version__

from .stand_in import BLOCK_TOKENS, answer_text
from .world import THRESHOLD_TOKENS, World, route_of

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))


def test_a_long_prompt_is_prefilled_elsewhere(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        route, answer = await world.complete(LONG)
        assert route["route"] == "offload"
        assert (route["prefill"], route["decode"]) == ("remote", "decode")
        assert route["uncached"] == str(len(LONG))
        assert int(route["bytes"]) == 4 * (len(LONG) - 1)
        assert (
            0 <= float(route["hidden"]) <= 1 and float(route["transfer_s"]) >= float(route["prefill_s"]) > 0
        )
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.decode.loaded == [len(LONG) - 1]
        (prefill,) = world.remote.generated()
        assert prefill.body["prompt"] == LONG[:-1] and prefill.body["max_tokens"] == 1
        assert world.local.generated() == []

    in_world(body)


@pytest.mark.parametrize(
    ("own", "held", "moved"), [(3, 0, 997), (3, 768, 997), (2000, 0, 1), (2000, 768, 768)]
)
def test_as_many_last_tokens_as_the_decode_engine_computes_itself_do_not_move(
    in_world: InWorld, own: int, held: int, moved: int
) -> None:
    """With several modules for multi-token prediction it computes more than the last one."""

    async def body(world: World) -> None:
        if held:
            await world.complete(LONG[: held + 1])
        world.plane.own_tokens["decode"] = own
        route, answer = await world.complete(LONG)
        assert route["prefill"] == "remote" if not held else "fallback" not in route
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.decode.loaded[-1] == moved - held

    in_world(body)


def test_a_short_prompt_stays_in_the_pd_cluster(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        route, answer = await world.complete(SHORT)
        assert (route["route"], route["prefill"], route["decode"]) == ("local", "local", "decode")
        assert int(route["bytes"]) == 4 * (len(SHORT) - 1)
        assert answer["choices"][0]["text"] == answer_text(SHORT)
        assert world.remote.generated() == []

    in_world(body)


def test_a_shared_prefix_is_not_sent_again(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.complete(LONG)
        route, _ = await world.complete([*LONG[:600], *SHORT, *LONG])
        held = 600 // 256 * 256
        assert 256 % BLOCK_TOKENS == 0
        assert (route["route"], route["cached"]) == ("offload", str(held))
        assert world.decode.loaded[1] == 600 + len(SHORT) + len(LONG) - 1 - held

    in_world(body)


def test_what_the_local_prefill_instance_holds_keeps_a_long_prompt_at_home(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.fails = 500
        await world.complete(LONG)
        world.remote.fails = None
        await asyncio.sleep(0.5)
        route, _ = await world.complete([*LONG[: 3 * 256], *SHORT])
        assert (route["route"], route["uncached"]) == ("local", str(len(SHORT)))

    in_world(body)


def test_text_is_tokenized_here_and_reaches_the_decode_engine_unchanged(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        text = "naïve <|im_end|> " * 30
        fields = {"stop": ["x"], "logprobs": 2, "seed": 5, "response_format": {"type": "json_object"}}
        route, answer = await world.complete(text, **fields)
        assert route["route"] == "offload"
        (decoded,) = world.decode.generated()
        sent = dict(decoded.body)
        assert list(sent.pop("kv_transfer_params")) == ["prfaas"]
        assert sent == {"model": "stand-in", "prompt": text, **fields}
        assert answer["usage"]["prompt_tokens"] == int(route["uncached"])

    in_world(body)


def test_a_chat_gives_the_ids_to_the_decode_engine(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "tell me " * 40}]}]
        response, answer = await world.post("/v1/chat/completions", {"messages": messages})
        (decoded,) = world.decode.generated()
        params = decoded.body["kv_transfer_params"]
        assert sorted(params) == ["prfaas", "prompt_token_ids"]
        assert params["prompt_token_ids"] == world.decode._ids({"messages": messages})
        assert decoded.body["messages"] == messages
        assert route_of(response)["route"] == "offload"
        assert answer["choices"][0]["message"]["content"] == answer_text(params["prompt_token_ids"])

    in_world(body)


def test_a_chat_with_tools_is_rendered_by_the_engine_and_keeps_its_messages(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        chat = {
            "messages": [{"role": "user", "content": "what is the weather? " * 10}],
            "tools": [{"type": "function", "function": {"name": "weather"}}],
            "tool_choice": "auto",
        }
        response, _ = await world.post("/v1/chat/completions", chat)
        (decoded,) = world.decode.generated()
        assert decoded.body["kv_transfer_params"].keys() == {"prfaas", "prompt_token_ids"}
        assert {k: decoded.body[k] for k in chat} == chat
        assert route_of(response)["route"] == "offload"

    in_world(body)


def test_an_engine_with_other_ids_is_asked_for_them(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        route, answer = await world.complete("x" * 300)
        assert route["route"] == "offload"
        assert answer["usage"]["prompt_tokens"] == 301 == int(route["uncached"])

    in_world(body, other_ids=True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": [[1] * 200, [2] * 200]}, "batch"),
        ({"prompt": ["a" * 200, "b"]}, "batch"),
        ({"prompt": "a" * 200, "n": 0}, "malformed"),
        ({"prompt": "a" * 200, "echo": True, "logprobs": 1}, "prompt-logprobs"),
        ({"prompt": "a" * 200, "use_beam_search": True, "n": 2}, "beam-search"),
        ({"prompt": "a" * 200, "n": 1025}, "samples"),
        ({"prompt_embeds": "a" * 5000}, "embeds"),
        ({"prompt": "a" * 4000}, "length"),
    ],
)
def test_what_cannot_move_goes_straight_to_the_decode_engine(
    in_world: InWorld, fields: dict[str, object], reason: str
) -> None:
    async def body(world: World) -> None:
        response, _ = await world.post("/v1/completions", fields)
        route = route_of(response)
        assert (route["route"], route["prefill"], route["reason"], route["bytes"]) == (
            "local",
            "decode",
            reason,
            "0",
        )
        (decoded,) = world.decode.generated()
        assert decoded.body == fields

    in_world(body)


@pytest.mark.parametrize("length", [LONG, SHORT], ids=["offload", "local"])
def test_a_stream_is_relayed_as_it_is(in_world: InWorld, length: list[int]) -> None:
    async def body(world: World) -> None:
        async with world.client.post("/v1/completions", json={"prompt": length, "stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            lines = (await response.read()).decode().split("\n\n")
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert len(lines) == 5 and f'"text":"{answer_text(length)[2]}"' in lines[2]
        assert await world.metric("prfaas_gateway_ttft_seconds_count") == 1

    in_world(body)


def test_many_requests_at_once_all_end_right(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        prompts = [[i, *(LONG if i % 3 else SHORT)] for i in range(1, 41)]
        results = await asyncio.gather(*(world.complete(p, stream=False) for p in prompts))
        assert [a["choices"][0]["text"] for _, a in results] == [answer_text(p) for p in prompts]
        assert {r["route"] for r, _ in results} == {"offload", "local"}
        assert sorted(world.decode.loaded) == sorted(len(p) - 1 for p in prompts)

    in_world(body)


def test_one_model(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for name, parent in (("stand-in", None), ("poet", "stand-in")):
            async with world.client.get(f"/v1/models/{name}") as response:
                card = await response.json()
            assert (card["id"], card["object"], card["parent"]) == (name, "model", parent)
        async with world.client.get("/v1/models/org/other") as response:
            assert response.status == 404
            error = (await response.json())["error"]
        assert error["message"] == "The model `org/other` does not exist; there is `stand-in`, `poet`."
        assert error["param"] == "model"

    in_world(body)


def test_version_and_a_head_without_a_body(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.client.get("/version") as response:
            assert await response.json() == {"version": __version__}
        async with world.client.head("/health") as response:
            assert response.status == 200 and await response.read() == b""
        assert await world.metric(f'prfaas_build_info{{python="{platform.python_version()}"') == 1

    in_world(body)


def test_ready_while_an_engine_decodes(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.client.get("/ready") as response:
            assert (response.status, await response.json()) == (200, {"status": "ready"})
        await world.decode.stop_http()
        await world.post("/v1/completions", {"prompt": SHORT})
        for path in ("/ready", "/health"):
            async with world.client.get(path) as response:
                assert response.status == 503
                assert (await response.json())["status"] == "no decode instance answers"
        async with world.client.head("/health") as response:
            assert response.status == 503

    in_world(body)


def test_models_health_and_metrics(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.client.get("/v1/models") as response:
            models = await response.json()
        assert models["object"] == "list" and models["data"][0]["id"] == "stand-in"
        async with world.client.get("/health") as response:
            assert response.status == 200
            assert (await response.json())["instances"] == {"remote": "up", "local": "up", "decode": "up"}
        await world.complete(LONG)
        assert await world.metric("prfaas_gateway_transferred_bytes_total") == 4 * (len(LONG) - 1)
        assert (
            await world.metric(
                'prfaas_gateway_requests_total{endpoint="completions",outcome="ok",route="offload"}'
            )
            == 1
        )
        assert await world.metric("prfaas_gateway_uncached_tokens_total") > THRESHOLD_TOKENS

    in_world(body)


@pytest.mark.parametrize(
    ("path", "raw", "status", "word"),
    [
        ("/v1/completions", b"{", 400, "JSON"),
        ("/v1/completions", b"[1]", 400, "object"),
        ("/v1/completions", b"{}", 400, "prompt"),
        ("/v1/chat/completions", b"{}", 400, "must be provided"),
        ("/v1/completions", b'{"model": "other", "prompt": "x"}', 404, "other"),
        ("/v1/completions", b'{"model": ["stand-in"], "prompt": "x"}', 400, "valid string"),
        ("/v1/completions", b'{"model": 5, "prompt": "x"}', 400, "valid string"),
        ("/v1/audio/speech", b"{}", 404, "/v1/audio/speech"),
        ("/v2/embed", b"{}", 404, "/v2/embed"),
        ("/health", b"{}", 405, "POST"),
        ("/v1/completions", b'{"prompt": "x", "stop": ' + b"[" * 600 + b"]" * 600 + b"}", 400, "deep"),
    ],
)
def test_errors_have_the_form_openai_clients_read(
    in_world: InWorld, path: str, raw: bytes, status: int, word: str
) -> None:
    async def body(world: World) -> None:
        headers = {"Content-Type": "application/json"}
        async with world.client.post(path, data=raw, headers=headers) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (status, status)
        assert word in error["message"] and sorted(error) == ["code", "message", "param", "type"]

    in_world(body)


def test_a_header_may_be_long(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for length, status in ((60_000, 200), (70_000, 400)):
            headers = {"Authorization": "Bearer " + "x" * length}
            async with world.client.post(
                "/v1/completions", json={"prompt": SHORT}, headers=headers
            ) as response:
                assert response.status == status

    in_world(body)
