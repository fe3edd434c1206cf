"""What traces cost the gateway, in CPU time per request: none, not sampled, and sampled.

Run: python bench/tracing.py [--requests N] [--json]

One request is all that an offloaded one does to its record and its spans, without the work in between: eight spans.
A collector in a process of its own takes them.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import CollectorRegistry

from prfaas.core.deployment import Instance
from prfaas.core.scheduling.decision import Decision, Route
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request_log import RequestLog, TransferredBytes
from prfaas.serving.gateway.ways.hops import HopTrace, TransferSpec
from prfaas.serving.gateway.ways.preparing import decision_attributes
from prfaas.serving.tracing import NO_TRACE
from prfaas.serving.tracing.collector import TraceCollector
from prfaas.serving.tracing.otel import OtelTracing

GOAL_NOT_SAMPLED_US = 100.0
GOAL_SAMPLED_US = 1000.0
ROUNDS = 5
# So that the queue has room: a gateway does not serve a thousand requests in the time of one batch.
BATCH_REQUESTS = 100
PAUSE_S = 0.2


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        pass


def collect(port: Connection) -> None:
    """Take spans until killed; the port goes to `port` first."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    port.send(server.server_port)
    server.serve_forever()


class _Plane:
    """What the spans of a hop ask for."""

    links: Any
    members: Any

    def __init__(self) -> None:
        self.links = self.members = self

        self._instances = {
            name: Instance(
                name=name,
                cluster=cluster,
                roles=("prefill",),
                host="127.0.0.1",
                http_port=1,
                kv_port=2,
            )
            for name, cluster in (("remote", "far"), ("decode", "pd"))
        }

    def instance(self, name: str) -> Instance:
        return self._instances[name]

    def resent_bytes(self, _producer: str, _consumer: str) -> int:
        return 0


DECISION = Decision(
    route=Route.OFFLOAD,
    prefill="remote",
    decode="decode",
    uncached_tokens=30_000,
    prefill_tokens=30_000,
    skip_tokens=0,
    kv_bytes=1 << 30,
    reason="long",
    threshold_tokens=19_400.0,
    predicted_ttft_s=1.5,
)
SPEC = TransferSpec("remote", "decode", range(30_000), 0, 1 << 30)
HEADERS = {"Content-Type": "application/json"}


async def one_request(log: RequestLog, plane: Any) -> None:
    """What an offloaded request does to its record and its spans."""
    clock = time.perf_counter
    with log.recording("completions", HEADERS) as record:
        record.model, record.streamed, record.prompt_tokens = "model", True, 30_000
        record.since("read", record.began_s)
        record.since("tokenize", clock())
        begun_s = clock()
        record.since("decide", begun_s, decision_attributes(DECISION, "tilted"))
        attempt = record.start(DECISION, 30_000)
        record.since("turn", clock())
        hop = HopTrace(record.trace, SPEC, plane)
        hop.headers(HEADERS)
        hop.prefilled(0)
        arrival: Any = asyncio.get_running_loop().create_future()
        arrival.set_result(TransferredBytes(1 << 30, 1 << 29))
        hop.arrived(arrival)
        attempt.outcome = "done"
        with record.trace.open("decode", {"prfaas.instance": "decode"}, asks_engine=True) as span:
            span.headers(HEADERS)
            span.tell({"http.response.status_code": 200})
        record.steps_s["first_byte"] = 1.0
        record.trace.event("first_byte")
        record.answered(200)


@dataclass(frozen=True)
class Cost:
    """CPU microseconds per request."""

    loop_us: float
    """Of the event loop's thread."""
    all_us: float
    """Of the whole process, so also of the thread that sends."""


async def measure(make: Callable[[Metrics], OtelTracing | None], requests: int) -> Cost:
    """The least of some rounds."""
    metrics = Metrics(CollectorRegistry())
    tracing = make(metrics)
    log, plane = RequestLog(1000, metrics, tracing), _Plane()
    rounds: list[Cost] = []
    for _ in range(ROUNDS):
        loop_s, process_s = 0.0, time.process_time()
        for _ in range(0, requests, BATCH_REQUESTS):
            begun_s = time.thread_time()
            for _ in range(BATCH_REQUESTS):
                await one_request(log, plane)
            loop_s += time.thread_time() - begun_s
            if tracing is not None:
                await asyncio.sleep(PAUSE_S)
        rounds.append(Cost(loop_s / requests * 1e6, (time.process_time() - process_s) / requests * 1e6))
    if tracing is not None:
        await tracing.close()
    return Cost(min(each.loop_us for each in rounds), statistics.median(each.all_us for each in rounds))


def hooks_us(requests: int) -> float:
    """Of a request without traces: the call to an engine that has no span."""
    rounds = []
    for _ in range(ROUNDS):
        begun_s = time.thread_time()
        for _ in range(requests):
            with NO_TRACE.open("decode", {"prfaas.instance": "decode"}, asks_engine=True) as span:
                span.headers(HEADERS)
                span.tell({"http.response.status_code": 200})
        rounds.append((time.thread_time() - begun_s) / requests * 1e6)
    return min(rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    collector = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,), daemon=True)
    collector.start()
    try:
        assert ours.poll(30), "the collector does not start"
        endpoint = f"http://127.0.0.1:{ours.recv()}/v1/traces"
        figures = run(endpoint, asked.requests)
    finally:
        collector.kill()
        collector.join()
    limits = {"not_sampled_us": GOAL_NOT_SAMPLED_US, "sampled_us": GOAL_SAMPLED_US}
    goals = [
        {"name": name, "value": figures[name], "unit": "µs", "goal": goal, "met": figures[name] <= goal}
        for name, goal in limits.items()
    ]
    if asked.json:
        print(json.dumps({"figures": figures, "goals": goals}, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:8.1f}")


def run(endpoint: str, requests: int) -> dict[str, float]:
    """CPU microseconds per request."""

    def traced(ratio: float) -> Callable[[Metrics], OtelTracing]:
        def make(metrics: Metrics) -> OtelTracing:
            def count(outcome: str, spans: int) -> None:
                metrics.trace_spans.labels(outcome).inc(spans)

            return OtelTracing(TraceCollector(endpoint, ratio), "bench", count)

        return make

    async def all_three() -> dict[str, float]:
        off = await measure(lambda _metrics: None, requests)
        unsampled = await measure(traced(0.0), requests)
        sampled = await measure(traced(1.0), requests)
        return {
            "record_us": off.loop_us,
            "hooks_us": hooks_us(requests),
            "not_sampled_us": unsampled.loop_us - off.loop_us,
            "sampled_us": sampled.loop_us - off.loop_us,
            "sampled_and_sent_us": sampled.all_us - off.all_us,
        }

    return asyncio.run(all_three())


if __name__ == "__main__":
    main()
