"""Ports for servers that tests start."""

import contextlib
import os
import random
import socket

EXAMPLES = range(18_000, 19_400)
"""Ports of the examples and of the guides."""

_ALL = [port for port in range(12_000, 32_000) if port not in EXAMPLES]


def own() -> list[int]:
    """Those of this worker of pytest-xdist, in the order in which they are given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    each = len(_ALL) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = _ALL[worker * each : (worker + 1) * each]
    random.SystemRandom().shuffle(own)
    return own


_OWN = own()


def free_ports(count: int) -> list[int]:
    """`count` ports of this machine that are free now.

    They lie below the range that outgoing connections take theirs from, so nothing takes one before its server is
    started, or while it is started anew and others keep trying to reach it. None is one of the examples' ports: a test
    may change some of an example's ports and leave the others. No port is given twice, by whichever worker of a test
    run, before all others of the worker were: its server may not have been started yet.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            if not _OWN:
                _OWN.extend(own())
            port = _OWN.pop()
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                found.append(port)
    return found


def neighbours(count: int) -> int:
    """The first of so many free ports, one behind the other: rank r of an engine listens at the one r behind."""
    while True:
        (first,) = free_ports(1)
        ports = range(first + 1, first + count)
        # Some were given, or are another worker's.
        if not all(port in _OWN for port in ports):
            continue
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                _OWN.remove(port)
            return first
