"""Hostile acts beside honest requests: is everybody else answered, as soon as before, and is nothing left?

    python bench/hostile.py [--acts N] [--requests N] [--per-s N] [--open N] [--seed N] [--json FILE]

Stand-in engines in one process behind one gateway process. The same number of honest streams is sent twice: alone, and
with the acts beside. Acts come from many loopback addresses, a few dozen at once:

slow      a head or a body of which one byte comes every half second
huge      a body that says it has a TiB, or sends megabytes of no JSON, or never ends
deep      JSON of 10,000 levels
numbers   NaN, 10**400 and worse as prompts and options
long      a stop string of a megabyte in a stream; prompts far beyond what the model takes
heads     a hundred header fields of 60 KB, trailers as large, a thousand requests at once on one connection
unread    a long stream of which nothing is read
form      bodies in other forms: text, gzip, heads of 100 KiB
garbage   bytes that are no frame, at a KV port
flood     connections to a KV port that say half of a greeting
role      authenticated as tools: PACE, ROSTER, PROBE, ABANDON and COPY, which only others may send
replay    an observer's greeting, sent again
pool      at the socket of a pool that stands beside: requests whose answers are not read, or messages of any bytes

Ends with 1 if under 99.9 % of the honest requests had their right answer, the 99th percentile of their first tokens was
over twice the one before, the memory of gateway, engines or pool over 1.5 times, or something is left over.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from faults_load import Answers
from faults_stack import MODEL, FaultStack
from faults_watch import Baseline, left_processes, leftovers, tracebacks
from pool_world import pooled_deployment, running_pool
from prfaas.core.deployment import TOOLS, Instance
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.pool.protocol import LENGTH_BYTES, PROTOCOL_VERSION, OpenSession, Stats
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.handshake import NONCE_BYTES, ROLE_OBSERVER, ClientHello
from prfaas.serving.transport.protocol.wire import FrameType, pack_control

ANSWER_TOKENS = 24
PROMPT_TOKENS = (100, 2500)
AT_ONCE = 32
HELD_S = (0.5, 3.0)
PATIENCE_S = 60.0
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(slots=True)
class Honest:
    """What became of the honest requests of one phase."""

    first_token_s: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return len(self.first_token_s) + sum(self.wrong.values())

    @property
    def answered(self) -> float:
        """The share with a right answer."""
        return len(self.first_token_s) / max(self.total, 1)

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.first_token_s, 99)) if self.first_token_s else float("inf")


class Acts:
    """The hostile acts, each a coroutine; the seed decides all of them."""

    def __init__(self, stack: FaultStack, pool: Path, seed: int) -> None:
        """`pool`: the socket of its daemon."""
        self._stack = stack
        self._pool = pool
        self._rng = random.Random(seed)
        gateway = stack.deployment.gateway
        self._clients = (gateway.host, gateway.port)
        self._key = load_key(stack.deployment.security.key_file)
        self._kinds: Sequence[Callable[[], Awaitable[None]]] = (
            self._slow,
            self._huge,
            self._deep,
            self._numbers,
            self._long,
            self._heads,
            self._unread,
            self._form,
            self._garbage,
            self._flood,
            self._role,
            self._replay,
            self._asks_pool,
        )
        self.done: Counter[str] = Counter()

    async def run(self, count: int, per_s: float) -> None:
        """`count` acts at random times, some dozen at once."""
        todo = [self._kinds[number % len(self._kinds)] for number in range(count)]
        self._rng.shuffle(todo)
        room = asyncio.Semaphore(AT_ONCE)

        async def one(act: Callable[[], Awaitable[None]]) -> None:
            # What a peer does to one that attacks it is its own business.
            with contextlib.suppress(OSError, EOFError, TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(PATIENCE_S):
                    await act()
            self.done[act.__name__.strip("_")] += 1
            room.release()

        async with asyncio.TaskGroup() as group:
            for act in todo:
                await room.acquire()
                group.create_task(one(act))
                await asyncio.sleep(self._rng.expovariate(per_s))

    async def _said(
        self, address: tuple[str, int], *pieces: bytes, pause_s: float = 0.0, held_s: float = 0.0
    ) -> None:
        """Send pieces from some loopback address, read nothing, and leave."""
        source = f"127.{self._rng.randrange(1, 255)}.{self._rng.randrange(256)}.{self._rng.randrange(1, 255)}"
        _, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            await asyncio.sleep(held_s)
        finally:
            writer.transport.abort()

    async def _post(self, body: bytes, **held: float) -> None:
        await self._said(self._clients, JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, **held)

    def _held_s(self) -> float:
        return self._rng.uniform(*HELD_S)

    def _kv_port(self) -> tuple[Instance, tuple[str, int]]:
        instance = self._rng.choice(self._stack.deployment.instances)
        return instance, (instance.host, instance.kv_port)

    async def _slow(self) -> None:
        text = JSON_HEAD + b"Content-Length: 1000\r\n\r\n{"
        begin = self._rng.choice((20, len(text) - 1))
        pieces = [text[:begin], *(bytes([byte]) for byte in text[begin : begin + 6])]
        await self._said(self._clients, *pieces, pause_s=0.5)

    async def _huge(self) -> None:
        chunk = b"10000\r\n" + b"7" * (1 << 16) + b"\r\n"
        match self._rng.randrange(3):
            case 0:
                await self._said(
                    self._clients, JSON_HEAD + b"Content-Length: %d\r\n\r\n{" % (1 << 40), held_s=0.5
                )
            case 1:
                await self._post(b'{"prompt": "' + b"\xff" * (8 << 20), held_s=0.5)
            case _:
                endless = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
                await self._said(self._clients, endless, *[chunk] * 200)

    async def _deep(self) -> None:
        opens, closes = self._rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        await self._post(b'{"prompt": ' + opens * 10_000 + b"1" + closes * 10_000 + b"}", held_s=0.2)

    async def _numbers(self) -> None:
        worst = self._rng.choice(
            (b"NaN", b"-Infinity", b"1" + b"0" * 400, b"-1", b"1e999", b"[[[]]]", b'"\\ud800"')
        )
        field = self._rng.choice((b"max_tokens", b"temperature", b"n", b"prompt", b"stream", b"logprobs"))
        await self._post(b'{"prompt": [1, 2, 3], "%b": %b}' % (field, worst), held_s=0.2)

    async def _long(self) -> None:
        ids = [self._rng.randrange(3, 250) for _ in range(PROMPT_TOKENS[1])]
        asked: dict[str, Any] = self._rng.choice(
            (
                {"prompt": ids, "max_tokens": 4, "stream": True, "stop": "~" * (1 << 20)},
                {"prompt": "one two " * (1 << 18)},
                {"prompt": [7] * (1 << 18)},
            )
        )
        await self._post(json.dumps({"model": MODEL} | asked).encode(), held_s=1.0)

    async def _heads(self) -> None:
        fields = [b"X-%d: " % number + b"x" * 60_000 + b"\r\n" for number in range(100)]
        chunked = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        match self._rng.randrange(3):
            case 0:
                await self._said(self._clients, JSON_HEAD, *fields)
            case 1:
                await self._said(self._clients, chunked, *fields)
            case _:
                await self._said(
                    self._clients, b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000, held_s=0.5
                )

    async def _unread(self) -> None:
        asked = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2000, "stream": True, "ignore_eos": True}
        await self._post(json.dumps(asked).encode(), held_s=self._held_s())

    async def _form(self) -> None:
        heads = (
            b"Content-Type: text/plain\r\n",
            b"Content-Type: application/json\r\nContent-Encoding: gzip\r\n",
            b"Content-Type: application/json\r\nX-Long: " + b"x" * 100_000 + b"\r\n",
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        )
        start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\n"
        await self._said(
            self._clients, start + self._rng.choice(heads) + b"Content-Length: 2\r\n\r\n{}", held_s=0.2
        )

    async def _garbage(self) -> None:
        noise = self._rng.randbytes(self._rng.randrange(1, 100_000))
        begin = self._rng.choice((b"", b"PFAS\x04\x01", b"\x16\x03\x01\x02\x00"))
        await self._said(self._kv_port()[1], begin + noise, held_s=0.2)

    async def _flood(self) -> None:
        instance, address = self._kv_port()
        hello = self._hello(instance).frame()
        halves = (self._said(address, hello[: self._rng.randrange(len(hello))], held_s=1.0) for _ in range(8))
        await asyncio.gather(*halves, return_exceptions=True)

    async def _role(self) -> None:
        instance, address = self._kv_port()
        observer = Observer(TOOLS, self._key, *address, f"{instance.name}/0")
        try:
            await observer.connect()
            kinds = (FrameType.PACE, FrameType.ROSTER, FrameType.PROBE, FrameType.ABANDON, FrameType.COPY)
            worst: dict[str, Any] = {
                "links": {"home->far": 1.0},
                "hold_ms": 60_000,
                "bytes": 1 << 30,
                "peers": [],
            }
            observer._send(pack_control(self._rng.choice(kinds), secrets.token_bytes(16), worst))
            await observer.stats()
        finally:
            await observer.close()

    async def _replay(self) -> None:
        instance, address = self._kv_port()
        proof = pack_control(FrameType.AUTH, body={"proof": self._rng.randbytes(32).hex()})
        stats = pack_control(FrameType.STATS, body={})
        await self._said(address, self._hello(instance).frame() + proof + stats * 50, held_s=0.3)

    async def _asks_pool(self) -> None:
        opened = OpenSession(PROTOCOL_VERSION, "tool", 0, self._rng.randbytes(8), None)
        said = [msgspec.msgpack.encode(each) for each in (opened, *[Stats()] * 20_000)]
        if self._rng.random() < 0.5:
            said[1:] = [self._rng.randbytes(self._rng.randrange(1, 1000))]
        _, writer = await asyncio.open_unix_connection(self._pool)
        try:
            writer.write(b"".join(len(each).to_bytes(LENGTH_BYTES, "little") + each for each in said))
            await asyncio.sleep(self._held_s())
        finally:
            writer.transport.abort()

    def _hello(self, instance: Instance) -> ClientHello:
        return ClientHello(
            nonce=secrets.token_hex(NONCE_BYTES),
            key=self._key,
            name="gateway",
            server_name=f"{instance.name}/0",
            role=ROLE_OBSERVER,
            session="replayed",
            fingerprint={},
        )


async def _honest(stack: FaultStack, answers: Answers, options: argparse.Namespace, seed: int) -> Honest:
    """So many streams at random times, each of a prompt of its own."""
    rng, found, room = random.Random(seed), Honest(), asyncio.Semaphore(options.open)

    async def one(prompt: list[int], session: aiohttp.ClientSession) -> None:
        async with room:
            await ask(prompt, session)

    async def ask(prompt: list[int], session: aiohttp.ClientSession) -> None:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        began_s, first_s, raw = time.perf_counter(), 0.0, b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                async with session.post(f"{stack.gateway_url}/v1/completions", json=body) as response:
                    async for piece in response.content.iter_any():
                        first_s = first_s or time.perf_counter() - began_s
                        raw += piece
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            found.wrong[type(error).__name__] += 1
            return
        events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
        said = [json.loads(event) for event in events]
        text = "".join(choice["text"] for each in said for choice in each.get("choices", ()))
        if response.status == 200 and text == answers.of(prompt, ANSWER_TOKENS):
            found.first_token_s.append(first_s)
        else:
            found.wrong[f"{response.status}: {raw[:80]!r}"] += 1

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(options.requests):
            prompt = rng.choices(range(3, 250), k=rng.randint(*PROMPT_TOKENS))
            group.create_task(one(prompt, session))
            await asyncio.sleep(rng.expovariate(options.per_s))
    return found


async def _most_bytes(pids: Mapping[str, int], over: asyncio.Event) -> dict[str, int]:
    """The largest resident memory of each process until then."""
    most = dict.fromkeys(pids, 0)
    while not over.is_set():
        for name, pid in pids.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            most[name] = max(most[name], pages * os.sysconf("SC_PAGE_SIZE"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 0.2)
    return most


async def measured(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both phases, and what is left."""
    stack = FaultStack(home)
    stack.engines = RunningEngines(stack.deployment, stand_ins_per_process=len(stack.deployment.instances))
    answers = Answers(stack.deployment)
    pooled = pooled_deployment(home, "beside", memory="64 MiB")
    async with stack.running(), AsyncExitStack() as beside_it:
        pools = beside_it.enter_context(running_pool(pooled))
        (node,) = pooled.pools
        baseline = Baseline.of(stack)
        found: list[tuple[Honest, dict[str, int]]] = []
        acts = Acts(stack, pooled.pool_socket(node), options.seed)
        pids = {
            "gateway": stack.gateway_pid,
            # Stand-ins share a process.
            "engines": stack.pid(stack.deployment.instances[0].name),
            "pool": pools.pid(node.name),
        }
        for phase in range(2):
            over = asyncio.Event()
            watching = asyncio.create_task(_most_bytes(pids, over))
            beside = asyncio.create_task(
                acts.run(options.acts if phase else 0, options.per_s * options.acts / options.requests)
            )
            honest = await _honest(stack, answers, options, options.seed + phase)
            await beside
            over.set()
            found.append((honest, await watching))
        left, _ = await leftovers(stack, baseline)
        broken = tracebacks(stack.deployment, stack.home)
    (alone, alone_bytes), (beside_acts, acts_bytes) = found
    return {
        "acts": dict(acts.done),
        "requests": beside_acts.total,
        "answered_alone": alone.answered,
        "answered": beside_acts.answered,
        "wrong": dict(beside_acts.wrong) | {f"alone: {what}": count for what, count in alone.wrong.items()},
        "p99_alone_s": alone.p99_s,
        "p99_s": beside_acts.p99_s,
        "alone_bytes": alone_bytes,
        "bytes": acts_bytes,
        "left_over": left + left_processes(home),
        "tracebacks": broken,
    }


