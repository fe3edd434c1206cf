"""An assembled endpoint: observers of its receiver read and steer its sender, and both follow one peer list."""

import asyncio
from collections.abc import Iterator

import pytest

from prfaas.core.deployment import CONTROL
from prfaas.serving.transport.io.endpoint import KvEndpoint
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.pacing import PaceOrder
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.region_layout import TransferLayout

from .harness import FAST_RECEIVER, FAST_SENDER, FINGERPRINT, KEY, SizesByTokens

TARGET = Peer("c/0", "127.0.0.1", 1, "wan", 1, 64e6, on_demand=True, share_bits_per_s=16e6)


def made(layout: TransferLayout) -> KvEndpoint:
    return KvEndpoint.of(
        name="p/0",
        key=KEY,
        host="127.0.0.1",
        port=0,
        fingerprint=FINGERPRINT,
        tls=None,
        peer_list=PeerList(),
        arena=StagingArena(1 << 20, 1 << 16),
        layout=layout,
        sender_options=FAST_SENDER,
        receiver_options=FAST_RECEIVER,
    )


@pytest.fixture
def endpoint() -> Iterator[KvEndpoint]:
    both = made(SizesByTokens())
    both.receiver.start()
    both.sender.start()
    yield both
    both.sender.close()
    both.receiver.close()


def test_an_observer_steers_the_sender_over_the_receivers_port(endpoint: KvEndpoint) -> None:
    peers = PeerList({TARGET.name: TARGET}, frozenset({"other/0"}))

    async def main() -> None:
        observer = Observer(CONTROL, KEY, "127.0.0.1", endpoint.receiver.port, "p/0")
        assert (await observer.telemetry())["sender"]["links"] == {}
        await observer.order(peers)
        await observer.order(PaceOrder({"wan": 32_000_000}, 30_000))
        stats = await observer.stats()
        assert stats["roster"] == {"digest": peers.digest, "told": True, "trouble": ""}
        assert stats["sender"]["links"]["wan"]["pace_bits_per_s"] == 32e6
        await observer.close()

    asyncio.run(main())
    assert endpoint.sender.ranks_of("c") == ("c/0",)


def test_sides_that_agree_on_layouts_do_so_for_both_directions() -> None:
    layouts: PeerLayouts[SizesByTokens] = PeerLayouts([1], lambda *_: SizesByTokens(), SizesByTokens())
    both = made(layouts)
    assert both.sender._layouts is both.receiver._handshake.hello.layouts is layouts
    assert made(SizesByTokens()).sender._layouts is None
