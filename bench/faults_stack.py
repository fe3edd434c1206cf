"""What `faults.py` breaks: stand-in engines in processes of their own behind a gateway in a process of its own."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ports import free_ports
from prfaas.core.deployment import TOOLS, Deployment, Instance, load_deployment
from prfaas.serving.engines.preparation import port_problem
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.secret_files import create_key, load_key
from prfaas.serving.transport.io.observer import Observer

MODEL = "qwen3-next"
# So few that some hundred idle clients use them up; engines and load need about a hundred.
GATEWAY_FILES = 512
READY_S = 60.0
DRAIN_S = 20.0
STALL_S = 6.0
_VOCABULARY = 1 << 16
_PREFILLS, _HOME_PREFILLS, _DECODES = 4, 1, 4
_T = TypeVar("_T")


def write_deployments(home: Path) -> tuple[Deployment, Deployment]:
    """The deployment, and the same one with a model whose KV blocks have another size."""
    ports = iter(free_ports(2 * (_PREFILLS + _HOME_PREFILLS + _DECODES) + 2))

    def cluster(name: str, kind: str, profile: str, *groups: tuple[str, int]) -> dict[str, Any]:
        instances = [
            {
                "name": f"{name}-{role}-{number}",
                "roles": [role],
                "host": "127.0.0.1",
                "http_port": next(ports),
                "kv_port": next(ports),
            }
            for role, count in groups
            for number in range(count)
        ]
        return {
            "name": name,
            "kind": kind,
            "hardware": "synthetic",
            "profile": profile,
            "speedup": 4,
            "instances": instances,
        }

    document = {
        "name": "faults",
        "clusters": [
            cluster("far", "prfaas", "internal-1t-h200", ("prefill", _PREFILLS)),
            cluster("home", "pd", "internal-1t-h20", ("prefill", _HOME_PREFILLS), ("decode", _DECODES)),
        ],
        "links": [
            {"source": "far", "target": "home", "bandwidth": "2 Gbit/s", "connections": 2},
            {"source": "home", "target": "far", "bandwidth": "1 Gbit/s", "connections": 1},
        ],
        # Roles stay as they are: what leaves routing has left it for a fault. A GPU that hangs is noticed soon.
        "control": {"allocation": False, "stall_s": STALL_S},
        "gateway": {"host": "127.0.0.1", "port": next(ports), "admin": {"port": next(ports)}},
        "engine": {
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 32,
            "kv_cache_gib": 1,
            "staging": "64 MiB",
            "transfer_block": "256 KiB",
        },
    }
    found = []
    for name, changes in (("right", {}), ("other", {"head_dim": 2 * tiny_config(MODEL)["head_dim"]})):
        directory = home / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(tiny_config(MODEL) | changes))
        write_tokenizer(directory, _VOCABULARY)
        model = {"served_name": MODEL, "path": str(directory), "max_model_len": 16384}
        path = home / f"{name}.yaml"
        path.write_text(json.dumps(document | {"model": model}))
        found.append(load_deployment(path, state_dir=home))
    right, other = found
    create_key(right.security.key_file)
    return right, other


@dataclass(slots=True)
class GatewayRun:
    """One process of the gateway. Times are the monotonic clock's."""

    process: subprocess.Popen[str]
    ready_s: float
    left_s: float = float("inf")
    """When it was told to end."""


