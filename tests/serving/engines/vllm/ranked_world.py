"""Engines whose KV is divided among ranks, in memory: what a model computed, and where each rank keeps its heads."""

import os
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

import numpy as np
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from prfaas.core.deployment import TransferLimits
from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import PageLayout
from prfaas.core.kv.rank_shares import RankGrid, rank_copies
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.drafter import Drafter
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout, Packing, opaque_layout, page_layout
from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, SendOrder
from prfaas.serving.engines.vllm.pages import HostPages, LayerPages, raw_pages
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.stages import LayerStage, regions_of
from prfaas.serving.engines.vllm.state_layout import state_parts
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import WireLayout, wire_layouts
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.sibling_staging import SiblingStaging
from prfaas.serving.transport.io.staging_memory import StagingArena, shared_memory
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, TransferAttributes

KEY = b"k" * 32
WIDTH, WINDOW_TOKENS, NUM_BLOCKS, MOST_TOKENS = 12, 20, 40, 130
LATENT_TOKENS, LATENT_WIDTH = 16, 9
KEY_WIDTH, VALUE_WIDTH, CONVOLVED = 4, 6, 3


STAGES = {2: ({"g0", "a0", "w0"}, {"a1", "m0"}), 3: ({"g0", "a0"}, {"a1", "m0"}, {"w0"})}
"""The layers of each stage by how many there are; a stage may have none of full attention."""


@dataclass(frozen=True)
class Model:
    """Heads of all ranks together."""

    full_heads: int = 8
    window_heads: int = 4
    state_keys: int = 4
    state_heads: int = 8
    is_mamba2: bool = False
    """Its heads come first in a convolution's state, then B and C of `state_keys` groups; else a gated delta net's."""


@dataclass(frozen=True)
class Keeping:
    """How an engine keeps KV."""

    ranks: int
    """Of each stage."""
    full_tokens: int = 16
    window_tokens: int = 16
    state_tokens: int = 16
    order: str = "HND"
    channels_outside: bool = True
    is_dense: bool = False
    """There is full attention only."""
    drafts: int = 0
    """Rows of a linear state behind those that a prompt leaves."""
    drafter: str = ""
    """Its identity; "" has none. It has a layer in the group of the model's full attention."""
    shares: bool = True
    """Ranks read each other's staging."""
    stages: int = 1
    """They have the layers of `STAGES`."""

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.ranks, self.stages)

    @property
    def groups(self) -> tuple[EngineGroup, ...]:
        groups = (
            EngineGroup(0, GroupKind.STATE, self.state_tokens, 0, ("g0",)),
            EngineGroup(1, GroupKind.FULL, self.full_tokens, 0, ("a0", *["d0"] * bool(self.drafter), "a1")),
            EngineGroup(2, GroupKind.WINDOW, self.window_tokens, WINDOW_TOKENS, ("w0",)),
            EngineGroup(3, GroupKind.FULL, LATENT_TOKENS, 0, ("m0",)),
        )
        return tuple(group for group in groups if group.kind is GroupKind.FULL or not self.is_dense)

    def groups_of(self, stage: int) -> tuple[EngineGroup, ...]:
        """As vLLM gives them to a stage: all groups, some without a layer."""
        if self.stages == 1:
            return self.groups
        own = STAGES[self.stages][stage]
        return tuple(
            replace(group, layer_names=tuple(name for name in group.layer_names if name in own))
            for group in self.groups
        )


