"""Watching transfers at a consumer, for gateways and tools: an asyncio client of its KV port."""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from prfaas.core.deployment import TransferLimits
from prfaas.serving.own_process import on_time_timeout
from prfaas.serving.tasks import end_all, look_at
from prfaas.serving.transport.io.greeting import greet_async
from prfaas.serving.transport.io.sockets import expedite, keep_alive, read_tcp_info
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.handshake import (
    NONCE_BYTES,
    ROLE_OBSERVER,
    ClientHello,
    HandshakeError,
)
from prfaas.serving.transport.protocol.liveness import Liveness, LookClock, heartbeat_period_s, path_timeout_s
from prfaas.serving.transport.protocol.pacing import PaceOrder, ProbeOrder
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.requests import ANSWERS, PoolOrder
from prfaas.serving.transport.protocol.sealing import SEALED_HEADER_BYTES, TAG_BYTES, Sealing
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    FrameType,
    TransferStatus,
    WireError,
    body_of,
    pack_control,
    parse_control,
    ping,
    read_body,
    unpack_header,
)

_T = TypeVar("_T")
OnSoon = Callable[[TransferStatus], None]

_CONNECT_S = 5.0
# An engine that starves shakes hands late. Whether one is frozen is for others to judge, sooner than this.
_HANDSHAKE_S = 30.0
# Frozen processes acknowledge what they don't read; dead machines and broken ways don't.
_USER_TIMEOUT_S = 10.0
_BACKOFF_S = 0.05
# A peer that reads nothing, or answers nothing, is asked over a new connection.
_MOST_UNSENT_BYTES = 64 << 20
_MOST_UNANSWERED = 1000
_FOR_OBSERVERS = frozenset({FrameType.STATUS, FrameType.STATS, FrameType.PONG, *ANSWERS.values()})


