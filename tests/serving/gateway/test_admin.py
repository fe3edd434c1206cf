"""The operators' port: what is there and nowhere else, and who may ask."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.core.deployment import AdminConfig, GatewayConfig
from prfaas.serving.gateway.routes import may_ask
from prfaas.serving.secret_files import AdminTokenError, load_token

from .world import World

InWorld = Callable[..., None]
PAGES = ["/metrics", "/prfaas/state", "/prfaas/requests/x"]
TOKEN = "a token of some length"[2:].replace(" ", "-")


@pytest.mark.parametrize("path", PAGES)
def test_clients_get_no_page_of_operators(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        async with world.client.get(path) as page:
            assert page.status == 404
            assert (await page.json())["error"]["message"] == f"There is no GET {path} here."

    in_world(body)


def test_operators_get_nothing_of_the_clients(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for path in ("/v1/models", "/health", "/ready"):
            async with world.admin.get(path) as page:
                assert page.status == 404
        async with world.admin.post("/v1/completions", json={"prompt": "x"}) as page:
            assert page.status == 404

    in_world(body)


@pytest.mark.parametrize("path", PAGES)
def test_a_name_that_was_pointed_here_gets_nothing(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        async with world.admin.get(path, headers={"Host": "evil.example:8001"}) as page:
            assert page.status == 403
            assert "gateway.hosts" in (await page.json())["error"]["message"]

    in_world(body)


def test_a_service_of_kubernetes_may_be_named(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for host, status in (("prfaas.llm.svc:8001", 200), ("PRFAAS.llm.svc", 200), ("prfaas.llm", 403)):
            async with world.admin.get("/prfaas/state", headers={"Host": host}) as page:
                assert page.status == status

    in_world(body, gateway_config=GatewayConfig("127.0.0.1", 0, hosts=("prfaas.llm.svc",)))


@pytest.mark.parametrize("path", PAGES[:2])
def test_a_token_is_asked_for(in_world: InWorld, tmp_path: Path, path: str) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)

    async def body(world: World) -> None:
        bearers = {
            f"Bearer {TOKEN}": 200,
            f"bearer  {TOKEN}": 200,
            f"Bearer {TOKEN[:-1]}": 401,
            f"Bearer {TOKEN}x": 401,
            "Bearer": 401,
            "Bearer é\udc80": 401,
            f"Basic {TOKEN}": 401,
            TOKEN: 401,
        }
        for authorization, status in bearers.items():
            async with world.admin.get(path, headers={"Authorization": authorization}) as page:
                assert page.status == status, authorization
        async with world.admin.get(path) as page:
            assert page.status == 401 and page.headers["WWW-Authenticate"] == "Bearer"
            assert "gateway.admin.token_file" in (await page.json())["error"]["message"]
        twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")]
        async with world.admin.get(path, headers=twice) as page:
            assert page.status == 401
        world.admin.headers["Authorization"] = f"Bearer {TOKEN}"

    in_world(body, gateway_config=GatewayConfig("127.0.0.1", 0, AdminConfig("127.0.0.1", 0, file)))


def test_a_web_page_changes_nothing(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.admin.post("/prfaas/state", headers={"Origin": "http://evil.example"}) as page:
            assert page.status == 403
        async with world.admin.post("/prfaas/state") as page:
            assert page.status == 405

    in_world(body)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, 0o600, "cannot be read: No such file"),
        ("short", 0o600, "16 characters or more"),
        ("with a blank in between the words", 0o600, "without blanks"),
        ("ünprintable-characters", 0o600, "16 characters or more"),
        ("0123456789abcdef", 0o604, "chmod 600"),
    ],
)
def test_token_files_that_cannot_be_used(tmp_path: Path, text: str | None, mode: int, words: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(AdminTokenError, match=f"token file {path} .*{words}"):
        load_token(path)


def test_a_token_that_its_group_may_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o440)
    assert load_token(path) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("header", "configured", "answer"),
    [
        ("localhost:8000", "10.0.0.5", True),
        ("127.0.0.1", "10.0.0.5", True),
        ("[::1]:8000", "10.0.0.5", True),
        ("10.0.0.5:8000", "10.0.0.5", True),
        ("10.0.0.6:8000", "10.0.0.5", False),
        ("gate.example:1", "gate.example", True),
        ("GATE.example.", "gate.example", True),
        ("10.0.0.6:8000", "0.0.0.0", True),
        ("[fe80::1]:8000", "::", True),
        ("evil.example:8000", "0.0.0.0", False),
        ("localhost.evil.example", "0.0.0.0", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("", "0.0.0.0", False),
    ],
)
def test_who_may_ask(header: str, configured: str, answer: bool) -> None:
    assert may_ask(header, configured) is answer


def test_further_names_may_ask() -> None:
    assert may_ask("prfaas.llm.svc:8001", "0.0.0.0", ("prfaas.llm.svc",))
    assert not may_ask("prfaas.llm.svc.evil.example", "0.0.0.0", ("prfaas.llm.svc",))


def test_a_gateway_without_a_file_reloads_nothing(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.admin.post("/prfaas/reload") as page:
            assert page.status == 409
            assert "without a file" in (await page.json())["error"]["message"]

    in_world(body)


def test_a_gateway_restarts_no_engine_that_others_have_started(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.admin.post("/prfaas/instances/decode/restart") as page:
            assert page.status == 409
            assert "restart it as it was started (--command)" in (await page.json())["error"]["message"]
        async with world.admin.post("/prfaas/instances/nobody/restart") as page:
            assert page.status == 404

    in_world(body)


def test_only_who_may_be_taken_away_gets_notice(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async def asked(name: str, notice: str) -> tuple[int, str]:
            async with world.admin.post(
                f"/prfaas/instances/{name}/drain", params={"notice_s": notice}
            ) as page:
                told = await page.json()
                return page.status, told["error"]["message"] if page.status != 200 else ""

        assert await asked("remote", "30") == (200, "")
        assert world.plane.notices == [("remote", 30.0)] and world.plane.drained == []
        status, sentence = await asked("decode", "30")
        assert status == 409 and "write `preemptible: true` at cluster pd" in sentence
        for notice in ("0", "-1", "3601", "nan", "inf", "soon", ""):
            status, sentence = await asked("remote", notice)
            assert status == 400 and "up to 3600" in sentence
        assert (await asked("nobody", "30"))[0] == 404
        assert len(world.plane.notices) == 1

    in_world(body, preemptible=True)
