"""Where servers are: hosts, as they are written in files and URLs, and the addresses of KV-cache events."""

import hashlib
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

TRACES_PATH = "/v1/traces"
"""Where OTLP/HTTP has traces."""

RANK_ENDING = "_dp"
"""What vLLM's publisher adds, with its number, to the sockets of a later data-parallel rank.

Only where the name has "inproc" in it.
"""

# With "inproc-" and "-replay_dp999" a Unix socket's address has 107 bytes.
_LONGEST_FOLDER, _NAME_BYTES = 87, 4
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")


@dataclass(frozen=True, slots=True)
class EventsEndpoint:
    """Where an engine publishes what its prefix cache holds, for its own machine: ZeroMQ addresses."""

    publish: str
    replay: str


def events_folder(home: Path) -> Path:
    """The folder of sockets of a deployment whose folder is `home`: their names must fit into a socket's address."""
    folder = home / "events"
    if len(os.fsencode(folder)) < _LONGEST_FOLDER - 2 * _NAME_BYTES:
        return folder
    place = hashlib.blake2b(os.fsencode(home), digest_size=6).hexdigest()
    return Path(f"/tmp/prfaas-{os.getuid()}-{place}")


def local_endpoint(home: Path, holder: str, rank: int = 0) -> EventsEndpoint:
    """Sockets of this machine, in a folder that only its user can enter: events hold token ids and salts.

    `rank`: the holder's in its data-parallel group. Later ranks have the ending that vLLM gives their sockets.
    """
    folder = events_folder(home)
    if len(os.fsencode(folder / holder)) > _LONGEST_FOLDER:
        holder = hashlib.blake2b(holder.encode(), digest_size=_NAME_BYTES).hexdigest()
    ending = f"{RANK_ENDING}{rank}" if rank else ""
    publish = f"ipc://{folder}/inproc-{holder}"
    return EventsEndpoint(f"{publish}{ending}", f"{publish}-replay{ending}")


def is_loopback(host: str) -> bool:
    """True if a host is this machine, by a name or an address that never leaves it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def checked_host(host: str) -> str:
    """A host as it was written: a name, or an IPv4 or IPv6 address. Whether it exists is not asked.

    Raises:
        ValueError: it is none; with what would be right.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        shown = host if len(host) <= 60 else f"{host[:57]}…"
        # No name ends with a number: resolvers take it for an address, some of them for a shortened one.
        if re.fullmatch(r"[0-9]+", host.rstrip(".").rpartition(".")[2]):
            raise ValueError(
                f'"{shown}" is no IPv4 address; write four numbers from 0 to 255, for example 192.0.2.10'
            ) from None
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(
                f'"{shown}" is no host; write a name or an address, without "http://", brackets or a port'
            ) from None
    return host


def plain_host(host: str) -> str:
    """A host in the one spelling by which machines are compared."""
    return "127.0.0.1" if host.lower() == "localhost" else host.lower()


def same_host(one: str, other: str) -> bool:
    """Whether two hosts listen at the same place, as far as their spelling tells."""
    one, other = (plain_host(host) for host in (one, other))
    if one == other:
        return True
    # A wildcard listener takes the port on every address of its machine; that is only certain for loopback.
    wildcards = {"0.0.0.0", "::"}
    return (one in wildcards and is_loopback(other)) or (other in wildcards and is_loopback(one))


def host_in_url(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def traces_url(url: str) -> str:
    """Where a collector takes traces; a URL without a path gets OTLP's own.

    Raises:
        ValueError: with what would be right.
    """
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or any(each.isspace() for each in url):
        raise ValueError(f'"{url}" is no URL of a collector; write one, for example "http://127.0.0.1:4318"')
    if "@" in parts.netloc:
        raise ValueError("must hold no password; put an Authorization header into the file of headers_file")
    if parts.query or parts.fragment:
        raise ValueError(f'"{url}" must end with its path')
    return url if parts.path.strip("/") else url.rstrip("/") + TRACES_PATH
