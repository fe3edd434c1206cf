"""Where an engine publishes what its prefix cache holds."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EventsEndpoint:
    """ZeroMQ addresses: `bind_*` for the engine, `publish` and `replay` for subscribers to connect to."""

    bind_publish: str
    bind_replay: str
    publish: str
    replay: str


def tcp_endpoint(host: str, port: int) -> EventsEndpoint:
    """Events at `port`, replay at the port after it. `host` as it stands in a URL."""
    # vLLM's publisher connects instead of binding unless its address has a wildcard.
    return EventsEndpoint(
        f"tcp://*:{port}", f"tcp://*:{port + 1}", f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}"
    )


def local_endpoint(home: Path, instance: str) -> EventsEndpoint:
    """Abstract sockets of this machine: no port, no file, and nothing that another machine could reach."""
    place = hashlib.blake2b(str(home).encode(), digest_size=6).hexdigest()
    publish, replay = f"ipc://@prfaas-{place}-{instance}", f"ipc://@prfaas-{place}-{instance}-replay"
    return EventsEndpoint(publish, replay, publish, replay)
