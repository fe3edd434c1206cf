"""One connection of an engine or tool to the daemon.

asyncio's streams cannot pass file descriptors, so this reads and writes the socket itself.
"""

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Protocol

import msgspec

from prfaas.core.pool.geometry import PageIdentity
from prfaas.core.pool.keys import KEY_BYTES
from prfaas.serving.pool import protocol
from prfaas.serving.pool.processes import PeerProcess
from prfaas.serving.pool.store import PageStore, StoreSession

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
# What a process sends before it has opened a session: of a geometry, some KiB.
_MOST_OPENING_BYTES = 1 << 20
_PAGE_ID_BYTES = KEY_BYTES + 1
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(protocol.Request)


class PoolHost(Protocol):
    """The daemon as its connections see it."""

    async def opened(
        self, message: protocol.OpenSession, process: PeerProcess
    ) -> tuple[PageStore | None, StoreSession | None]:
        """Open a session.

        Raises:
            ValueError: it is refused.
        """

    def closed(self, connection: "PoolConnection") -> None:
        """Forget a connection that has ended."""

    def has_room(self) -> bool:
        """Whether messages that are not whole yet fit into memory, of all connections together."""

    def used(self) -> None:
        """Schedule the store's deferred work."""

    def figures(self) -> protocol.Figures:
        """Figures of the pool."""

    async def verified(self) -> protocol.Figures:
        """Verify every page."""


