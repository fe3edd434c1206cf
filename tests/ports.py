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
    may change some of an example's ports and leave the others. No port is given twice in a test run, by whichever of
    its workers: its server may not have been started yet.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = _OWN.pop()
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                found.append(port)
    return found


def two_neighbours() -> int:
    """The first of two free ports, one behind the other: rank 1 of an engine listens at the second."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as sock, contextlib.suppress(OSError, ValueError):
            sock.bind(("127.0.0.1", port + 1))
            # Raises where it was given, or is another worker's.
            _OWN.remove(port + 1)
            return port
