"""Starts engines and pools again that have ended: later each time, and not for ever."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.backoff import Backoff
from prfaas.serving.engines import EngineError
from prfaas.serving.secret_files import KeyFileError, TlsFileError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_BACKOFF = Backoff(1.0, 60.0)


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Limits of restarts of an engine or a pool."""

    most: int = 5
    """Restarts in a row; then the deployment goes on without it. 0: it is never started again."""
    backoff: Backoff = _BACKOFF
    """Waits before restarts."""
    steady_s: float = 600.0
    """What answered so long after a restart counts as sound: its restarts are forgotten."""
    ready_timeout_s: float = 1200.0
    """A restart that is not ready by then has failed: it is ended, and counts."""


class Running(Protocol):
    """The part of `ChildProcesses` that the supervisor uses."""

    def is_running(self, name: str) -> bool: ...

    def ended_how(self, name: str) -> str: ...

    def restart(self, names: Collection[str]) -> None: ...

    def kill(self, name: str) -> None: ...

    def answers(self, name: str) -> bool: ...


@dataclass(slots=True)
class _Watched:
    restarts: int = 0
    due_s: float | None = None
    """When it is to be started again; None while it runs or is given up."""
    started_s: float | None = None
    """When it was started again; None before, and once it has answered."""
    sound_s: float | None = None
    """When its restarts are forgotten."""
    given_up: bool = False
    is_new: bool = False
    """It has not been started yet, or has not answered since."""


class Supervisor:
    """Watches the engines or the pools of one deployment on this machine. Belongs to one event loop's thread."""

    def __init__(
        self,
        running: Running,
        watched: Collection[str],
        limits: RestartLimits,
        tell: Callable[[str], None],
        *,
        kind: str = "engine",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All that is watched runs and is ready.

        Args:
            running: which ends and starts them.
            watched: names of engines, or units of them, or of pools.
            limits: how often and how soon.
            tell: called with every sentence that an operator should read.
            kind: what they are, in those sentences.
            clock: seconds that never go back.
        """
        self._running = running
        self._watched = {name: _Watched() for name in watched}
        self._kind = kind
        self._limits = limits
        self._tell = tell
        self._clock = clock

    @property
    def given_up(self) -> list[str]:
        """Names of those that are not started again any more."""
        return [name for name, each in self._watched.items() if each.given_up]

    def watch(self, name: str) -> None:
        """Start one more, and watch it; nothing where it is watched already."""
        if name not in self._watched:
            self._watched[name] = _Watched(due_s=self._clock(), is_new=True)

    def start_again(self, name: str) -> None:
        """Start one that was ended on purpose: that is no failure, and its restarts are forgotten."""
        if name in self._watched:
            self._watched[name] = _Watched(due_s=self._clock())

    def leave(self, name: str) -> None:
        """Watch one no longer: it is to end."""
        self._watched.pop(name, None)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Notice those that have ended, start again those that are due, and ask the starting ones if they are ready.

        What fails unexpectedly is logged: whoever else ends later must still be started again.
        """
        try:
            await self._look()
        except Exception:
            logger.exception("watching each %s failed, and goes on", self._kind)

    async def _look(self) -> None:
        for name, each in tuple(self._watched.items()):
            if each.due_s is None and not each.given_up and not self._running.is_running(name):
                self._ended(name, each)
        now_s = self._clock()
        due = [name for name, each in self._watched.items() if each.due_s is not None and each.due_s <= now_s]
        if due:
            await self._start(due)
        for name, each in tuple(self._watched.items()):
            if each.started_s is not None and each.due_s is None:
                await self._ask(name, each)
            elif each.sound_s is not None and self._clock() >= each.sound_s:
                each.restarts, each.sound_s = 0, None

    def _ended(self, name: str, each: _Watched) -> None:
        how = self._running.ended_how(name)
        each.started_s = each.sound_s = None
        if each.restarts >= self._limits.most:
            each.given_up = True
            again = f" after {each.restarts} restarts" if each.restarts else ""
            self._tell(f"{self._kind} {name} has ended{again} ({how}); the others go on without it")
            return
        wait_s = self._limits.backoff.pause_s(each.restarts + 1)
        each.restarts += 1
        each.due_s = self._clock() + wait_s
        self._tell(
            f"{self._kind} {name} has ended ({how}); restart {each.restarts} of {self._limits.most} in {wait_s:g} s"
        )

    async def _start(self, due: Collection[str]) -> None:
        """All that are due together: stand-ins that shared a process share one again.

        Where that fails, one after the other: what keeps one from starting must not cost the others a restart.
        """
        for name in due:
            self._watched[name].due_s = None
            self._watched[name].started_s = self._clock()
        try:
            # In a thread: the gateway serves in this one.
            await asyncio.to_thread(self._running.restart, due)
        except (EngineError, KeyFileError, TlsFileError, OSError) as error:
            for name in due:
                # Who has left meanwhile is not to be started any more.
                if name not in self._watched:
                    continue
                if len(due) == 1:
                    self._refused(name, error)
                else:
                    await self._start([name])

    def _refused(self, name: str, error: Exception) -> None:
        self._tell(f"no restart of {name}: {error}")
        # Of what has never run, nobody can say how it ended.
        if self._watched[name].is_new:
            self._watched[name].given_up = True
            self._watched[name].started_s = None

    async def _ask(self, name: str, each: _Watched) -> None:
        assert each.started_s is not None
        if await asyncio.to_thread(self._running.answers, name):
            again = "" if each.is_new else " again"
            each.is_new = False
            self._tell(f"{self._kind} {name} is ready{again} after {self._clock() - each.started_s:.0f} s")
            each.started_s, each.sound_s = None, self._clock() + self._limits.steady_s
        elif self._clock() - each.started_s > self._limits.ready_timeout_s and self._running.is_running(name):
            self._tell(
                f"{self._kind} {name} is not ready {self._limits.ready_timeout_s:g} s after its restart"
            )
            with contextlib.suppress(EngineError):
                await asyncio.to_thread(self._running.kill, name)
