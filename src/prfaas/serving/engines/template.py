"""Engines that are forks of one process, which has imported vLLM once for all of them.

`serving/engines/vllm/template.py` is that process. Each engine ends up as a child of this one, in a session and with a
log of its own, as if it had been started here.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from prfaas.serving.engines.log_file import LogFile
from prfaas.serving.engines.process_group import ProcessGroup
from prfaas.serving.tracing.collector import HEADERS_VARIABLE, PROTOCOL_VARIABLE

_MODULE = "prfaas.serving.engines.vllm.template"
_END_S = 10.0
# PR_SET_CHILD_SUBREAPER of Linux.
_TAKE_ORPHANS = 36
_LIBC = ctypes.CDLL(None)
# Read by an engine and by nothing that it imports: forks have them of their own.
_READ_LATE = frozenset(
    {
        HEADERS_VARIABLE,
        PROTOCOL_VARIABLE,
        "OTEL_RESOURCE_ATTRIBUTES",
        "OTEL_SERVICE_NAME",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)


@dataclass(frozen=True, slots=True)
class EngineStart:
    """An engine to be started."""

    name: str
    argv: Sequence[str]
    """As `EngineCommand.argv`: an interpreter, `-m`, a module and its arguments."""
    env: Mapping[str, str]
    """All of its environment."""
    log: LogFile

    @property
    def template_env(self) -> dict[str, str]:
        """The variables that a template must have."""
        return {name: value for name, value in self.env.items() if name not in _READ_LATE}

    @property
    def own_env(self) -> dict[str, str]:
        """The variables that its fork is given."""
        return {name: value for name, value in self.env.items() if name in _READ_LATE}


class EngineTemplate:
    """A process that has imported vLLM, or does so. Not thread-safe."""

    def __init__(self, env: Mapping[str, str], log: LogFile) -> None:
        """Start it; it needs many seconds until it can fork.

        Args:
            env: its environment, and that of its engines but for what each has of its own.
            log: for what it says itself.
        """
        self.env = dict(env)
        orders, self._orders = os.pipe()
        self._reports, report = os.pipe()
        try:
            argv = (sys.executable, "-m", _MODULE, str(report))
            self.group = ProcessGroup.start(argv, env, log, stdin=orders, pass_fds=(report,))
            """Its processes, and those of engines that are not there yet."""
        finally:
            os.close(orders)
            os.close(report)
        os.set_blocking(self._reports, False)
        self._starts: dict[str, EngineStart] = {}
        self._reported = b""

    @property
    def is_busy(self) -> bool:
        """True if engines have been ordered that are not there yet."""
        return bool(self._starts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the ordered engines."""
        return tuple(self._starts)

    def order(self, starts: Sequence[EngineStart]) -> None:
        """Have it become these engines as soon as it can; it must not be busy."""
        assert not self.is_busy
        self._starts = {start.name: start for start in starts}
        for start in starts:
            # With the line that says when it was started.
            start.log.open().close()
        engines = [
            {
                "name": start.name,
                "argv": start.argv,
                "env": start.own_env,
                "log": str(start.log.path.absolute()),
            }
            for start in starts
        ]
        _take_orphans(True)
        self._say(json.dumps({"engines": engines}))

    def born(self, watch: Callable[[ProcessGroup], None]) -> dict[str, ProcessGroup]:
        """The ordered engines, once all are there; nothing before.

        Args:
            watch: called with each before it runs.
        """
        if not self.is_busy:
            return {}
        pids = self._read_reports()
        if len(pids) < len(self._starts):
            return {}
        groups = {name: ProcessGroup.adopt(pids[name], start.log) for name, start in self._starts.items()}
        for group in groups.values():
            watch(group)
        self._starts, self._reported = {}, b""
        _take_orphans(False)
        self._say("go")
        return groups

    def close(self) -> None:
        """End it, and engines that were ordered and are not there yet. Idempotent."""
        if self._orders < 0:
            return
        os.close(self._orders)
        self._orders = -1
        if self.is_busy or not self.group.wait(_END_S):
            self.group.kill()
        # Forks end with it; they are this process's children by now.
        os.set_blocking(self._reports, True)
        for pid in self._read_reports().values():
            os.waitpid(pid, 0)
        os.close(self._reports)
        if self.is_busy:
            _take_orphans(False)
        self._starts = {}

    def _say(self, line: str) -> None:
        try:
            os.write(self._orders, line.encode() + b"\n")
        except BrokenPipeError:
            # It has ended, which shows in its group.
            return

    def _read_reports(self) -> dict[str, int]:
        """Pids of the ordered engines by name, as far as they are known."""
        try:
            while piece := os.read(self._reports, 4096):
                self._reported += piece
        except BlockingIOError:
            pass
        lines = self._reported.decode().splitlines(keepends=True)
        pairs = (line.rsplit(" ", 1) for line in lines if line.endswith("\n"))
        return {name: int(pid) for name, pid in pairs}


_orders_open = 0


def _take_orphans(take: bool) -> None:
    """While any template is busy, this process is the parent of what its descendants leave behind."""
    global _orders_open
    _orders_open += 1 if take else -1
    _LIBC.prctl(_TAKE_ORPHANS, int(_orders_open > 0), 0, 0, 0)


class EngineTemplates:
    """A template for each environment. As a context manager: they end on exit. Not thread-safe."""

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._templates: list[EngineTemplate] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def order(self, starts: Sequence[EngineStart], log: Callable[[], LogFile]) -> dict[str, ProcessGroup]:
        """Have these engines started; for each, what stands for it until it is there.

        Args:
            starts: which.
            log: makes the log of a template.
        """
        standing: dict[str, ProcessGroup] = {}
        rest = list(starts)
        while rest:
            env = rest[0].template_env
            alike = [start for start in rest if start.template_env == env]
            rest = [start for start in rest if start.template_env != env]
            template = self._free(env) or EngineTemplate(env, log())
            if template not in self._templates:
                self._templates.append(template)
            template.order(alike)
            standing |= dict.fromkeys(template.names, template.group)
        return standing

    def born(self, watch: Callable[[ProcessGroup], None]) -> dict[str, ProcessGroup]:
        """Ordered engines that are there now, each once; `watch` is called with each before it runs."""
        return {name: group for each in self._templates for name, group in each.born(watch).items()}

    @property
    def is_busy(self) -> bool:
        """True if any engine is not there yet."""
        return any(each.is_busy for each in self._templates)

    def give_up(self) -> None:
        """End those that engines are waited for of, and these engines."""
        for template in tuple(self._templates):
            if template.is_busy:
                self._templates.remove(template)
                template.close()

    def close(self) -> None:
        """End all, and engines that are not there yet. Idempotent."""
        while self._templates:
            self._templates.pop().close()

    def _free(self, env: Mapping[str, str]) -> EngineTemplate | None:
        idle = (each for each in self._templates if each.env == env and not each.is_busy)
        return next((each for each in idle if each.group.is_running), None)
