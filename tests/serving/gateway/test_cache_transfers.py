"""A prefix that another cluster holds moves to the prefill instance first; if that fails, everything is computed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from prfaas.core.scheduling import CacheTransfer, Decision, Route

from .stand_in import answer_text
from .world import World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5


def with_prefix(world: World, num_tokens: int, skip_tokens: int = 0) -> None:
    """Every prefill at the far instance starts from what the near one sends."""

    def edit(decision: Decision) -> Decision:
        if decision.route is not Route.OFFLOAD:
            return decision
        return replace(
            decision,
            prefill_tokens=len(LONG) - num_tokens,
            cache_transfer=CacheTransfer("local", num_tokens, skip_tokens, 4 * (num_tokens - skip_tokens)),
        )

    world.plane.edit = edit


@pytest.mark.parametrize(("asked", "sent"), [(601, 601), (5000, len(LONG) - 2)])
def test_the_prefix_moves_first(in_world: InWorld, asked: int, sent: int) -> None:
    async def body(world: World) -> None:
        with_prefix(world, asked, skip_tokens=256)
        route, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.remote.prefixes == [sent - 256] and world.decode.loaded == [len(LONG) - 1]
        assert route["cache_transfer"] == f"local:{4 * (sent - 256)}"
        (source,), (prefill,) = world.local.generated(), world.remote.generated()
        assert source.body["prompt"] == LONG[:sent] and source.body["max_tokens"] == 1
        params = prefill.body["kv_transfer_params"]
        assert params["prfaas_from"] == source.body["kv_transfer_params"]["prfaas"] != params["prfaas"]
        assert list(params) == ["prfaas", "prfaas_from"]
        moves, own = world.local._ticket(params["prfaas_from"]), world.local._ticket(params["prfaas"])
        assert moves is not None and moves.service.background
        assert own is not None and not own.service.background
        assert await world.metric('prfaas_gateway_cache_transfers_total{outcome="done"}') == 1
        assert await world.metric("prfaas_gateway_cache_transferred_bytes_total") == 4 * (sent - 256)
        assert world.plane.measured == ["remote"]

    in_world(body)


@pytest.mark.parametrize(
    "fault", ["refuses", "http-500", "not-announced", "transfer-deadline", "http-400", "short"]
)
def test_without_the_prefix_everything_is_computed(in_world: InWorld, fault: str) -> None:
    async def body(world: World) -> None:
        with_prefix(world, 601, skip_tokens=601 if fault == "short" else 0)
        if fault == "refuses":
            await world.local.stop_http()
        world.local.fails = {"http-500": 500, "http-400": 400}.get(fault)
        world.local.sends = fault != "not-announced"
        world.local.stalls = fault == "transfer-deadline"
        route, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert route["route"] == "offload" and "cache_transfer" not in route and "fallback" not in route
        (prefill,) = world.remote.generated()
        assert list(prefill.body["kv_transfer_params"]) == ["prfaas"] and world.remote.prefixes == []
        outcome = {"refuses": "unreachable"}.get(fault, fault)
        assert await world.metric(f'prfaas_gateway_cache_transfers_total{{outcome="{outcome}"}}') == 1

    in_world(body)


def test_a_prefix_that_nobody_takes_is_freed(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        with_prefix(world, 601)
        world.remote.dies = "before-headers"
        await world.remote.stop_http()
        route, answer = await world.complete(LONG)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert (route["prefill"], route["fallback"]) == ("local", "unreachable")
        assert await world.metric('prfaas_gateway_cache_transfers_total{outcome="done"}') == 1

    in_world(body)
