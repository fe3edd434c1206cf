"""Child processes that end as a whole, with everything that they started, also when this process is killed.

Run as a program, this file is the watchdog: it ends process groups when the process that started them is gone.
It needs only the standard library, so that it starts at once. It reads lines from stdin: "+PGID" watches a
group, "-PGID" forgets it. When stdin ends, its parent is gone or done, and it ends what it watches.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from prfaas.serving.engines.log_file import LogFile

_POLL_S = 0.05
_TERM_WAIT_S = 10.0


class _AdoptedChild:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ProcessGroup:
    """A child in a session of its own; its output goes to a log. Not thread-safe.

    The group's id is the child's pid, which stays reserved until the child is reaped: a signal never hits another
    process that happens to get the number later.
    """

    def __init__(self, child: "subprocess.Popen[bytes] | _AdoptedChild", log: "LogFile") -> None:
        """Of a child that leads a session, and whose output goes to `log` already."""
        self.log = log
        self._child = child
        log.keep_small()

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: "LogFile",
        *,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Start a child; `stdin` and `pass_fds` as `subprocess` has them."""
        with log.open() as file:
            child = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=stdin,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        return cls(child, log)

    @classmethod
    def adopt(cls, pid: int, log: "LogFile") -> Self:
        """Take over a child of this process that another one has started."""
        return cls(_AdoptedChild(pid), log)

    @property
    def pid(self) -> int:
        """Pid of the child, which is also the group's id."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """True until the child has ended. What it left behind is killed as soon as this is noticed."""
        if self._child.returncode is not None:
            return False
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return True
        self._signal(signal.SIGKILL)
        self._reap()
        return False

    @property
    def exit_status(self) -> int | None:
        """The child's exit code, or minus the signal that ended it; None while it runs."""
        return None if self.is_running else self._child.returncode

    def ask_to_end(self) -> None:
        """SIGTERM to the whole group, if it still runs."""
        if self.is_running:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when the child is gone."""
        if self.is_running:
            self._signal(signal.SIGKILL)
            self._reap()

    def wait(self, timeout_s: float) -> bool:
        """True if the child has ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.is_running:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _reap(self) -> None:
        self._child.wait()
        self.log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Watchdog:
    """A process that ends watched process groups as soon as this process is gone. Not thread-safe."""

    def __init__(self) -> None:
        self._watched: set[ProcessGroup] = set()
        self._process: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: ProcessGroup) -> None:
        """End `group` when this process is gone."""
        self._watched.add(group)
        self._send(f"+{group.pid}")

    def forget(self, group: ProcessGroup) -> None:
        """`group` has ended: its number may soon be that of another group."""
        if group in self._watched:
            self._watched.remove(group)
            self._send(f"-{group.pid}")

    def close(self) -> None:
        """End the watchdog; every watched group must have been reaped. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            # It must not act on the groups' numbers when its input ends.
            process.kill()
            process.communicate()
        self._watched.clear()

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # Without a watchdog groups still end in the orderly way; only a SIGKILL of this process would leave them.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def run_watchdog() -> None:
    """Watch until stdin ends, then SIGTERM every watched group, and SIGKILL what is left after a while."""
    # The parent decides when it is over: a Ctrl-C in its terminal or a SIGTERM to all must not end the watch before.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    deadline = time.monotonic() + _TERM_WAIT_S
    _signal_all(groups, signal.SIGTERM)
    while any(_is_there(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal_all(groups, signal.SIGKILL)


def _signal_all(groups: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    run_watchdog()
