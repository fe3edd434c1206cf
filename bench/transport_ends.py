"""One end of a transfer of this project's transport, as a process that `transport.py` leads.

    python bench/transport_ends.py receive '{"host": …, "nbytes": …, …}'
    python bench/transport_ends.py send '{"host": …, "port": …, …}'

Prints a line when it is ready. For each line on its input the sender sends all of its memory once, and prints how long
that took and the transfer's id. The receiver gets that id as a line, looks at the bytes and frees them.
"""

import json
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.core.deployment import TransferLimits
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.chunk_source import BytesSource, ChunkSource
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest

KEY = bytes(range(32))
REGIONS = 16
SEED = 11


@dataclass(frozen=True)
class Job:
    """What both ends are told."""

    host: str
    nbytes: int
    connections: int
    port: int = 0
    source: str = "bytes"
    """`bytes`, or `PAGE_BYTES` pages of an engine: `pages:8192` one behind the other, `scattered:8192` not so."""
    checksums: bool = True
    bits_per_s: float | None = None
    certificates: str | None = None
    """A folder with `ca.pem`, and certificate and key of `p` and `c`: the connections are encrypted with them."""

    def identity(self, name: str) -> TlsIdentity | None:
        if self.certificates is None:
            return None
        folder = Path(self.certificates)
        return TlsIdentity(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")


class EvenRegions:
    """The number of tokens of the ticket is the transfer's size in KiB, cut into equal regions."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        return [(num_tokens - skip_tokens) * 1024 // REGIONS] * REGIONS


def content(nbytes: int) -> "np.typing.NDArray[np.uint8]":
    """The same on both sides."""
    return np.random.default_rng(SEED).integers(0, 256, nbytes, dtype=np.uint8)


def sources(job: Job, data: "np.typing.NDArray[np.uint8]") -> Sequence[ChunkSource]:
    """One for each region."""
    layout, _, size = job.source.partition(":")
    regions = np.split(data, REGIONS)
    if layout == "bytes":
        return [BytesSource(memoryview(region)) for region in regions]  # type: ignore[arg-type]
    # Only here: torch is not needed for bytes.
    import torch

    from prfaas.serving.engines.vllm.pages import HostPages, PagedSource

    count = len(regions[0]) // int(size)
    blocks = np.arange(count)
    if layout == "scattered":
        # Every second block, so that no two neighbours follow each other.
        blocks = np.concatenate((blocks[::2], blocks[1::2]))
    paged: list[ChunkSource] = []
    for region in regions:
        memory = np.empty((count, int(size)), dtype=np.uint8)
        memory[blocks] = region.reshape(count, int(size))
        paged.append(PagedSource(HostPages(torch.from_numpy(memory)), blocks.tolist()))
    return paged


def receive(job: Job) -> None:
    receiver = Receiver(
        name="c/0",
        key=KEY,
        host=job.host,
        port=job.port,
        arena=StagingArena(job.nbytes + (4 << 20)),
        layout=EvenRegions(),
        fingerprint={},
        tls=job.identity("c"),
    )
    receiver.start()
    say({"port": receiver.port})
    expected = np.split(content(job.nbytes), REGIONS)
    looked = False
    for line in sys.stdin:
        staged = receiver.transfers.take(bytes.fromhex(line.strip()))
        if staged is None:
            raise SystemExit("the transfer did not arrive")
        if not looked:
            for region, bytes_of_region in enumerate(expected):
                pieces = staged.region_views(region, 0, len(bytes_of_region))
                if b"".join(pieces) != bytes_of_region.tobytes():
                    raise SystemExit(f"region {region} differs from what was sent")
            looked = True
        staged.free()
        say({})
    receiver.close()


def send(job: Job) -> None:
    identity = job.identity("p")
    encrypted = identity is not None
    peer = Peer("c/0", job.host, job.port, "link", job.connections, job.bits_per_s, encrypted=encrypted)
    options = SenderOptions(limits=TransferLimits(checksums=job.checksums))
    sender = Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint={}, options=options, tls=identity)
    sender.start()
    shown = sources(job, content(job.nbytes))
    while sender.stats()["peers"]["c/0"]["connections"] < job.connections:
        time.sleep(0.005)
    say({"congestion": sender.stats()["peers"]["c/0"]["congestion"]})
    for _ in sys.stdin:
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer="p/0",
            consumer="c/0",
            num_tokens=job.nbytes // 1024,
            skip_tokens=0,
            prompt_digest=prompt_digest([]),
            expires_at_s=time.time() + 600,
        )
        began_s = time.perf_counter()
        transfer = sender.open(ticket, ticket.seal(KEY), EvenRegions().region_bytes(ticket.num_tokens, 0))
        for region, source in enumerate(shown):
            transfer.put(region, 0, source)
        transfer.end()
        transfer.await_quiescent(600)
        elapsed_s = time.perf_counter() - began_s
        if transfer.phase is not SendPhase.COMPLETE:
            raise SystemExit(f"the transfer failed: {transfer.reason}")
        say({"elapsed_s": elapsed_s, "id": ticket.transfer_id.hex()})
    sender.close()


def say(what: dict[str, Any]) -> None:
    print(f"@{json.dumps(what)}", flush=True)


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](Job(**json.loads(sys.argv[2])))
