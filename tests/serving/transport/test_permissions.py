"""Who may say what at a KV port: every frame of every role, and what a refused one leaves undone."""

import secrets
import socket
import time

import pytest

from prfaas.core.deployment import CONTROL, GATEWAY, TOOLS
from prfaas.core.deployment.security import OBSERVERS
from prfaas.serving.transport.io.greeting import greet
from prfaas.serving.transport.io.sockets import ConnectionEnded
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.handshake import (
    NONCE_BYTES,
    ROLE_OBSERVER,
    ROLE_PRODUCER,
    ClientHello,
    PeerIdentity,
)
from prfaas.serving.transport.protocol.pacing import PaceOrder
from prfaas.serving.transport.protocol.permissions import PERMISSIONS, permitted_frames
from prfaas.serving.transport.protocol.wire import FrameType, body_of, pack_control, ping

from .harness import (
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    World,
    await_true,
    make_receiver,
    make_sender,
    receive_control,
)

PEERS = [
    ("p/0", ROLE_PRODUCER),
    (GATEWAY, ROLE_OBSERVER),
    (CONTROL, ROLE_OBSERVER),
    (TOOLS, ROLE_OBSERVER),
    ("east-0/0", ROLE_OBSERVER),
    ("c", ROLE_OBSERVER),
]


def connected(port: int, name: str, role: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    hello = ClientHello(
        nonce=secrets.token_hex(NONCE_BYTES),
        key=KEY,
        name=name,
        server_name="c/0",
        role=role,
        session="s",
        fingerprint=FINGERPRINT,
    )
    greet(sock, hello)
    return sock


def permitted(name: str, role: str) -> frozenset[FrameType]:
    return permitted_frames(PeerIdentity(name, role, "s"), "c/0", is_here=True)


def test_the_table() -> None:
    """As docs/reference/wire-format.md says it."""
    heartbeats = {FrameType.PING, FrameType.PONG}
    sends = {name: {kind.name for kind in permitted(name, role) - heartbeats} for name, role in PEERS}
    assert sends == {
        "p/0": {"OPEN", "DATA", "END", "ABORT", "FILLER"},
        GATEWAY: {"WATCH", "ABANDON", "STATS", "COPY"},
        CONTROL: {"STATS", "PACE", "PROBE", "ROSTER", "COPY", "ABANDON", "FOLLOW"},
        TOOLS: {"STATS", "WATCH"},
        "east-0/0": {"PULL"},
        "c": {"STATS", "LEAVE"},
    }
    assert all(heartbeats <= frames for frames in PERMISSIONS.values())
    assert set(PERMISSIONS) > OBSERVERS
    # Who only has the key says nothing in an engine's name from another machine.
    assert (
        permitted_frames(PeerIdentity("c", ROLE_OBSERVER, "s"), "c/0", is_here=False) == PERMISSIONS["member"]
    )
    # An engine that calls itself as an observer does is one only as an observer.
    assert permitted(CONTROL, ROLE_PRODUCER) == PERMISSIONS["producer"]


@pytest.mark.parametrize(("name", "role"), PEERS)
def test_a_frame_of_another_role_ends_the_connection(world: World, name: str, role: str) -> None:
    for kind in sorted(set(FrameType) - permitted(name, role)):
        with connected(world.receiver.port, name, role) as sock:
            sock.sendall(pack_control(kind, bytes(16)))
            with pytest.raises((ConnectionEnded, ConnectionResetError)):
                while True:
                    receive_control(sock)
    refused = len(set(FrameType) - permitted(name, role))
    await_true(
        lambda: world.receiver.stats()["failed_connections"] == refused, 5.0, lambda: f"{refused} refused"
    )
    assert world.receiver.stats()["thread_errors"] == 0


def test_an_address_of_another_machine_may_not_say_that_an_engine_ends(world: World) -> None:
    with socket.socket() as sock:
        # Loopback has many addresses, and the port listens on one.
        sock.bind(("127.0.0.2", 0))
        sock.settimeout(60)
        sock.connect(("127.0.0.1", world.receiver.port))
        hello = ClientHello(
            nonce=secrets.token_hex(NONCE_BYTES),
            key=KEY,
            name="c",
            server_name="c/0",
            role=ROLE_OBSERVER,
            session="s",
            fingerprint=FINGERPRINT,
        )
        greet(sock, hello)
        sock.sendall(pack_control(FrameType.LEAVE))
        with pytest.raises((ConnectionEnded, ConnectionResetError)):
            receive_control(sock)
    assert world.receiver.stats()["leaving"] is False


@pytest.mark.parametrize("name", ["east-0/0", GATEWAY, TOOLS])
def test_only_the_control_plane_paces_and_probes(name: str) -> None:
    arena = StagingArena(8 << 20)
    sender = make_sender(9, options=FAST_SENDER, bandwidth_bits_per_s=64e6, name="c/0")
    receiver = make_receiver(arena, sender=sender)
    try:
        for kind, body in (
            (FrameType.PACE, body_of(PaceOrder({"wan": 1}, 60_000))),
            (FrameType.PROBE, {"link": "wan", "bytes": 1 << 30}),
            (FrameType.ABANDON, {"reason": "mine"}),
        ):
            if kind in permitted(name, ROLE_OBSERVER):
                continue
            with connected(receiver.port, name, ROLE_OBSERVER) as sock:
                sock.sendall(pack_control(kind, bytes(16), body))
                with pytest.raises((ConnectionEnded, ConnectionResetError)):
                    receive_control(sock)
        assert sender._pacers["wan"].pace_bits_per_s == 64e6
        assert sender._pacers["wan"].admit_probe(1000, time.monotonic()) == 1000
        assert receiver.stats()["watched"] == 0
    finally:
        sender.close()
        receiver.close()


def test_what_is_permitted_goes_on(world: World) -> None:
    with connected(world.receiver.port, TOOLS, ROLE_OBSERVER) as sock:
        sock.sendall(pack_control(FrameType.STATS) + ping(7))
        assert receive_control(sock)[0].kind is FrameType.STATS
        header, _ = receive_control(sock)
        assert (header.kind, header.offset) == (FrameType.PONG, 7)
