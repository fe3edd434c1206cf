"""A producer and a consumer in one process, small deadlines, and what is left over afterwards."""

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from prfaas.core.deployment import TransferLimits
from prfaas.serving.transport.io.greeting import ServerHandshake
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.io.sockets import receive_exactly
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.handshake import ServerHello
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.ticket import (
    TRANSFER_ID_BYTES,
    Ticket,
    TransferAttributes,
    TransferClass,
    prompt_digest,
)
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    Header,
    TransferPhase,
    TransferStatus,
    parse_control,
    unpack_header,
)

KEY = bytes(range(32))
FINGERPRINT = {"model": "tiny", "layers": 4, "dtype": "bf16"}
_Options = TypeVar("_Options", ReceiverOptions, SenderOptions)


def with_options(options: _Options, **values: Any) -> _Options:
    """Other options, or limits of theirs, by name."""
    limits = {name: values.pop(name) for name in TransferLimits.__dataclass_fields__ if name in values}
    return replace(options, **values, limits=replace(options.limits, **limits))


FAST_RECEIVER = with_options(
    ReceiverOptions(tombstone_s=60.0, handshake_s=2.0),
    staging_wait_s=5.0,
    resume_s=1.0,
    progress_deadline_s=2.0,
    staging_ttl_s=60.0,
)
FAST_SENDER = with_options(
    SenderOptions(
        accept_margin_s=5.0, transfer_deadline_s=5.0, connect_s=2.0, backoff_min_s=0.01, backoff_max_s=0.1
    ),
    staging_wait_s=5.0,
    resume_s=1.0,
    progress_deadline_s=1.0,
)
# For tests in which nothing is given up: on a machine that starves them, a second is soon over.
PATIENT_RECEIVER = with_options(FAST_RECEIVER, resume_s=60.0, progress_deadline_s=60.0)
PATIENT_SENDER = with_options(
    FAST_SENDER, resume_s=60.0, progress_deadline_s=60.0, transfer_deadline_s=60.0, accept_margin_s=65.0
)


class SizesByTokens:
    """Regions of `num_tokens - skip_tokens` bytes times 1, 2, 3 …: any size can be asked for by a ticket."""

    def __init__(self, regions: int = 3) -> None:
        self.regions = regions

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        return [(index + 1) * (num_tokens - skip_tokens) for index in range(self.regions)]


@dataclass
class World:
    """One receiver and one sender. `dial_port`: where the sender connects (a proxy), else the receiver's port."""

    receiver: Receiver
    sender: Sender
    arena: StagingArena
    layout: SizesByTokens
    seed: int = 0
    senders: list[Sender] = field(default_factory=list)

    def open(
        self,
        unit_bytes: int,
        *,
        lifetime_s: float = 60.0,
        sender: Sender | None = None,
        background: bool = False,
    ) -> tuple[Ticket, SentTransfer, list[bytes]]:
        """A transfer with regions of 1, 2, 3 … times `unit_bytes`, and its seeded content; nothing is put yet."""
        ticket = make_ticket(unit_bytes, lifetime_s=lifetime_s, background=background)
        sizes = self.layout.region_bytes(unit_bytes, 0)
        self.seed += 1
        rng = random.Random(self.seed)
        content = [rng.randbytes(size) for size in sizes]
        return ticket, (sender or self.sender).open(ticket, ticket.seal(KEY), sizes), content

    def send(self, unit_bytes: int, *, background: bool = False) -> tuple[Ticket, SentTransfer, list[bytes]]:
        """Open, put all regions whole, end."""
        ticket, transfer, content = self.open(unit_bytes, background=background)
        for region, data in enumerate(content):
            transfer.put(region, 0, BytesSource(data))
        transfer.end()
        return ticket, transfer, content

    def status(self, ticket: Ticket) -> TransferStatus:
        found = self.receiver.transfers.state(ticket.transfer_id)
        assert found is not None
        return found

    def await_phase(self, ticket: Ticket, phase: TransferPhase, timeout_s: float = 10.0) -> TransferStatus:
        def reached() -> bool:
            found = self.receiver.transfers.state(ticket.transfer_id)
            return found is not None and found.phase is phase

        await_true(
            reached, timeout_s, lambda: f"{phase}: {self.receiver.transfers.state(ticket.transfer_id)}"
        )
        return self.status(ticket)

    def await_received(self, ticket: Ticket, nbytes: int) -> None:
        def reached() -> bool:
            found = self.receiver.transfers.state(ticket.transfer_id)
            return found is not None and found.received_bytes == nbytes

        await_true(
            reached,
            PATIENCE_S,
            lambda: f"{nbytes} bytes: {self.receiver.transfers.state(ticket.transfer_id)}",
        )

    def take(self, ticket: Ticket) -> list[bytes]:
        """The content of a complete transfer; frees its staging."""
        staged = self.receiver.transfers.take(ticket.transfer_id)
        assert staged is not None
        content = [
            b"".join(staged.region_views(region, 0, nbytes))
            for region, nbytes in enumerate(staged.region_bytes)
        ]
        staged.free()
        return content

    def await_clean(self) -> None:
        """Nothing of any transfer is left on either side."""

        def clean() -> bool:
            received, sent = self.receiver.stats(), self.sender.stats()["peers"]
            return (
                received["staging_used_blocks"] == 0
                and not any(received["transfers"].values())
                and all(
                    queue["queued_bytes"] == queue["pending_bytes"] == queue["in_flight_chunks"] == 0
                    and not queue["transfers"]
                    for queue in sent.values()
                )
            )

        await_true(clean, 5.0, lambda: f"{self.receiver.stats()} {self.sender.stats()}")
        assert self.receiver.stats()["thread_errors"] == 0
        assert self.sender.stats()["thread_errors"] == 0

    def close(self) -> None:
        for sender in [self.sender, *self.senders]:
            sender.close()
            assert sender.stats()["threads"] == 0
        self.receiver.close()
        assert self.receiver.stats()["threads"] == 0
        assert self.arena.used_blocks == 0


