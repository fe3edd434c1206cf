"""Named child processes of a deployment, which end with this one: what its engines and its pools have in common."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

from prfaas.core.deployment import Deployment
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.command import EngineCommand
from prfaas.serving.engines.log_file import LogFile
from prfaas.serving.engines.preparation import port_problem
from prfaas.serving.engines.process_group import ProcessGroup, Watchdog

# Seconds are usual; three engines that start at once on a loaded machine were seen to need more than five minutes.
READY_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.3


@dataclass(frozen=True, slots=True)
class StartProgress:
    """Progress of the start of one process."""

    name: str
    state: Literal["starting", "ready"]
    elapsed_s: float
    """Since its process was started."""


class ChildProcesses(ABC):
    """Processes by name. As a context manager: started on entry, stopped on exit.

    `start` makes the processes, `wait_ready` waits until they answer, `stop` ends them. They also end if this process
    is killed. Not thread-safe.
    """

    kind: ClassVar[str]
    """What one is called in sentences."""

    def __init__(
        self,
        deployment: Deployment,
        names: Iterable[str] | None = None,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            deployment: whose processes they are.
            names: those to start; None: all.
            extra_env: laid over the environment of each.
        """
        self.deployment = deployment
        self.names = tuple(self._all_names() if names is None else names)
        self._extra_env = dict(extra_env or {})
        self._groups: dict[str, ProcessGroup] = {}
        self._started_s: dict[str, float] = {}
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def restart(self, names: Collection[str]) -> None:
        """Start those of these names, in the order of the file. Returns at once: see `wait_ready`.

        Raises:
            EngineError: something that they need is missing or taken, or one runs already; none of them has been
                started then, and all others go on.
            KeyFileError: the key can't be used.
            TlsFileError: a certificate can't be used.
        """

    @abstractmethod
    def _all_names(self) -> Iterable[str]:
        """Of all that the deployment has."""

    @abstractmethod
    def _address(self, name: str) -> str:
        """Where one answers once it is ready."""

    @abstractmethod
    def answers(self, name: str) -> bool:
        """True if one answers there now."""

    def start(self, name: str | None = None) -> None:
        """Start one, or all, as `restart`."""
        self.restart(self.names if name is None else (name,))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(
        self,
        timeout_s: float = READY_TIMEOUT_S,
        on_progress: Callable[[StartProgress], None] | None = None,
    ) -> None:
        """Wait until all that were started answer.

        Args:
            timeout_s: for all of them together.
            on_progress: called with the progress of each about three times a second.

        Raises:
            EngineError: one ended (with the end of its log), or `timeout_s` passed.
        """
        begin = time.monotonic()
        waiting = list(self._groups)
        while waiting:
            for name in tuple(waiting):
                elapsed_s = time.monotonic() - self._started_s[name]
                self._check_alive(name)
                is_ready = self.answers(name)
                if is_ready:
                    waiting.remove(name)
                if on_progress is not None:
                    on_progress(StartProgress(name, "ready" if is_ready else "starting", elapsed_s))
            if waiting and time.monotonic() > begin + timeout_s:
                # No end of a log here: nothing failed, so its last line says nothing about why.
                raise EngineError(
                    f"gave up waiting for {len(waiting)} of {len(self._groups)} {self.kind}s of deployment "
                    f"{self.deployment.name} to start, after {timeout_s:g} s (a longer start can be allowed):\n"
                    + "\n".join(self._what_is_missing(name) for name in waiting)
                )
            if waiting:
                time.sleep(_POLL_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End all: asked first, killed after `timeout_s` in all. Idempotent."""
        deadline = time.monotonic() + timeout_s
        groups = set(self._groups.values())
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
        """SIGKILL one and all its processes, as if its machine had lost power.

        Raises:
            EngineError: it has not been started.
        """
        group = self._group(name)
        group.kill()
        self._forget(group)

    def pid(self, name: str) -> int:
        """Pid of the process that leads one's process group."""
        return self._group(name).pid

    def is_running(self, name: str) -> bool:
        """True if one has been started and not ended."""
        if name not in self._groups:
            return False
        group = self._group(name)
        if group.is_running:
            return True
        self._forget(group)
        return False

    def exit_status(self, name: str) -> int | None:
        """The exit code of one, or minus the signal that ended it; None while it runs."""
        return self._group(name).exit_status

    def ended_how(self, name: str) -> str:
        """The way in which one has ended, and where to read more."""
        if name not in self._groups:
            return f"it could not be started; see {self.log_path(name)}"
        status = self.exit_status(name)
        how = f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
        return f"{how}; see {self.log_path(name)}"

    def log_path(self, name: str) -> Path:
        """The file of the output of one."""
        group = self._groups.get(name)
        return group.log.path if group is not None else self._log(name).path

    def _spawn(self, names: Sequence[str], command: EngineCommand) -> None:
        """Start one process, which is all of these."""
        log_name = names[0] if len(names) == 1 else f"{names[0]}-to-{names[-1]}"
        group = ProcessGroup.start(command.argv, self._environment(command), self._log(log_name))
        for name in names:
            self._groups[name] = group
            self._started_s[name] = time.monotonic()
        self._watch(group)

    def _environment(self, command: EngineCommand) -> dict[str, str]:
        return {**command.environment(), **self._extra_env}

    def _log(self, name: str) -> LogFile:
        engine = self.deployment.engine
        path = self.deployment.logs_dir / f"{name}.log"
        return LogFile(path, max_bytes=engine.log_bytes, kept_files=engine.log_files)

    def _group(self, name: str) -> ProcessGroup:
        if name not in self._groups:
            raise EngineError(f"{self.kind} {name} has not been started")
        return self._groups[name]

    def _watch(self, group: ProcessGroup) -> None:
        if self._watchdog is None:
            self._watchdog = Watchdog()
        self._watchdog.watch(group)

    def _forget(self, group: ProcessGroup) -> None:
        if self._watchdog is not None:
            self._watchdog.forget(group)

    def _check_startable(self, name: str, host: str, ports: Iterable[int]) -> None:
        if self.is_running(name):
            raise EngineError(f"{self.kind} {name} runs already")
        for port in ports:
            problem = port_problem(host, port)
            if problem is not None:
                raise EngineError(f"{self.kind} {name} can't start: {problem}")

    def _check_alive(self, name: str) -> None:
        log, status = self._group(name).log, self.exit_status(name)
        if status is not None:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
            raise EngineError(
                f"{self.kind} {name} {how} before it was ready; the end of {log.path}:\n{log.tail(20)}"
            )

    def _what_is_missing(self, name: str) -> str:
        log = self._groups[name].log
        if log.written_bytes == 0:
            logged = "empty so far"
        else:
            logged = f"last written to {max(0.0, time.time() - log.path.stat().st_mtime):.0f} s ago"
        return (
            f"{self.kind} {name} runs, but does not answer {self._address(name)}, "
            f"{time.monotonic() - self._started_s[name]:.0f} s after it was started; "
            f"its log is {log.path} ({logged})"
        )
