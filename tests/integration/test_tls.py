"""Real vLLM servers behind TLS: they answer the gateway, refuse strangers, and read a new certificate."""

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest
from cryptography import x509

from prfaas.core.deployment import TOOLS, Deployment, Instance, load_deployment
from prfaas.serving.certificates import CertificateFolder, https_options, identity_of
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.live import serve_live

from .stack import ENGINE_ENV, MODEL, PATIENCE_S, TEMPLATES, prompt, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own, and certificates that are read anew"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One engine that prefills elsewhere and one that decodes, running."""
    path = write_deployment(
        tmp_path_factory.mktemp("prfaas-test-tls"), bandwidth="400 Mbit/s", max_model_len=8192
    )
    document = json.loads(path.read_text())
    document["clusters"][1]["instances"].pop(0)
    document["security"]["engine_tls"] = "always"
    path.write_text(json.dumps(document))
    made = load_deployment(path)
    with RunningEngines(made, extra_env=ENGINE_ENV, templates=TEMPLATES) as engines:
        engines.wait_ready()
        yield made


def served_serial(instance: Instance, context: ssl.SSLContext) -> int:
    """Of the certificate that an engine shows now."""

    async def look() -> int:
        _, writer = await asyncio.open_connection(
            instance.host, instance.http_port, ssl=context, server_hostname=instance.name
        )
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        return x509.load_der_x509_certificate(shown).serial_number

    return asyncio.run(look())


def answers(deployment: Deployment, *seeds: int) -> list[tuple[int, str]]:
    """Status and route of a long prompt for each seed, all at once, by a gateway of its own."""

    async def ask_all() -> list[tuple[int, str]]:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        gateway = asyncio.create_task(serve_live(deployment, ready=port.set_result))
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{await port}") as clients:

                async def ask(seed: int) -> tuple[int, str]:
                    body = {"model": MODEL, "prompt": prompt(seed, 2500), "max_tokens": 4}
                    async with clients.post("/v1/completions", json=body) as response:
                        await response.read()
                        return response.status, response.headers.get("x-prfaas-route", "")

                return list(await asyncio.gather(*map(ask, seeds)))
        finally:
            gateway.cancel()
            with suppress(asyncio.CancelledError):
                await gateway

    return asyncio.run(ask_all())


def test_vllm_answers_the_gateway_over_tls(deployment: Deployment) -> None:
    for status, route in answers(deployment, 1, 2):
        assert status == 200
        assert route.startswith("offload; prefill=east-prefill-0") and "fallback" not in route, route


def test_vllm_refuses_who_has_no_certificate(deployment: Deployment) -> None:
    instance = deployment.instance("east-prefill-0")
    without = ssl.create_default_context(cafile=str(deployment.security.ca_file))
    urls = (instance.url, instance.url.replace("https", "http"))

    async def check() -> None:
        for url in urls:
            async with aiohttp.ClientSession() as session:
                with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                    options = {"ssl": without, "server_hostname": instance.name} if url == urls[0] else {}
                    await session.get(f"{url}/health", **options)  # type: ignore[arg-type]
        async with aiohttp.ClientSession() as session:
            known = https_options(instance, identity_of(deployment, TOOLS))
            async with session.get(f"{instance.url}/health", **known) as response:
                assert response.status == 200

    asyncio.run(check())


def test_vllm_reads_a_new_certificate(deployment: Deployment) -> None:
    folder, tools = CertificateFolder(deployment), identity_of(deployment, TOOLS)
    assert tools is not None
    before = {each.name: served_serial(each, tools.https_context()) for each in deployment.instances}
    folder.make(rotate=True)
    deadline_s = time.monotonic() + PATIENCE_S
    for instance in deployment.instances:
        content = deployment.security.identity_file(instance.name).read_bytes()
        new = x509.load_pem_x509_certificate(content).serial_number
        assert new != before[instance.name]
        while served_serial(instance, tools.https_context()) != new:
            assert time.monotonic() < deadline_s, f"{instance.name} still shows its old certificate"
            time.sleep(0.2)
    for status, route in answers(deployment, 3, 4):
        assert status == 200
        assert "fallback" not in route, route
