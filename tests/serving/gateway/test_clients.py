"""Only clients with a key are let in, each as a tenant of its own, by what the file says now."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from prfaas.core.deployment import GatewayConfig
from prfaas.serving.gateway import clients as module
from prfaas.serving.gateway.admission import Admission
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.clients import Clients
from prfaas.serving.gateway.prompts.request import Tenants
from prfaas.serving.secret_files import ClientsFileError

from .world import World, route_of, running_world

LONG = list(range(50, 250)) * 5


def hashed(*keys: str) -> list[str]:
    return [hashlib.sha256(key.encode()).hexdigest() for key in keys]


def write(path: Path, said: Any) -> Path:
    path.write_text(yaml.safe_dump(said))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    two = {"acme": {"key_sha256": hashed("one", "two"), "share": 3}, "other": {"key_sha256": hashed("three")}}
    return write(tmp_path / "clients.yaml", two)


def bearer(key: str) -> CIMultiDict[str]:
    return CIMultiDict({"Authorization": f"Bearer {key}"})


def test_a_key_is_taken_as_either_api_sends_it(file: Path) -> None:
    clients = Clients(file)
    found = [
        clients.take(CIMultiDict(headers))
        for headers in (
            {"Authorization": "Bearer one"},
            {"authorization": "bearer   two "},
            {"X-Api-Key": "one"},
            {"x-api-key": "one", "Authorization": "Bearer one"},
        )
    ]
    assert [(each.name, each.share) for each in found] == [("acme", 3)] * 4
    for headers in (
        {},
        {"Authorization": "Bearer four"},
        {"Authorization": "Basic one"},
        {"Authorization": ""},
        {"x-api-key": hashed("one")[0]},
        {"x-api-key": "one", "Authorization": "Bearer three"},
    ):
        with pytest.raises(ApiError) as refused:
            clients.take(CIMultiDict(headers))
        assert refused.value.status == 401 and "four" not in refused.value.message


def test_the_rate_is_that_of_the_file(tmp_path: Path) -> None:
    now_s = 0.0
    slow = {"slow": {"key_sha256": hashed("k"), "requests_per_s": 2}, "free": {"key_sha256": hashed("f")}}
    clients = Clients(write(tmp_path / "c.yaml", slow), lambda: now_s)

    def taken(wanted: int) -> int:
        for number in range(wanted):
            try:
                clients.count(clients.take(bearer("k")))
            except ApiError as refused:
                assert (
                    refused.status == 429
                    and refused.retry_after_s is not None
                    and refused.retry_after_s <= 0.5
                )
                return number
        return wanted

    assert taken(10) == 2
    now_s = 0.5
    assert taken(10) == 1
    now_s = 100.0
    assert taken(10) == 2
    for _ in range(10):
        clients.count(clients.take(bearer("f")))


def test_who_sends_too_many_is_seen_by_operators(tmp_path: Path) -> None:
    slow = {"slow": {"key_sha256": hashed("k"), "requests_per_s": 1e-3}}
    config = GatewayConfig("127.0.0.1", 0, clients=write(tmp_path / "clients.yaml", slow))
    key = {"x-api-key": "k"}

    async def main() -> None:
        async with running_world(tmp_path, gateway_config=config) as world:
            asked = {"prompt": LONG[:20]}
            answers = [await world.post("/v1/completions", asked, headers=key) for _ in range(2)]
            assert [response.status for response, _ in answers] == [200, 429]
            assert await world.metric('prfaas_gateway_refused_total{reason="rate"}') == 1
            async with world.admin.get("/prfaas/requests") as listed:
                assert [told["status"] for told in (await listed.json())["requests"]] == [429, 200]
            # Lists of models are requests too.
            async with world.client.get("/v1/models", headers=key) as response:
                assert response.status == 429
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[1", r"clients.yaml:2: is no valid YAML \([^\n]*\)$"),
        ("a: {b: 1\nc: ]", r"clients.yaml:2: is no valid YAML \([^\n]*\)$"),
        ("!!timestamp x", r"clients.yaml:1: looks like a date or a number, and is none; [^\n]*$"),
        ({"a": {}}, "key_sha256"),
        ({"a": {"key_sha256": ["ABC"]}}, "key_sha256"),
        ({"a": {"key_sha256": hashed("x"), "colour": 1}}, "colour"),
        ({"a": {"key_sha256": hashed("x"), "share": 0}}, "share"),
        ({"a": {"key_sha256": hashed("x"), "requests_per_s": float("nan")}}, "clients.yaml"),
        ({"a": {"key_sha256": hashed("x"), "priority": "high"}}, "priority"),
        ({"a": {"key_sha256": hashed("x")}, "b": {"key_sha256": hashed("x")}}, "a and b have one key"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_sentence(tmp_path: Path, said: Any, why: str) -> None:
    path = tmp_path / "clients.yaml"
    if said is not None:
        path.write_text(said if isinstance(said, str) else yaml.safe_dump(said))
    with pytest.raises(ClientsFileError, match=why):
        Clients(path)


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ClientsFileError, match="it has more than 4 MiB"):
        Clients(Path("/dev/zero"))


def test_the_file_is_followed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    clients = Clients(file)

    async def until(key: str, *, known: bool) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    clients.take(bearer(key))
                    found = True
                except ApiError:
                    found = False
                if found is known:
                    return
                await asyncio.sleep(0.01)

    async def main() -> None:
        watching = asyncio.create_task(clients.watch())
        await asyncio.sleep(0)
        write(file, {"new": {"key_sha256": hashed("four")}})
        await until("four", known=True)
        await until("one", known=False)
        file.write_text("broken: [")
        await asyncio.sleep(0.05)
        file.unlink()
        await asyncio.sleep(0.05)
        assert clients.take(bearer("four")).name == "new"
        write(file, {"newer": {"key_sha256": hashed("five")}})
        await until("five", known=True)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(main())


@given(
    st.sampled_from(["Bearer", "bearer", "BEARER"]),
    st.text(" \t", max_size=3),
    st.text(" \t", min_size=1, max_size=3),
)
def test_spelling_makes_no_tenant(scheme: str, around: str, between: str) -> None:
    tenants = Tenants(b"k" * 32, "authorization", {"bearer  Key": 5})
    plain = tenants.salt(CIMultiDict({"authorization": "Bearer Key"}))
    assert tenants.salt(CIMultiDict({"Authorization": around + scheme + between + "Key" + around})) == plain
    assert tenants.salt(CIMultiDict({"authorization": "Bearer key"})) != plain
    assert tenants.transfer_class(plain, background=False).weight == 5


def test_a_gateway_asks_for_keys(tmp_path: Path, file: Path) -> None:
    config = GatewayConfig("127.0.0.1", 0, clients=file)

    async def main() -> None:
        async with running_world(tmp_path, gateway_config=config) as world:
            await use(world)
            await world.settled()

    async def use(world: World) -> None:
        async def ask(key: str) -> dict[str, str]:
            response, _ = await world.post("/v1/completions", {"prompt": LONG}, headers={"x-api-key": key})
            assert response.status == 200
            return route_of(response)

        refused, told = await world.post("/v1/completions", {"prompt": LONG})
        assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert told["error"]["type"] == "UnauthorizedError"
        refused, told = await world.post("/v1/messages", {"messages": []}, headers={"x-api-key": "no"})
        assert (refused.status, told["error"]["type"]) == (401, "authentication_error")
        for path, status in (
            ("/health", 200),
            ("/ready", 200),
            ("/version", 200),
            ("/v1/models", 401),
            ("/x", 401),
        ):
            async with world.client.get(path) as response:
                assert response.status == status
        assert not world.remote.generated() and not world.decode.generated()
        first, again, other = await ask("one"), await ask("two"), await ask("three")
        assert (first["cached"], again["cached"], other["cached"]) == ("0", str(3 * 256), "0")

    asyncio.run(main())


def test_low_priority_has_what_is_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"low": {"key_sha256": hashed("l"), "priority": "low"}, "any": {"key_sha256": hashed("a")}}
    config = GatewayConfig("127.0.0.1", 0, clients=write(tmp_path / "clients.yaml", said))

    def busy(_admission: Admission) -> None:
        raise ApiError(429, "busy", retry_after_s=1.0)

    async def main() -> None:
        async with running_world(tmp_path, gateway_config=config) as world:

            async def status(key: str) -> int:
                return (
                    await world.post("/v1/completions", {"prompt": LONG[:20]}, headers={"x-api-key": key})
                )[0].status

            assert (await status("l"), await status("a")) == (200, 200)
            monkeypatch.setattr(Admission, "check_spare", busy)
            assert (await status("l"), await status("a")) == (429, 200)
            await world.settled()

    asyncio.run(main())
