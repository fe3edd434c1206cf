"""Producer and consumer whose engines keep the same KV in other blocks and another order, over the real transport."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from prfaas.core.deployment import TransferLimits
from prfaas.core.kv.groups import GroupKind, region_bytes
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout, Packing, opaque_layout, page_layout
from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, SendOrder
from prfaas.serving.engines.vllm.pages import HostPages, PagedSource, raw_pages
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import WireLayout, wire_layouts
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol import region_layout
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket
from prfaas.serving.transport.protocol.wire import TransferPhase, TransferStatus

KEY = b"k" * 32
HEADS, WIDTH, WINDOW_TOKENS, STATE_BYTES = 2, 40, 20, 1000
NUM_BLOCKS = 80
FULL_LAYERS, STATE_LAYERS, WINDOW_LAYERS = ("a0", "a1"), ("g0", "g1"), ("w0",)


@dataclass(frozen=True)
class Keeping:
    """How an engine keeps KV."""

    full_tokens: int
    window_tokens: int
    state_tokens: int
    order: str = "HND"
    split: int = 1
    """The kernels' blocks in one of the manager's, of full attention."""
    is_dense: bool = False
    """There is full attention only."""

    @property
    def groups(self) -> tuple[EngineGroup, EngineGroup, EngineGroup]:
        return (
            EngineGroup(0, GroupKind.STATE, self.state_tokens, 0, STATE_LAYERS),
            EngineGroup(1, GroupKind.FULL, self.full_tokens, 0, FULL_LAYERS),
            EngineGroup(2, GroupKind.WINDOW, self.window_tokens, WINDOW_TOKENS, WINDOW_LAYERS),
        )


class Engine:
    """Memory of one engine, and where each token of a request's KV lies in it."""

    def __init__(self, keeping: Keeping, seed: int) -> None:
        self.groups = keeping.groups
        self.state, self.full, self.window = self.groups
        random = np.random.default_rng(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.seen: dict[str, torch.Tensor] = {}
        pages, layouts = {}, {}
        for group in self.groups:
            split = keeping.split if group is self.full else 1
            count, tokens = NUM_BLOCKS * split, group.block_tokens // split
            for name in group.layer_names:
                if group is self.state:
                    tensor = torch.from_numpy(
                        random.integers(0, 256, (NUM_BLOCKS, STATE_BYTES), dtype=np.uint8)
                    )
                    seen = tensor
                elif keeping.order == "HND":
                    tensor = torch.from_numpy(
                        random.integers(1, 30000, (count, HEADS, tokens, WIDTH), dtype=np.int16)
                    )
                    seen = tensor.permute(0, 2, 1, 3)
                else:
                    tensor = torch.from_numpy(
                        random.integers(1, 30000, (count, tokens, HEADS, WIDTH), dtype=np.int16)
                    ).permute(0, 2, 1, 3)
                    seen = tensor.permute(0, 2, 1, 3)
                raw = raw_pages(tensor, NUM_BLOCKS)
                self.tensors[name], self.seen[name] = tensor, seen
                pages[name] = [HostPages(raw)]
                layouts[name] = [
                    opaque_layout(group, raw.shape[1])
                    if group is self.state
                    else page_layout(group, tensor, HEADS, Packing.PLAIN, raw.shape[1])
                ]
        groups = (self.full,) if keeping.is_dense else self.groups
        self.layout = KvLayout(groups, pages, page_layouts=layouts)
        ids = random.permutation(np.arange(1, NUM_BLOCKS)).tolist()
        self.tables = {
            group.index: ids[20 * number : 20 * (number + 1)] for number, group in enumerate(self.groups)
        }

    def token(self, name: str, group: EngineGroup, token: int) -> torch.Tensor:
        """What a layer keeps of one token; a linear state's group: the state after it."""
        block, row = divmod(token, group.block_tokens)
        block_id = self.tables[group.index][block]
        if group.kind is GroupKind.STATE:
            return self.seen[name][block_id]
        per_block = self.seen[name].shape[0] // NUM_BLOCKS
        inside, row = divmod(row, self.seen[name].shape[1])
        return self.seen[name][block_id * per_block + inside, row]

    def run(self, group: EngineGroup, first: int, end: int) -> BlockRun:
        return BlockRun(group.index, first, tuple(self.tables[group.index][first:end]))

    def moving(self, group: EngineGroup, num_tokens: int, held_tokens: int) -> BlockRun:
        blocks = group.moving_blocks(num_tokens, held_tokens)
        return self.run(group, blocks.start, blocks.stop)


@dataclass
class Pair:
    """A prefill and a decode engine."""

    east: Engine
    home: Engine
    producing: KvProducer
    consuming: KvConsumer
    receiver: Receiver
    sender: Sender
    wires: Mapping[str, PeerLayouts[WireLayout]]

    def prefill(
        self,
        num_tokens: int,
        skip: int,
        chunk_ends: Sequence[int],
        decode_on: Callable[[], None] | None = None,
    ) -> Ticket:
        """`decode_on`: the engine decodes the request after this prompt, and so does this to its memory."""
        ticket = self.ticket(num_tokens, skip)
        self.compute(ticket, chunk_ends, decodes_on=decode_on is not None)
        if decode_on is not None:
            decode_on()
        self.producing.hold({"p": False})
        self.until(lambda: bool(self.producing.finished()))
        return ticket

    @staticmethod
    def ticket(num_tokens: int, skip: int) -> Ticket:
        return Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer="east",
            consumer="home",
            num_tokens=num_tokens,
            skip_tokens=skip,
            prompt_digest=bytes(16),
            expires_at_s=time.time() + 60,
        )

    def compute(
        self, ticket: Ticket, chunk_ends: Sequence[int], *, begun: int = 0, decodes_on: bool = False
    ) -> None:
        """`begun`: so many tokens were computed before."""
        num_tokens, skip = ticket.num_tokens, ticket.skip_tokens
        east = self.east
        sent = {
            group: max(group.first_block(num_tokens, skip), begun // group.block_tokens)
            for group in (east.full, east.window)
        }
        for end_tokens in chunk_ends:
            final = end_tokens == num_tokens
            streamed = []
            for group, first in sent.items():
                end = group.end_block(num_tokens) if final else end_tokens // group.block_tokens
                if end > first:
                    streamed.append(east.run(group, first, end))
                    sent[group] = end
            closing = (east.moving(east.state, num_tokens, 0),) if final else ()
            order = SendOrder(
                "p", ticket, ticket.seal(KEY), tuple(streamed), closing, final, decodes_on=decodes_on
            )
            for name in (*FULL_LAYERS, *WINDOW_LAYERS):
                self.producing.save_layer([order], name)
            self.producing.end_step([order])

    def load(self, ticket: Ticket, local_tokens: int, usable_tokens: int = 0) -> tuple[set[str], set[str]]:
        """`usable_tokens`: of a transfer that broke; 0: load a whole one."""
        num_tokens = usable_tokens or ticket.num_tokens
        runs = tuple(self.home.moving(group, num_tokens, local_tokens) for group in self.home.groups)
        self.consuming.order([LoadOrder("d", ticket, local_tokens, runs, usable_tokens)], [])
        found: list[tuple[set[str], set[str]]] = []

        def ended() -> bool:
            found.append(self.consuming.results())
            return bool(found[-1][0])

        self.until(ended)
        return found[-1]

    def status(self, ticket: Ticket) -> TransferStatus:
        status = self.receiver.transfers.state(ticket.transfer_id)
        assert status is not None
        return status

    def connected(self) -> None:
        self.until(lambda: self.sender.stats()["peers"]["home/0"]["connections"] == 2)

    @staticmethod
    def until(is_so: object) -> None:
        deadline_s = time.monotonic() + 60
        while not is_so():  # type: ignore[operator]
            assert time.monotonic() < deadline_s
            time.sleep(0.002)


@contextmanager
def pair_of(
    ours: Keeping, theirs: Keeping, *, page_digests: bool = True, on_demand: bool = False
) -> Iterator[Pair]:
    """`on_demand`: they meet when the first transfer is to go."""
    east, home = Engine(ours, 1), Engine(theirs, 2)
    wires = {
        name: wire_layouts(engine.layout, name, 0, page_digests=page_digests)
        for name, engine in (("east", east), ("home", home))
    }
    arena = StagingArena(4 << 20, 64 << 10)
    receiver = Receiver(
        name="home/0",
        key=KEY,
        host="127.0.0.1",
        port=0,
        arena=arena,
        layout=wires["home"],
        fingerprint={},
        peer_list=PeerList(producers=frozenset(["east/0"])),
        options=ReceiverOptions(limits=TransferLimits(resume_s=0.3), uncounted_regions=int(page_digests)),
    )
    receiver.start()
    sender = Sender(
        name="east/0",
        key=KEY,
        peers={"home/0": Peer("home/0", "127.0.0.1", receiver.port, "east->home", 2, None, on_demand)},
        fingerprint={},
        options=SenderOptions(limits=TransferLimits(resume_s=0.3)),
        layouts=wires["east"],
    )
    sender.start()
    stats = ConnectorStats()
    producing = KvProducer(east.layout, wires["east"], sender, 20.0, stats)
    consuming = KvConsumer(wires["home"], receiver, TransferLimits(load_wait_s=2.0, staging_ttl_s=5.0), stats)
    try:
        yield Pair(east, home, producing, consuming, receiver, sender, wires)
    finally:
        consuming.close()
        sender.close()
        receiver.close()
        assert arena.used_blocks == 0


def assert_moved(pair: Pair, before: Mapping[str, torch.Tensor], num_tokens: int, held: int) -> None:
    """The decode engine has what it needs behind the tokens that it held, and lost nothing of these."""
    east, home = pair.east, pair.home
    for name in STATE_LAYERS:
        ours = east.token(name, east.state, num_tokens - 1)
        assert torch.equal(home.token(name, home.state, num_tokens - 1), ours), name
    oldest = max(0, num_tokens - WINDOW_TOKENS + 1)
    for token in range(oldest, num_tokens):
        assert torch.equal(home.token("w0", home.window, token), east.token("w0", east.window, token)), token
    for name in FULL_LAYERS:
        for token in range(held, num_tokens):
            arrived = home.token(name, home.full, token)
            assert torch.equal(arrived, east.token(name, east.full, token)), (name, token)
    # What is no block of this load is as it was.
    for group in home.groups:
        blocks = group.moving_blocks(num_tokens, held)
        loaded = {home.tables[group.index][block] for block in blocks}
        untouched = [block for block in range(NUM_BLOCKS) if block not in loaded]
        for name in group.layer_names:
            shape = (NUM_BLOCKS, -1)
            now, then = home.tensors[name].reshape(shape), before[name].reshape(shape)
            assert torch.equal(now[untouched], then[untouched]), name


SIXTEEN, EIGHT = Keeping(16, 8, 16), Keeping(8, 16, 8)
KEEPINGS = {
    "16 to 8": (SIXTEEN, EIGHT),
    "8 to 16": (EIGHT, SIXTEEN),
    "32 to 128": (Keeping(32, 32, 32), Keeping(128, 128, 128)),
    "128 to 32": (Keeping(128, 128, 128), Keeping(32, 32, 32)),
    "24 to 16, no multiples": (Keeping(24, 12, 24), Keeping(16, 8, 16)),
    "only states": (Keeping(16, 16, 16), Keeping(16, 16, 48)),
    "only full attention": (Keeping(32, 16, 16), Keeping(16, 16, 16)),
    "another order": (Keeping(16, 16, 16, "NHD"), Keeping(16, 16, 16, "HND")),
    "both tokens first": (Keeping(32, 32, 16, "NHD"), Keeping(16, 8, 16, "NHD")),
    "order and size": (Keeping(64, 16, 16, "HND"), Keeping(16, 32, 16, "NHD")),
    "kernel blocks": (Keeping(64, 16, 16, "HND", 4), Keeping(32, 32, 16, "NHD", 1)),
    "kernel blocks at home": (Keeping(24, 16, 16), Keeping(48, 16, 16, "HND", 6)),
}


@pytest.mark.parametrize("keepings", KEEPINGS)
@pytest.mark.parametrize(
    ("num_tokens", "skip", "local", "chunk_ends"),
    [
        (100, 0, 0, [100]),
        (100, 0, 0, [10, 37, 64, 100]),
        (129, 0, 0, [33, 65, 129]),
        (128, 0, 64, [48, 128]),
        (100, 40, 48, [45, 100]),
        (7, 0, 0, [7]),
    ],
)
def test_the_decode_engine_has_every_token_in_its_own_blocks(
    keepings: str, num_tokens: int, skip: int, local: int, chunk_ends: list[int]
) -> None:
    ours, theirs = KEEPINGS[keepings]
    # An engine's own hit ends where one of its blocks does.
    local = -(-local // theirs.full_tokens) * theirs.full_tokens
    if local >= num_tokens:
        local = 0
    skip = min(skip, local)
    with pair_of(ours, theirs) as pair:
        pair.connected()
        ticket = pair.prefill(num_tokens, skip, chunk_ends)
        before = {name: tensor.clone() for name, tensor in pair.home.tensors.items()}
        status = pair.status(ticket)
        assert pair.load(ticket, local) == ({"d"}, set())
        assert_moved(pair, before, num_tokens, local)
        # Each byte once: no more than what either side's own blocks would have.
        most = max(
            sum(region_bytes(engine.layout.regions, num_tokens, skip)) for engine in (pair.east, pair.home)
        )
        assert 0 < status.received_bytes <= most
        assert pair.consuming.stats.data["bytes_sent"] == status.received_bytes


@pytest.mark.parametrize("page_digests", [True, False])
@pytest.mark.parametrize("keepings", ["16 to 8", "32 to 128", "24 to 16, no multiples", "order and size"])
def test_unlike_engines_get_states_and_windows_as_the_prompt_left_them(
    keepings: str, page_digests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine decodes the request: it writes over states, gives window blocks to others, and fills last pages."""
    num_tokens, decoded, views = 100, threading.Event(), PagedSource.views

    def late_views(source: PagedSource, start: int, nbytes: int) -> list[memoryview] | None:
        decoded.wait(60)
        return views(source, start, nbytes)

    monkeypatch.setattr(PagedSource, "views", late_views)
    with pair_of(*KEEPINGS[keepings], page_digests=page_digests) as pair:
        east = pair.east
        computed = {name: tensor.clone() for name, tensor in east.tensors.items()}

        def decode_on() -> None:
            for name in (*STATE_LAYERS, *WINDOW_LAYERS):
                east.tensors[name].bitwise_not_()
            for name in FULL_LAYERS:
                for token in range(num_tokens, east.full.end_block(num_tokens) * east.full.block_tokens):
                    east.token(name, east.full, token).bitwise_not_()
            decoded.set()

        pair.connected()
        ticket = pair.prefill(num_tokens, 0, [45, num_tokens], decode_on)
        before = {name: tensor.clone() for name, tensor in pair.home.tensors.items()}
        assert pair.load(ticket, 0) == ({"d"}, set())
        for name, tensor in east.tensors.items():
            tensor.copy_(computed[name])
        assert_moved(pair, before, num_tokens, 0)


def test_equal_engines_move_their_pages_as_they_are() -> None:
    with pair_of(SIXTEEN, SIXTEEN) as pair:
        pair.connected()
        for engine, wire in (
            (pair.east, pair.wires["east"].agreed("home/0", is_sent=True)),
            (pair.home, pair.wires["home"].agreed("east/0", is_sent=False)),
        ):
            assert wire.mark == ""
            for region, own in zip(wire.regions, engine.layout.regions, strict=True):
                assert region.pages is own.pages
                run = BlockRun(own.group.index, 2, (5, 9))
                assert region.run(run, 100, 0) is run
        ticket = pair.prefill(100, 0, [100])
        before = {name: tensor.clone() for name, tensor in pair.home.tensors.items()}
        assert pair.load(ticket, 0) == ({"d"}, set())
        assert_moved(pair, before, 100, 0)


def test_where_only_one_kind_of_layers_differs_the_others_move_as_they_are() -> None:
    with pair_of(*KEEPINGS["only full attention"]) as pair:
        pair.connected()
        wire = pair.wires["east"].agreed("home/0", is_sent=True)
        as_they_are = {
            region.layer_name
            for region, own in zip(wire.regions, pair.east.layout.regions, strict=True)
            if region.pages is own.pages
        }
        assert as_they_are == {*STATE_LAYERS, *WINDOW_LAYERS}


def test_a_page_that_is_changed_on_its_way_is_seen_between_unlike_engines() -> None:
    with pair_of(SIXTEEN, EIGHT) as pair:
        pair.connected()
        ticket = pair.prefill(100, 0, [100])
        take = pair.receiver.transfers.take

        def spoilt(transfer_id: bytes, *, broken_tokens: int = 0) -> StagedTransfer | None:
            staged = take(transfer_id, broken_tokens=broken_tokens)
            assert staged is not None
            staged.region_views(1, 700, 1)[0][0] ^= 1
            return staged

        pair.receiver.transfers.take = spoilt  # type: ignore[method-assign]
        assert pair.load(ticket, 0) == ({"d"}, {"d"})
        assert pair.consuming.stats.data["digest_mismatches"] == 1


@pytest.mark.parametrize("page_digests", [True, False])
@pytest.mark.parametrize("keepings", ["32 to 128", "128 to 32", "24 to 16, no multiples", "order and size"])
@pytest.mark.parametrize(("skip", "local"), [(0, 0), (100, 128)])
def test_of_a_broken_transfer_whole_blocks_of_the_decode_engine_are_loaded(
    keepings: str, skip: int, local: int, page_digests: bool
) -> None:
    ours, theirs = (replace(keeping, is_dense=True) for keeping in KEEPINGS[keepings])
    num_tokens, computed = 600, 330
    with pair_of(ours, theirs, page_digests=page_digests) as pair:
        pair.connected()
        ticket = pair.ticket(num_tokens, skip)
        pair.compute(ticket, [70, 200, computed])
        # What leaves is whole blocks of the prefill engine; an engine goes on from whole blocks of its own.
        left_tokens = computed // ours.full_tokens * ours.full_tokens
        usable_tokens = left_tokens // theirs.full_tokens * theirs.full_tokens

        def has_come() -> bool:
            transfer = pair.receiver.transfers.table._transfers.get(ticket.transfer_id)
            if transfer is None or transfer.lease is None:
                return False
            layouts = pair.receiver.transfers.table._open_check.layout
            return usable_tokens == region_layout.resume_points(layouts, ticket, transfer.covered_end).tokens

        pair.until(has_come)
        pair.sender.close()
        pair.until(lambda: pair.status(ticket).phase is TransferPhase.FAILED)
        assert pair.status(ticket).usable_tokens == usable_tokens > local
        before = {name: tensor.clone() for name, tensor in pair.home.tensors.items()}
        assert pair.load(ticket, local, usable_tokens) == ({"d"}, set())
        for name in FULL_LAYERS:
            for token in range(local, usable_tokens):
                arrived = pair.home.token(name, pair.home.full, token)
                assert torch.equal(arrived, pair.east.token(name, pair.east.full, token)), (name, token)
            loaded = pair.home.tables[1][local // theirs.full_tokens : usable_tokens // theirs.full_tokens]
            untouched = [block for block in range(NUM_BLOCKS) if block not in loaded]
            now, then = (each.reshape(NUM_BLOCKS, -1) for each in (pair.home.tensors[name], before[name]))
            assert torch.equal(now[untouched], then[untouched]), name


def test_a_transfer_in_another_form_than_was_agreed_is_refused() -> None:
    """The prefill engine has not heard that the decode engine came back with other blocks."""
    with pair_of(SIXTEEN, EIGHT, page_digests=False) as pair:
        pair.connected()
        alike = pair.wires["east"].alike
        agreed = pair.wires["east"]._agreed.pop(("home/0", True))
        assert agreed.mark and not alike.mark
        ticket = pair.prefill(96, 0, [96])
        assert pair.status(ticket).reason.startswith("east/0 sends KV in form '', where ")
        assert pair.producing.stats.data["sends_failed"] == 1
        assert pair.load(ticket, 0) == ({"d"}, {"d"})


def test_a_null_block_is_never_read_or_written_in_parts() -> None:
    with pair_of(SIXTEEN, EIGHT) as pair:
        pair.connected()
        wire = pair.wires["east"].agreed("home/0", is_sent=True)
        (region,) = (region for region in wire.regions if region.layer_name == "a0")
        assert region.run(BlockRun(1, 0, (1, 2)), 100, 0).block_ids == (2, 3, 4, 5)
        with pytest.raises(RuntimeError, match="layer a0: a block to move is vLLM's null block"):
            region.run(BlockRun(1, 0, (1, 0)), 100, 0)
        # What a window has left behind is the null block in the table, and moves nothing.
        wire = pair.wires["home"].agreed("east/0", is_sent=False)
        (window,) = (region for region in wire.regions if region.layer_name == "w0")
        assert window.run(BlockRun(2, 0, (0, 0, 0, 0, 0, 30, 31)), 100, 0) == BlockRun(2, 10, (60, 61, 62))


def test_pages_that_hold_other_kv_are_refused_by_name() -> None:
    ours, theirs = Engine(SIXTEEN, 1), Engine(EIGHT, 2)
    layouts = wire_layouts(ours.layout, "east", 0)
    told = wire_layouts(theirs.layout, "home", 0).reported
    assert isinstance(told, dict)
    assert layouts.note("home/0", told, sends=True) is None
    told["pages"][0][5][0][0] = 4
    assert layouts.note("home/0", told, sends=True) == (
        "KV layout differs in 'heads' of full_attention layers: east/0 has 2, home/0 has 4"
    )
    for wrong, sentence in (
        (None, "an object is expected"),
        ({"ranks": 1}, "a list of at most 65536 entries is expected"),
        ({"ranks": 0}, "an engine has at least one rank"),
        ({"ranks": "1"}, "field 'ranks' must be an integer within 0..1024"),
    ):
        said = layouts.note("home/0", wrong, sends=True)
        assert said is not None and said.startswith("the KV layout that home/0 tells east/0 can't be read: ")
        assert said.endswith(sentence)
