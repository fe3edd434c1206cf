"""Every engine and every gateway is replaced once while streams of all kinds go on: does any client notice?

    python bench/rollout.py [--engines stand-ins|vllm] [--streams N] [--per-s RATE] [--replace INSTANCE…] [--no-etcd]
                            [--json FILE] [--keep-logs DIR]

Two sites, two gateways that share an etcd (without the binary they share none, and hear of drains from the engines).
Engines are restarted as systemd does it: `prfaas drain --as-engine` before the signal (ExecStop), then SIGTERM.
`prfaas rollout` goes from one to the next. A gateway is taken out of the load balancer before its SIGTERM, as a pod is.

Ends with 1 if a stream broke, an answer was none of 200, or P99 of the first tokens was more than twice that of the
same load in quiet.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson

from ports import free_ports
from prfaas.core.deployment import load_deployment
from prfaas.serving.engines.preparation import ensure_model
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.template import EngineTemplates
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.secret_files import create_key

T = TypeVar("T")
MODEL = "tiny"
READY_S = 180.0
DRAIN_S = 20
STREAM_S = 120.0
TTFT_FACTOR = 2.0
_LOOK_S = 0.1
_PRFAAS = (sys.executable, "-m", "prfaas.cli.main")
_TOOL = {"type": "function", "function": {"name": "pick", "parameters": {"type": "object"}}}
_DONE = (b"data: [DONE]",)
_ENDS = {
    **dict.fromkeys(("text", "reasoning", "tools"), _DONE),
    "responses": (b"event: response.completed", b"event: response.incomplete"),
    "messages": (b"event: message_stop",),
}
# The last event of a response has all of its text.
_TAIL_BYTES = 64 << 10
_PARSERS = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def _kinds(said: str, tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of a stream, by kind."""
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": said}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    return {
        "text": ("/v1/completions", {"prompt": said, "max_tokens": tokens, "ignore_eos": True}),
        "reasoning": ("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}}),
        "tools": ("/v1/chat/completions", {**chat, "tools": [_TOOL]}),
        "responses": ("/v1/responses", {"input": said, "max_output_tokens": tokens}),
        "messages": ("/v1/messages", {"messages": chat["messages"], "max_tokens": tokens}),
    }


@dataclass(slots=True)
class Stream:
    """What became of one stream."""

    kind: str
    status: int = 0
    ttft_s: float = math.inf
    trouble: str = ""

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and not self.trouble


def write_deployments(home: Path, engines: str, etcd: str | None) -> list[Path]:
    """One file for each gateway."""
    counts = (
        {"far": 2, "home-p": 1, "home-d": 3}
        if engines == "stand-ins"
        else {"far": 1, "home-p": 0, "home-d": 2}
    )
    ports = iter(free_ports(2 * sum(counts.values()) + 4))

    def instances(name: str, role: str, count: int) -> list[dict[str, Any]]:
        return [
            {
                "name": f"{name}-{i}",
                "roles": [role],
                "host": "127.0.0.1",
                "http_port": next(ports),
                "kv_port": next(ports),
            }
            for i in range(count)
        ]

    far: dict[str, Any] = {
        "name": "far",
        "kind": "prfaas",
        "instances": instances("far", "prefill", counts["far"]),
    }
    at_home = [
        *instances("home-p", "prefill", counts["home-p"]),
        *instances("home-d", "decode", counts["home-d"]),
    ]
    near: dict[str, Any] = {"name": "home", "kind": "pd", "instances": at_home}
    model: dict[str, Any] = {"served_name": MODEL, "max_model_len": 8192}
    engine: dict[str, Any] = {"max_num_batched_tokens": 1024, "kv_cache_gib": 0.25, "staging": "64 MiB"}
    if engines == "stand-ins":
        far |= {"hardware": "synthetic", "profile": "internal-1t-h200", "speedup": 8}
        near |= {"hardware": "synthetic", "profile": "internal-1t-h20", "speedup": 8}
        folder = home / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tiny_config("qwen3")))
        write_tokenizer(folder, 1 << 16)
        model["path"] = str(folder)
        engine |= {"max_num_seqs": 64}
    else:
        far["hardware"] = near["hardware"] = "cpu"
        model["tiny"] = "qwen3"
        engine |= {"extra_args": _PARSERS}
    document = {
        "name": "rollout",
        "model": model,
        "clusters": [far, near],
        "links": [{"source": "far", "target": "home", "bandwidth": "1 Gbit/s", "connections": 2}],
        "routing": {"policy": "static_threshold", "threshold_tokens": 1000},
        "control": {"allocation": False, "silence_s": 15 if engines == "vllm" else 3},
        "gateway": {"host": "127.0.0.1"},
        "engine": {**engine, "shutdown_timeout_s": DRAIN_S},
    }
    found = []
    for number in range(2):
        gateway = {"host": "127.0.0.1", "port": next(ports), "admin": {"port": next(ports)}}
        fleet = {} if etcd is None else {"fleet": {"etcd": [etcd], "name": f"gateway-{number}"}}
        found.append(home / f"gateway-{number}.yaml")
        found[-1].write_text(json.dumps({**document, "gateway": gateway, **fleet}))
    return found


