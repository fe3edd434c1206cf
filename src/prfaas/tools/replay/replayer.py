"""The open loop: every request at its time, whatever became of those before."""

import asyncio
import time
from collections.abc import Callable, Iterable

import aiohttp

from prfaas.core.workload.requests import TracedRequest
from prfaas.tools.replay.client import ReplayedRequest, ReplayOptions, Target, send
from prfaas.tools.replay.result import ReplayResult

# Servers close idle connections after some seconds (uvicorn after 5): a request must not meet one that is closing.
_KEEPALIVE_S = 2.0
_READ_BYTES = 1 << 18


async def replay(
    target: Target,
    requests: Iterable[TracedRequest],
    options: ReplayOptions | None = None,
    on_record: Callable[[ReplayedRequest], None] | None = None,
    on_due: Callable[[], None] | None = None,
) -> ReplayResult:
    """Send `requests`, which ascend in time from 0 s on, and wait for the last answer.

    `on_due` is called when a request is due, `on_record` when it has ended. Cancelling ends what is under way.
    """
    options = options or ReplayOptions()
    records: list[ReplayedRequest] = []
    waited = 0
    slots = asyncio.Semaphore(options.max_connections)
    started_at_s, started_s = time.time(), time.monotonic()

    def clock() -> float:
        # Not the loop's own: uvloop's counts whole milliseconds.
        return time.monotonic() - started_s

    async def one(request: TracedRequest, due: ReplayedRequest) -> None:
        nonlocal waited
        waited += slots.locked()
        async with slots:
            record = await send(session, target, request, due, options, clock)
        records.append(record)
        if on_record is not None:
            on_record(record)

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    session = aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=_READ_BYTES,
    )
    async with session, asyncio.TaskGroup() as tasks:
        for index, request in enumerate(requests):
            # Also when it is late already: what is under way must get on.
            await asyncio.sleep(max(request.arrival_s - clock(), 0.0))
            due = ReplayedRequest(index, request.arrival_s, request.input_tokens, request.output_tokens)
            tasks.create_task(one(request, due))
            if on_due is not None:
                on_due()
    records.sort(key=lambda record: record.index)
    return ReplayResult(target, started_at_s, clock(), tuple(records), waited)
