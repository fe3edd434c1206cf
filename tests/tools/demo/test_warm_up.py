"""Every engine gets a page of text, and one of them a longer one that is timed."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

from aiohttp import web
from tests.ports import free_ports

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.tools.demo.line import prefill_speed, warm_text, warm_up
from prfaas.tools.demo.prompts import demo_prompts

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"


def moved(tmp_path: Path) -> Deployment:
    """The example at free ports."""
    deployment = load_deployment(EXAMPLE, state_dir=tmp_path)
    clusters = tuple(
        replace(
            cluster,
            instances=tuple(
                replace(each, http_port=port)
                for each, port in zip(cluster.instances, free_ports(len(cluster.instances)), strict=True)
            ),
        )
        for cluster in deployment.clusters
    )
    return replace(deployment, clusters=clusters)


class Engines:
    """Answers at the ports of all engines, by the length of prompts; `broken`: with an error."""

    def __init__(self, deployment: Deployment, *, broken: bool = False) -> None:
        self._ports = [instance.http_port for instance in deployment.instances]
        self._broken = broken
        self.prompts: list[tuple[int, str]] = []

    async def __aenter__(self) -> "Engines":
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        for port in self._ports:
            await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert request.url.port is not None
        self.prompts.append((request.url.port, body["prompt"]))
        if self._broken:
            return web.json_response({"error": {"message": "no"}}, status=500)
        return web.json_response({"usage": {"prompt_tokens": len(body["prompt"])}})


def test_each_engine_once_with_a_page_that_no_prompt_begins_like(tmp_path: Path) -> None:
    deployment = moved(tmp_path)

    async def check() -> list[tuple[int, str]]:
        async with Engines(deployment) as engines:
            await warm_up(deployment, 1.0)
            return engines.prompts

    prompts = asyncio.run(check())
    assert Counter(port for port, _ in prompts) == Counter(each.http_port for each in deployment.instances)
    assert {text for _, text in prompts} == {warm_text(1.0)}
    assert not any(prompt.text.startswith(warm_text(1.0)[:16]) for prompt in demo_prompts())


def test_the_speed_is_that_of_the_first_engine_with_another_text(tmp_path: Path) -> None:
    deployment = moved(tmp_path)
    senders = deployment.with_role("prefill")

    async def check() -> tuple[float, int]:
        async with Engines(deployment) as engines:
            speed = await prefill_speed(deployment, senders, 1.0)
            ((port, text),) = engines.prompts
            assert port == senders[0].http_port and text[:16] != warm_text(1.0)[:16]
            assert speed is not None and speed.tokens_per_s > 0
            return len(text), speed.tokens

    sent, counted = asyncio.run(check())
    assert sent == counted == 1200


def test_an_engine_that_fails_has_no_speed(tmp_path: Path) -> None:
    deployment = moved(tmp_path)

    async def check() -> None:
        async with Engines(deployment, broken=True):
            await warm_up(deployment, 1.0)
            assert await prefill_speed(deployment, deployment.with_role("prefill"), 1.0) is None

    asyncio.run(check())
    # Nobody listens any more.
    asyncio.run(warm_up(deployment, 1.0))