class Gateway:
    """One process of a gateway, and whether the load balancer sends it anything."""

    def __init__(self, home: Path, path: Path) -> None:
        self._home, self._path = home, path
        self.url = load_deployment(path, state_dir=home).gateway.url
        self.is_in = False
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        with (self._home / f"{self._path.stem}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*_PRFAAS, "serve", str(self._path)], stdout=log, stderr=log, env=_environment(self._home)
            )
        deadline_s = time.monotonic() + READY_S
        while not await _is_ready(session, self.url):
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise TimeoutError(f"the gateway {self._path.stem} is not ready")
            await asyncio.sleep(_LOOK_S)
        self.is_in = True

    async def replace(self, session: aiohttp.ClientSession) -> None:
        """As Kubernetes does: out of the load balancer, then SIGTERM, then a new one."""
        self.is_in = False
        await asyncio.sleep(5 * _LOOK_S)
        await self.stop()
        await self.start(session)

    async def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready", timeout=aiohttp.ClientTimeout(total=2)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PRFAAS_HOME": str(home)}


class Supervisor:
    """What systemd is elsewhere: POST /NAME restarts an engine, with ExecStop before the signal."""

    def __init__(self, home: Path, path: Path, engines: RunningEngines) -> None:
        self._home, self._path, self._engines = home, path, engines
        self._thread = ThreadPoolExecutor(1, "engines")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                trouble = outer.call(outer.restart, self.path.strip("/"))
                self.send_response(500 if trouble else 200)
                self.end_headers()
                self.wfile.write(trouble.encode())

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def command(self) -> str:
        """For `prfaas rollout --command`."""
        url = f"http://127.0.0.1:{self._server.server_port}/"
        code = f"import sys, urllib.request as u; u.urlopen(u.Request({url!r} + sys.argv[1], method='POST'))"
        return shlex.join((sys.executable, "-c", code, "{instance}"))

    def call(self, do: Callable[..., T], *args: object) -> T:
        """Have the one thread do it that has all to do with engines."""
        return self._thread.submit(do, *args).result()

    def restart(self, name: str) -> str:
        """Returns what went wrong."""
        done = subprocess.run(
            [*_PRFAAS, "drain", name, str(self._path), "--as-engine", "--wait", str(DRAIN_S)],
            env=_environment(self._home),
            capture_output=True,
            text=True,
            timeout=60 + DRAIN_S,
        )
        print(f"  ExecStop: {done.stdout.strip() or done.stderr.strip()}", file=sys.stderr)
        self._engines.end(self._engines.deployment.instance(name), 2.0 * DRAIN_S)
        self._engines.restart([name])
        self._engines.wait_ready(READY_S)
        return "" if done.returncode in (0, 1) and "drain" in done.stdout else done.stderr

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.call(self._engines.stop)
        self._thread.shutdown()


