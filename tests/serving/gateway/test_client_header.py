"""What `x-prfaas-route` tells a client: numbers only of its own prompts, or of everybody's where the file says so."""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from multidict import CIMultiDict

from prfaas.core.deployment import GatewayConfig
from prfaas.core.route_header import ROUTE_HEADER
from prfaas.serving.gateway.prompts.request import Tenants

from .world import World, route_of, running_world

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = GatewayConfig("127.0.0.1", 0)


async def header(world: World, prompt: list[int], headers: Mapping[str, str] | None = None) -> str:
    response, _ = await world.post("/v1/completions", {"prompt": prompt}, headers=headers or {})
    assert response.status == 200
    return response.headers["x-prfaas-route"]


def test_by_default_a_client_is_told_the_route_and_why(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        response, _ = await world.post("/v1/completions", {"prompt": LONG})
        assert response.headers["x-prfaas-route"] == "offload; reason=long"
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            told = await page.json()
        assert "; uncached=1000; " in told["route"] and "prefill=remote" in told["route"]

    in_world(body, gateway_config=SHORT)


def test_no_number_is_told_whatever_became_of_the_request(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        told = [await header(world, LONG), await header(world, LONG), await header(world, LONG[:20])]
        world.remote.fails = 500
        told.append(await header(world, LONG[::-1]))
        for value in told:
            route, *fields = value.split("; ")
            assert route in ("local", "offload")
            assert [field.split("=")[0] for field in fields] == ["reason"]
            assert not any(character.isdigit() for character in value)

    in_world(body, gateway_config=SHORT)


def test_a_named_tenant_is_told_of_its_own_prompts_only(tmp_path: Path) -> None:
    """Whatever others have sent before, what a tenant is told is as if it were alone."""
    source = random.Random(0)
    heads = [[source.randrange(50, 250) for _ in range(1024)] for _ in range(3)]
    sent = [
        (
            source.choice(("a", "b", "")),
            source.choice(heads) + [source.randrange(50, 250) for _ in range(200)],
        )
        for _ in range(24)
    ]

    async def told(tenants: Collection[str]) -> dict[str, list[list[str]]]:
        """What each of the tenants is told when only they send."""
        answers: dict[str, list[list[str]]] = {tenant: [] for tenant in tenants}
        home = tmp_path / "".join(["world", *tenants])
        home.mkdir()
        async with running_world(home, tenant_header="x-tenant", gateway_config=SHORT) as world:
            for tenant, prompt in sent:
                if tenant in tenants:
                    response, _ = await world.post(
                        "/v1/completions", {"prompt": prompt}, headers={"x-tenant": tenant} if tenant else {}
                    )
                    # Who names no tenant shares a salt with all others who don't.
                    assert (ROUTE_HEADER in response.headers) == bool(tenant)
                    route = route_of(response) if tenant else {}
                    answers[tenant].append([route.get(name, "-") for name in ("uncached", "cached", "bytes")])
            await world.settled()
        return answers

    together = asyncio.run(told(("a", "b", "")))
    del together[""]
    assert together == asyncio.run(told(("a",))) | asyncio.run(told(("b",)))
    # The test would see nothing if nothing were reused.
    assert any(int(cached) for numbers in together.values() for _, cached, _ in numbers)


def test_who_names_a_tenant() -> None:
    tenants = Tenants(b"k" * 32, "x-tenant")
    assert tenants.names(CIMultiDict({"X-Tenant": "a"}))
    assert not tenants.names(CIMultiDict({"X-Tenant": ""}))
    assert not tenants.names(CIMultiDict({}))
    assert not Tenants(b"k" * 32, None).names(CIMultiDict({"X-Tenant": "a"}))


def test_errors_tell_no_number_either(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.dies = "http-500"
        async with world.client.post("/v1/completions", json={"prompt": LONG}) as response:
            assert response.status == 500
            assert response.headers["x-prfaas-route"] == "offload; reason=long"

    in_world(body, gateway_config=SHORT)
