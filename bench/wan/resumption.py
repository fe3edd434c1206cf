"""Interruptions of the line in the middle of one transfer of the transport alone: what is sent again."""

import json
import random
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest
from wan.laboratory import Laboratory, LineSettings
from wan.mid_run import RATE_BITS_PER_S, RTT_S
from wan.stack import FAR, FIRST_KV_PORT, HOME

CONNECTIONS = 4
_TCP_IP_BYTES = 52

REGIONS = 16
TRANSFER_BYTES = 48 << 20
KEY = bytes(range(32))
INTERRUPTIONS = ("none", "kill-1", "kill-4", "freeze-2")


class _EqualRegions:
    """As many bytes in each region as the ticket has tokens."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        return [num_tokens - skip_tokens] * REGIONS


@dataclass(frozen=True, slots=True)
class ResumedTransfer:
    """One transfer of the transport alone, interrupted when half of it was there."""

    interruption: str
    phase: str
    elapsed_s: float
    requeued_chunks: int
    chunk_bytes: int
    """Of the largest chunk at this rate."""
    sent_again_bytes: int
    """Payload that crossed the line beyond the transfer's own size, and what TCP sent again."""
    is_intact: bool


def run(interruptions: Sequence[str]) -> list[dict[str, Any]]:
    """A transfer for each interruption, over fresh connections."""
    rows = []
    line = LineSettings.of_round_trip(RATE_BITS_PER_S, RTT_S)
    for interruption in interruptions:
        with Laboratory({FAR: 1, HOME: 1}, line) as laboratory:
            rows.append(asdict(_resumed(laboratory, interruption)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _resumed(laboratory: Laboratory, interruption: str) -> ResumedTransfer:
    settings = laboratory.line(FAR, HOME)
    with laboratory.inside("home-0"):
        receiver = Receiver(
            name="c/0",
            key=KEY,
            host=laboratory.address("home-0"),
            port=FIRST_KV_PORT,
            arena=StagingArena(2 * TRANSFER_BYTES),
            layout=_EqualRegions(),
            fingerprint={},
            peer_list=PeerList(producers=frozenset(["p/0"])),
        )
        receiver.start()
    with laboratory.inside("far-0"):
        peer = Peer(
            "c/0",
            laboratory.address("home-0"),
            FIRST_KV_PORT,
            "wan",
            CONNECTIONS,
            settings.goodput_bits_per_s,
        )
        sender = Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint={})
        sender.start()
    try:
        return _interrupted(laboratory, interruption, sender, receiver)
    finally:
        sender.close()
        receiver.close()


def _interrupted(
    laboratory: Laboratory, interruption: str, sender: Sender, receiver: Receiver
) -> ResumedTransfer:
    while sender.stats()["peers"]["c/0"]["connections"] < CONNECTIONS:
        time.sleep(0.01)
    before = laboratory.counters(FAR, HOME)
    nbytes = TRANSFER_BYTES // REGIONS
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="p/0",
        consumer="c/0",
        num_tokens=nbytes,
        skip_tokens=0,
        prompt_digest=prompt_digest([]),
        expires_at_s=time.time() + 120,
    )
    content = [random.Random(region).randbytes(nbytes) for region in range(REGIONS)]
    began_s = time.monotonic()
    transfer = sender.open(ticket, ticket.seal(KEY), [nbytes] * REGIONS)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    while transfer.acked_bytes < TRANSFER_BYTES // 2 and not transfer.phase.terminal:
        time.sleep(0.01)
    kind, _, number = interruption.partition("-")
    if kind == "kill":
        laboratory.kill_connections(int(number), FIRST_KV_PORT)
    elif kind == "freeze":
        laboratory.change(blackhole=True)
        time.sleep(float(number))
        laboratory.change(blackhole=False)
    transfer.await_quiescent(90)
    elapsed_s = time.monotonic() - began_s
    after = laboratory.counters(FAR, HOME)
    staged = receiver.transfers.take(ticket.transfer_id)
    is_intact = staged is not None and content == [
        b"".join(staged.region_views(region, 0, nbytes)) for region in range(REGIONS)
    ]
    if staged is not None:
        staged.free()
    segments = after.offered_segments - before.offered_segments
    payload_bytes = after.offered_bytes - before.offered_bytes - _TCP_IP_BYTES * segments
    peer = sender.stats()["peers"]["c/0"]
    return ResumedTransfer(
        interruption=interruption,
        phase=str(transfer.phase),
        elapsed_s=elapsed_s,
        requeued_chunks=peer["requeued_chunks"],
        chunk_bytes=int(
            laboratory.line(FAR, HOME).goodput_bits_per_s / 8 / CONNECTIONS * SenderOptions().chunk_s
        ),
        sent_again_bytes=payload_bytes - TRANSFER_BYTES,
        is_intact=is_intact,
    )


def goals(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of one interruption."""
    name = f"one transfer, {row['interruption']}"
    connections = (
        int(row["interruption"].partition("-")[2]) if row["interruption"].startswith("kill") else CONNECTIONS
    )
    return [
        {
            "name": f"{name}: chunks sent again",
            "value": row["requeued_chunks"],
            "unit": "chunks",
            "goal": connections,
            "met": row["is_intact"] and row["requeued_chunks"] <= connections,
        }
    ]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        print(
            f"one transfer of {TRANSFER_BYTES >> 20} MiB, {row['interruption']}: {row['phase']} after "
            f"{row['elapsed_s']:.2f} s, {'intact' if row['is_intact'] else 'NOT INTACT'}, "
            f"{row['requeued_chunks']} chunks of {row['chunk_bytes'] >> 10} KiB queued again, "
            f"{row['sent_again_bytes'] / 1e3:.0f} KB more than its size on the line"
        )
