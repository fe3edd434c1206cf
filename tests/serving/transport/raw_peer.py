"""A producer that speaks the protocol frame by frame, also wrongly."""

import secrets
import socket
from typing import Any

import pytest

from prfaas.serving.transport.io.greeting import greet
from prfaas.serving.transport.io.sockets import ConnectionEnded
from prfaas.serving.transport.protocol.handshake import NONCE_BYTES, ROLE_PRODUCER, ClientHello
from prfaas.serving.transport.protocol.ticket import Ticket
from prfaas.serving.transport.protocol.wire import FrameType, Header, checksum, pack_control, pack_header

from .harness import FINGERPRINT, KEY, World, receive_control


class RawProducer:
    """Speaks the protocol frame by frame."""

    def __init__(self, world: World, *, session: str = "raw", key: bytes = KEY, name: str = "p/0") -> None:
        self.sock = socket.create_connection(("127.0.0.1", world.receiver.port), timeout=60)
        hello = ClientHello(
            nonce=secrets.token_hex(NONCE_BYTES),
            key=key,
            name=name,
            server_name="c/0",
            role=ROLE_PRODUCER,
            session=session,
            fingerprint=FINGERPRINT,
        )
        try:
            greet(self.sock, hello)
        except BaseException:
            self.sock.close()
            raise

    def __enter__(self) -> "RawProducer":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def open(self, ticket: Ticket, regions: Any, *, sealed: str | None = None) -> tuple[Header, Any]:
        body = {"ticket": ticket.seal(KEY) if sealed is None else sealed, "regions": regions}
        self.sock.sendall(pack_control(FrameType.OPEN, ticket.transfer_id, body))
        return receive_control(self.sock)

    def data(self, transfer_id: bytes, region: int, offset: int, payload: bytes, *, damage: int = 0) -> None:
        header = pack_header(
            FrameType.DATA,
            transfer_id,
            region=region,
            offset=offset,
            length_bytes=len(payload),
            payload_checksum=checksum(payload) ^ damage,
        )
        self.sock.sendall(header + payload)

    def end(self, transfer_id: bytes, total_bytes: int) -> None:
        body = {"total_bytes": total_bytes, "overlapped_bytes": 0}
        self.sock.sendall(pack_control(FrameType.END, transfer_id, body))

    def answer(self) -> tuple[Header, Any]:
        return receive_control(self.sock)

    def assert_closed(self) -> None:
        with pytest.raises((ConnectionEnded, ConnectionResetError)):
            while True:
                receive_control(self.sock)