def make_ticket(
    unit_bytes: int,
    *,
    lifetime_s: float = 60.0,
    producer: str = "p",
    consumer: str = "c",
    background: bool = False,
) -> Ticket:
    return Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer=producer,
        consumer=consumer,
        num_tokens=unit_bytes,
        skip_tokens=0,
        prompt_digest=prompt_digest([1, 2, 3]),
        expires_at_s=time.time() + lifetime_s,
        attributes=TransferAttributes(service=TransferClass(background=background)),
    )


def make_receiver(
    arena: StagingArena,
    *,
    options: ReceiverOptions = FAST_RECEIVER,
    layout: SizesByTokens | None = None,
    port: int = 0,
    key: bytes = KEY,
    tls: TlsIdentity | None = None,
    plain_peers: Sequence[str] = (),
    sender: Sender | None = None,
) -> Receiver:
    receiver = Receiver(
        name="c/0",
        key=key,
        host="127.0.0.1",
        port=port,
        arena=arena,
        layout=layout or SizesByTokens(),
        fingerprint=FINGERPRINT,
        options=options,
        peer_list=PeerList(producers=frozenset(["p/0"]), plain=frozenset(plain_peers)),
        tls=tls,
        sender=sender,
    )
    receiver.start()
    return receiver


def make_sender(
    port: int,
    *,
    connections: int = 4,
    options: SenderOptions = FAST_SENDER,
    bandwidth_bits_per_s: float | None = None,
    name: str = "p/0",
    key: bytes = KEY,
    fingerprint: dict[str, str | int] | None = None,
    tls: TlsIdentity | None = None,
    compressed: bool = False,
) -> Sender:
    """`tls`: it encrypts, with this identity."""
    peer = Peer(
        *("c/0", "127.0.0.1", port, "wan", connections, bandwidth_bits_per_s),
        encrypted=tls is not None,
        compressed=compressed,
    )
    sender = Sender(
        name=name,
        key=key,
        peers={"c/0": peer},
        fingerprint=fingerprint or FINGERPRINT,
        options=options,
        tls=tls,
    )
    sender.start()
    return sender


def receive_control(sock: socket.socket) -> tuple[Header, dict[str, Any]]:
    """The next control frame of a plain connection."""
    raw = bytearray(HEADER_BYTES)
    receive_exactly(sock, memoryview(raw))
    header = unpack_header(raw)
    payload = bytearray(header.length_bytes)
    receive_exactly(sock, memoryview(payload))
    return header, parse_control(header, payload)


def server_handshake(name: str, tls: TlsIdentity | None = None) -> ServerHandshake:
    """For a consumer that is played frame by frame."""
    hello = ServerHello(key=KEY, name=name, session=secrets.token_hex(8), fingerprint=FINGERPRINT)
    return ServerHandshake(hello=hello, tls=tls)


# Nothing is expected to fail for lack of time, so waiting longer costs nothing, and a loaded machine may need it.
PATIENCE_S = 60.0


def await_true(check: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    timeout_s = max(timeout_s, PATIENCE_S)
    deadline_s = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline_s, f"not reached within {timeout_s} s: {what()}"
        time.sleep(0.002)


def await_over(transfer: SentTransfer, timeout_s: float = PATIENCE_S) -> None:
    assert transfer.await_quiescent(timeout_s), (transfer.phase, transfer.acked_bytes, transfer.total_bytes)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prfaas-")]


def open_sockets() -> int:
    count = 0
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")  # noqa: PTH115
    return count
