"""The burst on the running deployments: both at the same time, so what slows this machine slows both."""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import aiohttp
import uvloop

from prfaas.core.workload.requests import TracedRequest
from prfaas.tools.demo.gateway import DemoError, demo_gateway
from prfaas.tools.demo.pays.burst import Burst, Side
from prfaas.tools.replay import (
    ReplayedRequest,
    ReplayError,
    ReplayOptions,
    ReplayResult,
    Target,
    find_target,
    replay,
)

# Before the burst, one after the other: the first ones connect everybody, the others are timed.
_FIRST, _TIMED = 2, 6
_PROBE_TOKENS = (128, 2448)
# Ids of blocks that no request of the burst has.
_PROBE_BLOCK, _BLOCK_TOKENS = 1 << 40, 512


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The burst on one side."""

    result: ReplayResult
    overhead_s: float
    """What a request takes on the idle side beside its prefill and the first decode step: HTTP, hops, hand-over."""


def live_runs(sides: Sequence[Side], burst: Burst, on_record: Callable[[], None]) -> tuple[LiveRun, ...]:
    """Sends the burst to all sides at once, whose engines run; `on_record` is called after each answer.

    Raises:
        DemoError: a gateway ended, or a probe got no answer.
    """
    # Until the loop is closed: what is left of the gateways is cancelled then.
    with _no_tracebacks():
        return uvloop.run(_live_runs(sides, burst, on_record))


async def _live_runs(
    sides: Sequence[Side], burst: Burst, on_record: Callable[[], None]
) -> tuple[LiveRun, ...]:
    requests = burst.requests()
    # Nobody starts before all are warm.
    warm = asyncio.Barrier(len(sides))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_live_run(side, requests, warm, on_record)) for side in sides]
    except ExceptionGroup as failed:
        # The first one has ended the other side.
        raise failed.exceptions[0] from None
    return tuple(task.result() for task in tasks)


async def _live_run(
    side: Side, requests: Sequence[TracedRequest], warm: asyncio.Barrier, on_record: Callable[[], None]
) -> LiveRun:
    # Nobody else needs to know the ports.
    anywhere = replace(side.deployment, gateway=replace(side.deployment.gateway, port=0))
    async with demo_gateway(anywhere) as gateway:
        return await gateway.unless_ended(_probed_run(gateway.url, side, requests, warm, on_record))


async def _probed_run(
    url: str,
    side: Side,
    requests: Sequence[TracedRequest],
    warm: asyncio.Barrier,
    on_record: Callable[[], None],
) -> LiveRun:
    try:
        async with aiohttp.ClientSession() as session:
            target = await find_target(session, url)
    except ReplayError as error:
        raise DemoError(str(error)) from error
    probes = [await _probe(target, number) for number in range(_FIRST + _TIMED)]
    overhead_s = median(_beside_work_s(side, record) for record in probes[_FIRST:])
    await warm.wait()
    with _no_pauses():
        result = await replay(target, requests, ReplayOptions(), lambda _record: on_record())
    return LiveRun(result, overhead_s)


async def _probe(target: Target, number: int) -> ReplayedRequest:
    tokens = _PROBE_TOKENS[number % len(_PROBE_TOKENS)]
    begin = _PROBE_BLOCK + number * _BLOCK_TOKENS
    blocks = tuple(range(begin, begin + -(-tokens // _BLOCK_TOKENS)))
    result = await replay(target, [TracedRequest(0.0, tokens, 2, blocks, _BLOCK_TOKENS)])
    (record,) = result.records
    if record.ttft_s is None:
        raise DemoError(f"a request to the stand-ins got no answer: {record.error}")
    return record


def _beside_work_s(side: Side, record: ReplayedRequest) -> float:
    """Its TTFT without what the profiles say of its prefill and of one decode step."""
    assert record.ttft_s is not None
    (pd,) = side.planned.pd_clusters
    name = record.route_fields.get("prefill", "")
    at = side.planned.cluster(side.deployment.instance(name).cluster) if name else pd
    step_s = pd.profile.decode_step_s(pd.profile.range_batch[0])
    return max(record.ttft_s - at.profile.prefill_s(record.input_tokens) - step_s, 0.0)


@contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Answers that nobody reads any more, after Ctrl-C, are no errors to show; lost ones are counted."""
    server = logging.getLogger("prfaas.http")
    before = server.level
    server.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        server.setLevel(before)


@contextmanager
def _no_pauses() -> Iterator[None]:
    """Whatever was imported and made so far is not looked through for garbage again: that takes tens of ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
