"""An engine's or a tool's end of the pool's Unix socket."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.protocol import PageRef, PoolMatch, SessionKind


class PoolClient:
    """Thread-safe by one lock. A dead or slow daemon is an empty pool; it is reconnected in the background."""

    def __init__(
        self,
        path: Path,
        kind: SessionKind,
        geometry: PoolGeometry | None,
        rank: int = 0,
        timeout_s: float = 2.0,
    ) -> None:
        raise NotImplementedError

    epoch: int
    """Of the daemon's start; 0 = not connected."""
    arena: npt.NDArray[np.uint8]
    """All of the arena; empty while not connected. Take it anew for each copy: a reconnect replaces it."""

    def connect(self) -> bool:
        """Open the session now; False if the daemon cannot be reached or refuses (the log says why)."""
        raise NotImplementedError

    def close(self) -> None:
        """End the session; pins and reservations are dropped."""
        raise NotImplementedError

    def match(
        self, chain: bytes, start_tokens: int, limit_tokens: int, *, whole: bool, tenant: bytes, pin: bool
    ) -> PoolMatch | None:
        """What the pool has of a prompt. None if it cannot be asked."""
        raise NotImplementedError

    def unpin(self, pin: int) -> None:
        """The pages of a match are no longer needed."""
        raise NotImplementedError

    def reserve(
        self, tenant: bytes, pages: Sequence[tuple[bytes, PageIdentity | None]]
    ) -> list[PageRef | None] | None:
        """Room for pages. None entries: already there, being written, or no room. None: the pool cannot be asked."""
        raise NotImplementedError

    def commit(self, pages: Sequence[tuple[PageRef, int]]) -> None:
        """This rank has written its parts, of these xxh3_64. Kept and sent later if the daemon cannot be reached."""
        raise NotImplementedError

    def abort(self, pages: Sequence[PageRef]) -> None:
        """A worker: this rank will not write its parts. A scheduler: nobody got the order to write them."""
        raise NotImplementedError

    def discard(self, page_ids: Sequence[bytes]) -> None:
        """Superseded pages: those that are READY, unpinned and were never hit go."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any] | None:
        """What the pool holds and did. None if it cannot be asked."""
        raise NotImplementedError

    def clear(self) -> dict[str, Any] | None:
        """Drop every page that nobody uses. Returns how many there were."""
        raise NotImplementedError

    def verify(self) -> dict[str, Any] | None:
        """Compare every page's bytes with its checksums; wrong pages go."""
        raise NotImplementedError

    def page_state(self, slot: int) -> PageState:
        """Of the page that a match or reservation gave; FREE once the slot has another use."""
        raise NotImplementedError

    def intact(self, epoch: int, pages: Sequence[PageRef]) -> bool:
        """After copying pages out: whether all of them were readable all the time since the match of that epoch."""
        raise NotImplementedError

    def checksum_to_verify(self, slot: int) -> int | None:
        """xxh3_64 of this rank's part if the page must be verified by its reader (it outlived a daemon), else None."""
        raise NotImplementedError

    @contextmanager
    def writing(self, epoch: int) -> Iterator[bool]:
        """Around every copy into the arena. False: the epoch is over, nothing may be written.

        A session after a restart is opened only when no copy is inside: so the daemon knows that old ones ended.
        """
        raise NotImplementedError
        yield False
