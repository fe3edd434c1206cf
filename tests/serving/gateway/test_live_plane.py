"""The gateway with the real control plane before stand-in engines: routes, failures, and nothing left over."""

import asyncio
from collections.abc import Callable

import pytest

from prfaas.core.workload.lengths import EDGE
from prfaas.serving.console.history import StateHistory
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.plane import LivePlane

from .stand_in import answer_text
from .world import World, route_of

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))
SENTENCE = "KV layout differs in 'layout': decode/0 has 'other', remote/0 has 'ids'"


def test_prompts_go_where_the_threshold_sends_them(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        plane: LivePlane | None = world.live
        assert plane is not None
        routes = [(await world.complete(prompt))[0] for prompt in (LONG, SHORT)]
        assert [(r["route"], r["prefill"]) for r in routes] == [("offload", "remote"), ("local", "local")]
        assert [float(r["threshold"]) for r in routes] == [pytest.approx(100, rel=EDGE / 2 + 0.005)] * 2
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


def test_a_drained_instance_gets_nothing_and_its_streams_end(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async def drain(name: str, what: str = "drain") -> str | None:
            async with world.admin.post(f"/prfaas/instances/{name}/{what}") as page:
                drained: str | None = (await page.json())["drain"]
                return drained

        async def health() -> int:
            async with world.client.get("/health") as page:
                return page.status

        asked = {"model": "stand-in", "prompt": SHORT, "stream": True, "max_tokens": 60}
        async with world.client.post("/v1/completions", json=asked) as stream:
            await stream.content.readany()
            busy = "decode" if world.decode.generated() else "spare"
            other = "spare" if busy == "decode" else "decode"
            assert await drain(busy) == "draining"
            for _ in range(5):
                assert (await world.complete(SHORT))[0]["decode"] == other
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        assert await health() == 200
        # All that could decode in this cluster is closed: nothing is a last resort.
        for name in ("decode", "spare", "local"):
            assert await drain(name) == "drained"
        response, answer = await world.post("/v1/completions", {"model": "stand-in", "prompt": SHORT})
        assert response.status == 503 and "No decode instance" in answer["error"]["message"]
        assert await health() == 503
        assert await drain(other, "undrain") is None
        assert (await world.complete(SHORT))[0]["decode"] == other
        assert await health() == 200

    in_world(body, live=True, spare=True, chunk_s=0.02)


def test_an_engine_of_another_layout_costs_one_attempt_each_and_takes_nobody_out(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.live is not None
        for number in range(12):
            prompt = [number + 1, *LONG]
            response, answer = await world.post("/v1/completions", {"model": "stand-in", "prompt": prompt})
            route = route_of(response)
            if route["reason"] == "incompatible":
                async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
                    told = [note["what"] for note in (await page.json())["notes"]]
                assert (
                    f"remote may send nothing to decode: decode/0 rejected the connection: {SENTENCE}" in told
                )
            assert answer["choices"][0]["text"] == answer_text(prompt)
            # Only an attempt of a pair that nobody had tried before may fail, and for this reason alone.
            assert route.get("fallback", "incompatible") == "incompatible"
            assert not any(world.live.health.is_suspect(name) for name in world.live.cluster_state.names)
        assert await world.metric("prfaas_gateway_fallbacks_total") <= 2
        # Some of the prompts went to the decode engine that takes no KV; it prefilled them itself.
        (far,) = [each for each in world.live.state()["incompatible"] if each["producer"] == "remote"]
        assert (far["consumer"], far["reason"]) == (
            "decode",
            f"decode/0 rejected the connection: {SENTENCE}",
        )
        assert world.live.state()["routes"]["local"].get("incompatible", 0) > 0
        assert world.live.state()["routes"]["offload"]["long"] > 0
        assert world.live.state()["links"]["far->pd"]["up"]
        async with asyncio.timeout(60):
            # Gauges are written once a second.
            while await world.metric("prfaas_control_incompatible_pairs") < 1:
                await asyncio.sleep(0.1)

    in_world(body, spare=True, live=True, layout="other")


def test_a_loop_that_fails_ends_nothing(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on without what it does, and it is tried again."""
    monkeypatch.setattr(StateHistory, "take", lambda _: 1 / 0)
    monkeypatch.setattr(LinkBudget, "divide", lambda _: 1 / 0)

    async def body(world: World) -> None:
        assert world.live is not None
        failures = world.live.loop_failures.counts
        while failures["StateHistory"] < 2 or failures["LinkBudget"] < 2:
            assert (await world.complete(SHORT))[0]["route"] == "local"
            await asyncio.sleep(0.05)
        assert not world.gateway.done()

    in_world(body, live=True)
