"""What TLS with certificates on both sides costs a hop from the gateway to an engine.

    python bench/https_hop.py [--json]

The gateway's own pool asks a server in another process, over HTTP and over TLS in turn. A short request has 1 KiB and
an answer of 400 bytes; a long one is the 600 KB of a prompt with 128K token ids. Processor time is of both processes;
it depends least on what else the machine does.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import uvloop

from prfaas.core.deployment import GATEWAY, Deployment, load_deployment
from prfaas.serving.certificates import CertificateFolder, identity_of
from prfaas.serving.gateway.http_pool import HttpPool, HttpTimes
from prfaas.serving.transport.io.tls_identity import TlsIdentity

EXAMPLE = Path(__file__).parents[1] / "examples" / "local.yaml"
ENGINE = "east-prefill-0"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n" + b"x" * 400
SHORT, LONG = b"x" * 1024, b"x" * 600_000
ROUNDS = 9


class _Answering(asyncio.Protocol):
    """Answers when a request's body is complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._missing: int | None = None

    def data_received(self, data: bytes) -> None:
        if self._missing is None:
            head, _, data = data.partition(b"\r\n\r\n")
            self._missing = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self._missing -= len(data)
        if self._missing <= 0:
            self._missing = None
            self._transport.write(ANSWER)


def serve(deployment: Deployment, pipe: Connection) -> None:
    """Tell the ports, then the processor time whenever asked."""

    async def run() -> None:
        loop, identity = asyncio.get_running_loop(), identity_of(deployment, ENGINE)
        assert identity is not None
        ports = []
        for context in (None, identity.listening_context()):
            server = await loop.create_server(_Answering, "127.0.0.1", 0, ssl=context)
            ports.append(server.sockets[0].getsockname()[1])
        pipe.send(ports)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())

    uvloop.run(run())


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    name: str
    body: bytes
    requests: int
    kept: bool
    """Whether the connection is kept for the next request."""


CASES = (
    Case("short request, connection kept", SHORT, 1000, True),
    Case("short request, new connection", SHORT, 150, False),
    Case("128K token ids, connection kept", LONG, 100, True),
)


async def ask(case: Case, port: int, tls: TlsIdentity | None) -> list[float]:
    """The seconds that each request took."""
    took_s = []
    pool = HttpPool(HttpTimes(connect_s=10.0, keepalive_s=60.0), tls=tls)
    for _ in range(case.requests):
        begun_s = time.perf_counter()
        answer = await pool.request(
            "POST", "127.0.0.1", port, "/v1/completions", {}, case.body, server_name=ENGINE if tls else None
        )
        await answer.read()
        took_s.append(time.perf_counter() - begun_s)
        if not case.kept:
            pool.close()
    pool.close()
    return took_s


async def measure(
    case: Case, ports: list[int], tls: TlsIdentity, server_cpu_s: Callable[[], float]
) -> dict[str, float]:
    """Medians over rounds of HTTP and TLS in turn, in milliseconds a request."""
    cpu_ms: dict[bool, list[float]] = {True: [], False: []}
    took_ms: dict[bool, list[float]] = {True: [], False: []}
    for number in range(ROUNDS + 1):
        for encrypted in (True, False) if number % 2 else (False, True):
            before_s = time.process_time() + server_cpu_s()
            took_s = await ask(case, ports[encrypted], tls if encrypted else None)
            spent_s = time.process_time() + server_cpu_s() - before_s
            if number:
                cpu_ms[encrypted].append(spent_s / case.requests * 1e3)
                took_ms[encrypted].append(statistics.median(took_s) * 1e3)
    more_ms = [a - b for a, b in zip(cpu_ms[True], cpu_ms[False], strict=True)]
    return {
        "HTTP, CPU ms": round(statistics.median(cpu_ms[False]), 4),
        "TLS, CPU ms": round(statistics.median(cpu_ms[True]), 4),
        "TLS adds, CPU ms": round(statistics.median(more_ms), 4),
        "TLS adds, CPU ms, least": round(min(more_ms), 4),
        "TLS adds, CPU ms, most": round(max(more_ms), 4),
        "HTTP, ms": round(statistics.median(took_ms[False]), 4),
        "TLS, ms": round(statistics.median(took_ms[True]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        deployment = load_deployment(EXAMPLE, state_dir=Path(home))
        CertificateFolder(deployment).make()
        file = deployment.security.identity_file(GATEWAY)
        gateway = TlsIdentity(file, file, deployment.security.ca_file)
        here, there = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(deployment, there), daemon=True
        )
        server.start()
        ports: list[int] = here.recv()

        def server_cpu_s() -> float:
            here.send(True)
            return float(here.recv())

        result = {case.name: uvloop.run(measure(case, ports, gateway, server_cpu_s)) for case in CASES}
        here.send(False)
        server.join(10)
        server.kill()
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, figures in result.items():
        print(name)
        for figure, number in figures.items():
            print(f"  {figure}: {number}")


if __name__ == "__main__":
    main()
