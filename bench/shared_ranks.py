"""What it costs that ranks of a decode engine keep the same KV: processor time of whole transfers over loopback.

    python bench/shared_ranks.py [--json] [--rounds N] [--tokens N]

Latents, as MLA keeps them, go from the ranks of a prefill engine to those of a decode engine: pages are digested, sent,
received, loaded by every rank out of shared staging, and checked, in one process. The bytes on the wire are those of
one copy. Each round does the same transfer between engines of one rank each, and between several, in turn; and as many
bytes between the same engines where each rank has heads of its own. All have as many connections, shared out among
ranks.

Ratios are medians over rounds of paired measurements: to the same engines without copies, and to one rank to one. Every
rank has memory of its own to fill, whatever is shared: the last ratio counts the loads of all ranks as one, so that it
says what sharing itself costs.
"""

import argparse
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from typing import Any

import torch

from goals import Figure, goal, report
from moved_prompt import KEY, WAIT_S, move, until
from prfaas.core.deployment import TransferLimits
from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.rank_shares import paired_ranks
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout, Packing, page_layout
from prfaas.serving.engines.vllm.metadata import BlockRun
from prfaas.serving.engines.vllm.pages import HostPages, raw_pages
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import WireLayout, wire_layouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.sibling_staging import SiblingStaging
from prfaas.serving.transport.io.staging_memory import StagingArena, shared_memory
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList

LAYERS = tuple(f"layer.{number}" for number in range(8))
# As a latent of 512 elements and 64 of a rotated key, in bf16; where ranks have heads of their own, two of half of it.
BLOCK_TOKENS, TOKEN_BYTES, HEADS = 64, 1152, 2
LIMITS = TransferLimits(load_wait_s=WAIT_S, staging_ttl_s=WAIT_S)
MOST_RATIO = 1.10
CONNECTIONS = 4
RANKS = ((1, 1), (2, 2), (1, 2), (2, 1))


class Rank:
    """Memory of one rank of an engine that holds one prompt."""

    def __init__(self, num_tokens: int, ranks: int, seed: int, table_seed: int, *, copies: bool) -> None:
        """`copies`: all ranks keep the same; else each has its share of the heads."""
        heads = HEADS if copies else HEADS // ranks
        self.group = EngineGroup(0, GroupKind.FULL, BLOCK_TOKENS, 0, LAYERS)
        blocks = self.group.end_block(num_tokens) + 1
        generator = torch.Generator().manual_seed(seed)
        shape = (blocks, heads, BLOCK_TOKENS, TOKEN_BYTES // HEADS // 2)
        tensors = {
            name: torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
            for name in LAYERS
        }
        self.raw = {name: raw_pages(tensor, blocks) for name, tensor in tensors.items()}
        self.layout = KvLayout(
            [self.group],
            {name: [HostPages(raw)] for name, raw in self.raw.items()},
            page_layouts={
                name: [page_layout(self.group, tensor, heads, Packing.PLAIN, self.raw[name].shape[1])]
                for name, tensor in tensors.items()
            },
            copies=dict.fromkeys(LAYERS, ranks) if copies and ranks > 1 else {},
        )
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(table_seed))
        self.table = (order + 1).tolist()

    def run(self, first: int, end: int) -> tuple[BlockRun, ...]:
        return (BlockRun(0, first, tuple(self.table[first:end])),)