class PoolConnection:
    """Reads requests and writes answers, one after the other. Bad input ends this connection and nothing else.

    The loop calls `_readable`, which answers every complete request (`_answer`). The first one opens the session
    through the host; most are answered at once from the store (`_answer_to`), opening and verifying in a task. While an
    answer cannot be sent whole, no request is answered; `_writable` goes on.
    """

    def __init__(self, connection: socket.socket, host: PoolHost) -> None:
        """Serve a non-blocking socket; call it in the event loop.

        Raises:
            ValueError: the process at the other end cannot be seen.
        """
        self.process = PeerProcess.of(connection)
        self.store: PageStore | None = None
        self.session: StoreSession | None = None
        self.said_goodbye = False
        self._connection = connection
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.received = bytearray()
        """What is not answered yet."""
        self._unsent = b""
        self._task: asyncio.Task[None] | None = None
        self._opened = False
        self._closed = False
        self._reads = True
        self._loop.add_reader(connection.fileno(), self._readable)

    def close(self) -> None:
        """End the connection."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        if self._task is not None:
            self._task.cancel()
        self._host.closed(self)

    def _readable(self) -> None:
        try:
            received = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if not received:
            self.close()
            return
        self.received += received
        self._answer_all()
        if len(self.received) > _MOST_OPENING_BYTES and not self._host.has_room():
            self._refuse("the pool has no memory for this message beside those of others: send it again")
        # Who reads no answers is not read either: what it sends on waits in its own socket.
        if not self._closed and (self._task or self._unsent) and len(self.received) > _READ_BYTES:
            self._loop.remove_reader(self._connection.fileno())
            self._reads = False

    def _answer_all(self) -> None:
        """Answer every complete request, as long as the answers can be sent; then read on."""
        while (
            not (self._closed or self._task or self._unsent) and len(self.received) >= protocol.LENGTH_BYTES
        ):
            length = int.from_bytes(self.received[: protocol.LENGTH_BYTES], "little")
            if not 0 < length <= (protocol.MOST_MESSAGE_BYTES if self._opened else _MOST_OPENING_BYTES):
                self._refuse(f"a message of {length} bytes is none of the pool's")
                return
            end = protocol.LENGTH_BYTES + length
            if len(self.received) < end:
                break
            body = bytes(self.received[protocol.LENGTH_BYTES : end])
            del self.received[:end]
            self._answer(body)
        if not (self._reads or self._closed or self._task or self._unsent):
            self._loop.add_reader(self._connection.fileno(), self._readable)
            self._reads = True

    def _answer(self, body: bytes) -> None:
        try:
            request = _DECODER.decode(body)
            if isinstance(request, protocol.OpenSession):
                self._later(self._open(request))
            elif not self._opened:
                raise ValueError("the first message opens the session")
            elif isinstance(request, protocol.Verify):
                self._later(self._verify())
            elif isinstance(request, protocol.Goodbye):
                self.said_goodbye = True
                # What the session had is free before the client hears that it is.
                self._host.closed(self)
                self._send(protocol.Done())
                self.close()
            else:
                self._send(self._answer_to(request))
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            self._refuse(str(error))
        except Exception:
            logger.exception("a request of process %d could not be answered", self.process.pid)
            self.close()

    def _answer_to(self, request: protocol.Request) -> protocol.Answer:
        if isinstance(request, protocol.Stats):
            return self._host.figures()
        store, session = self.store, self.session
        if store is None or session is None:
            raise ValueError("the pool has no pages before the first engine has opened a session")
        self._host.used()
        match request:
            case protocol.Match():
                return store.match(session, request)
            case protocol.Reserve():
                refs = store.reserve(request.tenant, _pages(request), session)
                return protocol.Reserved(
                    protocol.packed([-1 if ref is None else ref.slot for ref in refs]),
                    protocol.packed([0 if ref is None else ref.offset for ref in refs]),
                )
            case protocol.Commit():
                checksums = protocol.unpacked(request.checksums, "Q")
                for slot, checksum in zip(protocol.unpacked(request.slots), checksums, strict=True):
                    store.reservations.commit(slot, session.rank, checksum)
            case protocol.Abort():
                for slot in protocol.unpacked(request.slots):
                    if session.kind == "scheduler":
                        store.reservations.abort_all(slot)
                    else:
                        store.reservations.abort(slot, session.rank)
            case protocol.Unpin():
                store.unpin_match(session, request.pin)
            case protocol.Discard():
                store.discard(_page_ids(request.page_ids))
            case protocol.Clear():
                return protocol.Figures({"dropped_pages": store.clear()})
        return protocol.Done()

    async def _open(self, message: protocol.OpenSession) -> None:
        if self._opened:
            raise ValueError("the session is open already")
        if message.version != protocol.PROTOCOL_VERSION:
            raise ValueError(f"the pool speaks version {protocol.PROTOCOL_VERSION}, not {message.version}")
        self.store, self.session = await self._host.opened(message, self.process)
        self._opened = True
        if self.store is None:
            self._send(protocol.Opened(0, False))
        else:
            self._send(protocol.Opened(self.store.epoch, True), self.store.memory.arena.fileno)

    async def _verify(self) -> None:
        self._send(await self._host.verified())

    def _later(self, answer: Coroutine[None, None, None]) -> None:
        """Answer in a task; until it ends, requests are only buffered."""
        self._task = self._loop.create_task(self._wait(answer))

    async def _wait(self, answer: Coroutine[None, None, None]) -> None:
        try:
            await answer
        except ValueError as error:
            self._refuse(str(error))
        except Exception:
            logger.exception("a request of process %d could not be answered", self.process.pid)
            self.close()
        finally:
            self._task = None
        self._answer_all()

    def _refuse(self, reason: str) -> None:
        if not self._closed:
            self._send(protocol.Refused(reason))
            self.close()

    def _send(self, answer: protocol.Answer, descriptor: int | None = None) -> None:
        body = _ENCODER.encode(answer)
        message = len(body).to_bytes(protocol.LENGTH_BYTES, "little") + body
        try:
            if descriptor is None:
                sent = self._connection.send(message)
            else:
                sent = socket.send_fds(self._connection, [message], [descriptor])
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(message):
            self._unsent = message[sent:]
            self._loop.add_writer(self._connection.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            sent = self._connection.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._loop.remove_writer(self._connection.fileno())
            self._answer_all()


def _page_ids(page_ids: bytes) -> list[bytes]:
    if len(page_ids) % _PAGE_ID_BYTES:
        raise ValueError(f"{len(page_ids)} bytes of page ids are not a multiple of {_PAGE_ID_BYTES}")
    return [page_ids[at : at + _PAGE_ID_BYTES] for at in range(0, len(page_ids), _PAGE_ID_BYTES)]


def _pages(request: protocol.Reserve) -> list[tuple[bytes, PageIdentity | None]]:
    return list(zip(_page_ids(request.page_ids), request.identities, strict=True))
