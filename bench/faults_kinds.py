"""The faults of `faults.py`: which, in what order, and how each is done to an engine or to the gateway."""

import asyncio
import contextlib
import itertools
import math
import random
import resource
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from faults_stack import GATEWAY_FILES, FaultStack, open_files
from prfaas.core.deployment import Instance

Kind = Literal["kill", "freeze", "incompatible", "garbage", "stall", "files", "flood", "restart"]
Lane = Literal["prefill", "decode", "gateway"]
KINDS: Sequence[Kind] = get_args(Kind)
GATEWAY = "gateway"

# Hostile clients must not harm the engine or gateway that they talk to: it counts as healthy meanwhile.
HARMLESS: frozenset[Kind] = frozenset({"garbage", "flood"})

_WEIGHTS: dict[Kind, int] = {
    "kill": 4,
    "freeze": 5,
    "incompatible": 2,
    "garbage": 2,
    "stall": 3,
    "files": 2,
    "flood": 1,
    "restart": 1,
}
# Shortest and longest, in seconds; drawn evenly from the logarithms.
_SECONDS: dict[Kind, tuple[float, float]] = {
    "kill": (0.1, 4.0),
    "freeze": (1.0, 60.0),
    "incompatible": (4.0, 10.0),
    "garbage": (1.0, 3.0),
    "stall": (1.0, 30.0),
    "files": (3.0, 8.0),
    "flood": (8.0, 14.0),
    "restart": (0.1, 1.0),
}
_FLOOD_CONNECTIONS = 250
_FLOOD_BYTE_S = 3.0
_IDLE_CONNECTIONS = 30
_GARBAGE_CONNECTIONS = 40


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to be done, decided before anything runs."""

    number: int
    kind: Kind
    lane: Lane
    seconds: float
    """How long the fault itself lasts; a restart takes its own time beside."""


@dataclass(slots=True)
class DoneFault:
    """What was done. Times are the monotonic clock's."""

    fault: Fault
    target: str
    """An instance's name, or "gateway"."""
    began_s: float
    ended_s: float = math.inf
    """When the target could work again."""
    problem: str = ""
    """Why it could not be done as planned."""


def plan(count: int, seed: int, only: Kind | None, longest_s: float) -> list[Fault]:
    """All faults in the order in which they begin; the same for the same arguments."""
    rng = random.Random(seed)
    # In rounds with every kind in its proportion, so that a short run has every kind too.
    rounds = itertools.chain.from_iterable(_round(rng, only, first=number == 0) for number in range(count))
    faults: list[Fault] = []
    for number, kind in enumerate(itertools.islice(rounds, count)):
        low, high = (min(each, longest_s) for each in _SECONDS[kind])
        seconds = math.exp(rng.uniform(math.log(low), math.log(high)))
        lane: Lane = rng.choice(("prefill", "decode"))
        if kind == "restart" or (kind in ("garbage", "files") and rng.random() < 0.4):
            lane = "gateway"
        faults.append(Fault(number, kind, lane, seconds))
    return faults


def _round(rng: random.Random, only: Kind | None, *, first: bool) -> list[Kind]:
    if only is not None:
        return [only]
    kinds = [kind for kind, weight in _WEIGHTS.items() for _ in range(1 if first else weight)]
    rng.shuffle(kinds)
    return kinds


