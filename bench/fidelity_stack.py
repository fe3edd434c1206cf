"""The deployment that `fidelity.py` measures: three vLLM servers and the gateway on this machine, each engine with
a part of a core."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import yaml

from cpu_share import limited
from measured_model import MeasuredModel
from ports import free_ports
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines.running import RunningEngines

EAST, HOME = "east", "home"
EAST_PREFILL, HOME_PREFILL, HOME_DECODE = "east-prefill-0", "home-prefill-0", "home-decode-0"
ENGINES = (EAST_PREFILL, HOME_PREFILL, HOME_DECODE)
SERVED_NAME = "tiny"

# Engines, gateway and client stand for machines of their own. Those that prefill come before all else, up to a limit:
# they always get the same, whatever others do at the moment. The decode engine has that limit too: it may prefill. What
# three of them leave is more than gateway and client use.
ENGINE_SHARE = 0.6
_READY_S = 240.0

NEVER_S = 3600.0
"""A period of the slow loops that no run lasts."""

KV_CACHE_GIB = 1


class MeasuredStack(Protocol):
    """A running deployment of one PrfaaS prefill, one PD prefill and one PD decode engine, as measurements see it.

    Engines go by the names of this file, whatever the deployment calls them.
    """

    @property
    def gateway_url(self) -> str:
        """Of the gateway's HTTP API."""
        ...

    def url(self, engine: str) -> str:
        """Of an engine's HTTP API."""
        ...

    def near(self, engine: str) -> contextlib.AbstractContextManager[None]:
        """Connections that are made meanwhile begin in the engine's own cluster."""
        ...

    def cpu_s(self) -> dict[str, float]:
        """Seconds of processor time so far: of each engine, the gateway, and this process."""
        ...


