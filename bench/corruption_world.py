"""Prefill and decode connectors of two tensor-parallel ranks over the real transport on loopback, with small CPU
tensors in place of an engine's KV; and the faults that are injected into their transfers (for `corruption.py`)."""

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from prfaas.core.deployment import TransferLimits
from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.page_digests import DIGEST_BYTES
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.layout import EngineGroup, EngineRegion, KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, SendOrder
from prfaas.serving.engines.vllm.pages import BlockIds, HostPages
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import wire_layouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.sockets import receive_exactly
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    FrameType,
    checksum,
    pack_header,
    unpack_header,
)

KEY = bytes(range(32))
RANKS = 2
NUM_BLOCKS = 48
WAIT_S = 60.0
Bytes2D = npt.NDArray[np.uint8]
Tables = Mapping[int, list[int]]
Damage = Callable[[bytearray], None]


class HeldPages(HostPages):
    """Pages that the sender may not read while the gate is shut; `instead` leads it to another layer's."""

    gate: threading.Event
    instead: HostPages | None = None

    def views(self, blocks: BlockIds, start: int, nbytes: int) -> list[memoryview] | None:
        if not self.gate.wait(WAIT_S):
            raise TimeoutError("the gate stayed shut")
        return HostPages.views(self.instead or self, blocks, start, nbytes)

    def read(self, blocks: BlockIds, start: int, out: memoryview) -> None:
        HostPages.read(self.instead or self, blocks, start, out)


class EarlyReceiver(Receiver):
    """Hands complete transfers out before the connector asks for them, so that their staging can be spoilt."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._early: dict[bytes, StagedTransfer] = {}
        self._take = self.transfers.take
        self.transfers.take = self._taken  # type: ignore[method-assign]

    def take_early(self, transfer_id: bytes) -> StagedTransfer:
        staged = self._take(transfer_id)
        if staged is None:
            raise RuntimeError("the transfer is not complete")
        self._early[transfer_id] = staged
        return staged

    def _taken(self, transfer_id: bytes, *, broken_tokens: int = 0) -> StagedTransfer | None:
        return self._early.pop(transfer_id, None) or self._take(transfer_id, broken_tokens=broken_tokens)


class TamperingProxy:
    """A relay of frames that changes the payload of one DATA frame of a region when it is armed."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._armed: tuple[int, Damage, bool] | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def armed(self) -> bool:
        return self._armed is not None

    def arm(self, region: int, damage: Damage, *, forge: bool) -> None:
        """`forge`: the frame gets a new checksum, so that only digests can tell."""
        self._armed = (region, damage, forge)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += (client, server)
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        raw = bytearray(HEADER_BYTES)
        with contextlib.suppress(OSError):
            while True:
                receive_exactly(source, memoryview(raw))
                header = unpack_header(raw)
                payload = bytearray(header.length_bytes)
                receive_exactly(source, memoryview(payload))
                frame = bytes(raw)
                with self._lock:
                    armed = self._armed
                    if header.kind is FrameType.DATA and armed is not None and armed[0] == header.region:
                        self._armed = None
                        armed[1](payload)
                        if armed[2]:
                            frame = pack_header(
                                header.kind,
                                header.transfer_id,
                                region=header.region,
                                offset=header.offset,
                                length_bytes=len(payload),
                                payload_checksum=checksum(payload),
                            )
                target.sendall(frame + payload)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _back(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def random_groups(rng: random.Random) -> tuple[tuple[EngineGroup, ...], dict[str, int]]:
    """KV groups of all kinds, and the page size of every layer; two layers of each kind have equal pages."""
    groups: list[EngineGroup] = []
    page_bytes: dict[str, int] = {}
    kinds = [GroupKind.STATE, GroupKind.FULL, GroupKind.WINDOW]
    rng.shuffle(kinds)
    for index, kind in enumerate(kinds):
        layers = tuple(f"{kind.value}.{number}" for number in range(rng.randint(2, 3)))
        size = rng.choice((24, 100, 513, 1000, 4096))
        page_bytes |= dict.fromkeys(layers[:2], size)
        page_bytes |= dict.fromkeys(layers[2:], rng.choice((8, 77, 2048)))
        window = rng.randint(2, 40) if kind is GroupKind.WINDOW else 0
        groups.append(EngineGroup(index, kind, rng.choice((4, 8, 16)), window, layers))
    return tuple(groups), page_bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """One transfer, as all ranks carry it out."""

    ticket: Ticket
    local_tokens: int
    """Tokens that the decode engine holds already."""
    chunk_ends: tuple[int, ...]
    east: Tables
    """The prefill engine's blocks of every group."""
    home: Tables
    """The decode engine's."""

    @property
    def extent(self) -> tuple[int, int]:
        return self.ticket.num_tokens, self.local_tokens


def random_prompt(rng: random.Random, groups: tuple[EngineGroup, ...], *, load_all: bool) -> Prompt:
    """`load_all`: the decode engine holds what is skipped and no more."""
    num_tokens = rng.randint(1, 150)
    skip = rng.choice((0, 0, rng.randint(0, num_tokens - 1)))
    local = skip if load_all else rng.randint(skip, num_tokens - 1)
    ends = {rng.randint(1, num_tokens) for _ in range(rng.randint(0, 3))} | {num_tokens}

    def tables() -> Tables:
        return {g.index: rng.sample(range(1, NUM_BLOCKS), g.end_block(num_tokens)) for g in groups}

    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=num_tokens,
        skip_tokens=skip,
        prompt_digest=bytes(16),
        expires_at_s=time.time() + 600,
    )
    return Prompt(ticket, local, tuple(sorted(ends)), tables(), tables())


