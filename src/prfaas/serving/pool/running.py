"""The pools of a deployment as child processes of this one."""

import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prfaas.core.deployment import Deployment, PoolNode
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.command import EngineCommand
from prfaas.serving.engines.log_file import LogFile
from prfaas.serving.engines.preparation import ensure_certificates, ensure_key, port_problem
from prfaas.serving.engines.process_group import ProcessGroup, Watchdog
from prfaas.serving.pool.client import PoolClient

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
_ANSWER_S = 2.0
_POLL_S = 0.05


def pool_command(deployment: Deployment, node: PoolNode, *, keep_memory: bool = False) -> EngineCommand:
    """How to start the daemon of one pool. `keep_memory`: its pages stay in shared memory when it ends."""
    argv = [
        *(sys.executable, "-m", "prfaas.serving.pool"),
        *("--state-dir", str(deployment.state_dir)),
        *(("--keep-memory",) if keep_memory else ()),
        str(deployment.path.absolute()),
        node.name,
    ]
    return EngineCommand(tuple(argv), {})


class RunningPools:
    """Pools of one deployment on this machine. As a context manager: started on entry, stopped on exit.

    They also end if this process is killed. Their pages stay on disk, and in memory until the machine is restarted.
    `start` and `restart` make the processes, `wait_ready` waits for their sockets, `stop` ends them. Not thread-safe.
    """

    def __init__(
        self,
        deployment: Deployment,
        names: Iterable[str] | None = None,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        """Make it without starting any.

        Args:
            deployment: whose pools they are. The daemons read its file themselves.
            names: pools to start; None: all.
            extra_env: laid over the environment of each.
        """
        self.deployment = deployment
        self.names: Sequence[str] = (
            tuple(names) if names is not None else tuple(node.name for node in deployment.pools)
        )
        self._extra_env = dict(extra_env or {})
        self._groups: dict[str, ProcessGroup] = {}
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all of them. Returns at once: see `wait_ready`.

        Raises:
            EngineError: a port is taken, or a pool runs already.
            KeyFileError: the key can't be used.
            TlsFileError: a certificate can't be used.
        """
        self.restart(self.names)

    def restart(self, names: Collection[str]) -> None:
        """Start pools again that have ended. Returns at once.

        Raises:
            EngineError: as `start`; none of them has been started then, and all others go on.
            KeyFileError: the key can't be used.
            TlsFileError: a certificate can't be used.
        """
        nodes = [self.deployment.pool_named(name) for name in self.names if name in names]
        if not nodes:
            return
        for node in nodes:
            self._check_startable(node)
        ensure_key(self.deployment)
        ensure_certificates(self.deployment, [node.name for node in nodes])
        if self._watchdog is None:
            self._watchdog = Watchdog()
        for node in nodes:
            command = pool_command(self.deployment, node)
            env = {**command.environment(), **self._extra_env}
            group = ProcessGroup.start(command.argv, env, self._log(node.name))
            self._groups[node.name] = group
            self._watchdog.watch(group)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every started pool answers at its socket.

        Raises:
            EngineError: one ended (with the end of its log), or `timeout_s` passed.
        """
        deadline = time.monotonic() + timeout_s
        for name in tuple(self._groups):
            while not self.answers_health(self.deployment.pool_named(name)):
                if not self.is_running(name):
                    raise EngineError(
                        f"pool {name} has ended before it was ready ({self.ended_how(name)}); the end of it:\n"
                        f"{self._group(name).log.tail(20)}"
                    )
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"pool {name} runs, but does not answer at "
                        f"{self.deployment.pool_socket(self.deployment.pool_named(name))} after {timeout_s:g} s; "
                        f"see {self.log_path(name)}"
                    )
                time.sleep(_POLL_S)

    def answers_health(self, node: PoolNode) -> bool:
        """True if the pool's daemon takes a session at its socket."""
        path = self.deployment.pool_socket(node)
        if not path.exists():
            return False
        client = PoolClient(path, "tool", None, timeout_s=_ANSWER_S)
        try:
            return client.connect()
        finally:
            client.close()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End every pool: asked first, killed after `timeout_s` in all. Idempotent."""
        deadline = time.monotonic() + timeout_s
        groups = tuple(self._groups.values())
        try:
            for group in groups:
                group.ask_to_end()
            for group in groups:
                group.wait(max(0.0, deadline - time.monotonic()))
        finally:
            # Also when a second Ctrl-C interrupts the waiting.
            for group in groups:
                group.kill()
            self._groups.clear()
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None

    def kill(self, name: str) -> None:
        """SIGKILL one pool, as if its machine had lost power; its memory is what the next one finds.

        Raises:
            EngineError: it has not been started.
        """
        group = self._group(name)
        group.kill()
        self._forget(group)

    def pid(self, name: str) -> int:
        """Pid of a pool's daemon."""
        return self._group(name).pid

    def is_running(self, name: str) -> bool:
        """True if a pool has been started and not ended."""
        group = self._groups.get(name)
        if group is None:
            return False
        if group.is_running:
            return True
        self._forget(group)
        return False

    def ended_how(self, name: str) -> str:
        """How a pool that has ended did so, and where to read more."""
        status = self._group(name).exit_status
        how = f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
        return f"{how}; see {self.log_path(name)}"

    def log_path(self, name: str) -> Path:
        """Where a pool's output goes."""
        return self.deployment.logs_dir / f"{name}.log"

    def _log(self, name: str) -> LogFile:
        engine = self.deployment.engine
        return LogFile(self.log_path(name), max_bytes=engine.log_bytes, kept_files=engine.log_files)

    def _group(self, name: str) -> ProcessGroup:
        if name not in self._groups:
            raise EngineError(f"pool {name} has not been started")
        return self._groups[name]

    def _check_startable(self, node: PoolNode) -> None:
        if self.is_running(node.name):
            raise EngineError(f"pool {node.name} runs already")
        events = () if node.events_port is None else (node.events_port, node.events_port + 1)
        for port in (node.kv_port, *events):
            problem = port_problem(node.host, port)
            if problem is not None:
                raise EngineError(f"pool {node.name} can't start: {problem}")

    def _forget(self, group: ProcessGroup) -> None:
        if self._watchdog is not None:
            self._watchdog.forget(group)
