"""Ports for the servers that benches start."""

import random

from prfaas.serving.engines.preparation import port_problem


def free_ports(count: int) -> list[int]:
    """Neighbours that nobody listens on, below those that the kernel gives to connections: a port is free again
    when its server is started again."""
    while True:
        first = random.randrange(10_000, 32_000 - count)
        chosen = range(first, first + count)
        if not any(port_problem("127.0.0.1", port) for port in chosen):
            return list(chosen)
