"""What others have sent shows in nothing that a client is told: usage, headers, errors, of all four APIs."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from synthetic_world import MODEL, running, write_deployment

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.live import serve_live

# Of one request's own answer, its time, or of the load, whoever made it.
OWN = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "text",
    "content",
    "delta",
    "output",
    "item_id",
    "item",
    "sequence_number",
}
OWN |= {"Date", "X-Request-ID", "Content-Length"}
LOAD = {"prefill", "decode", "bytes", "hidden", "transfer_s", "prefill_s", "threshold", "predicted_ttft_s"}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = write_deployment(tmp_path, speedup=500.0)
    document = json.loads(made.path.read_text())
    document["clusters"] = [each for each in document["clusters"] if each["name"] == "home"]
    document["links"] = []
    document["gateway"]["route_header"] = "short"
    document["security"] = {"tenant_header": "x-tenant"}
    made.path.write_text(json.dumps(document))
    return load_deployment(made.path, state_dir=tmp_path)


def prompt(seed: int) -> str:
    """About as many tokens as characters."""
    return "".join(random.Random(seed).choices("abcdefghij ", k=2000))


def requests(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All ways to send a prompt, and one that an engine refuses."""
    messages = [{"role": "user", "content": text}]
    for stream in (False, True):
        more = {"max_tokens": 4, "stream": stream, "model": MODEL}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        yield "/v1/completions", {"prompt": text, **more, **usage}
        yield "/v1/chat/completions", {"messages": messages, **more, **usage}
        yield "/v1/messages", {"messages": messages, **more}
        yield "/v1/responses", {"input": text, "max_output_tokens": 4, "stream": stream, "model": MODEL}
    yield "/v1/completions", {"prompt": text, "max_tokens": 100_000, "model": MODEL}


def less_own(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: less_own(value) for name, value in told.items() if name not in OWN}
    return [less_own(each) for each in told] if isinstance(told, list) else told


async def seen(http: aiohttp.ClientSession, text: str, name: str, *, anew: bool = True) -> list[Any]:
    """All that a client is told, less what is of its own answer and its time.

    `anew`: each request is of another tenant, so that nothing depends on which engine has the one before.
    """
    found = []
    for number, (path, body) in enumerate(requests(text)):
        tenant = f"{name}{number}" if name and anew else name
        async with http.post(path, json=body, headers={"x-tenant": tenant} if tenant else {}) as response:
            raw = await response.text()
            headers = dict(response.headers)
        route = [
            part for part in headers.pop("x-prfaas-route", "").split("; ") if part.split("=")[0] not in LOAD
        ]
        events = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
        # How many pieces a text comes in is its time's.
        events = [event for event in events if re.search(r'"usage": ?\{', event)]
        found.append(
            (
                path,
                response.status,
                less_own(headers),
                route,
                [less_own(json.loads(e)) for e in events or [raw]],
            )
        )
    return found


@pytest.mark.slow("starts engines, and sends forty requests")
def test_what_others_have_sent_shows_nowhere(deployment: Deployment) -> None:
    async def check(http: aiohttp.ClientSession) -> None:
        for tenant in ("", "a"):
            await seen(http, prompt(1), tenant)
        # Tenant "b", and a second client without a name, try what others have sent, and what nobody has.
        for tenant in ("", "b"):
            guessed, other = await seen(http, prompt(1), tenant), await seen(http, prompt(2), tenant)
            assert guessed == other
        # Of its own a named one is told.
        async with asyncio.timeout(120):
            while True:
                told = json.dumps(await seen(http, prompt(2), "c", anew=False))
                if '"cached_tokens": 1' in told and '"cache_read_input_tokens": 1' in told:
                    break

    async def main() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with running(deployment):
            gateway = asyncio.create_task(serve_live(deployment, ready=port.set_result))
            try:
                async with aiohttp.ClientSession(base_url=f"http://127.0.0.1:{await port}") as http:
                    await check(http)
            finally:
                gateway.cancel()
                await asyncio.gather(gateway, return_exceptions=True)

    asyncio.run(main())