@contextlib.contextmanager
def running_etcd(home: Path) -> Iterator[str | None]:
    """Its URL; None where there is no such binary."""
    if shutil.which("etcd") is None:
        yield None
        return
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    urls = [
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
    ]
    urls += [
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]
    with (home / "etcd.log").open("ab") as log:
        process = subprocess.Popen(["etcd", f"--data-dir={home / 'etcd'}", *urls], stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s and process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{client}/health", timeout=1) as told:
                if b"true" in told.read():
                    break
            time.sleep(_LOOK_S)
        yield client
    finally:
        process.kill()
        process.wait()


@dataclass
class Load:
    """Streams over both gateways, as a load balancer leads them."""

    session: aiohttp.ClientSession
    gateways: Sequence[Gateway]
    per_s: float
    tokens: int
    rng: random.Random
    done: list[Stream] = field(default_factory=list)
    _open: set[asyncio.Task[None]] = field(default_factory=set)
    _sent: int = 0

    async def run(self, until: asyncio.Event, least: int) -> list[Stream]:
        """Send until told to stop, and at least so many; their ends are waited for."""
        self.done = []
        due_s, count = time.monotonic(), 0
        while count < least or not until.is_set():
            due_s += self.rng.expovariate(self.per_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.create_task(self._send())
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            count += 1
        if self._open:
            await asyncio.wait(self._open)
        return self.done

    async def _send(self) -> None:
        self._sent += 1
        words = self.rng.choices(
            ("naïve", "things", "about", "数字", "at", "length"), k=self.rng.choice((20, 300))
        )
        kinds = _kinds(" ".join((str(self._sent), *words)), self.rng.randint(self.tokens // 2, self.tokens))
        kind = list(kinds)[self._sent % len(kinds)]
        path, body = kinds[kind]
        stream = Stream(kind)
        self.done.append(stream)
        gateway = self._gateway()
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(STREAM_S):
                content = orjson.dumps({"model": MODEL, "stream": True, "temperature": 0, **body})
                async with self.session.post(
                    gateway.url + path, data=content, headers={"Content-Type": "application/json"}
                ) as response:
                    stream.status = response.status
                    if response.status != 200:
                        stream.trouble = (await response.text())[:200]
                        return
                    await self._read(stream, response, begun_s)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            stream.trouble = f"{type(error).__name__}: {error}"

    def _gateway(self) -> Gateway:
        able = [each for each in self.gateways if each.is_in]
        return able[self._sent % len(able)]

    @staticmethod
    async def _read(stream: Stream, response: aiohttp.ClientResponse, begun_s: float) -> None:
        tail = b""
        async for piece in response.content.iter_any():
            if stream.ttft_s == math.inf:
                stream.ttft_s = time.monotonic() - begun_s
            if (at := piece.find(b'"error":{')) >= 0:
                stream.trouble = piece[at : at + 200].decode("utf-8", "replace")
            tail = (tail + piece)[-_TAIL_BYTES:]
        if not stream.trouble and not any(end in tail for end in _ENDS[stream.kind]):
            stream.trouble = f"it ended with {tail[-100:]!r}"


@dataclass
class Report:
    """One run, judged."""

    engines: str
    etcd: bool
    streams: int
    broken: list[Stream]
    kinds: dict[str, int]
    replaced: list[str]
    took_s: float
    quiet_ttft_s: float
    ttft_s: float

    @property
    def failures(self) -> list[str]:
        found = [f"{len(self.broken)} of {self.streams} streams broke"] if self.broken else []
        if self.ttft_s > TTFT_FACTOR * self.quiet_ttft_s:
            found.append(f"P99 of the first tokens: {self.ttft_s:.2f} s, {self.quiet_ttft_s:.2f} s in quiet")
        return found


def _p99(streams: Sequence[Stream]) -> float:
    times = sorted(each.ttft_s for each in streams)
    return times[min(len(times) - 1, int(0.99 * len(times)))] if times else math.inf


async def _replace_all(
    home: Path, path: Path, names: Sequence[str], supervisor: Supervisor, load: Load
) -> list[str]:
    """Every gateway but the first, every engine, and then the first gateway."""
    await load.gateways[1].replace(load.session)
    process = await asyncio.create_subprocess_exec(
        *(*_PRFAAS, "rollout", str(path), *names, "--command", supervisor.command, "--drain", str(DRAIN_S)),
        *("--ready-timeout", str(READY_S), "--json"),
        env=_environment(home),
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    document = json.loads(told)
    if process.returncode:
        raise RuntimeError(document["failed"])
    await load.gateways[0].replace(load.session)
    return [name for each in document["replaced"] for name in each["instances"]]


async def run(options: argparse.Namespace, home: Path, etcd: str | None) -> Report:
    engines, streams, per_s, names = options.engines, options.streams, options.per_s, options.replace
    paths = write_deployments(home, engines, etcd)
    deployment = load_deployment(paths[0], state_dir=home)
    create_key(deployment.security.key_file)
    if engines == "vllm":
        ensure_model(deployment)
    children = RunningEngines(deployment, templates=EngineTemplates(), stand_ins_per_process=1)
    supervisor = Supervisor(home, paths[0], children)
    gateways = [Gateway(home, path) for path in paths]
    try:
        await asyncio.to_thread(supervisor.call, children.start)
        await asyncio.to_thread(supervisor.call, children.wait_ready, READY_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            await asyncio.gather(*(each.start(session) for each in gateways))
            load = Load(session, gateways, per_s, 60 if engines == "vllm" else 200, random.Random(7))
            at_once = asyncio.Event()
            at_once.set()
            await load.run(at_once, 10)
            quiet = await load.run(at_once, max(20, streams // 3))
            over = asyncio.Event()
            sending = asyncio.create_task(load.run(over, streams))
            began_s = time.monotonic()
            try:
                replaced = await _replace_all(home, paths[0], names, supervisor, load)
                took_s = time.monotonic() - began_s
            finally:
                over.set()
                sent = await sending
    finally:
        for gateway in gateways:
            await gateway.stop()
        await asyncio.to_thread(supervisor.close)
    broken = [each for each in (*quiet, *sent) if not each.is_whole]
    kinds = dict(Counter(each.kind for each in sent))
    return Report(
        engines, etcd is not None, len(sent), broken, kinds, replaced, took_s, _p99(quiet), _p99(sent)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", choices=("stand-ins", "vllm"), default="stand-ins")
    parser.add_argument("--streams", type=int, default=3000)
    parser.add_argument("--per-s", type=float, default=20.0)
    parser.add_argument("--replace", nargs="*", default=[], metavar="INSTANCE", help="only these engines")
    parser.add_argument("--no-etcd", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep-logs", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prfaas-rollout-") as folder:
        home = Path(folder)
        os.environ["PRFAAS_HOME"] = folder
        try:
            with contextlib.nullcontext(None) if options.no_etcd else running_etcd(home) as etcd:
                report = asyncio.run(run(options, home, etcd))
        finally:
            if options.keep_logs:
                shutil.copytree(
                    home,
                    options.keep_logs,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("etcd", "events", "pools", "models"),
                )
    print(
        f"{report.streams} streams of {len(report.kinds)} kinds in {report.took_s:.0f} s, "
        f"{len(report.replaced)} engines and 2 gateways replaced, {len(report.broken)} broken; "
        f"P99 TTFT {report.ttft_s:.3f} s, in quiet {report.quiet_ttft_s:.3f} s"
    )
    for each in report.broken[:20]:
        print(f"  {each.kind}: {each.status} {each.trouble}")
    if options.json:
        options.json.write_text(json.dumps(asdict(report) | {"failures": report.failures}, default=str))
    for failure in report.failures:
        print(failure, file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