class FaultStack:
    """The processes. Engines are changed by one thread: `RunningEngines` is for one."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.deployment, other = write_deployments(home)
        self.engines = RunningEngines(self.deployment, stand_ins_per_process=1)
        self._other = RunningEngines(other, stand_ins_per_process=1)
        self._thread = ThreadPoolExecutor(1, "engines")
        self._gateway_log = home / "gateway.log"
        self.session: aiohttp.ClientSession
        self.gateways: list[GatewayRun] = []

    @property
    def gateway_url(self) -> str:
        return self.deployment.gateway.url

    @property
    def admin_url(self) -> str:
        """Where the gateway answers its operators."""
        return self.deployment.gateway.admin.url

    @property
    def gateway_pid(self) -> int:
        return self.gateways[-1].process.pid

    @property
    def is_gateway_away(self) -> bool:
        """From the signal to its end until a new one is ready."""
        return self.gateways[-1].left_s < float("inf")

    def restarted_within(self, start_s: float, end_s: float) -> bool:
        """Whether the gateway was away at some time between the two."""
        back_s = [*(run.ready_s for run in self.gateways[1:]), float("inf")]
        return any(
            run.left_s <= end_s and start_s <= ready_s
            for run, ready_s in zip(self.gateways, back_s, strict=True)
        )

    async def in_thread(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    async def start_engine(self, name: str, *, other: bool = False) -> None:
        """Start it with the right layout or the other one; returns when it answers.

        Raises:
            TimeoutError: it doesn't within a minute.
        """
        await self.in_thread((self._other if other else self.engines).start, name)
        url = f"{self.deployment.instance(name).url}/health"
        await self._until_answers(url)

    async def kill_engine(self, name: str) -> None:
        """SIGKILL, whichever of the two it is."""
        for engines in (self.engines, self._other):
            if await self.in_thread(engines.is_running, name):
                await self.in_thread(engines.kill, name)

    def pid(self, name: str) -> int:
        engines = self._other if self._other.is_running(name) else self.engines
        return engines.pid(name)

    def signal_engine(self, name: str, number: signal.Signals) -> None:
        os.killpg(self.pid(name), number)

    async def start_gateway(self) -> None:
        """Returns when clients can connect."""
        limited = ("sh", "-c", 'ulimit -n "$0" && exec "$@"', str(GATEWAY_FILES))
        with self._gateway_log.open("a") as log:
            process = subprocess.Popen(
                [*limited, sys.executable, "-m", "prfaas.cli.main", "serve", str(self.deployment.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PRFAAS_HOME": str(self.home), "PYTHONFAULTHANDLER": "1"},
                text=True,
            )
        try:
            await self._until_answers(f"{self.gateway_url}/v1/models", process)
        except BaseException as error:
            # With the stacks of its threads, which say where it hangs.
            process.send_signal(signal.SIGABRT)
            process.wait()
            error.add_note(f"the gateway's log ends with:\n{self._gateway_log.read_text()[-8000:]}")
            raise
        self.gateways.append(GatewayRun(process, time.monotonic()))

    async def end_gateway(self, number: signal.Signals) -> None:
        """Returns when its process is gone: a SIGKILL follows when it takes too long."""
        run = self.gateways[-1]
        run.left_s = time.monotonic()
        run.process.send_signal(number)
        deadline_s = run.left_s + DRAIN_S
        while run.process.poll() is None:
            if time.monotonic() > deadline_s:
                run.process.kill()
            await asyncio.sleep(0.02)

    async def state(self) -> dict[str, Any] | None:
        """`GET /prfaas/state`; None when there is no answer."""
        try:
            async with asyncio.timeout(2.0), self.session.get(f"{self.admin_url}/prfaas/state") as response:
                return await response.json() if response.status == 200 else None
        except (OSError, TimeoutError, aiohttp.ClientError, ValueError):
            return None

    async def kv_stats(self, instance: Instance) -> dict[str, Any]:
        key = load_key(self.deployment.security.key_file)
        observer = Observer(TOOLS, key, instance.host, instance.kv_port, f"{instance.name}/0")
        try:
            async with asyncio.timeout(5.0):
                return await observer.stats()
        finally:
            await observer.close()

    async def engine_metrics(self, instance: Instance) -> dict[str, float]:
        """The engine's series by name, without labels."""
        async with asyncio.timeout(5.0), self.session.get(f"{instance.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("vllm:")}

    def ports(self) -> list[tuple[str, int]]:
        """All that engines and gateway listen on."""
        gateway = self.deployment.gateway
        found = [(gateway.host, gateway.port), (gateway.admin.host, gateway.admin.port)]
        for each in self.deployment.instances:
            found += [(each.host, each.http_port), (each.host, each.kv_port)]
        return found

    async def _until_answers(self, url: str, process: subprocess.Popen[str] | None = None) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                if process is not None and process.poll() is not None:
                    raise RuntimeError(f"the gateway has ended with exit code {process.returncode}")
                with contextlib.suppress(OSError, TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(2.0), self.session.get(url) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything up; afterwards nothing of it runs."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self.session:
            try:
                await self.in_thread(self.engines.start)
                await self.in_thread(self.engines.wait_ready, READY_S * 2)
                await self.start_gateway()
                yield
            finally:
                for run in self.gateways:
                    if run.process.poll() is None:
                        run.process.terminate()
                        try:
                            run.process.wait(DRAIN_S)
                        except subprocess.TimeoutExpired:
                            run.process.kill()
                            run.process.wait()
                for engines in (self.engines, self._other):
                    await self.in_thread(engines.stop, 10.0)
                self._thread.shutdown()


def open_files(pid: int) -> int:
    """How many file descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def taken_ports(ports: list[tuple[str, int]]) -> list[str]:
    return [problem for host, port in ports if (problem := port_problem(host, port)) is not None]