class Way:
    """Two engines and the transport between their ranks."""

    def __init__(
        self, senders: int, readers: int, num_tokens: int, stack: ExitStack, *, copies: bool = True
    ) -> None:
        self.num_tokens = num_tokens
        # Ranks of one engine have the same tables, and those of a prefill engine the same content.
        self.east = [
            Rank(num_tokens, senders, 1 if copies else 11 + rank, 1, copies=copies) for rank in range(senders)
        ]
        self.home = [Rank(num_tokens, readers, 2 + rank, 2, copies=copies) for rank in range(readers)]
        self.copies = copies
        self.kv_bytes = num_tokens * TOKEN_BYTES * len(LAYERS)
        wires = [wire_layouts(each.layout, "home", rank, readers) for rank, each in enumerate(self.home)]
        staging_bytes = self.kv_bytes + (32 << 20)
        memories = [shared_memory(staging_bytes) for _ in self.home]
        arenas = [StagingArena(staging_bytes, 1 << 20, memory) for _, memory in memories]
        receivers = [
            Receiver(
                name=f"home/{rank}",
                key=KEY,
                host="127.0.0.1",
                port=0,
                arena=arenas[rank],
                layout=wires[rank],
                fingerprint={},
                peer_list=PeerList(
                    producers=frozenset([f"east/{each}" for each in paired_ranks(rank, readers, senders)])
                ),
                options=ReceiverOptions(uncounted_regions=1),
            )
            for rank in range(readers)
        ]
        sockets: list[dict[int, socket.socket]] = [{} for _ in self.home]
        for one, other in combinations(range(readers), 2):
            sockets[one][other], sockets[other][one] = socket.socketpair()
        siblings: list[SiblingStaging | None] = [None] * readers
        if copies and readers > 1:
            with ThreadPoolExecutor(readers) as threads:
                siblings[:] = threads.map(
                    lambda rank: SiblingStaging(
                        *(arenas[rank], memories[rank][0], receivers[rank], sockets[rank]), ReceiverOptions()
                    ),
                    range(readers),
                )
        self.consumers = []
        for rank, receiver in enumerate(receivers):
            receiver.start()
            stack.callback(receiver.close)
            sibling = siblings[rank]
            if sibling is not None:
                stack.callback(sibling.close)
                wires[rank].on_begin = partial(_begin, sibling)
            self.consumers.append(
                KvConsumer(wires[rank], receiver, LIMITS, ConnectorStats(), siblings=sibling)
            )
            stack.callback(self.consumers[-1].close)
        self.producers = []
        connections = CONNECTIONS // max(senders, readers)
        for rank, memory in enumerate(self.east):
            own = wire_layouts(memory.layout, "east", rank, senders)
            peers = {
                f"home/{each}": Peer(
                    f"home/{each}", "127.0.0.1", receivers[each].port, "link", connections, None
                )
                for each in paired_ranks(rank, senders, readers)
            }
            sender = Sender(
                name=f"east/{rank}",
                key=KEY,
                peers=peers,
                fingerprint={},
                options=SenderOptions(),
                layouts=own,
            )
            sender.start()
            stack.callback(sender.close)
            until(partial(_is_connected, sender, connections))
            self.producers.append(KvProducer(memory.layout, own, sender, WAIT_S, ConnectorStats()))

    def transfer(self) -> tuple[float, float]:
        """Prefill, move and load the prompt at all ranks; processor seconds of all, and without further loads."""
        east = list(zip(self.east, self.producers, strict=True))
        before_s = self._loading_s()
        took_s = move(east, list(zip(self.home, self.consumers, strict=True)), self.num_tokens)
        loading_s = self._loading_s() - before_s
        return took_s, took_s - loading_s * (1 - 1 / len(self.consumers))

    def _loading_s(self) -> float:
        clocks = [time.pthread_getcpuclockid(each._thread.ident or 0) for each in self.consumers]
        return sum(map(time.clock_gettime, clocks))

    def check(self) -> None:
        """Raises RuntimeError: a rank does not have what was computed."""
        source = self.east[0]
        if not self.copies:
            self._check_heads()
            return
        for memory in self.home:
            for name in LAYERS:
                if not torch.equal(memory.raw[name][memory.table], source.raw[name][source.table]):
                    raise RuntimeError(f"{name} is another one")

    def _check_heads(self) -> None:
        for name in LAYERS:
            sent, loaded = (
                torch.cat(
                    [
                        each.raw[name][each.table].reshape(len(each.table), -1, TOKEN_BYTES // HEADS)
                        for each in ranks
                    ],
                    1,
                )
                for ranks in (self.east, self.home)
            )
            if not torch.equal(sent, loaded):
                raise RuntimeError(f"{name} is another one")


def _begin(siblings: SiblingStaging, transfer_id: bytes, wire: WireLayout) -> None:
    siblings.begin(transfer_id, wire.readers)


def _is_connected(sender: Sender, connections: int) -> bool:
    return all(peer["connections"] == connections for peer in sender.stats()["peers"].values())


def measure(num_tokens: int, rounds: int) -> Iterator[Figure]:
    """Medians for each pair of engines."""
    took: list[list[tuple[float, float]]] = []
    with ExitStack() as stack:
        ways = [Way(*ranks, num_tokens, stack) for ranks in RANKS]
        ways += [Way(*ranks, num_tokens, stack, copies=False) for ranks in RANKS[1:]]
        # The first round touches memory for the first time.
        for number in range(rounds + 1):
            order = [(number + turn) % len(ways) for turn in range(len(ways))]
            seconds = {way: ways[way].transfer() for way in order}
            took.append([seconds[way] for way in range(len(ways))])
        for each in ways:
            each.check()
        gigabytes = ways[0].kv_bytes / 1e9
    took = took[1:]

    def own(way: int) -> int:
        """The same engines without copies."""
        return way and len(RANKS) - 1 + way

    for way, (senders, readers) in enumerate(RANKS):
        yield {
            "ranks": f"{senders} to {readers}",
            "s_per_gb": round(statistics.median(seconds[way][0] for seconds in took) / gigabytes, 3),
            "ratio": round(statistics.median(seconds[way][0] / seconds[own(way)][0] for seconds in took), 3),
            "to_one_rank_ratio": round(
                statistics.median(seconds[way][0] / seconds[0][0] for seconds in took), 3
            ),
            "one_load_ratio": round(
                statistics.median(seconds[way][1] / seconds[0][1] for seconds in took), 3
            ),
        }


def sentence(figure: Mapping[str, Any]) -> str:
    ratios = (
        f"{figure['ratio']} of the same engines without copies, {figure['to_one_rank_ratio']} of 1 to 1, "
        f"{figure['one_load_ratio']} with one load"
    )
    return f"{figure['ranks']} ranks: {figure['s_per_gb']} s/GB, {ratios}"


def goals_of(figure: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if figure["ranks"] != "1 to 1":
        name = f"processor time of {figure['ranks']} ranks over the same bytes without copies"
        yield goal(name, figure["ratio"], MOST_RATIO, is_least=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--rounds", type=int, default=7, help="paired transfers of each pair of engines")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the prompt")
    arguments = parser.parse_args(argv)
    report(measure(arguments.tokens, arguments.rounds), sentence, goals_of, as_json=arguments.json)


if __name__ == "__main__":
    main()
