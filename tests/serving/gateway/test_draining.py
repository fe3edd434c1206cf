"""A gateway that is about to end, or has no descriptors left: what is open ends, what is new is refused."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

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


def test_idle_clients_leave_descriptors_to_those_that_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        # Room for 40 descriptors of clients and their requests: 64 of its own and 8 per engine are kept.
        monkeypatch.setattr("prfaas.serving.gateway.server.raise_descriptor_limit", lambda: 64 + 3 * 8 + 40)
        async with running_world(tmp_path, chunk_s=0.05) as world:
            body: dict[str, Any] = {"model": "stand-in", "prompt": "a", "stream": True, "max_tokens": 16}
            async with world.client.post("/v1/completions", json=body) as stream:
                await stream.content.readany()
                address = (world.client._base_url.host, world.client._base_url.port)
                idle = [await asyncio.open_connection(*address) for _ in range(60)]
                for _, writer in idle[::2]:
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
                for reader, _ in idle[:40]:
                    # Where its bytes had come, but were not read yet, the connection ends with a reset.
                    with contextlib.suppress(ConnectionResetError):
                        assert await asyncio.wait_for(reader.read(), 30) == b""
                response, _ = await world.post("/v1/completions", {"model": "stand-in", "prompt": "b"})
                assert response.status == 200
                # The stream's connection is older than all of them.
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            for _, writer in idle:
                writer.close()
            await world.settled()

    asyncio.run(check())