def send_orders(groups: tuple[EngineGroup, ...], prompt: Prompt) -> Iterator[SendOrder]:
    """What vLLM's scheduler side orders for each chunk."""
    ticket, sealed = prompt.ticket, prompt.ticket.seal(KEY)
    full = [group for group in groups if group.kind is GroupKind.FULL]
    sent = {g.index: g.first_block(ticket.num_tokens, ticket.skip_tokens) for g in full}
    for end_tokens in prompt.chunk_ends:
        final = end_tokens == ticket.num_tokens
        streamed = []
        for group in full:
            end = group.end_block(end_tokens) if final else end_tokens // group.block_tokens
            first = sent[group.index]
            if end > first:
                blocks = prompt.east[group.index][first:end]
                streamed.append(BlockRun(group.index, first, tuple(blocks)))
                sent[group.index] = end
        closing = _runs([g for g in groups if g not in full], prompt.east, ticket.num_tokens, 0)
        yield SendOrder("p", ticket, sealed, tuple(streamed), closing if final else (), final)


def _runs(groups: list[EngineGroup], tables: Tables, num_tokens: int, skip: int) -> tuple[BlockRun, ...]:
    moving = [(group.index, group.moving_blocks(num_tokens, skip)) for group in groups]
    return tuple(BlockRun(i, blocks.start, tuple(tables[i][blocks.start :])) for i, blocks in moving)


