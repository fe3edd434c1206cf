"""One child process with everything that it starts, ended as a whole."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_POLL_S = 0.05


class ProcessGroup:
    """A child in a session of its own; its output goes to `log_path`. Not thread-safe.

    The group's id is the child's pid, which stays reserved until the child is reaped: a signal never hits another
    process that happens to get the number later.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        log: IO[bytes]
        with log_path.open("wb") as log:
            self._child = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

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
        self._child.wait()
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
            self._child.wait()

    def wait(self, timeout_s: float) -> bool:
        """True if the child has ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.is_running:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the output."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
