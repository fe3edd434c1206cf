"""Tenants share no prefix and adapters share none: in the record, in tickets and in what engines are told."""

from collections.abc import Callable

import pytest
from multidict import CIMultiDict

from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.prompts.request import Tenants
from prfaas.serving.transport.protocol.ticket import TransferClass

from .stand_in import StandInEngine
from .world import World, route_of

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
KEY = b"k" * 32


def salt(tenants: Tenants, **headers: str) -> str:
    return tenants.salt(CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}))


def test_salts_are_the_tenants_own_and_nobody_elses() -> None:
    tenants = Tenants(KEY, "x-tenant")
    salts = [
        salt(tenants, X_Tenant="a"),
        salt(tenants, x_tenant="b"),
        salt(tenants),
        salt(tenants, x_tenant="ä"),
    ]
    assert len(set(salts)) == 4 and all(len(s) == 32 and int(s, 16) >= 0 for s in salts)
    assert salt(tenants, x_tenant="a") == salts[0] and salt(tenants, x_tenant="") == salts[2]
    assert salt(Tenants(b"l" * 32, "x-tenant"), x_tenant="a") not in salts
    assert salt(Tenants(KEY, None), x_tenant="a") == ""


def test_a_tenant_named_twice_is_refused() -> None:
    headers = CIMultiDict([("x-tenant", "a"), ("X-Tenant", "b")])
    with pytest.raises(ApiError, match="more than once"):
        Tenants(KEY, "x-tenant").salt(headers)


def test_a_tenant_hits_what_it_sent_and_another_one_does_not(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async def ask(tenant: str) -> dict[str, str]:
            response, _ = await world.post(
                "/v1/completions", {"prompt": LONG, "cache_salt": "mine"}, headers={"X-Tenant": tenant}
            )
            assert response.status == 200
            return route_of(response)

        first, again, other = await ask("a"), await ask("a"), await ask("b")
        assert (first["cached"], again["cached"], other["cached"]) == ("0", str(3 * 256), "0")
        assert other["uncached"] == str(len(LONG))
        for engine in (world.remote, world.decode):
            salts = [seen.body["cache_salt"] for seen in engine.generated()]
            assert salts[0] == salts[1] != salts[2] and all(len(s) == 32 for s in salts)
        tickets = [
            world.remote._ticket(seen.body["kv_transfer_params"]["prfaas"])
            for seen in world.remote.generated()
        ]
        digests = [ticket.prompt_digest for ticket in tickets if ticket is not None]
        assert len(digests) == 3 and digests[0] == digests[1] != digests[2]
        classes = [ticket.attributes.service for ticket in tickets if ticket is not None]
        assert classes[0] == classes[1] != classes[2] and not any(each.background for each in classes)

    in_world(body, tenant_header="x-tenant")


def test_a_tenants_part_of_a_link_is_sealed_in_its_ticket() -> None:
    tenants = Tenants(KEY, "x-tenant", {"gold": 4})
    gold, other, nobody = (salt(tenants, x_tenant=name) for name in ("gold", "other", ""))
    classes = [tenants.transfer_class(each, background=False) for each in (gold, other, nobody)]
    assert [each.weight for each in classes] == [4, 1, 1]
    assert len({each.tenant for each in classes}) == 3
    assert all(each.tenant.hex() not in gold + other + nobody for each in classes)
    assert tenants.transfer_class(gold, background=True) == TransferClass(classes[0].tenant, 4, True)
    assert Tenants(KEY, None).transfer_class("", background=False) == TransferClass()


def test_without_a_tenant_header_engines_get_no_salt(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.complete(LONG, cache_salt="mine")
        for engine in (world.remote, world.decode):
            (seen,) = engine.generated()
            assert "cache_salt" not in seen.body

    in_world(body)


def test_an_adapter_is_a_model_of_its_own(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.client.get("/v1/models") as response:
            cards = (await response.json())["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("stand-in", None), ("poet", "stand-in")]
        await world.complete(LONG)
        route, _ = await world.complete(LONG, model="poet")
        assert route["route"] == "offload" and route["cached"] == "0"

        def models(engine: StandInEngine) -> list[str]:
            return [seen.body["model"] for seen in engine.generated()]

        assert models(world.remote) == models(world.decode) == ["stand-in", "poet"]
        again, _ = await world.complete(LONG, model="poet")
        assert again["cached"] == str(3 * 256)

    in_world(body)