class Observer:
    """One connection to the receiver `peer_name` at host:port; use it from one event loop only.

    1. The first call connects; several callers share one attempt, which goes on if they are cancelled.
    2. `_stay_connected` then reads answers and reconnects after a loss. `wait` calls are asked again; they fail with
       ConnectionError only if the receiver is away for half of `silence_s` or was restarted. Other calls fail at once.
    3. `_listen` closes a silent connection while a `wait` or `request` is open.
    """

    def __init__(
        self,
        name: str,
        key: bytes,
        host: str,
        port: int,
        peer_name: str,
        tls: TlsIdentity | None = None,
        *,
        silence_s: float = TransferLimits().silence_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it without connecting.

        Args:
            name: this side's.
            key: of the deployment, 32 bytes.
            host: the receiver's.
            port: the receiver's.
            peer_name: whom to expect there.
            tls: the connection is encrypted, and never falls back; None: it is plain.
            silence_s: a silent path is given up within this time, while a `wait` is open.
            clock: measures the limits of connecting; best the event loop's own (`LoopClock`).
        """
        self.name = name
        self.peer_name = peer_name
        self._key = key
        self._address = (host, port)
        self._tls = tls
        self._session = secrets.token_hex(8)
        self.peer_session = ""
        """New with each start of the receiver; empty before the first connection."""
        self._peer_frames: frozenset[int] = frozenset()
        self._writer: asyncio.StreamWriter | None = None
        self._sealing: Sealing | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connection_task: asyncio.Task[None] | None = None
        self._closed = False
        self._silence_s = silence_s
        self._clock = clock
        self._waits: dict[bytes, set[asyncio.Future[TransferStatus]]] = {}
        self._leads: dict[bytes, tuple[float, OnSoon]] = {}
        self._announced: set[bytes] = set()
        self._stats_waits: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._requests: dict[bytes, asyncio.Future[dict[str, Any]]] = {}

    async def connect(self) -> None:
        """Connect unless that is done.

        Raises:
            ConnectionError: with the reason; a HandshakeError is one.
        """
        if self._closed:
            raise ConnectionError(f"observer of {self.peer_name} is closed")
        if self._connection_task is not None and not self._connection_task.done():
            return
        connecting = self._connecting
        if connecting is None or connecting.done():
            connecting = asyncio.create_task(self._connect(), name=f"prfaas-connect-{self.peer_name}")
            # All callers may have given up when it fails.
            connecting.add_done_callback(look_at)
            self._connecting = connecting
        # Not cancelled with a caller that gives up: otherwise the next call would begin anew.
        await asyncio.wait((connecting,))
        if connecting.cancelled():
            raise ConnectionError(f"observer of {self.peer_name} was closed")
        connecting.result()

    async def close(self) -> None:
        """End the connection; pending calls raise ConnectionError. Idempotent."""
        self._closed = True
        await end_all(*(task for task in (self._connecting, self._connection_task) if task is not None))
        self._connecting = self._connection_task = None
        await self._disconnect()
        self._fail_all("the observer was closed")

    async def wait(
        self, transfer_id: bytes, timeout_s: float, lead_s: float = 0.0, on_soon: OnSoon | None = None
    ) -> TransferStatus:
        """The final status (COMPLETE or FAILED) of a transfer, which need not have been opened yet.

        `on_soon` is called at most once, when the receiver expects the transfer to complete within `lead_s`. A fast
        transfer may complete without it. Only one open `wait` of a transfer may ask for it.

        Raises:
            TimeoutError: there is none after `timeout_s`.
            ConnectionError: the receiver is gone.
        """
        async with asyncio.timeout(timeout_s):
            await self.connect()
            future: asyncio.Future[TransferStatus] = asyncio.get_running_loop().create_future()
            self._waits.setdefault(transfer_id, set()).add(future)
            if on_soon is not None and lead_s > 0:
                self._leads[transfer_id] = (lead_s, on_soon)
            try:
                self._watch(transfer_id)
                return await future
            finally:
                self._leads.pop(transfer_id, None)
                waiting = self._waits.get(transfer_id)
                if waiting is not None:
                    waiting.discard(future)
                    if not waiting:
                        del self._waits[transfer_id]
                        self._announced.discard(transfer_id)

    def announced(self, transfer_id: bytes) -> bool:
        """True if the receiver has reported a status of this transfer, to an open `wait`."""
        return transfer_id in self._announced

    async def abandon(self, transfer_id: bytes, reason: str, *, keep: bool = False) -> None:
        """Ask the receiver to drop a transfer, or to refuse it if it has not come yet.

        `keep`: an incomplete one is kept for a while as a partial transfer, and a complete one is not dropped.

        Raises:
            ConnectionError: it cannot be reached; its own deadlines drop the transfer then.
        """
        await self.connect()
        self._send(pack_control(FrameType.ABANDON, transfer_id, {"reason": reason[:4096], "keep": keep}))
        if self._writer is None or self._writer.is_closing():
            raise ConnectionError(f"connection to {self.peer_name} is lost")

    async def order(self, order: PaceOrder | ProbeOrder | PeerList) -> None:
        """Have the rank keep paces, send filler, or take other peers. There is no answer.

        Raises:
            ConnectionError: the receiver is gone.
        """
        await self.connect()
        body = order.to_body() if isinstance(order, PeerList) else body_of(order)
        self._send(pack_control(order.kind, body=body))

    async def leave(self) -> None:
        """Have the rank tell all gateways that its process is to end. Only its own machine may ask for that.

        Raises:
            ConnectionError: the receiver is gone, or of a release that does not know this.
        """
        await self.connect()
        if FrameType.LEAVE not in self._peer_frames:
            raise ConnectionError(f"{self.peer_name} is of an older release: it takes no LEAVE")
        self._send(pack_control(FrameType.LEAVE))

    async def stats(self) -> dict[str, Any]:
        """The receiver's `stats()`.

        Raises:
            ConnectionError: the receiver is gone.
        """
        return await self._ask_stats({})

    async def telemetry(self) -> dict[str, Any]:
        """The receiver's `telemetry()`. Several may be asked at once: a late answer holds no question back.

        Raises:
            ConnectionError: the receiver is gone.
        """
        return await self._ask_stats({"of": "links"})

    async def request(self, transfer_id: bytes, order: PoolOrder, timeout_s: float) -> dict[str, Any]:
        """Ask a pool for a copy or for pages, or any holder for its events; the body of the answer.

        Raises:
            TimeoutError: there is none after `timeout_s`.
            ConnectionError: the peer is gone, or of a release that does not know such an order, or the connection
                to it is lost.
        """
        async with asyncio.timeout(timeout_s):
            await self.connect()
            if order.kind not in self._peer_frames:
                raise ConnectionError(
                    f"{self.peer_name} is of an older release: it takes no {order.kind.name}"
                )
            future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._requests[transfer_id] = future
            try:
                self._send(pack_control(order.kind, transfer_id, body_of(order)))
                return await future
            finally:
                self._requests.pop(transfer_id, None)

    async def _ask_stats(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.connect()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stats_waits.append(future)
        self._send(pack_control(FrameType.STATS, body=body))
        return await future

    def _watch(self, transfer_id: bytes) -> None:
        lead = self._leads.get(transfer_id)
        body = None if lead is None else {"lead_s": lead[0]}
        self._send(pack_control(FrameType.WATCH, transfer_id, body))

    def _send(self, frame: bytes) -> None:
        # While reconnecting there is no writer; open waits are asked again afterwards. A closing transport is skipped
        # too: uvloop raises RuntimeError for a write to it, which would end the gateway.
        if self._writer is not None and not self._writer.is_closing():
            transport = self._writer.transport
            unsent_bytes = transport.get_write_buffer_size()
            if unsent_bytes > _MOST_UNSENT_BYTES or len(self._stats_waits) > _MOST_UNANSWERED:
                transport.abort()
                return
            self._writer.write(frame if self._sealing is None else self._sealing.sealer.seal(frame))

    async def _connect(self) -> None:
        try:
            reader = await self._open_connection()
        except ConnectionResetError:
            # A receiver that was too busy to shake hands in its time ends the connection.
            reader = await self._reconnect()
        self._connection_task = asyncio.create_task(
            self._stay_connected(reader), name=f"prfaas-observe-{self.peer_name}"
        )

    async def _open_connection(self) -> asyncio.StreamReader:
        """Connect and shake hands."""
        host, port = self._address
        try:
            async with on_time_timeout(_CONNECT_S, self._clock):
                reader, writer = await asyncio.open_connection(host, port)
            sock = writer.get_extra_info("socket")
            keep_alive(sock, user_timeout_s=_USER_TIMEOUT_S)
            expedite(sock)
            try:
                async with on_time_timeout(_HANDSHAKE_S, self._clock):
                    welcome = await greet_async(reader, writer, self._hello(), self._tls)
            except BaseException:
                writer.close()
                raise
        except TimeoutError:
            raise ConnectionError(f"{self.peer_name} did not answer at {host}:{port}") from None
        except asyncio.IncompleteReadError:
            raise ConnectionResetError(
                f"{self.peer_name} at {host}:{port} ended the connection in its handshake"
            ) from None
        except WireError as error:
            raise ConnectionError(f"{self.peer_name} at {host}:{port}: {error}") from None
        except HandshakeError:
            raise
        except OSError as error:
            kind = (
                type(error)
                if isinstance(error, ConnectionRefusedError | ConnectionResetError)
                else ConnectionError
            )
            raise kind(f"{self.peer_name} at {host}:{port}: {error}") from error
        if self.peer_session not in ("", welcome.session):
            self._fail_all(f"{self.peer_name} was restarted")
        self.peer_session, self._peer_frames = welcome.session, welcome.frames
        self._sealing, self._writer = welcome.sealing, writer
        return reader

    def _hello(self) -> ClientHello:
        return ClientHello(
            key=self._key,
            name=self.name,
            server_name=self.peer_name,
            role=ROLE_OBSERVER,
            session=self._session,
            nonce=secrets.token_hex(NONCE_BYTES),
            fingerprint={},
        )

    async def _stay_connected(self, reader: asyncio.StreamReader) -> None:
        """Read until the connection is lost; then reconnect, or give up after a while."""
        trouble = "connection lost"
        try:
            while True:
                listening = asyncio.create_task(self._listen())
                try:
                    await self._read(reader)
                except (OSError, WireError, asyncio.IncompleteReadError) as error:
                    trouble = str(error)
                finally:
                    listening.cancel()
                await self._disconnect()
                self._fail_answers(f"connection to {self.peer_name} lost")
                reader = await self._reconnect()
                for transfer_id in self._waits:
                    self._watch(transfer_id)
        except ConnectionError as error:
            trouble = str(error)
        finally:
            await self._disconnect()
            self._fail_all(f"{self.peer_name} is gone: {trouble}")

    async def _listen(self) -> None:
        """Abort the connection when its path is silent while a `wait` or request is open."""
        clock, liveness, pings = LookClock(time.monotonic()), Liveness(), 0
        writer = self._writer
        while writer is not None:
            await asyncio.sleep(heartbeat_period_s(self._silence_s))
            elapsed_s = clock.elapsed_s(time.monotonic())
            if not self._waits and not self._requests:
                liveness.rest()
                continue
            try:
                info = read_tcp_info(writer.get_extra_info("socket"))
            except OSError:
                return
            liveness.look(info, elapsed_s, asked=False, spare_s=heartbeat_period_s(self._silence_s))
            if liveness.path_s > path_timeout_s(self._silence_s):
                writer.transport.abort()
                return
            pings += 1
            self._send(ping(pings))

    async def _reconnect(self) -> asyncio.StreamReader:
        backoff_s, trouble = _BACKOFF_S, ConnectionError(f"nothing has come back from {self.peer_name}")
        try:
            async with on_time_timeout(self._silence_s / 2, self._clock):
                while True:
                    try:
                        return await self._open_connection()
                    except ConnectionError as error:
                        trouble = error
                    await asyncio.sleep(backoff_s)
                    backoff_s *= 2
        except TimeoutError:
            raise trouble from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        opener = None if self._sealing is None else self._sealing.opener
        header_bytes, tag_bytes = (HEADER_BYTES, 0) if opener is None else (SEALED_HEADER_BYTES, TAG_BYTES)
        while True:
            raw = await reader.readexactly(header_bytes)
            header = unpack_header(raw if opener is None else opener.open_header(raw))
            if header.kind not in _FOR_OBSERVERS:
                raise WireError(f"{self.peer_name} may not send {header.kind.name} to an observer")
            payload = (
                await reader.readexactly(header.length_bytes + tag_bytes) if header.length_bytes else b""
            )
            body = parse_control(
                header, payload if opener is None or not payload else opener.open_payload(payload)
            )
            if header.kind is FrameType.STATUS:
                self._settle(header.transfer_id, read_body(TransferStatus, body))
            elif header.kind is FrameType.STATS:
                if self._stats_waits:
                    _resolve(self._stats_waits.popleft(), body)
            elif header.kind is not FrameType.PONG and header.transfer_id in self._requests:
                _resolve(self._requests[header.transfer_id], body)

    def _settle(self, transfer_id: bytes, status: TransferStatus) -> None:
        if transfer_id in self._waits:
            self._announced.add(transfer_id)
        if status.soon and not status.phase.terminal and transfer_id in self._leads:
            _, on_soon = self._leads.pop(transfer_id)
            on_soon(status)
        if status.phase.terminal:
            for future in self._waits.get(transfer_id, ()):
                _resolve(future, status)

    async def _disconnect(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _fail_all(self, reason: str) -> None:
        for futures in self._waits.values():
            for future in futures:
                if not future.done():
                    future.set_exception(ConnectionError(reason))
        self._fail_answers(reason)

    def _fail_answers(self, reason: str) -> None:
        # A request is not asked again: it may have been begun.
        waits = [*self._stats_waits, *self._requests.values()]
        self._stats_waits.clear()
        for future in waits:
            if not future.done():
                future.set_exception(ConnectionError(reason))


def _resolve(future: "asyncio.Future[_T]", value: _T) -> None:
    if not future.done():
        future.set_result(value)
