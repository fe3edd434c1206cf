"""A deployment in the laboratory: a PrfaaS cluster at one end of the line, PD cluster and gateway at the other."""

import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.core.deployment import Deployment, Instance, load_deployment
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.engines.command import EngineCommand
from prfaas.serving.engines.process_group import ProcessGroup
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.secret_files import create_key
from wan.laboratory import Laboratory

FAR, HOME = "far", "home"
GATEWAY_HOST = "home-0"
LINK = f"{FAR}->{HOME}"
GATEWAY_PORT, ADMIN_PORT, HTTP_PORT = 8000, 8001, 8100
FIRST_KV_PORT = 8200
"""The first engine's; each has another one, by which its connections are known."""
SERVED_NAME = "tiny"
_READY_S = 400.0
_GATEWAY_READY_S = 90.0
_GATEWAY_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of the deployment; it runs in the namespace of the same number as it has in its cluster."""

    name: str
    host: str
    """The namespace."""
    roles: Sequence[str]


def engines_of(far: int, home: Sequence[Sequence[str]]) -> Sequence[Engine]:
    """`far` prefill engines, and one engine at home for each of these lists of roles."""
    return [
        *(Engine(f"far-prefill-{number}", f"far-{number}", ("prefill",)) for number in range(far)),
        *(Engine(f"home-{number}", f"home-{number}", roles) for number, roles in enumerate(home)),
    ]


def write_deployment(
    directory: Path,
    laboratory: Laboratory,
    engines: Sequence[Engine],
    *,
    model: Path,
    max_model_len: int,
    bandwidth_bits_per_s: float,
    rtt_s: float,
    connections: int = 4,
    encryption: bool = True,
    clusters: Mapping[str, Mapping[str, Any]],
    **sections: Mapping[str, Any],
) -> Deployment:
    """The deployment file and its certificates.

    Args:
        directory: for the file, and for all that runs write.
        laboratory: where the engines' namespaces are.
        engines: see `engines_of`.
        model: the checkpoint.
        max_model_len: see the deployment file.
        bandwidth_bits_per_s: of the link from far to home, as the file has it.
        rtt_s: of the link, as the file has it.
        connections: of the link.
        encryption: of the link.
        clusters: further fields of the two clusters, `hardware` at least.
        **sections: further sections of the file.
    """

    def cluster(name: str, kind: str) -> dict[str, Any]:
        members = [engine for engine in engines if engine.host.startswith(f"{name}-")]
        return {
            "name": name,
            "kind": kind,
            "instances": [
                {
                    "name": engine.name,
                    "roles": list(engine.roles),
                    "host": laboratory.address(engine.host),
                    "http_port": HTTP_PORT,
                    "kv_port": FIRST_KV_PORT + engines.index(engine),
                }
                for engine in members
            ],
            **clusters[name],
        }

    document = {
        "name": "wan",
        "model": {"served_name": SERVED_NAME, "path": str(model), "max_model_len": max_model_len},
        "clusters": [cluster(FAR, "prfaas"), cluster(HOME, "pd")],
        "links": [
            {
                "source": FAR,
                "target": HOME,
                "bandwidth": bandwidth_bits_per_s,
                "connections": connections,
                "rtt_s": rtt_s,
                "encryption": encryption,
            }
        ],
        "gateway": {
            "host": "127.0.0.1",
            "port": GATEWAY_PORT,
            "admin": {"port": ADMIN_PORT},
            "route_header": "full",
            # What is measured is the way of the KVCache.
            "first_token": "decode",
        },
        # The benches ask engines themselves, too, and have no certificate.
        "security": {"engine_tls": "never"},
        **sections,
    }
    path = directory / "wan.yaml"
    path.write_text(json.dumps(document, indent=1))  # JSON is YAML
    deployment = load_deployment(path, state_dir=directory / "home")
    create_key(deployment.security.key_file)
    CertificateFolder(deployment).make()
    return deployment


class WanStack:
    """Engines and gateway of a deployment, each in its namespace."""

    def __init__(
        self,
        laboratory: Laboratory,
        deployment: Deployment,
        engines: Sequence[Engine],
        *,
        command: Callable[[Deployment, Instance], EngineCommand] | None = None,
    ) -> None:
        """Nothing is started yet. `command`: see `RunningEngines`."""
        self._command = command
        self.laboratory = laboratory
        self.deployment = deployment
        self.engines = {engine.name: engine for engine in engines}
        self.running: dict[str, RunningEngines] = {}
        self.gateway: ProcessGroup | None = None

    @contextlib.contextmanager
    def started(
        self,
        cpus: Mapping[str, Collection[int]] | None = None,
        *,
        gateway: bool = True,
    ) -> Iterator["WanStack"]:
        """Everything up and ready; it has ended afterwards.

        Args:
            cpus: where the engines of a site, and the gateway with those at home, run; None: anywhere.
            gateway: whether it is started, too.
        """
        cpus = cpus or {}
        with contextlib.ExitStack() as stack:
            for engine in self.engines.values():
                running = RunningEngines(
                    self.deployment, [engine.name], command=self._command, stand_ins_per_process=1
                )
                self.running[engine.name] = running
                with self.laboratory.inside(engine.host, cpus.get(engine.host.rpartition("-")[0])):
                    stack.callback(running.stop)
                    running.start()
            for engine in self.engines.values():
                with self.laboratory.inside(engine.host):
                    self.running[engine.name].wait_ready(_READY_S)
            if gateway:
                self._start_gateway(cpus.get(HOME))
            yield self

    def restart_gateway(self, cpus: Collection[int] | None = None) -> None:
        """End the gateway, if it runs, and start it with the deployment file as it is now."""
        if self.gateway is not None:
            self.gateway.ask_to_end()
            self.gateway.wait(_GATEWAY_END_S)
            self.gateway.kill()
        self._start_gateway(cpus)

    def _start_gateway(self, cpus: Collection[int] | None) -> None:
        log = self.deployment.path.parent / "gateway.log"
        self.gateway = self.laboratory.start(
            GATEWAY_HOST,
            [sys.executable, "-m", "prfaas.cli.main", "serve", str(self.deployment.path)],
            log=log,
            env={"PRFAAS_HOME": str(self.deployment.path.parent / "home")},
            cpus=cpus,
        )
        deadline_s = time.monotonic() + _GATEWAY_READY_S
        while time.monotonic() < deadline_s and self.gateway.is_running:
            with contextlib.suppress(OSError, ValueError, KeyError):
                status, body = self.ask(GATEWAY_HOST, GATEWAY_PORT, "/health")
                if status == 200 and set(body["instances"].values()) == {"up"}:
                    return
            time.sleep(0.3)
        raise SystemExit(f"the gateway did not start:\n{log.read_text()[-3000:]}")

    def url(self, engine: str) -> str:
        """Of an engine's HTTP API; reachable from every namespace."""
        return self.deployment.instance(engine).url

    def state(self) -> Any:
        """`GET /prfaas/state`."""
        return self.ask(GATEWAY_HOST, ADMIN_PORT, "/prfaas/state")[1]

    def ask(
        self,
        host: str,
        port: int,
        path: str,
        body: Any = None,
        *,
        address: str = "127.0.0.1",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """GET, or POST of a JSON body, from a namespace; the status and the parsed answer."""
        with self.laboratory.inside(host):
            connection = http.client.HTTPConnection(address, port, timeout=900)
            try:
                data = None if body is None else json.dumps(body)
                sent = {"Content-Type": "application/json", **(headers or {})}
                connection.request("GET" if body is None else "POST", path, data, sent)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            finally:
                connection.close()

    def ask_engine(self, engine: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The same of an engine, from its own namespace: without the line."""
        host = self.engines[engine].host
        return self.ask(host, HTTP_PORT, path, body, address=self.laboratory.address(host))


def halves_of_the_cores() -> dict[str, list[int]]:
    """The first half of this machine's cores for the far site, the second for home; all for both where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return {FAR: cores[:half] or cores, HOME: cores[half:]}
