"""Transfers over links that compress: byte-exact, shorter on the wire, plain and sealed, and when bytes are damaged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.wire import TransferPhase

from .authority import Authority
from .harness import World, await_over
from .proxy import FaultyProxy

MakeWorld = Callable[..., World]


def numbers(nbytes: int, seed: int) -> bytes:
    """Normal numbers as bf16."""
    floats = np.random.default_rng(seed).standard_normal(nbytes // 2 + 1).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:nbytes]


def send_numbers(world: World, unit_bytes: int) -> tuple[Any, SentTransfer, list[bytes]]:
    """Regions of bf16, of an odd length, and of random bytes in turns."""
    ticket, transfer, content = world.open(unit_bytes)
    for region, data in enumerate(content):
        if region % 2 == 0:
            content[region] = numbers(len(data), region)
        transfer.put(region, 0, BytesSource(content[region]))
    transfer.end()
    return ticket, transfer, content


@pytest.mark.parametrize("sealed", [False, True])
def test_it_is_byte_exact_and_shorter(make_world: MakeWorld, authority: Authority, sealed: bool) -> None:
    identities = {"tls": authority.identity("p"), "server_tls": authority.identity("c")} if sealed else {}
    world = make_world(compressed=True, bandwidth_bits_per_s=80e6, **identities)
    ticket, transfer, content = send_numbers(world, 300_001)
    await_over(transfer)
    status = world.await_phase(ticket, TransferPhase.COMPLETE)
    assert status.received_bytes == sum(map(len, content))
    assert world.take(ticket) == content
    coding = world.sender.stats()["peers"]["c/0"]["coding"]
    assert coding["coded_chunks"] > 0
    assert coding["sent_bytes"] < 0.75 * coding["raw_bytes"]
    # The consumer says the same of this one transfer.
    assert status.spared_bytes == coding["raw_bytes"] - coding["sent_bytes"]
    world.await_clean()


def test_links_that_do_not_ask_for_it_send_bytes_as_they_are(make_world: MakeWorld) -> None:
    world = make_world(bandwidth_bits_per_s=800e6)
    ticket, transfer, content = send_numbers(world, 100_000)
    await_over(transfer)
    assert world.take(ticket) == content
    assert world.sender.stats()["peers"]["c/0"]["coding"] is None


def test_damaged_coded_chunks_are_sent_again(make_world: MakeWorld) -> None:
    proxy = FaultyProxy(seed=3, flips=4)
    try:
        world = make_world(through=proxy.start, compressed=True, bandwidth_bits_per_s=200e6, connections=2)
        ticket, transfer, content = send_numbers(world, 400_000)
        await_over(transfer)
        assert transfer.phase is SendPhase.COMPLETE, transfer.reason
        assert world.take(ticket) == content
        stats = world.sender.stats()["peers"]["c/0"]
        assert stats["resent_chunks"] + stats["requeued_chunks"] > 0
    finally:
        proxy.close()