class Rank:
    """One rank of a prefill engine and the same rank of a decode engine."""

    def __init__(
        self,
        number: int,
        groups: tuple[EngineGroup, ...],
        page_bytes: Mapping[str, int],
        *,
        digests: bool = True,
        staging_bytes: int = 4 << 20,
        transfer_block_bytes: int = 4 << 10,
        num_blocks: int = NUM_BLOCKS,
        seed: int = 0,
    ) -> None:
        random_bytes = np.random.default_rng(seed)
        self.groups = groups
        self.gate = threading.Event()
        self.gate.set()
        self.east = _memory(random_bytes, page_bytes, num_blocks)
        self.home = _memory(random_bytes, page_bytes, num_blocks)
        held = {name: HeldPages(torch.from_numpy(pages)) for name, pages in self.east.items()}
        for pages in held.values():
            pages.gate = self.gate
        self.pages = held
        self.layout = KvLayout(groups, {name: [pages] for name, pages in held.items()})
        home = {name: [HostPages(torch.from_numpy(pages))] for name, pages in self.home.items()}
        home_layout = KvLayout(groups, home)
        wires = wire_layouts(self.layout, "east", number, RANKS, page_digests=digests)
        home_wires = wire_layouts(home_layout, "home", number, RANKS, page_digests=digests)
        digest_plan = (
            wire_layouts(self.layout, "east", number, RANKS).agreed("home/0", is_sent=True).digest_plan
        )
        assert digest_plan is not None
        self.digest_plan = digest_plan
        self.arena = StagingArena(staging_bytes, transfer_block_bytes)
        self.receiver = EarlyReceiver(
            name=f"home/{number}",
            key=KEY,
            host="127.0.0.1",
            port=0,
            arena=self.arena,
            layout=home_wires,
            fingerprint={},
            peer_list=PeerList(producers=frozenset([f"east/{number}"])),
            options=ReceiverOptions(uncounted_regions=int(digests)),
        )
        self.receiver.start()
        self.proxy = TamperingProxy(self.receiver.port)
        peer = Peer(f"home/{number}", "127.0.0.1", self.proxy.port, "link", 2, None)
        self.sender = Sender(
            name=f"east/{number}",
            key=KEY,
            peers={peer.name: peer},
            fingerprint={},
            options=SenderOptions(),
            layouts=wires,
        )
        self.sender.start()
        # Before, orders are postponed: their pages would be summed up after the faults.
        _until(lambda: self.sender.meet("home"))
        self.stats = ConnectorStats()
        self.producer = KvProducer(self.layout, wires, self.sender, WAIT_S, self.stats)
        self.consumer = KvConsumer(
            home_wires, self.receiver, TransferLimits(load_wait_s=WAIT_S, staging_ttl_s=WAIT_S), self.stats
        )

    def close(self) -> None:
        self.gate.set()
        self.consumer.close()
        self.sender.close()
        self.receiver.close()
        self.proxy.close()

    def prefill(self, prompt: Prompt, random_bytes: np.random.Generator) -> None:
        """Compute pages, and queue them for sending."""
        self.compute(prompt, random_bytes)
        self.queue(prompt)

    def compute(self, prompt: Prompt, random_bytes: np.random.Generator) -> None:
        """Fill the prompt's blocks, and remember with what."""
        for region in self.layout.regions:
            pages = self.east[region.layer_name]
            blocks = prompt.east[region.group.index]
            pages[blocks] = random_bytes.integers(0, 256, (len(blocks), pages.shape[1]), dtype=np.uint8)
        self.computed = {name: pages.copy() for name, pages in self.east.items()}

    def queue(self, prompt: Prompt) -> None:
        """The hooks of the engine's steps: layer by layer, then the end of each."""
        full = [r.layer_name for r in self.layout.regions if r.group.kind is GroupKind.FULL]
        for order in send_orders(self.groups, prompt):
            for layer_name in full:
                self.producer.save_layer([order], layer_name)
            self.producer.end_step([order])

    def await_arrival(self, prompt: Prompt) -> None:
        """Wait until the transfer is complete; the prefill engine frees the blocks."""
        self.producer.hold({"p": False})
        _until(lambda: bool(self.producer.finished()))
        status = self.receiver.transfers.state(prompt.ticket.transfer_id)
        if status is None or status.phase != "complete":
            raise RuntimeError(f"the transfer did not complete: {status}")

    def load(self, prompt: Prompt) -> bool:
        """Load the transfer; False if vLLM would prefill locally."""
        runs = _runs(list(self.groups), prompt.home, *prompt.extent)
        self.consumer.order([LoadOrder("d", prompt.ticket, prompt.local_tokens, runs)], [])
        failed: list[str] = []

        def ended() -> bool:
            done, bad = self.consumer.results()
            failed.extend(bad)
            return bool(done)

        _until(ended)
        return not failed

    def holds_what_was_computed(self, prompt: Prompt) -> bool:
        """Whether every page that had to be loaded is the one that was computed."""
        return all(
            np.array_equal(
                self.home[region.layer_name][prompt.home[region.group.index][block]],
                self.computed[region.layer_name][prompt.east[region.group.index][block]],
            )
            for region in self.layout.regions
            for block in region.group.moving_blocks(*prompt.extent)
        )

    def loaded_pages(self, prompt: Prompt) -> list[tuple[EngineRegion, int]]:
        """(region, block of the prompt) of every page that the decode engine loads."""
        return [(r, block) for r in self.layout.regions for block in r.group.moving_blocks(*prompt.extent)]


