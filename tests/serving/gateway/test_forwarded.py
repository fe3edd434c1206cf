"""What one engine answers alone: forwarded by load, behind the same checks as all else."""

from collections.abc import Callable
from typing import Any

import pytest

from .stand_in_apis import FORWARDED
from .world import World, route_of

InWorld = Callable[..., None]
GENERATE = "/inference/v1/generate"
IDS = list(range(40, 640))


@pytest.mark.parametrize("path", FORWARDED)
def test_the_less_loaded_engine_gets_it_as_it_is(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        sent = {
            "model": "stand-in",
            "input": ["https://a.text", "b"],
            "kv_transfer_params": {"x": 1},
            "top_n": 3,
        }
        took = []
        for busy in ("decode", "spare"):
            world.plane.prefers = ""
            world.plane.open[busy] += 5
            response, answer = await world.post(path, sent)
            world.plane.open[busy] -= 5
            assert response.status == 200 and "x-prfaas-route" not in response.headers
            assert answer["of"] == {"model": "stand-in", "input": ["https://a.text", "b"], "top_n": 3}
            took.append(answer["by"])
        assert took == ["spare", "decode"]
        assert not world.plane.observed and not world.remote.seen
        name = path.strip("/").split("/")[-1]
        assert await world.metric(f'prfaas_gateway_requests_total{{endpoint="{named(path, name)}"') == 2

    in_world(body, spare=True)


def named(path: str, last: str) -> str:
    return {
        "/v1/completions/derender": "derender_completion",
        "/v1/chat/completions/derender": "derender_chat",
    }.get(path, last)


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        ("/v1/embeddings", {"model": "another", "input": "x"}, 404),
        (
            "/score",
            {
                "queries": "x",
                "documents": {"content": [{"type": "image_url", "image_url": "http://in.side/"}]},
            },
            400,
        ),
        (
            "/pooling",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": "http://in.side/"}]}
                ]
            },
            400,
        ),
        (GENERATE, {"token_ids": IDS, "sampling_params": {"extra_args": {"kv_transfer_params": {}}}}, 400),
        (GENERATE, {"token_ids": IDS, "sampling_params": {}, "features": {"mm_hashes": {}}}, 400),
        (GENERATE, {"token_ids": IDS, "sampling_params": {"n": 10_000}}, 400),
    ],
)
def test_what_is_checked_of_all_requests_is_checked(
    in_world: InWorld, path: str, sent: dict[str, Any], status: int
) -> None:
    async def body(world: World) -> None:
        response, answer = await world.post(path, sent)
        assert response.status == status and answer["error"]["message"]
        assert not [seen for seen in world.decode.seen if seen.path == path]

    in_world(body)


def test_token_ids_are_routed_by_their_prefix_and_belong_to_their_tenant(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        sent = {
            "token_ids": IDS,
            "sampling_params": {"max_tokens": 2},
            "kv_transfer_params": {"prfaas": "mine"},
        }
        response, answer = await world.post(GENERATE, sent)
        first = route_of(response)
        assert answer["choices"][0]["token_ids"] == IDS[-2:] and answer["kv_transfer_params"] is None
        assert (first["route"], first["reason"], first["uncached"]) == ("local", "generate", str(len(IDS)))
        world.plane.open[first["decode"]] += 5
        response, _ = await world.post(GENERATE, sent)
        world.plane.open[first["decode"]] -= 5
        assert route_of(response)["decode"] == first["decode"] and route_of(response)["uncached"] != str(
            len(IDS)
        )
        engine = world.decode if first["decode"] == "decode" else world.spare
        seen = [each.body for each in engine.seen if each.path == GENERATE]
        assert len(seen) == 2 and seen[0].keys() == {"token_ids", "sampling_params", "cache_salt"}
        assert [length for length, _ in world.plane.observed] == [len(IDS)] * 2

    in_world(body, spare=True, tenant_header="x-tenant")


def test_a_seed_that_would_end_a_cpu_engine_is_refused_there_too(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        sent = {"token_ids": IDS, "sampling_params": {"seed": 3, "temperature": 1.0}}
        response, answer = await world.post(GENERATE, sent)
        assert response.status == 400 and "seed" in answer["error"]["message"]

    in_world(body, hardware="cpu")