def verdicts(found: dict[str, Any]) -> list[tuple[bool, str]]:
    """Each goal, and whether it is met."""
    return [
        (
            found["answered"] >= 0.999,
            f"{found['answered']:.2%} of {found['requests']} honest requests answered right",
        ),
        (
            found["p99_s"] <= 2 * found["p99_alone_s"],
            f"first tokens, 99th percentile: {found['p99_s']:.2f} s, alone {found['p99_alone_s']:.2f} s",
        ),
        *(
            (
                most <= 1.5 * found["alone_bytes"][name],
                f"memory of {name}: {most >> 20} MiB, alone {found['alone_bytes'][name] >> 20} MiB",
            )
            for name, most in found["bytes"].items()
        ),
        (not found["left_over"], f"{len(found['left_over'])} things left over"),
        (not found["tracebacks"], f"{len(found['tracebacks'])} tracebacks in the logs"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--acts", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--per-s", type=float, default=20.0, help="honest requests a second")
    parser.add_argument("--open", type=int, default=1000, help="most honest requests at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prfaas-hostile-") as home:
        found = uvloop.run(measured(Path(home), options))
    for what, count in (found["acts"] | found["wrong"]).items():
        print(f"{count:6}  {what}")
    for text in found["left_over"] + found["tracebacks"]:
        print(text)
    for good, sentence in verdicts(found):
        print(f"{'yes' if good else 'NO '}  {sentence}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(good for good, _ in verdicts(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
