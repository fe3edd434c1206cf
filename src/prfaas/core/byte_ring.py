"""The newest of what comes, numbered, in bounded memory."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RingEntry:
    """One entry: its number and its bytes."""

    number: int
    """From 1 on, in steps of 1."""
    data: bytes


class ByteRing:
    """Keeps the newest entries: `most_entries` at most, and together `most_bytes` at most. The oldest go first.

    Numbers are never used twice, so a reader that comes back sees by them whether it has missed something.
    An entry that alone is larger than `most_bytes` is not kept, and neither is anything before it.
    """

    def __init__(self, *, most_entries: int, most_bytes: int) -> None:
        if most_entries < 1 or most_bytes < 1:
            raise ValueError(f"a ring needs room, not {most_entries} entries and {most_bytes} bytes")
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._entries: deque[RingEntry] = deque()
        self.used_bytes = 0
        """Of the entries kept."""
        self.newest = 0
        """The number of the last entry that came; 0 before the first."""

    def append(self, data: bytes) -> int:
        """Keep `data`; returns its number."""
        self.newest += 1
        self._entries.append(RingEntry(self.newest, data))
        self.used_bytes += len(data)
        while len(self._entries) > self._most_entries or self.used_bytes > self._most_bytes:
            self.used_bytes -= len(self._entries.popleft().data)
        return self.newest

    def after(self, number: int) -> Iterator[RingEntry]:
        """Entries with higher numbers, oldest first. The ring must not change meanwhile."""
        if number >= self.newest:
            return
        for entry in self._entries:
            if entry.number > number:
                yield entry

    def __len__(self) -> int:
        return len(self._entries)
