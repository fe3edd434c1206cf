"""What the gateway is measured beside: vllm-router in its PD mode, and the least that two hops cost in aiohttp."""

import asyncio
import multiprocessing as mp
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

import aiohttp
import uvloop
from aiohttp import web

_START_S = 60.0


@asynccontextmanager
async def vllm_router(executable: str, prefill_url: str, decode_url: str) -> AsyncIterator[tuple[int, int]]:
    """(port, pid) of a vllm-router that sends each request to both engines.

    Per request it parses the body, writes it out twice (prefill with `max_tokens` 1, decode with the prefill's
    `kv_transfer_params`) and waits for the prefill before it asks decode. It does not tokenize or hash the
    prompt, issues no ticket and follows no transfer.
    """
    port = _free_port()
    arguments = ["--vllm-pd-disaggregation", "--prefill", prefill_url, "--decode", decode_url]
    arguments += ["--policy", "round_robin", "--port", str(port), "--prometheus-port", str(_free_port())]
    arguments += ["--worker-startup-check-interval", "1", "--log-level", "error"]
    process = await asyncio.create_subprocess_exec(
        executable,
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
            while not await _answers(session, f"http://127.0.0.1:{port}/health"):
                if process.returncode is not None:
                    raise RuntimeError(f"{executable} ended with status {process.returncode}")
                await asyncio.sleep(0.2)
        yield port, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def bare_relay(prefill_url: str, decode_url: str) -> AsyncIterator[tuple[int, int]]:
    """(port, pid) of a process that posts each body unread to one engine and then to the other."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_relay_process, args=(prefill_url, decode_url, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield await asyncio.to_thread(ours.recv), process.pid
    finally:
        process.terminate()
        process.join()


def _relay_process(prefill_url: str, decode_url: str, pipe: Connection) -> None:
    async def serve() -> None:
        session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        headers = {"Content-Type": "application/json"}

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            async with session.post(prefill_url + request.path, data=body, headers=headers) as answer:
                await answer.read()
            async with session.post(decode_url + request.path, data=body, headers=headers) as answer:
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                while chunk := await answer.content.readany():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", relay)
        app.router.add_post("/v1/chat/completions", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(serve())


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
