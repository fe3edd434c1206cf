"""An engine's or a tool's end of the pool's Unix socket."""

import contextlib
import errno
import hashlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.core.backoff import Backoff
from prfaas.core.deployment import PoolSettings
from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.serving.pool import protocol
from prfaas.serving.pool.arena import Arena, ArenaError, map_arena
from prfaas.serving.pool.page_table import PageState

logger = logging.getLogger(__name__)

_BACKOFF = Backoff(0.05, 1.0)
_WATCH_S = 0.5
_PROVIDED_S = 0.1
# To verify or clear a large pool takes a while.
_TOOL_TIMEOUT_S = 600.0
_MOST_KEPT_ENDS = 100_000


A = TypeVar("A", protocol.Opened, protocol.Matched, protocol.Reserved, protocol.Figures, protocol.Done)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(protocol.Answer)


class Unavailable(Exception):
    """The daemon cannot answer now; the text says why."""


def has_hung_up(connection: socket.socket, timeout_s: float) -> bool:
    """Wait for the end of a connection; answers that arrive are passed over. A closed socket has ended, too."""
    file = connection.fileno()
    if file < 0:
        return True
    poll = select.poll()
    poll.register(file, select.POLLRDHUP)
    return bool(poll.poll(timeout_s * 1000))


def exchange(
    connection: socket.socket, message: protocol.Request, expected: type[A], timeout_s: float
) -> tuple[A, list[int]]:
    """Send a request and receive its answer, and the file descriptors that come with it.

    Raises:
        Unavailable: it took too long, the connection is gone, or the daemon refuses.
    """
    deadline_s = time.monotonic() + timeout_s
    body = _ENCODER.encode(message)
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.sendall(len(body).to_bytes(protocol.LENGTH_BYTES, "little") + body)
        head, descriptors, _, _ = socket.recv_fds(connection, protocol.LENGTH_BYTES, 1)
        head += _receive(connection, protocol.LENGTH_BYTES - len(head), deadline_s) if head else b""
        length = int.from_bytes(head, "little")
        if not 0 < length <= protocol.MOST_MESSAGE_BYTES:
            raise Unavailable("the daemon is gone" if not head else "its answer is garbage")
        answer = _DECODER.decode(_receive(connection, length, deadline_s))
        if isinstance(answer, protocol.Refused):
            raise Unavailable(answer.reason)
        if not isinstance(answer, expected):
            raise Unavailable("it answers something else than was asked")
    except BaseException as error:
        for each in descriptors:
            os.close(each)
        if isinstance(error, TimeoutError):
            raise Unavailable(f"no answer within {timeout_s:g} s") from None
        if isinstance(error, OSError):
            raise Unavailable(f"the daemon is gone ({error.strerror})") from None
        if isinstance(error, ValueError):
            raise Unavailable("its answer is garbage") from None
        raise
    return answer, descriptors


def _receive(connection: socket.socket, size_bytes: int, deadline_s: float) -> bytearray:
    """Receive exactly `size_bytes`.

    Raises:
        OSError: the connection ended, or the deadline has passed (TimeoutError).
    """
    received = bytearray(size_bytes)
    view = memoryview(received)
    while view:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        view = view[count:]
    return received