def heads_of(heads: int, rank: int, ranks: int) -> range:
    """vLLM's: consecutive ones, or a copy of one."""
    first = rank * heads // ranks
    return range(first, max(first + 1, (rank + 1) * heads // ranks))


class Truth:
    """What a model has computed of a prompt: each layer's KV of each token, and the state after the last."""

    def __init__(self, model: Model, seed: int) -> None:
        random = np.random.default_rng(seed)

        def some(*shape: int) -> torch.Tensor:
            return torch.from_numpy(random.integers(1, 30000, shape, dtype=np.int16))

        self.model = model
        self.tokens = {
            "a0": some(MOST_TOKENS, model.full_heads, WIDTH),
            "a1": some(MOST_TOKENS, model.full_heads, WIDTH),
            "d0": some(MOST_TOKENS, model.full_heads, WIDTH),
            "w0": some(MOST_TOKENS, model.window_heads, WIDTH),
            "m0": some(MOST_TOKENS, 1, LATENT_WIDTH),
        }
        self.queries = some(model.state_keys, KEY_WIDTH, CONVOLVED)
        self.keys = some(model.state_keys, KEY_WIDTH, CONVOLVED)
        self.values = some(model.state_heads, VALUE_WIDTH, CONVOLVED)
        self.recurrent = some(model.state_heads, VALUE_WIDTH, KEY_WIDTH)

    def state(self, rank: int, keeping: Keeping, token: int) -> list[torch.Tensor]:
        """One rank's state after a token: of the convolution, and the recurrent one."""
        keys = heads_of(self.model.state_keys, rank, keeping.ranks)
        heads = heads_of(self.model.state_heads, rank, keeping.ranks)
        parts = [self.queries[list(keys)], self.keys[list(keys)], self.values[list(heads)]]
        if self.model.is_mamba2:
            parts = [parts[2], *parts[:2]]
        convolved = torch.cat([part.reshape(-1, CONVOLVED) for part in parts])
        if not keeping.channels_outside:
            convolved = convolved.T
        return [convolved + token, self.recurrent[list(heads)] + token]


class RankMemory:
    """KV of one rank of an engine, and the blocks that a request has."""

    def __init__(self, model: Model, keeping: Keeping, number: int, seed: int) -> None:
        """`number`: of the rank, in all stages."""
        self.model, self.keeping, self.number = model, keeping, number
        self.stage, rank = divmod(number, keeping.ranks)
        self.rank = rank
        self.groups = keeping.groups_of(self.stage)
        self._seed = seed
        random = np.random.default_rng(seed)
        self.seen: dict[str, torch.Tensor] = {}
        self.heads = {
            "a0": heads_of(model.full_heads, rank, keeping.ranks),
            "a1": heads_of(model.full_heads, rank, keeping.ranks),
            "d0": heads_of(model.full_heads, rank, keeping.ranks),
            "w0": heads_of(model.window_heads, rank, keeping.ranks),
            "m0": range(1),
        }
        pages: dict[str, list[LayerPages]] = {}
        layouts: dict[str, list[PageLayout]] = {}
        for group in self.groups:
            for name in group.layer_names:
                tensor, layout = self._tensor(group, name, random)
                raw = raw_pages(tensor, NUM_BLOCKS)
                pages[name], layouts[name] = [HostPages(raw)], [layout]
        drafter = Drafter(keeping.drafter, frozenset(["d0"] * bool(keeping.drafter)))
        self.layout = KvLayout(
            self.groups, pages, page_layouts=layouts, drafter=drafter, copies=self._copies()
        )
        ids = np.random.default_rng(seed // 100).permutation(np.arange(1, NUM_BLOCKS)).tolist()
        self.tables = {group.index: ids for group in self.groups}

    def _copies(self) -> dict[str, int]:
        ranks = self.keeping.ranks
        if not self.keeping.shares:
            return {}
        heads = max(1, self.model.full_heads // ranks)
        copies = rank_copies(self.model.full_heads, heads, ranks)
        return {"m0": rank_copies(0, 1, ranks), "a0": copies, "a1": copies}

    def _tensor(
        self, group: EngineGroup, name: str, random: np.random.Generator
    ) -> tuple[torch.Tensor, PageLayout]:
        tokens = group.block_tokens
        if name == "g0":
            spec = self._spec()
            items = spec.state_content_size_bytes // 2
            tensor = torch.from_numpy(random.integers(1, 30000, (NUM_BLOCKS, items), dtype=np.int16))
            self.seen[name] = tensor
            layout = opaque_layout(group, 2 * items)
            return tensor, PageLayout(
                layout.kind, layout.block_tokens, layout.page_tokens, layout.page_bytes, state_parts(spec)
            )
        if name == "m0":
            tensor = torch.from_numpy(
                random.integers(1, 30000, (NUM_BLOCKS, tokens, LATENT_WIDTH), dtype=np.int16)
            )
            self.seen[name] = tensor[:, :, None]
            return tensor, opaque_layout(group, 2 * tokens * LATENT_WIDTH)
        heads = len(self.heads[name])
        if self.keeping.order == "HND":
            tensor = torch.from_numpy(
                random.integers(1, 30000, (NUM_BLOCKS, heads, tokens, WIDTH), dtype=np.int16)
            )
        else:
            plain = random.integers(1, 30000, (NUM_BLOCKS, tokens, heads, WIDTH), dtype=np.int16)
            tensor = torch.from_numpy(plain).permute(0, 2, 1, 3)
        self.seen[name] = tensor.permute(0, 2, 1, 3)
        page_bytes = 2 * tokens * heads * WIDTH
        return tensor, page_layout(group, tensor, heads, Packing.PLAIN, page_bytes)

    def _spec(self) -> MambaSpec:
        keys = len(heads_of(self.model.state_keys, self.rank, self.keeping.ranks))
        heads = len(heads_of(self.model.state_heads, self.rank, self.keeping.ranks))
        channels = 2 * keys * KEY_WIDTH + heads * VALUE_WIDTH
        rows = CONVOLVED + self.keeping.drafts
        convolved = (channels, rows) if self.keeping.channels_outside else (rows, channels)
        of_model = "MAMBA2" if self.model.is_mamba2 else "GDN_ATTN"
        return MambaSpec(
            block_size=self.keeping.state_tokens,
            shapes=(convolved, (heads, VALUE_WIDTH, KEY_WIDTH)),
            dtypes=(torch.int16, torch.int16),
            mamba_type=MambaAttentionBackendEnum[of_model],
            num_speculative_blocks=self.keeping.drafts,
        )

    def token(self, name: str, group: EngineGroup, token: int) -> list[torch.Tensor]:
        """What a layer keeps of one token; a linear state's: the state after it, without the rows of drafts."""
        block, row = divmod(token, group.block_tokens)
        found = self.seen[name][self.tables[group.index][block]]
        if group.kind is not GroupKind.STATE:
            return [found[row]]
        convolved, recurrent = self._spec().shapes
        items = prod(convolved)
        rows = found[:items].view(convolved).narrow(int(self.keeping.channels_outside), 0, CONVOLVED)
        return [rows, found[items:].view(recurrent)]

    def expected(self, truth: Truth, name: str, token: int) -> list[torch.Tensor]:
        if name == "g0":
            return truth.state(self.rank, self.keeping, token)
        return [truth.tokens[name][token, list(self.heads[name])]]

    def needed(self, num_tokens: int, held: int) -> Iterator[tuple[str, EngineGroup, int]]:
        """Layers and tokens without which the prompt can't be continued."""
        for group in self.groups:
            first = {
                GroupKind.STATE: num_tokens - 1,
                GroupKind.WINDOW: max(0, num_tokens - WINDOW_TOKENS + 1),
                GroupKind.FULL: held,
            }[group.kind]
            for name in group.layer_names:
                for token in range(first, num_tokens):
                    yield name, group, token

    def compute(self, truth: Truth, num_tokens: int) -> None:
        for name, group, token in self.needed(num_tokens, 0):
            for kept, computed in zip(
                self.token(name, group, token), self.expected(truth, name, token), strict=True
            ):
                kept.copy_(computed)

    def assert_has(self, truth: Truth, num_tokens: int, held: int, drafter: str = "") -> None:
        """`drafter`: of the engine that has sent; the KV of another one was left as it is."""
        before = RankMemory(self.model, self.keeping, self.number, self._seed)
        for name, group, token in self.needed(num_tokens, held):
            came = name != "d0" or drafter == self.keeping.drafter
            expected = self.expected(truth, name, token) if came else before.token(name, group, token)
            found = self.token(name, group, token)
            assert all(map(torch.equal, found, expected)), f"rank {self.rank}: token {token} of {name}"

    def moving(self, group: EngineGroup, num_tokens: int, held: int) -> BlockRun:
        blocks = group.moving_blocks(num_tokens, held)
        return BlockRun(
            group.index, blocks.start, tuple(self.tables[group.index][blocks.start : blocks.stop])
        )


@dataclass
class RankedPair:
    """A prefill and a decode engine of several ranks each, over the real transport."""

    east: list[RankMemory]
    home: list[RankMemory]
    producing: list[KvProducer]
    consuming: list[KvConsumer]
    receivers: list[Receiver]
    senders: list[Sender]
    wires: dict[str, list[PeerLayouts[WireLayout]]] = field(default_factory=dict)
    siblings: list[SiblingStaging] = field(default_factory=list)

    def prefill(
        self,
        num_tokens: int,
        skip: int,
        chunk_ends: Sequence[int],
        others: Mapping[int, Sequence[int]] | None = None,
        truth: Truth | None = None,
        checkpoints: Mapping[int, Collection[int]] | None = None,
    ) -> Ticket:
        """
        Args:
            num_tokens: of the prompt.
            skip: of these the decode engine holds so many.
            chunk_ends: of every rank's chunks.
            others: where the chunks of some ranks end, which send more or less before they break.
            truth: what each chunk computes before it is sent; None: nothing.
            checkpoints: by rank, after which chunks it sends one; each comes before the next chunk.
        """
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer="east",
            consumer="home",
            num_tokens=num_tokens,
            skip_tokens=skip,
            prompt_digest=bytes(16),
            expires_at_s=time.time() + 60,
            attributes=TransferAttributes(checkpoint_tokens=16 if checkpoints else 0),
        )
        for memory, producing in zip(self.east, self.producing, strict=True):
            ends = (others or {}).get(memory.number, chunk_ends)
            attention = [group for group in memory.groups if group.kind is not GroupKind.STATE]
            states = [group for group in memory.groups if group.kind is GroupKind.STATE]
            sent = {group.index: group.first_block(num_tokens, skip) for group in attention}
            for end_tokens in ends:
                final = end_tokens == num_tokens
                streamed = []
                for group in attention:
                    end = group.end_block(num_tokens) if final else end_tokens // group.block_tokens
                    first = sent[group.index]
                    if end > first:
                        ids = tuple(memory.tables[group.index][first:end])
                        streamed.append(BlockRun(group.index, first, ids))
                        sent[group.index] = end
                closing = tuple(memory.moving(group, num_tokens, 0) for group in states) if final else ()
                order = SendOrder("p", ticket, ticket.seal(KEY), tuple(streamed), closing, final)
                if truth is not None:
                    memory.compute(truth, end_tokens)
                if end_tokens in (checkpoints or {}).get(memory.number, ()):
                    cut = [group for group in memory.groups if group.kind is not GroupKind.FULL]
                    runs = tuple(memory.moving(group, end_tokens, 0) for group in cut)
                    order = replace(order, checkpoint_tokens=end_tokens, checkpoint=runs)
                    until(lambda each=producing: bool(each.ready_for_checkpoints()))
                for name in ("a0", "a1", "w0", "m0", *["d0"] * bool(memory.keeping.drafter)):
                    if name in memory.layout.layer_names:
                        producing.save_layer([order], name)
                producing.end_step([order])
        return ticket

    def sent(self) -> None:
        """All ranks have sent, or given up."""
        for producing in self.producing:
            producing.hold({"p": False})
            until(lambda each=producing: bool(each.finished()))

    def load(
        self, ticket: Ticket, local_tokens: int, usable_tokens: int = 0
    ) -> list[tuple[set[str], set[str]]]:
        """What becomes of it at each rank; `usable_tokens`: of a transfer that broke, 0: load a whole one."""
        self.order(ticket, local_tokens, usable_tokens)
        return self.results()

    def order(self, ticket: Ticket, local_tokens: int, usable_tokens: int = 0) -> None:
        num_tokens = usable_tokens or ticket.num_tokens
        for memory, consuming in zip(self.home, self.consuming, strict=True):
            runs = tuple(memory.moving(group, num_tokens, local_tokens) for group in memory.groups)
            consuming.order([LoadOrder("d", ticket, local_tokens, runs, usable_tokens)], [])

    def results(self) -> list[tuple[set[str], set[str]]]:
        results = []
        for consuming in self.consuming:
            found: list[tuple[set[str], set[str]]] = []

            def ended(of: KvConsumer = consuming, into: list[tuple[set[str], set[str]]] = found) -> bool:
                into.append(of.results())
                return bool(into[-1][0])

            until(ended)
            results.append(found[-1])
        return results

    def connected(self) -> None:
        for sender in self.senders:
            until(lambda each=sender: all(peer["connections"] for peer in each.stats()["peers"].values()))

    def total(self, name: str) -> int:
        """A counter of all ranks."""
        stats = [each.stats for each in self.producing] + [each.stats for each in self.consuming]
        return sum(int(each.data.get(name, 0)) for each in stats)


def until(is_so: object) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def ranks_wires(
    name: str, memories: Sequence[RankMemory], *, page_digests: bool = True
) -> list[PeerLayouts[WireLayout]]:
    """Of all ranks of an engine."""
    ranks = memories[0].keeping.ranks
    return [
        wire_layouts(
            memory.layout,
            name,
            memory.number,
            ranks,
            page_digests=page_digests,
            stage=LayerStage.among(
                [regions_of(each.layout) for each in memories if each.rank == memory.rank], memory.stage
            ),
        )
        for memory in memories
    ]


@contextmanager
def ranked_pair(
    model: Model,
    ours: Keeping,
    theirs: Keeping,
    *,
    page_digests: bool = True,
    on_demand: bool = False,
    load_wait_s: float = 2.0,
) -> Iterator[RankedPair]:
    """`ours`: the prefill engine's, `theirs`: the decode engine's, `on_demand`: met by the first transfer."""
    east = [RankMemory(model, ours, number, 100 + number) for number in range(ours.grid.count)]
    home = [RankMemory(model, theirs, number, 200 + number) for number in range(theirs.grid.count)]
    wires = {
        name: ranks_wires(name, memories, page_digests=page_digests)
        for name, memories in (("east", east), ("home", home))
    }
    pair = RankedPair(east, home, [], [], [], [], wires)
    memories = [shared_memory(2 << 20) for _ in home]
    arenas = [StagingArena(2 << 20, 16 << 10, memory) for _, memory in memories]
    sockets: list[dict[int, socket.socket]] = [{} for _ in home]
    for one, other in combinations(range(theirs.ranks if theirs.shares else 0), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    with ExitStack() as stack:
        for rank, arena in enumerate(arenas):
            receiver = Receiver(
                name=f"home/{rank}",
                key=KEY,
                host="127.0.0.1",
                port=0,
                arena=arena,
                layout=wires["home"][rank],
                fingerprint={},
                peer_list=PeerList(
                    producers=frozenset([f"east/{each}" for each in theirs.grid.paired(rank, ours.grid)])
                ),
                options=ReceiverOptions(
                    limits=TransferLimits(resume_s=0.3), uncounted_regions=int(page_digests)
                ),
            )
            receiver.start()
            stack.callback(receiver.close)
            pair.receivers.append(receiver)
        if theirs.shares:
            # Each waits for the others' greetings.
            with ThreadPoolExecutor(theirs.ranks) as threads:
                pair.siblings = list(
                    threads.map(
                        lambda rank: SiblingStaging(
                            *(arenas[rank], memories[rank][0], pair.receivers[rank], sockets[rank]),
                            ReceiverOptions(
                                limits=TransferLimits(staging_ttl_s=5.0, staging_wait_s=5.0),
                                keep_partial_s=1.0,
                            ),
                        ),
                        range(theirs.ranks),
                    )
                )
        for rank, receiver in enumerate(pair.receivers):
            siblings = pair.siblings[rank] if theirs.shares else None
            if siblings is not None:
                stack.callback(siblings.close)
                lend = siblings.begin
                wires["home"][rank].on_begin = lambda transfer_id, wire, lend=lend: lend(
                    transfer_id, wire.readers
                )
            consuming = KvConsumer(
                wires["home"][rank],
                receiver,
                TransferLimits(load_wait_s=load_wait_s, staging_ttl_s=5.0),
                ConnectorStats(),
                siblings=siblings,
            )
            stack.callback(consuming.close)
            pair.consuming.append(consuming)
        for rank, memory in enumerate(east):
            peers = {
                f"home/{each}": Peer(
                    f"home/{each}", "127.0.0.1", pair.receivers[each].port, "east->home", 1, None, on_demand
                )
                for each in ours.grid.paired(rank, theirs.grid)
            }
            sender = Sender(
                name=f"east/{rank}",
                key=KEY,
                peers=peers,
                fingerprint={},
                options=SenderOptions(limits=TransferLimits(resume_s=0.3)),
                layouts=wires["east"][rank],
            )
            sender.start()
            stack.callback(sender.close)
            pair.senders.append(sender)
            stats = ConnectorStats()
            pair.producing.append(KvProducer(memory.layout, wires["east"][rank], sender, 20.0, stats))
        yield pair
    assert [arena.used_blocks for arena in arenas] == [0] * len(arenas)
    for fd, _ in memories:
        os.close(fd)
