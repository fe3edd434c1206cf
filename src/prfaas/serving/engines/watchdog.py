"""Ends process groups when the process that started them is gone, even if that was killed without warning.

Runs as a process of its own (only the standard library, so that it starts at once). It reads lines from stdin:
"+PGID" watches a group, "-PGID" forgets it. When stdin ends, its parent is gone or done, and it ends what it watches.
"""

import contextlib
import os
import signal
import sys
import time

TERM_WAIT_S = 10.0


def main() -> None:
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
    deadline = time.monotonic() + TERM_WAIT_S
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
    main()