@dataclass(frozen=True, slots=True)
class Stack:
    """What runs."""

    deployment: Deployment
    engines: RunningEngines
    gateway_pid: int

    @property
    def gateway_url(self) -> str:
        return self.deployment.gateway.url

    def url(self, engine: str) -> str:
        return self.deployment.instance(engine).url

    def near(self, engine: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def cpu_s(self) -> dict[str, float]:
        """Seconds of processor time so far: of each engine, the gateway, and this process."""
        used = {name: cpu_s(self.engines.pid(name)) for name in ENGINES}
        return used | {"gateway": _cpu_of(self.gateway_pid), "client": time.process_time()}


def write_deployment(
    directory: Path,
    *,
    max_model_len: int,
    chunk_tokens: int,
    bandwidth: str,
    policy: str = "offload_all",
    threshold_tokens: float | None = None,
    profiles: Mapping[str, Path] | None = None,
    workload: Mapping[str, Any] | None = None,
    step_limit_s: float | None = None,
    threshold_period_s: float = NEVER_S,
    model: MeasuredModel = MeasuredModel(),
    to_run: bool = True,
) -> Path:
    """One PrfaaS prefill, one PD prefill and one PD decode engine on free ports of this machine.

    The same file serves `prfaas serve` and, with `profiles` (by cluster), `workload` and `step_limit_s`, the planner
    and the simulator. Roles stay as they are. The threshold does too, so that one run measures one point of operation,
    unless `threshold_period_s` says how often it is optimised. `to_run` False: only to plan with, without weights.
    """
    ports = iter(free_ports(7))

    def instance(name: str, role: str) -> dict[str, object]:
        return {
            "name": name,
            "roles": [role],
            "host": "127.0.0.1",
            "http_port": next(ports),
            "kv_port": next(ports),
        }

    def profile(cluster: str) -> dict[str, str]:
        return {} if profiles is None else {"profile": str(profiles[cluster].resolve())}

    path = model.write(directory.resolve() / "model", with_weights=to_run)
    document: dict[str, Any] = {
        "name": "fidelity",
        "model": {"served_name": SERVED_NAME, "path": str(path), "max_model_len": max_model_len},
        "clusters": [
            {
                "name": EAST,
                "kind": "prfaas",
                "hardware": "cpu",
                **profile(EAST),
                "instances": [instance(EAST_PREFILL, "prefill")],
            },
            {
                "name": HOME,
                "kind": "pd",
                "hardware": "cpu",
                **profile(HOME),
                "instances": [instance(HOME_PREFILL, "prefill"), instance(HOME_DECODE, "decode")],
            },
        ],
        "links": [{"source": EAST, "target": HOME, "bandwidth": bandwidth, "connections": 4}],
        "routing": {"policy": policy},
        "control": {"threshold_period_s": threshold_period_s, "allocation": False},
        # As it is simulated.
        "gateway": {
            "host": "127.0.0.1",
            "port": next(ports),
            "route_header": "full",
            "first_token": "decode",
        },
        "engine": engine_section(chunk_tokens),
    }
    if threshold_tokens is not None:
        document["routing"]["threshold_tokens"] = threshold_tokens
    if workload is not None:
        document["workload"] = dict(workload)
    if step_limit_s is not None:
        document["slo"] = {"tpot_s": step_limit_s}
    deployment_path = directory / "fidelity.yaml"
    deployment_path.write_text(yaml.safe_dump(document, sort_keys=False))
    return deployment_path


def engine_section(chunk_tokens: int) -> dict[str, Any]:
    """How a deployment file starts these engines."""
    return {
        "max_num_batched_tokens": chunk_tokens,
        "max_num_seqs": 16,
        "kv_cache_gib": KV_CACHE_GIB,
        "staging": "256 MiB",
    }


@contextlib.contextmanager
def running(path: Path, directory: Path) -> Iterator[Stack]:
    """Engines and gateway, ready, each engine with its part of a core.

    Everything has ended afterwards, whatever happened meanwhile.
    """
    deployment = load_deployment(path, state_dir=directory / "home")
    with RunningEngines(deployment) as engines:
        engines.wait_ready(_READY_S)
        log_path = directory / "gateway.log"
        with log_path.open("wb") as log:
            gateway = subprocess.Popen(
                [sys.executable, "-m", "prfaas.cli.main", "serve", str(path)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PRFAAS_HOME": str(directory / "home")},
            )
        try:
            _wait_healthy(deployment, gateway, log_path)
            with limited_engines({name: engines.pid(name) for name in ENGINES}):
                yield Stack(deployment, engines, gateway.pid)
        finally:
            gateway.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.wait(10)
            gateway.kill()
            gateway.wait()


@contextlib.contextmanager
def limited_engines(groups: Mapping[str, int]) -> Iterator[None]:
    """Meanwhile each engine has a part of a core; those that prefill have it on cores of their own.

    Args:
        groups: The process groups of `ENGINES`.
    """
    cores = sorted(os.sched_getaffinity(0))
    processes = {name: _processes_of(group) for name, group in groups.items()}
    for name, core in ((EAST_PREFILL, cores[0]), (HOME_PREFILL, cores[-1])):
        _pin(processes[name], core)
    decode = processes.pop(HOME_DECODE)
    with limited(list(processes.values()), ENGINE_SHARE, first=True), limited([decode], ENGINE_SHARE):
        yield


def _pin(processes: Sequence[int], core: int) -> None:
    """All threads of these to one core."""
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.sched_setaffinity(int(thread.name), {core})


def cpu_s(group: int) -> float:
    """Seconds of processor time that a process group has used."""
    return sum(_cpu_of(process) for process in _processes_of(group))


def machine_cpu_s() -> float:
    """Seconds of processor time that everything on this machine has used, and that its host took away (steal)."""
    user, nice, system, _idle, _wait, irq, soft_irq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_of(process: int) -> float:
    return sum(map(int, _stat(process)[11:13])) / os.sysconf("SC_CLK_TCK")


def _processes_of(group: int) -> Sequence[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and (stat := _stat(int(entry.name))) and int(stat[2]) == group
    ]


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name (state, parent, group, …); none if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _wait_healthy(deployment: Deployment, gateway: "subprocess.Popen[bytes]", log_path: Path) -> None:
    opener = build_opener(ProxyHandler({}))
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if gateway.poll() is not None:
            break
        with (
            contextlib.suppress(URLError, OSError),
            opener.open(f"{deployment.gateway.url}/health", timeout=5) as answer,
        ):
            instances = yaml.safe_load(answer.read())["instances"]
            if set(instances.values()) == {"up"}:
                return
        time.sleep(0.3)
    raise SystemExit(f"the gateway did not start:\n{log_path.read_text()[-2000:]}")
