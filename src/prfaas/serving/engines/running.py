"""The engines of a deployment as child processes of this one."""

import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.asking import EngineQuestions
from prfaas.serving.engines.command import EngineCommand, synthetic_command, vllm_command
from prfaas.serving.engines.log_file import LogFile
from prfaas.serving.engines.preparation import (
    ensure_certificates,
    ensure_dtypes,
    ensure_key,
    ensure_model,
    ensure_nixl,
    ensure_vllm,
    port_problem,
)
from prfaas.serving.engines.process_group import ProcessGroup, Watchdog
from prfaas.serving.engines.template import EngineStart, EngineTemplates

# Seconds are usual; three engines that start at once on a loaded machine were seen to need more than five minutes.
READY_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 20.0
STAND_INS_PER_PROCESS = 16
_POLL_S = 0.3
_DEATH_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """How far one engine's start has come."""

    name: str
    state: Literal["starting", "ready"]
    elapsed_s: float
    """Since its process was started."""


class RunningEngines:
    """Engines of one deployment on this machine. As a context manager: started on entry, stopped on exit.

    They also end if this process is killed. Not thread-safe.
    """

    def __init__(
        self,
        deployment: Deployment,
        names: Iterable[str] | None = None,
        extra_env: Mapping[str, str] | None = None,
        *,
        command: Callable[[Deployment, Instance], EngineCommand] | None = None,
        stand_ins_per_process: int = STAND_INS_PER_PROCESS,
        templates: EngineTemplates | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            deployment: whose engines they are.
            names: the instances to start; None: all.
            extra_env: laid over the environment of each.
            command: starts every instance in a process of its own; None: vLLM, or stand-ins that share processes.
            stand_ins_per_process: how many stand-ins share a process at most.
            templates: of engines on CPUs, kept for those that are started later; None: none are kept.
        """
        self.deployment = deployment
        self.names: Sequence[str] = (
            tuple(names) if names is not None else tuple(instance.name for instance in deployment.instances)
        )
        self._command = command
        self._stand_ins_per_process = stand_ins_per_process
        self._extra_env = dict(extra_env or {})
        self._groups: dict[str, ProcessGroup] = {}
        self._killed: set[str] = set()
        self._started_s: dict[str, float] = {}
        self._keeps_templates = templates is not None
        self._templates = templates or EngineTemplates()
        self._watchdog: Watchdog | None = None
        self._questions = EngineQuestions()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str | None = None) -> None:
        """Start one engine, or all. Returns at once: see `wait_ready`.

        Raises:
            EngineError: vLLM, the model or a port is missing, its KVCache can't be kept here, or it runs already.
            KeyFileError: the key can't be used.
            TlsFileError: a certificate can't be used.
        """
        self._launch(self.names if name is None else (name,))

    def restart(self, names: Collection[str]) -> None:
        """Start engines again that have ended; stand-ins among them share processes as at first. Returns at once.

        Raises:
            EngineError: as `start`; none of them has been started then, and all others go on.
            KeyFileError: the key can't be used.
            TlsFileError: a certificate can't be used.
        """
        self._launch([each.name for each in self.deployment.instances if each.name in names])

    def _launch(self, names: Sequence[str]) -> None:
        instances = [self.deployment.instance(each) for each in names]
        if self._command is None and not all(map(self.deployment.is_synthetic, instances)):
            ensure_vllm()
        for instance in instances:
            self._check_startable(instance)
        if self._command is None:
            ensure_nixl(self.deployment, instances)
            weights = not all(map(self.deployment.is_synthetic, instances))
            ensure_model(self.deployment, weights=weights)
            ensure_dtypes(self.deployment, instances)
        ensure_key(self.deployment)
        ensure_certificates(self.deployment, names)
        if self._watchdog is None:
            self._watchdog = Watchdog()
        launched: list[str] = []
        try:
            forks: list[EngineStart] = []
            for together, command in self._commands(instances):
                launched += together
                if command.is_forkable:
                    forks += self._fork_of(together, command)
                else:
                    self._start_process(together, command)
            self._groups |= self._templates.order(forks, lambda: self._log("template"))
        except BaseException:
            self._templates.give_up()
            for name in launched:
                if (group := self._groups.pop(name, None)) is not None:
                    group.kill()
                    self._forget(group)
            if not self._groups:
                self.stop()
            raise

    def check(self, deployment: Deployment, added: Collection[Instance]) -> None:
        """Whether these instances of another deployment file could be started here.

        Raises:
            EngineError: a port is taken.
            TlsFileError: a certificate can't be used.
        """
        for instance in added:
            self._check_startable(instance)
        ensure_certificates(deployment, [instance.name for instance in added])

    def end(self, instance: Instance, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End an engine that the file has no more, and that has no work: asked first, killed after `timeout_s`.

        Others in its process go on.
        """
        if instance.name not in self._groups:
            return
        group = self._group(instance.name)
        if not self._shares(instance.name):
            group.ask_to_end()
            group.wait(timeout_s)
        self._kill(instance)
        del self._groups[instance.name]
        self._killed.discard(instance.name)

    def wait_ready(
        self,
        timeout_s: float = READY_TIMEOUT_S,
        on_progress: Callable[[EngineProgress], None] | None = None,
    ) -> None:
        """Wait until every started engine answers /health.

        Args:
            timeout_s: for all of them together.
            on_progress: called with each engine's progress about three times a second.

        Raises:
            EngineError: one ended (with the end of its log), or `timeout_s` passed.
        """
        begin = time.monotonic()
        waiting = list(self._groups)
        while waiting:
            self._take_born()
            for name in tuple(waiting):
                elapsed_s = time.monotonic() - self._started_s[name]
                self._check_alive(name)
                is_ready = self.answers_health(self.deployment.instance(name))
                if is_ready:
                    waiting.remove(name)
                if on_progress is not None:
                    on_progress(EngineProgress(name, "ready" if is_ready else "starting", elapsed_s))
            if waiting and time.monotonic() > begin + timeout_s:
                # No end of a log here: the engine did not fail, so its last line says nothing about why.
                raise EngineError(
                    f"gave up waiting for {len(waiting)} of {len(self._groups)} engines of deployment "
                    f"{self.deployment.name} to start, after {timeout_s:g} s (a longer start can be allowed):\n"
                    + "\n".join(self._what_is_missing(name) for name in waiting)
                )
            if waiting:
                time.sleep(_POLL_S)

    def answers_health(self, instance: Instance) -> bool:
        """True if the instance's server says that it is healthy."""
        return self._questions.ask(self.deployment, instance, "GET", "/health") == 200

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End every engine: asked first, killed after `timeout_s` in all. Idempotent."""
        deadline = time.monotonic() + timeout_s
        try:
            self._take_born()
            self._templates.give_up()
            groups = set(self._groups.values())
            for group in groups:
                group.ask_to_end()
            for group in groups:
                group.wait(max(0.0, deadline - time.monotonic()))
        finally:
            # Also when a second Ctrl-C interrupts the waiting.
            for group in set(self._groups.values()):
                group.kill()
            self._groups.clear()
            self._killed.clear()
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None

    def kill(self, name: str) -> None:
        """SIGKILL one engine and all its processes, as if its machine had lost power.

        A stand-in that shares its process with others closes its ports at once instead. Returns when the engine's
        ports are free.

        Raises:
            EngineError: they were not within some seconds.
        """
        self._kill(self.deployment.instance(name))

    def _shares(self, name: str) -> bool:
        """Whether others run in an engine's process."""
        group = self._group(name)
        others = [each for each in self._groups if each != name and self._groups[each] is group]
        return any(each not in self._killed for each in others)

    def _kill(self, instance: Instance) -> None:
        name = instance.name
        group = self._group(name)
        if self._shares(name):
            self._questions.ask(self.deployment, instance, "POST", "/synthetic/die")
            self._killed.add(name)
        else:
            group.kill()
            self._forget(group)
        self._await_end(instance)

    def pid(self, name: str) -> int:
        """Pid of an engine's API server, which leads the engine's process group (stand-ins share one)."""
        return self._group(name).pid

    def is_running(self, name: str) -> bool:
        """True if an engine has been started and not ended."""
        if name not in self._groups:
            return False
        group = self._group(name)
        if group.is_running:
            return name not in self._killed
        self._forget(group)
        return False

    def exit_status(self, name: str) -> int | None:
        """An engine's exit code, or minus the signal that ended it; None while it runs."""
        return -signal.SIGKILL if name in self._killed else self._group(name).exit_status

    def ended_how(self, name: str) -> str:
        """How an engine that has ended did so, and where to read more."""
        if name not in self._groups:
            return f"it could not be started; see {self.log_path(name)}"
        status = self.exit_status(name)
        how = f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
        return f"{how}; see {self.log_path(name)}"

    def log_path(self, name: str) -> Path:
        """Where an engine's output goes."""
        group = self._groups.get(name)
        return group.log.path if group is not None else self.deployment.logs_dir / f"{name}.log"

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines of an engine's output."""
        return self._group(name).log.tail(lines)

    def _group(self, name: str) -> ProcessGroup:
        if name not in self._groups:
            raise EngineError(f"engine {name} has not been started")
        self._take_born()
        return self._groups[name]

    def _check_startable(self, instance: Instance) -> None:
        if self.is_running(instance.name):
            raise EngineError(f"engine {instance.name} runs already")
        events_port = instance.events_port
        event_ports = () if events_port is None else (events_port, events_port + 1)
        nixl_ports = () if instance.nixl_port is None else (instance.nixl_port,)
        for port in (instance.http_port, *instance.kv_ports, *event_ports, *nixl_ports):
            problem = port_problem(instance.host, port)
            if problem is not None:
                raise EngineError(f"engine {instance.name} can't start: {problem}")

    def _commands(self, instances: Sequence[Instance]) -> Iterator[tuple[Sequence[str], EngineCommand]]:
        """Each process to start, with the names of the instances in it."""
        stand_ins = []
        for instance in instances:
            if self._command is None and self.deployment.is_synthetic(instance):
                stand_ins.append(instance.name)
            else:
                build = self._command or vllm_command
                yield (instance.name,), build(self.deployment, instance)
        for start in range(0, len(stand_ins), self._stand_ins_per_process):
            together = stand_ins[start : start + self._stand_ins_per_process]
            yield together, synthetic_command(self.deployment, together)

    def _start_process(self, names: Sequence[str], command: EngineCommand) -> None:
        log_name = names[0] if len(names) == 1 else f"{names[0]}-to-{names[-1]}"
        group = ProcessGroup.start(command.argv, self._environment(command), self._log(log_name))
        for name in names:
            self._groups[name] = group
            self._begins(name)
        self._watch(group)

    def _fork_of(self, names: Sequence[str], command: EngineCommand) -> Iterator[EngineStart]:
        for name in names:
            self._begins(name)
            yield EngineStart(name, command.argv, self._environment(command), self._log(name))

    def _begins(self, name: str) -> None:
        self._started_s[name] = time.monotonic()
        self._killed.discard(name)

    def _take_born(self) -> None:
        """Engines that a template has forked are processes of their own from now on."""
        for name, group in self._templates.born(self._watch).items():
            self._groups[name] = group
            if name in self._killed:
                group.kill()
                self._forget(group)
        if not self._keeps_templates and not self._templates.is_busy:
            self._templates.close()

    def _environment(self, command: EngineCommand) -> dict[str, str]:
        return {**command.environment(), **self._extra_env}

    def _log(self, name: str) -> LogFile:
        engine = self.deployment.engine
        path = self.deployment.logs_dir / f"{name}.log"
        return LogFile(path, max_bytes=engine.log_bytes, kept_files=engine.log_files)

    def _watch(self, group: ProcessGroup) -> None:
        assert self._watchdog is not None
        self._watchdog.watch(group)

    def _await_end(self, instance: Instance) -> None:
        # The last process of a group may have a port for a moment longer than the first.
        deadline = time.monotonic() + _DEATH_S
        for port in (instance.http_port, *instance.kv_ports):
            while port_problem(instance.host, port) is not None:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"engine {instance.name} still has port {port}, {_DEATH_S:.0f} s after its end"
                    )
                time.sleep(_POLL_S / 10)

    def _what_is_missing(self, name: str) -> str:
        instance, group = self.deployment.instance(name), self._groups[name]
        if group.log.written_bytes == 0:
            logged = "empty so far"
        else:
            written_s = group.log.path.stat().st_mtime
            logged = f"last written to {max(0.0, time.time() - written_s):.0f} s ago"
        return (
            f"engine {name} runs, but does not answer {instance.url}/health, "
            f"{time.monotonic() - self._started_s[name]:.0f} s after it was started; "
            f"its log is {group.log.path} ({logged})"
        )

    def _check_alive(self, name: str) -> None:
        group, status = self._groups[name], self.exit_status(name)
        if status is not None:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
            raise EngineError(
                f"engine {name} {how} before it was ready; the end of {group.log.path}:\n{group.log.tail(20)}"
            )

    def _forget(self, group: ProcessGroup) -> None:
        if self._watchdog is not None:
            self._watchdog.forget(group)