class FaultMaker:
    """Does faults to a running stack."""

    def __init__(self, stack: FaultStack, seed: int) -> None:
        self._stack = stack
        self._rng = random.Random(seed)

    async def make(self, fault: Fault, target: str) -> None:
        """Returns when the target can work again."""
        if target == GATEWAY:
            address = (self._stack.deployment.gateway.host, self._stack.deployment.gateway.port)
            match fault.kind:
                case "restart":
                    await self._restart_gateway(fault.seconds)
                case "files":
                    await self._idle(address, GATEWAY_FILES + 100, fault.seconds)
                case _:
                    await self._throw([address], fault.seconds)
            return
        instance = self._stack.deployment.instance(target)
        ports = [(instance.host, instance.http_port), (instance.host, instance.kv_port)]
        match fault.kind:
            case "kill":
                await self._stack.kill_engine(target)
                await asyncio.sleep(fault.seconds)
                await self._stack.start_engine(target)
            case "freeze":
                await self._freeze(target, fault.seconds)
            case "incompatible":
                await self._stack.kill_engine(target)
                await self._stack.start_engine(target, other=True)
                await asyncio.sleep(fault.seconds)
                await self._stack.kill_engine(target)
                await self._stack.start_engine(target)
            case "stall":
                await self._stall(instance, fault.seconds)
            case "files":
                await self._use_up_files(instance, fault.seconds)
            case "flood":
                await self._flood(ports[1], fault.seconds)
            case _:
                await self._throw(ports, fault.seconds)

    async def _freeze(self, target: str, seconds: float) -> None:
        self._stack.signal_engine(target, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._stack.signal_engine(target, signal.SIGCONT)

    async def _stall(self, instance: Instance, seconds: float) -> None:
        url = f"{instance.url}/synthetic/stall"
        async with asyncio.timeout(5.0), self._stack.session.post(url, json={"seconds": seconds}) as response:
            response.raise_for_status()
        await asyncio.sleep(seconds)

    async def _use_up_files(self, instance: Instance, seconds: float) -> None:
        """The engine's process may open hardly a file more."""
        pid = self._stack.pid(instance.name)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files(pid) + 2, before[1]))
        try:
            await self._idle((instance.host, instance.http_port), _IDLE_CONNECTIONS, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        # libzmq ends the process when a peer of its events connects meanwhile and there is no file for it.
        if not await self._stack.in_thread(self._stack.engines.is_running, instance.name):
            await self._stack.start_engine(instance.name)

    async def _restart_gateway(self, seconds: float) -> None:
        await self._stack.end_gateway(self._rng.choice((signal.SIGTERM, signal.SIGKILL)))
        await asyncio.sleep(seconds)
        await self._stack.start_gateway()

    async def _idle(self, address: tuple[str, int], count: int, seconds: float) -> None:
        """Connections that say nothing, or half of a request's head."""
        async with _connections(address, count) as writers:
            for writer in writers[::2]:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            await asyncio.sleep(seconds)

    async def _flood(self, address: tuple[str, int], seconds: float) -> None:
        """Many connections that send a byte at a time; those that are closed come again."""
        hello = b"PRFAAS" + self._rng.randbytes(64)
        until_s = time.monotonic() + seconds

        async def drip(at_s: float) -> None:
            await asyncio.sleep(at_s)
            while time.monotonic() < until_s:
                with contextlib.suppress(OSError):
                    async with _connections(address, 1) as (writer,):
                        for at in range(len(hello)):
                            writer.write(hello[at : at + 1])
                            await writer.drain()
                            await asyncio.sleep(max(0.0, min(_FLOOD_BYTE_S, until_s - time.monotonic())))
                            if time.monotonic() >= until_s or writer.is_closing():
                                break
                await asyncio.sleep(0.2)

        await asyncio.gather(*(drip(number / _FLOOD_CONNECTIONS) for number in range(_FLOOD_CONNECTIONS)))

    async def _throw(self, addresses: Sequence[tuple[str, int]], seconds: float) -> None:
        """Bytes that are no request and no frame, some of them almost."""

        async def one(address: tuple[str, int], at_s: float) -> None:
            await asyncio.sleep(at_s)
            with contextlib.suppress(OSError):
                async with _connections(address, 1) as (writer,):
                    writer.write(_garbage(self._rng))
                    await writer.drain()
                    await asyncio.sleep(self._rng.uniform(0.0, seconds / 2))

        await asyncio.gather(
            *(
                one(address, seconds / 2 * number / _GARBAGE_CONNECTIONS)
                for number in range(_GARBAGE_CONNECTIONS)
                for address in addresses
            )
        )


def _garbage(rng: random.Random) -> bytes:
    noise = rng.randbytes(int(math.exp(rng.uniform(0, math.log(200_000)))))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"model": "qwen3-next", "prompt": [1, 2, ' + noise[:50]
    length = b"Content-Length: %d\r\n\r\n"
    return rng.choice(
        (
            noise,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,  # the beginning of a TLS hello
            head + length % len(body) + body,
            head + length % (1 << 40) + body,
            head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + noise,
            head + b"X-Long: " + noise.hex().encode() + b"\r\n\r\n",
            b"GET /" + noise.hex().encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /health HTTP/7.7\r\n\r\n" + noise,
        )
    )


@contextlib.asynccontextmanager
async def _connections(address: tuple[str, int], count: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(count):
            # A port whose queue of connections is full doesn't answer; it has enough of them then.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    _, writer = await asyncio.open_connection(*address)
                writers.append(writer)
                continue
            break
        if count and not writers:
            raise ConnectionError(f"{address[0]}:{address[1]} takes no connection")
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()
