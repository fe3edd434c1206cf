"""A gateway that is about to end, or has no descriptors left: what is open ends, what is new is refused."""

import asyncio
from pathlib import Path

import pytest

from prfaas.serving.gateway import Draining
from prfaas.serving.gateway.bodies import ApiError

from .world import running_world


def test_it_settles_when_the_last_request_has_ended() -> None:
    async def check() -> None:
        draining = Draining()
        with draining.request():
            with draining.request():
                draining.begin()
                assert draining.active and draining.open_requests == 2
                assert not await draining.settled(0.01)
            with pytest.raises(ApiError) as refused, draining.request():
                pass
            assert refused.value.status == 503
            assert refused.value.headers() == {"Retry-After": "5"}
        assert await draining.settled(0)

    asyncio.run(check())


def test_an_idle_gateway_is_settled_at_once() -> None:
    async def check() -> None:
        draining = Draining()
        assert not await draining.settled(0.01)
        draining.begin()
        draining.begin()
        assert await draining.settled(0)

    asyncio.run(check())


def test_streams_end_and_new_requests_are_refused(tmp_path: Path) -> None:
    async def check() -> None:
        draining = Draining()
        async with running_world(tmp_path, draining=draining, chunk_s=0.05) as world:
            body = {"model": "stand-in", "prompt": "a", "stream": True, "max_tokens": 16}
            async with world.client.post("/v1/completions", json=body) as stream:
                await stream.content.readany()
                draining.begin()
                response, answer = await world.post("/v1/completions", {"model": "stand-in", "prompt": "b"})
                assert (response.status, response.headers["Retry-After"]) == (503, "5")
                assert "about to end" in answer["error"]["message"]
                assert "X-Request-Id" in response.headers
                for path, status in (("/ready", 503), ("/health", 200)):
                    async with world.client.get(path) as page:
                        assert page.status == status
                assert not await draining.settled(0)
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            assert await draining.settled(5)
            await world.settled()

    asyncio.run(check())
