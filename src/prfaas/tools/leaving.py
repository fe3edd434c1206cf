"""An engine that is to end, as its own machine sees it: it tells all gateways, and waits until its work has ended."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.certificates import identity_of
from prfaas.serving.control.engine_http import EngineHttp
from prfaas.serving.control.engine_reading import read_exposition
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.observer import Observer

_LOOK_EVERY_S = 0.5
_ANSWER_S = 2.0
# What a gateway had decided when it heard may still be on its way.
_IDLE_LOOKS = 2
_QUEUES = ("queued_bytes", "open_bytes")


async def leave(deployment: Deployment, name: str, within_s: float) -> str:
    """Have all gateways send an instance nothing more, and wait for its work.

    It is closed for them until its next process answers. Its KV port is asked in its own name: its machine alone has
    the certificate for that.

    Returns:
        What is left after `within_s`, as the end of a sentence; empty: nothing.

    Raises:
        ConnectionError: its KV port does not answer.
        KeyFileError, TlsFileError: its key or its certificate can't be used.
    """
    instance = deployment.instance(name)
    tls, key = identity_of(deployment, name), load_key(deployment.security.key_file)
    async with AsyncExitStack() as stack:
        http = EngineHttp(tls)
        stack.push_async_callback(http.close)
        ports = [
            Observer(name, key, instance.host, port, f"{name}/{rank}", tls)
            for rank, port in enumerate(instance.kv_ports)
        ]
        for port in ports:
            stack.push_async_callback(port.close)
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.gather(*(port.leave() for port in ports))
        return await _settled(instance, http, ports, time.monotonic() + within_s)


async def _settled(instance: Instance, http: EngineHttp, ports: list[Observer], deadline_s: float) -> str:
    idle = 0
    while True:
        left = await _left(instance, http, ports)
        idle = 0 if left else idle + 1
        if idle >= _IDLE_LOOKS or time.monotonic() >= deadline_s:
            return left
        await asyncio.sleep(_LOOK_EVERY_S)


async def _left(instance: Instance, http: EngineHttp, ports: list[Observer]) -> str:
    """What is still to happen before an engine can end. Whoever answers no more has nothing left."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            stats = await asyncio.gather(*(port.stats() for port in ports))
        if unaware := max(each["gateways_unaware"] for each in stats):
            return f"{unaware} gateways have not been told"
        if sent := sum(map(_unsent_bytes, stats)):
            return f"{sent:,} bytes of KVCache are to be sent"
    text = await http.metrics(instance, _ANSWER_S)
    reading = None if text is None else read_exposition(text)
    if reading is not None and reading.running + reading.waiting:
        return f"{reading.running + reading.waiting:g} requests are open"
    return ""


def _unsent_bytes(stats: Mapping[str, Any]) -> int:
    return sum(link[name] for link in stats["sender"]["links"].values() for name in _QUEUES)
