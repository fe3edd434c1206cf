"""A deployment whose engines speak TLS only: it answers, refuses strangers, and changes its certificates meanwhile."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from tests.serving.engines.synthetic_world import MODEL, random_ids, running, write_deployment
from tests.serving.transport.authority import Authority

from prfaas.core.deployment import GATEWAY, TOOLS, Deployment, load_deployment
from prfaas.serving.certificates import CertificateFolder, https_options, identity_of
from prfaas.serving.control.engine_http import EngineHttp
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.live import serve_live
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.tools.doctor import check_engines
from prfaas.tools.process_facts import check_processes

PROMPT_TOKENS = 2000


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """Every prompt is offloaded that can be."""
    made = write_deployment(tmp_path, speedup=200.0)
    document = json.loads(made.path.read_text())
    document |= {"routing": {"policy": "offload_all"}, "security": {"engine_tls": "always"}}
    document["gateway"] |= {"route_header": "full"}
    document["clusters"] = [each for each in document["clusters"] if each["name"] != "other"]
    made.path.write_text(json.dumps(document))
    return load_deployment(made.path, state_dir=tmp_path)


@asynccontextmanager
async def gateway_of(deployment: Deployment) -> AsyncIterator[aiohttp.ClientSession]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(serve_live(deployment, ready=port.set_result))
    try:
        async with asyncio.timeout(120), aiohttp.ClientSession(f"http://127.0.0.1:{await port}") as clients:
            yield clients
    finally:
        gateway.cancel()
        with suppress(asyncio.CancelledError):
            await gateway


async def ask(clients: aiohttp.ClientSession, seed: int) -> tuple[str, list[int]]:
    """How the gateway says it went, and the answer."""
    body = {
        "model": MODEL,
        "prompt": random_ids(PROMPT_TOKENS, seed),
        "max_tokens": 8,
        "return_token_ids": True,
    }
    async with clients.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-prfaas-route"], (await response.json())["choices"][0]["token_ids"]


async def health(deployment: Deployment, name: str, **options: Any) -> int:
    instance = deployment.instance(name)
    url = f"{instance.url}/health"
    async with aiohttp.ClientSession() as session, session.get(url, **options) as response:
        return response.status


@pytest.mark.slow("starts processes")
def test_answers_come_over_tls_and_strangers_get_none(deployment: Deployment, tmp_path: Path) -> None:
    folder = deployment.security.certificates
    foreign = Authority(tmp_path / "foreign").identity(GATEWAY)
    stranger = TlsIdentity(foreign.certificate, foreign.key, deployment.security.ca_file)
    without = ssl.create_default_context(cafile=str(deployment.security.ca_file))
    far = deployment.instance("far-0")

    async def check() -> None:
        async with running(deployment), gateway_of(deployment) as clients:
            for seed in range(4):
                route, ids = await ask(clients, seed)
                assert len(ids) == 8
                assert route.startswith("offload; prefill=far-") and "fallback" not in route, route
            assert (
                await health(deployment, "far-0", **https_options(far, identity_of(deployment, TOOLS))) == 200
            )
            for context in (stranger.https_context(), without):
                with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                    await health(deployment, "far-0", ssl=context, server_hostname="far-0")
            # A certificate of the deployment for another name is good to come with, not to be taken for this engine.
            home = TlsIdentity(folder / "home-0.pem", folder / "home-0.pem", folder / "ca.crt")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await health(deployment, "far-0", ssl=home.https_context(), server_hostname="home-0")
            with pytest.raises(aiohttp.ClientError):
                async with aiohttp.ClientSession() as session:
                    await session.get(f"http://{far.host}:{far.http_port}/health")
            async with aiohttp.ClientSession() as session:
                findings = await check_engines(deployment, session) + await check_processes(
                    deployment, session
                )
            assert [each for each in findings if each.level != "ok"] == []

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_certificates_and_ca_change_while_it_runs_without_a_lost_request(deployment: Deployment) -> None:
    folder = CertificateFolder(deployment)
    far = deployment.instance("far-0")

    async def check() -> None:
        async with running(deployment), gateway_of(deployment) as clients:
            seeds = iter(range(1000))
            # Those that are kept open carry on; each wave is wider than the one before, so it needs new connections.
            await asyncio.gather(*(ask(clients, next(seeds)) for _ in range(2)))
            old = identity_of(deployment, TOOLS)
            assert old is not None
            before = https_options(far, old)
            assert await health(deployment, "far-0", **before) == 200
            steps = (
                lambda: folder.make(rotate=True),
                folder.add_authority,
                lambda: folder.make(rotate=True),
                folder.retire_authorities,
            )
            for width, step in enumerate(steps, start=2):
                open_requests = [asyncio.create_task(ask(clients, next(seeds))) for _ in range(4)]
                await asyncio.to_thread(step)
                for route, _ in await asyncio.gather(
                    *open_requests, *(ask(clients, next(seeds)) for _ in range(4 * width))
                ):
                    assert "fallback" not in route, route
            assert (
                await health(deployment, "far-0", **https_options(far, identity_of(deployment, TOOLS))) == 200
            )
            # Who still has only what the retired CA gave is a stranger now.
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await health(deployment, "far-0", **before)

    asyncio.run(check())


@pytest.mark.parametrize("loop_run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_the_monitor_tells_an_engine_that_refuses_it_from_a_silent_one(
    deployment: Deployment, tmp_path: Path, loop_run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    foreign = Authority(tmp_path / "foreign").identity(GATEWAY)
    stranger = TlsIdentity(foreign.certificate, foreign.key, deployment.security.ca_file)

    async def check() -> None:
        async with running(deployment, "far-0"):
            for identity, healthy in (
                (identity_of(deployment, GATEWAY), True),
                (stranger, False),
                (TlsIdentity(foreign.certificate, foreign.key, foreign.ca), False),
            ):
                http = EngineHttp(identity)
                try:
                    assert await http.is_healthy(deployment.instance("far-0"), 10.0) is healthy
                finally:
                    await http.close()

    loop_run(check())


def test_doctor_says_who_does_not_agree_on_tls(deployment: Deployment, tmp_path: Path) -> None:
    text = deployment.path.read_text().replace('"engine_tls": "always"', '"engine_tls": "never"')
    (tmp_path / "plain.yaml").write_text(text)
    plain = load_deployment(tmp_path / "plain.yaml", state_dir=tmp_path)

    async def check() -> None:
        async with running(plain, "far-0"), aiohttp.ClientSession() as session:
            (finding, *_) = await check_engines(deployment, session)
        assert finding.level == "problem" and "don't agree on TLS" in finding.text
        assert "prfaas certs FILE --show" in str(finding.mend)
        deployment.security.identity_file(TOOLS).unlink()
        async with aiohttp.ClientSession() as session:
            (finding, *_) = await check_engines(deployment, session)
        assert finding.level == "problem" and "far-0 speaks TLS only" in finding.text

    asyncio.run(check())


@pytest.mark.slow("starts processes")
def test_processes_are_started_asked_and_ended_over_tls(deployment: Deployment) -> None:
    for file in deployment.security.certificates.iterdir():
        file.unlink()
    with RunningEngines(deployment, ["far-0", "home-0", "home-1"], stand_ins_per_process=3) as engines:
        engines.wait_ready(300)
        assert all(state.is_fit for state in CertificateFolder(deployment).states())
        engines.kill("home-1")
        assert not engines.answers("home-1")
        assert engines.answers("home-0")