def _memory(
    random_bytes: np.random.Generator, page_bytes: Mapping[str, int], num_blocks: int
) -> dict[str, Bytes2D]:
    return {
        name: random_bytes.integers(0, 256, (num_blocks, size), dtype=np.uint8)
        for name, size in page_bytes.items()
    }


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("a step of a transfer did not end")
        time.sleep(0.0002)


@dataclass(slots=True)
class World:
    """Two ranks with one layout, and what chance is made of."""

    seed: int
    rng: random.Random = field(init=False)
    random_bytes: np.random.Generator = field(init=False)
    groups: tuple[EngineGroup, ...] = field(init=False)
    ranks: tuple[Rank, Rank] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.random_bytes = np.random.default_rng(self.seed)
        self.groups, page_bytes = random_groups(self.rng)
        self.ranks = (
            Rank(0, self.groups, page_bytes, seed=2 * self.seed),
            Rank(1, self.groups, page_bytes, seed=2 * self.seed + 1),
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def damage(rng: random.Random, page: bytearray) -> None:
    """Change some bits: one, several, a run, whole words, or the top bits of an even number of words."""
    before = bytes(page)
    size = len(page)
    kind = rng.randrange(6)
    if kind == 1:
        for _ in range(rng.randint(2, 9)):
            page[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == 2:
        start = rng.randrange(size)
        end = min(size, start + rng.randint(1, 64))
        page[start:end] = bytes(end - start)
    elif kind == 3:
        page[:] = rng.randbytes(size)
    elif kind == 4 and size >= 16:
        for word in rng.sample(range(size // 8), 2):
            page[8 * word + 7] ^= 0x80
    elif kind == 5 and size >= 16:
        one, other = (8 * word for word in rng.sample(range(size // 8), 2))
        page[one : one + 8], page[other : other + 8] = page[other : other + 8], page[one : one + 8]
    if page == before:
        page[rng.randrange(size)] ^= 1 << rng.randrange(8)


def spoil_staged(rng: random.Random, rank: Rank, prompt: Prompt) -> None:
    """Damage one page, or one digest, of a complete transfer in staging."""
    staged = rank.receiver.take_early(prompt.ticket.transfer_id)
    region, block = rng.choice(rank.loaded_pages(prompt))
    ticket = prompt.ticket
    if rng.random() < 0.1:
        digests = rank.digest_plan.of_transfer(ticket.transfer_id, ticket.num_tokens, ticket.skip_tokens)
        index, offset, size = digests.region, DIGEST_BYTES * digests.index(region.index, block), DIGEST_BYTES
    else:
        index, size = region.index, region.page_bytes
        offset = (block - region.group.first_block(ticket.num_tokens, ticket.skip_tokens)) * size
    pieces = staged.region_views(index, offset, size)
    page = bytearray(b"".join(pieces))
    damage(rng, page)
    _fill(pieces, page)


def exchange(one: list[memoryview], other: list[memoryview]) -> None:
    """Two ranges of staging change places."""
    first, second = b"".join(one), b"".join(other)
    _fill(one, second)
    _fill(other, first)


def _fill(pieces: list[memoryview], data: bytes | bytearray) -> None:
    start = 0
    for piece in pieces:
        piece[:] = data[start : start + len(piece)]
        start += len(piece)
