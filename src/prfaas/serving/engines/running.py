"""The engines of a deployment as child processes of this one."""

import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prfaas.core.deployment import TOOLS, Deployment, Instance
from prfaas.serving.certificates import identity_of
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.child_processes import STOP_TIMEOUT_S, ChildProcesses
from prfaas.serving.engines.command import EngineCommand, synthetic_command, vllm_command
from prfaas.serving.engines.data_parallel import end_group_before
from prfaas.serving.engines.engine_server import ask
from prfaas.serving.engines.preparation import (
    ensure_certificates,
    ensure_dtypes,
    ensure_events_folder,
    ensure_key,
    ensure_model,
    ensure_nixl,
    ensure_vllm,
    port_problem,
)
from prfaas.serving.engines.process_group import ProcessGroup
from prfaas.serving.engines.template import EngineStart, EngineTemplates
from prfaas.serving.transport.io.tls_identity import TlsIdentity

STAND_INS_PER_PROCESS = 16
_DEATH_S = 10.0
_PORT_POLL_S = 0.03


class RunningEngines(ChildProcesses):
    """Engines of one deployment on this machine.

    Stand-ins share processes. vLLM on CPUs is forked from a template, which stands for an engine until it is there.
    """

    kind = "engine"

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
        """As `ChildProcesses`.

        Args:
            deployment: as there.
            names: as there.
            extra_env: as there.
            command: starts every instance in a process of its own; None: vLLM, or stand-ins that share processes.
            stand_ins_per_process: how many stand-ins share a process at most.
            templates: of engines on CPUs, kept for those that are started later; None: none are kept.
        """
        super().__init__(deployment, names, extra_env)
        self._command = command
        self._stand_ins_per_process = stand_ins_per_process
        self._killed: set[str] = set()
        self._keeps_templates = templates is not None
        self._templates = templates or EngineTemplates()
        self._tls: TlsIdentity | None = None

    def restart(self, names: Collection[str]) -> None:
        """Start engines, as `ChildProcesses.restart`; stand-ins among them share processes."""
        self._launch([each for each in self._all_names() if each in names])

    def _all_names(self) -> Iterable[str]:
        return (instance.name for instance in self.deployment.instances)

    def _launch(self, names: Sequence[str]) -> None:
        instances = [self.deployment.instance(each) for each in names]
        if self._command is None and not all(each.is_stand_in for each in instances):
            ensure_vllm()
        for instance in instances:
            self._check_free(instance)
        if self._command is None:
            ensure_nixl(self.deployment, instances)
            weights = not all(each.is_stand_in for each in instances)
            ensure_model(self.deployment, weights=weights)
            ensure_dtypes(self.deployment, instances)
        ensure_key(self.deployment)
        ensure_certificates(self.deployment, names)
        ensure_events_folder(self.deployment)
        for instance in instances:
            end_group_before(self.deployment, instance, started=names)
        launched: list[str] = []
        try:
            forks: list[EngineStart] = []
            for together, command in self._commands(instances):
                launched += together
                self._killed.difference_update(together)
                if command.is_forkable:
                    forks += self._fork_of(together, command)
                else:
                    self._spawn(together, command)
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
        """Check that these instances of another deployment file could be started here.

        Raises:
            EngineError: a port is taken.
            TlsFileError: a certificate can't be used.
        """
        for instance in added:
            self._check_free(instance)
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

    def answers(self, name: str) -> bool:
        """True if an engine's server says that it is healthy."""
        return self._ask(self.deployment.instance(name), "GET", "/health") == 200

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End all, as `ChildProcesses.stop`."""
        try:
            self._take_born()
            self._templates.give_up()
        finally:
            super().stop(timeout_s)
            self._killed.clear()

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
        if self._shares(name):
            self._ask(instance, "POST", "/synthetic/die")
            self._killed.add(name)
        else:
            super().kill(name)
        self._await_end(instance)

    def is_running(self, name: str) -> bool:
        """True if an engine has been started and not ended."""
        return super().is_running(name) and name not in self._killed

    def exit_status(self, name: str) -> int | None:
        """An engine's exit code, or minus the signal that ended it; None while it runs."""
        return -signal.SIGKILL if name in self._killed else super().exit_status(name)

    def _address(self, name: str) -> str:
        return f"{self.deployment.instance(name).url}/health"

    def _ask(self, instance: Instance, method: str, path: str) -> int | None:
        """Ask an engine's HTTP server; the status of its answer, None where there is none."""
        if instance.tls:
            self._tls = self._tls or identity_of(self.deployment, TOOLS)
        return ask(instance, method, path, tls=self._tls)

    def _group(self, name: str) -> ProcessGroup:
        if name in self._groups:
            self._take_born()
        return super()._group(name)

    def _check_free(self, instance: Instance) -> None:
        nixl_ports = () if instance.nixl_port is None else (instance.nixl_port,)
        meeting_ports = () if instance.data_parallel is None else (instance.meeting_port,)
        ports = (instance.http_port, *instance.kv_ports, *nixl_ports, *meeting_ports)
        self._check_startable(instance.name, instance.host, ports)

    def _commands(self, instances: Sequence[Instance]) -> Iterator[tuple[Sequence[str], EngineCommand]]:
        """Each process to start, with the names of the instances in it."""
        stand_ins = []
        for instance in instances:
            if self._command is None and instance.is_stand_in:
                stand_ins.append(instance.name)
            else:
                build = self._command or vllm_command
                yield (instance.name,), build(self.deployment, instance)
        for start in range(0, len(stand_ins), self._stand_ins_per_process):
            together = stand_ins[start : start + self._stand_ins_per_process]
            yield together, synthetic_command(self.deployment, together)

    def _fork_of(self, names: Sequence[str], command: EngineCommand) -> Iterator[EngineStart]:
        for name in names:
            self._started_s[name] = time.monotonic()
            yield EngineStart(name, command.argv, self._environment(command), self._log(name))

    def _take_born(self) -> None:
        """Engines that a template has forked are processes of their own from now on."""
        for name, group in self._templates.born(self._watch).items():
            self._groups[name] = group
            if name in self._killed:
                group.kill()
                self._forget(group)
        if not self._keeps_templates and not self._templates.is_busy:
            self._templates.close()

    def _await_end(self, instance: Instance) -> None:
        # The last process of a group may have a port for a moment longer than the first.
        deadline = time.monotonic() + _DEATH_S
        for port in (instance.http_port, *instance.kv_ports):
            while port_problem(instance.host, port) is not None:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"engine {instance.name} still has port {port}, {_DEATH_S:.0f} s after its end"
                    )
                time.sleep(_PORT_POLL_S)
