"""The gateway with the real control plane before stand-in engines: routes, failures, and nothing left over."""

import asyncio
from collections.abc import Callable

import pytest

from prfaas.serving.gateway.control_plane import ControlPlane

from .stand_in import answer_text
from .world import World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))


def test_prompts_go_where_the_threshold_sends_them(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        plane: ControlPlane | None = world.live
        assert plane is not None
        routes = [(await world.complete(prompt))[0] for prompt in (LONG, SHORT)]
        assert [(r["route"], r["prefill"], r["threshold"]) for r in routes] == [
            ("offload", "remote", "100"),
            ("local", "local", "100"),
        ]
        assert all(float(r["predicted_ttft_s"]) >= 0 for r in routes)
        async with world.admin.get("/prfaas/state") as page:
            state = await page.json()
        assert state["routes"] == {"local": {"short": 1}, "offload": {"long": 1}}
        async with world.client.get("/health") as health:
            assert health.status == 200
            names = (await health.json())["instances"]
        assert names == {"remote": "up", "local": "up", "decode": "up"}
        assert await world.metric("prfaas_control_decisions_total") == 2

    in_world(body, live=True)


def test_many_requests_over_dying_engines_all_end_right(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None and world.third is not None
        prompts = [[i, *(LONG if i % 3 else SHORT)] for i in range(1, 31)]
        world.spare.dies, world.remote.fails = "in-body", 500
        results = await asyncio.gather(*(world.complete(prompt) for prompt in prompts))
        assert [answer["choices"][0]["text"] for _, answer in results] == [answer_text(p) for p in prompts]
        assert {route["decode"] for route, _ in results} <= {"decode", "third", "local"}
        assert world.spare.deaths > 0

    in_world(body, spare=True, third=True, live=True)


@pytest.mark.parametrize("fault", ["mid-stream", "mid-event"])
def test_a_stream_goes_on_elsewhere(in_world: InWorld, fault: str) -> None:
    async def body(world: World) -> None:
        for engine in world.engines:
            engine.dies_after = 3
        world.decode.dies = fault
        asked = {"prompt": LONG, "max_tokens": 9, "stream": True}
        texts = []
        for _ in range(4):
            async with world.client.post("/v1/completions", json=asked) as response:
                raw = await response.text()
            assert raw.endswith("data: [DONE]\n\n") and "error" not in raw
            texts.append(
                "".join(part.split('"')[0] for part in raw.replace('": "', '":"').split('"text":"')[1:])
            )
        assert texts == [answer_text(LONG, 9)] * 4
        assert world.decode.deaths > 0

    in_world(body, spare=True, live=True)


def test_an_engine_of_another_layout_costs_one_attempt_each_and_takes_nobody_out(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.live is not None
        for number in range(12):
            prompt = [number + 1, *LONG]
            route, answer = await world.complete(prompt)
            assert answer["choices"][0]["text"] == answer_text(prompt)
            # Only an attempt of a pair that nobody had tried before may fail, and for this reason alone.
            assert route.get("fallback", "incompatible") == "incompatible"
            assert not any(world.live.health.is_suspect(name) for name in world.live.cluster_state.names)
        assert await world.metric("prfaas_gateway_fallbacks_total") <= 2
        # Some of the prompts went to the decode engine that takes no KV; it prefilled them itself.
        (far,) = [each for each in world.live.state()["incompatible"] if each["producer"] == "remote"]
        assert (far["consumer"], far["reason"]) == (
            "decode",
            "decode/0 rejected the connection: "
            "KV layout differs in 'layout': decode/0 has 'other', remote/0 has 'ids'",
        )
        assert world.live.state()["routes"]["local"].get("incompatible", 0) > 0
        assert world.live.state()["routes"]["offload"]["long"] > 0
        assert world.live.state()["links"]["far->pd"]["up"]

    in_world(body, spare=True, live=True, layout="other")
