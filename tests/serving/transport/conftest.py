from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.options import ReceiverOptions, SenderOptions

from .authority import Authority
from .harness import (
    FAST_RECEIVER,
    FAST_SENDER,
    SizesByTokens,
    World,
    make_receiver,
    make_sender,
    open_sockets,
    our_threads,
)
from .proxy import FaultyProxy


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test must end the threads and sockets it started."""
    sockets, threads = open_sockets(), our_threads()
    yield
    # Engines that other tests run all the time have threads for their logs.
    assert [name for name in our_threads() if name not in threads] == []
    assert open_sockets() <= sockets


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(
        *,
        staging_bytes: int = 32 << 20,
        block_bytes: int = 256 << 10,
        connections: int = 4,
        receiver_options: ReceiverOptions = FAST_RECEIVER,
        sender_options: SenderOptions = FAST_SENDER,
        through: Callable[[int], int] = lambda port: port,
        server_tls: TlsIdentity | None = None,
        plain_peers: Sequence[str] = (),
        **more: Any,
    ) -> World:
        """`more`: arguments of `make_sender`; `tls` among them is the sender's identity."""
        layout = SizesByTokens()
        arena = StagingArena(staging_bytes, block_bytes)
        receiver = make_receiver(
            arena, options=receiver_options, layout=layout, tls=server_tls, plain_peers=plain_peers
        )
        sender = make_sender(through(receiver.port), connections=connections, options=sender_options, **more)
        worlds.append(World(receiver, sender, arena, layout))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    """It breaks nothing, and may be frozen."""
    made = FaultyProxy(seed=1)
    yield made
    made.close()