class PoolClient:
    """An engine's or tool's session with a pool's daemon; thread-safe by one lock.

    1. `connect` opens the session and maps the arena; a thread (`_keep`) reconnects in the background.
    2. A scheduler calls `match` for a prompt (`unpin` afterwards) and `reserve` for pages to store.
    3. Workers copy pages out of `arena` and check `intact`, or copy into it inside `writing` and `commit`.

    A dead or slow daemon looks like an empty pool: no method raises because of it, and each ends within the timeout.
    """

    def __init__(
        self,
        path: Path,
        kind: protocol.SessionKind,
        geometry: PoolGeometry | None,
        rank: int = 0,
        timeout_s: float = PoolSettings().timeout_s,
        engine_id: str = "",
    ) -> None:
        """Make it without connecting.

        Args:
            path: of the daemon's socket.
            kind: purpose of the session. Scheduler and workers of one engine have a session each.
            geometry: of the engine's KVCache. None, for a tool: the pool's; for a scheduler: its engine's, whose worker
                must have a session.
            rank: the worker's tensor-parallel rank.
            timeout_s: longest wait for an answer.
            engine_id: the same in all processes of an engine, another in every engine of the process group.
        """
        self._path = path
        self._kind: protocol.SessionKind = kind
        self._geometry = geometry
        self._rank = rank
        self._timeout_s = timeout_s
        self._engine_id = engine_id
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._arena: Arena | None = None
        self._epoch = 0
        self._pages: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        # Commits and aborts that the daemon has not received: slot → checksum, or None.
        self._ends: dict[int, int | None] = {}
        self._ends_epoch = 0
        self._copies = 0
        self._copies_changed = threading.Condition()
        self._keeper: threading.Thread | None = None
        self._closed = False
        self._said = ""

    @property
    def epoch(self) -> int:
        """Number of the daemon's start; 0 = not connected."""
        return self._epoch

    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        """Bytes of the arena; empty before the first connection. Read it for each copy: a reconnect replaces it."""
        return self._pages

    @property
    def geometry(self) -> PoolGeometry | None:
        """The given geometry, or else the pool's."""
        return self._geometry if self._arena is None else self._arena.layout.geometry

    def connect(self) -> bool:
        """Open the session now. False if that fails: the log says why, and it is tried again in the background."""
        with self._lock:
            if self._socket is None:
                try:
                    self._connect()
                except Unavailable as error:
                    self._lost(error)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="prfaas-pool", daemon=True)
                self._keeper.start()
            return self._socket is not None

    def close(self) -> None:
        """End the session: pins and reservations are dropped. Waits for copies into the arena."""
        self._wait_for_copies(self._timeout_s)
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(Unavailable):
                    self._ask(protocol.Goodbye(), protocol.Done)
            self._disconnect()

    def match(
        self, chain: bytes, start_tokens: int, limit_tokens: int, *, whole: bool, tenant: bytes, pin: bool
    ) -> protocol.PoolMatch | None:
        """Look up a prompt in the pool. None if it cannot answer.

        Args:
            chain: the keys of all whole steps from token 0 on, packed.
            start_tokens: tokens that the engine has already.
            limit_tokens: most usable tokens.
            whole: match all groups, by the hybrid rule; False: full-attention groups only.
            tenant: of the request, 8 bytes.
            pin: keep the pages that a load needs in memory until `unpin`, reading them from SSD if need be.
        """
        question = protocol.Match(chain, start_tokens, limit_tokens, whole=whole, tenant=tenant, pin=pin)
        with self._lock:
            answer = self._request(question, protocol.Matched)
            epoch = self._epoch
        if answer is None:
            return None
        pages = tuple(
            protocol.MatchedPages(group, first, protocol.page_refs(slots, offsets))
            for group, first, slots, offsets in answer.pages
        )
        return protocol.PoolMatch(
            pin=answer.pin,
            usable_tokens=answer.usable_tokens,
            attention_tokens=answer.attention_tokens,
            memory_tokens=answer.memory_tokens,
            pages=pages,
            epoch=epoch,
        )

    def unpin(self, pin: int) -> None:
        """Release the pages of a match."""
        with self._lock:
            self._request(protocol.Unpin(pin), protocol.Done)

    def reserve(
        self, tenant: bytes, pages: Sequence[tuple[bytes, PageIdentity | None]]
    ) -> list[protocol.PageRef | None] | None:
        """Reserve room for pages. None entries: already there, being written, or no room. None: no answer."""
        page_ids = b"".join([page_id for page_id, _ in pages])
        question = protocol.Reserve(tenant, page_ids, [identity for _, identity in pages])
        with self._lock:
            answer = self._request(question, protocol.Reserved)
        if answer is None:
            return None
        return [ref if ref.slot >= 0 else None for ref in protocol.page_refs(answer.slots, answer.offsets)]

    def commit(self, pages: Sequence[tuple[protocol.PageRef, int]]) -> None:
        """Report this rank's written shares with their xxh3_64; sent later if the daemon cannot be reached."""
        self._end({ref.slot: checksum for ref, checksum in pages})

    def abort(self, pages: Sequence[protocol.PageRef]) -> None:
        """Report that this rank will not write its shares; from a scheduler: that no rank will."""
        self._end({ref.slot: None for ref in pages})

    def discard(self, page_ids: Sequence[bytes]) -> None:
        """Drop superseded pages, if they are unused and were never hit."""
        with self._lock:
            self._request(protocol.Discard(b"".join(page_ids)), protocol.Done)

    def stats(self) -> dict[str, Any] | None:
        """Figures of the pool's content and work. None if it cannot answer."""
        return self._figures(protocol.Stats(), self._timeout_s)

    def clear(self) -> dict[str, Any] | None:
        """Drop every unused page. Returns their number; None if the pool cannot answer."""
        return self._figures(protocol.Clear(), _TOOL_TIMEOUT_S)

    def verify(self) -> dict[str, Any] | None:
        """Compare every page's bytes with its checksums, and drop wrong pages. None if the pool cannot answer."""
        return self._figures(protocol.Verify(), _TOOL_TIMEOUT_S)

    def page_states(self, pages: Sequence[protocol.PageRef]) -> npt.NDArray[np.uint8]:
        """States of pages that a match or reservation gave, as numbers; FREE once the slot has another use."""
        arena = self._arena
        if arena is None:
            return np.full(len(pages), PageState.FREE, np.uint8)
        return arena.table.states([page.slot for page in pages])

    def checksums_to_verify(self, pages: Sequence[protocol.PageRef]) -> dict[int, int]:
        """By slot: xxh3_64 of this rank's share, of pages that outlived a daemon and that the reader must verify."""
        arena = self._arena
        return (
            {}
            if arena is None
            else arena.table.checksums_to_verify([page.slot for page in pages], self._rank)
        )

    def intact(self, epoch: int, pages: Sequence[protocol.PageRef]) -> bool:
        """True if pages that were copied out have been readable ever since the match of that epoch."""
        arena = self._arena
        return (
            arena is not None
            and epoch == self._epoch == arena.epoch
            and arena.table.are_readable([page.slot for page in pages])
        )

    @contextmanager
    def writing(self, epoch: int) -> Iterator[bool]:
        """Guard for every copy into the arena. False: the epoch is over, nothing may be written.

        A session is opened only while no copy is inside, so the daemon knows that earlier copies have ended. Check
        `page_states` inside: only WRITING pages may be written.
        """
        with self._copies_changed:
            self._copies += 1
        try:
            yield epoch != 0 and epoch == self._epoch
        finally:
            with self._copies_changed:
                self._copies -= 1
                self._copies_changed.notify_all()

    def _end(self, ends: dict[int, int | None]) -> None:
        with self._lock:
            self._ends |= ends
            if len(self._ends) > _MOST_KEPT_ENDS:
                # The daemon frees those slots when this process opens a session or ends.
                self._ends.clear()
            if self._socket is not None:
                try:
                    self._send_ends()
                except Unavailable as error:
                    self._lost(error)

    def _send_ends(self) -> None:
        committed = {slot: checksum for slot, checksum in self._ends.items() if checksum is not None}
        aborted = [slot for slot, checksum in self._ends.items() if checksum is None]
        if committed:
            slots, checksums = (
                protocol.packed(list(committed)),
                protocol.packed(list(committed.values()), "Q"),
            )
            self._ask(protocol.Commit(slots, checksums), protocol.Done)
        if aborted:
            self._ask(protocol.Abort(protocol.packed(aborted)), protocol.Done)
        self._ends.clear()

    def _figures(self, message: protocol.Request, timeout_s: float) -> dict[str, Any] | None:
        with self._lock:
            answer = self._request(message, protocol.Figures, timeout_s)
        return None if answer is None else dict(answer.figures)

    def _request(
        self, message: protocol.Request, expected: type[A], timeout_s: float | None = None
    ) -> A | None:
        if self._socket is None:
            return None
        try:
            return self._ask(message, expected, timeout_s)
        except Unavailable as error:
            self._lost(error)
            return None

    def _ask(self, message: protocol.Request, expected: type[A], timeout_s: float | None = None) -> A:
        assert self._socket is not None
        return exchange(self._socket, message, expected, timeout_s or self._timeout_s)[0]

    def _connect(self) -> None:
        """Open the session.

        Raises:
            Unavailable: the daemon does not answer, or refuses.
        """
        if self._copies:
            raise Unavailable("a copy into the last session's arena has not ended")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(self._timeout_s)
            connection.connect(str(self._path))
            geometry = None if self._geometry is None else self._geometry.encode()
            engine = hashlib.blake2b(self._engine_id.encode(), digest_size=8).digest()
            opening = protocol.OpenSession(
                protocol.PROTOCOL_VERSION, self._kind, self._rank, engine, geometry
            )
            answer, descriptors = exchange(connection, opening, protocol.Opened, self._timeout_s)
            if answer.has_arena:
                self._arena = map_arena(descriptors[0])
                self._pages = np.frombuffer(self._arena.view, np.uint8)
                if self._kind == "worker":
                    arguments = (self._arena,)
                    threading.Thread(
                        target=self._populate, args=arguments, name="prfaas-pool-map", daemon=True
                    ).start()
            self._socket = connection
            if self._ends and answer.epoch == self._ends_epoch:
                self._send_ends()
        except (OSError, ValueError, IndexError, ArenaError, Unavailable) as error:
            connection.close()
            self._socket = None
            raise Unavailable(f"{getattr(error, 'strerror', None) or error}") from None
        self._ends.clear()
        self._epoch = self._ends_epoch = answer.epoch
        self._said = ""
        logger.info("the pool at %s is used", self._path)

    def _lost(self, error: Unavailable) -> None:
        """Disconnect, and log the reason once."""
        self._disconnect()
        if str(error) != self._said:
            self._said = str(error)
            logger.warning("the pool at %s is not used for now: %s", self._path, error)

    def _disconnect(self) -> None:
        # First, so that no copy begins any more: `writing`.
        self._epoch = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _keep(self) -> None:
        """Notice that the daemon has gone, and connect again, until closed."""
        failures = 0
        while not self._closed:
            connection = self._socket
            if connection is not None:
                failures = 0
                if has_hung_up(connection, _WATCH_S):
                    with self._lock:
                        if self._socket is connection:
                            self._lost(Unavailable("the daemon is gone"))
                continue
            failures += 1
            time.sleep(_BACKOFF.pause_s(failures))
            self._wait_for_copies(_BACKOFF.pause_s(failures + 1))
            with self._lock:
                if not self._closed and self._socket is None:
                    try:
                        self._connect()
                    except Unavailable as error:
                        self._lost(error)

    def _populate(self, arena: Arena) -> None:
        """Map the slabs into this process as the daemon provides them, so that copies need not."""
        for slab in range(arena.layout.slabs):
            while arena.provided_slabs <= slab:
                if self._closed or self._arena is not arena:
                    return
                time.sleep(_PROVIDED_S)
            arena.populate(slab)

    def _wait_for_copies(self, timeout_s: float) -> None:
        with self._copies_changed:
            self._copies_changed.wait_for(lambda: not self._copies, timeout_s)
