"""Ports for servers that tests start."""

import contextlib
import random
import socket

EXAMPLES = range(18_000, 19_400)
"""Ports of the examples and of the guides."""

_DRAW = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """`count` ports of this machine that are free now.

    They lie below the range that outgoing connections take theirs from, so nothing takes one before its server is
    started, or while it is started anew and others keep trying to reach it. None is one of the examples' ports: a test
    may change some of an example's ports and leave the others.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = _DRAW.randrange(12_000, 32_000)
            if port in EXAMPLES:
                continue
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                found.append(port)
    return found
