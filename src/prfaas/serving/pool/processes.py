"""Engines and processes at the other end of a Unix socket, and whether they still live.

Process numbers are reused, so a process is known by its number and its start time. The number of a process group is
not reused while the group has a process.
"""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("iII")
# Field 22 of /proc/PID/stat, counted from the state, which follows the name in parentheses.
_STARTED = 19
_STATE, _GROUP = 0, 2
_ENDED = ("Z", "X")


@dataclass(frozen=True, slots=True)
class Owner:
    """The engine that reserved a page: one or more processes of one process group."""

    process_group: int
    started: int
    """Start time of the group's leader in clock ticks since boot, 0 if it had ended; numbers are reused."""
    engine: bytes
    """8 bytes that distinguish engines of one process group."""


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process that opened a connection."""

    pid: int
    started: int
    """Clock ticks since boot, 0 if it had ended already."""

    @classmethod
    def of(cls, connection: socket.socket) -> "PeerProcess":
        """The process that connected to that Unix socket.

        Raises:
            ValueError: it is in a process namespace that cannot be seen from here.
        """
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        if not pid:
            raise ValueError(
                "the pool's daemon and its engines must see each other's processes: use one PID namespace"
            )
        return cls(pid, start_ticks(pid))

    def owner(self, engine: bytes) -> Owner:
        """The engine that it belongs to, by its process group."""
        try:
            group = os.getpgid(self.pid)
        except ProcessLookupError:
            group = self.pid
        return Owner(group, start_ticks(group), engine)

    @property
    def lives(self) -> bool:
        """True until it has ended."""
        return self.started > 0 and start_ticks(self.pid) == self.started


def start_ticks(pid: int) -> int:
    """Start time of a process, in clock ticks since boot; 0 if it has ended."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else 0


def owner_lives(owner: Owner) -> bool:
    """True if a process of the engine may still live."""
    started = start_ticks(owner.process_group)
    if started:
        return started == owner.started or not owner.started
    try:
        os.killpg(owner.process_group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # The leader has ended; it may be there as a zombie, which has a group but writes nothing.
    group = str(owner.process_group)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return any(fields and fields[_GROUP] == group for fields in map(_stat, pids))


def _stat(pid: int) -> list[str]:
    """The fields of a process from its state on, none if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    fields = stat.rpartition(")")[2].split()
    return [] if fields[_STATE] in _ENDED else fields
