"""Each layer leaves when it is computed, states and windows with the last chunk: not before, not later."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun, SendOrder
from prfaas.serving.engines.vllm.pages import HostPages
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import wire_layouts
from prfaas.serving.transport.protocol.chunk_source import ChunkSource
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket

KINDS = (GroupKind.FULL, GroupKind.STATE, GroupKind.WINDOW)
BLOCK_TOKENS = 16
WINDOW_TOKENS = 20
BLOCKS = 12
PAGE_BYTES = 32


@dataclass
class ReadTransfer:
    """Reads what is put at once, as a free connection would."""

    regions: list[bytearray]
    urgent: set[int] = field(default_factory=set)
    there: dict[int, int] = field(default_factory=dict)
    """Region → bytes that were put."""
    has_ended: bool = False

    def put(self, region: int, offset: int, source: ChunkSource, *, urgent: bool = False) -> None:
        assert not self.has_ended
        out = bytearray(source.nbytes)
        source.read_into(0, memoryview(out))
        self.regions[region][offset : offset + len(out)] = out
        self.there[region] = self.there.get(region, 0) + len(out)
        self.urgent |= {region} if urgent else set()

    def end(self) -> None:
        self.has_ended = True

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)


class ReadingSender:
    def __init__(self) -> None:
        self.transfers: dict[bytes, ReadTransfer] = {}
        self.cached_tokens: int | None = None

    def ranks_of(self, instance: str) -> tuple[str, ...]:
        return (instance,)

    def meet(self, instance: str) -> bool:
        return True

    def open(
        self,
        ticket: Ticket,
        sealed: str,
        region_bytes: Sequence[int],
        peer: str,
        *,
        cached_tokens: int | None,
        **way: object,
    ) -> ReadTransfer:
        assert (peer, way) == ("home", {"form": "", "part": 0})
        self.cached_tokens = cached_tokens
        return self.transfers.setdefault(
            ticket.transfer_id, ReadTransfer([bytearray(nbytes) for nbytes in region_bytes])
        )


class Model:
    """Layers that are computed one after the other, each of them writing its own pages; attention may call the hook."""

    def __init__(
        self, kinds: Sequence[GroupKind], *, ordered: bool = True, numbers: Sequence[int] | None = None
    ) -> None:
        numbers = range(len(kinds)) if numbers is None else numbers
        self.kinds = {
            f"model.layers.{number}.{kind.name.lower()}": kind
            for number, kind in zip(numbers, kinds, strict=True)
        }
        self.rng = np.random.default_rng(len(kinds))
        self.memory = {name: np.zeros((BLOCKS * 3, PAGE_BYTES), np.uint8) for name in self.kinds}
        used = [kind for kind in KINDS if kind in kinds]
        self.groups = [
            EngineGroup(
                index,
                kind,
                BLOCK_TOKENS,
                WINDOW_TOKENS if kind is GroupKind.WINDOW else 0,
                tuple(name for name, its in self.kinds.items() if its is kind),
            )
            for index, kind in enumerate(used)
        ]
        pages = {name: [HostPages(torch.from_numpy(memory))] for name, memory in self.memory.items()}
        self.layout = KvLayout(self.groups, pages, tuple(self.kinds) if ordered else ())
        self.sender = ReadingSender()
        sender: Any = self.sender
        self.producer = KvProducer(
            self.layout,
            wire_layouts(self.layout, "east", 0, page_digests=False),
            sender,
            60.0,
            ConnectorStats(),
        )

    def step(
        self,
        sends: Sequence[SendOrder],
        spans: Sequence[tuple[int, int, int]],
        hooks: Mapping[str, int] | None = None,
    ) -> list[dict[int, int]]:
        """One step over (first block of memory, first token, end token) of each request.

        Args:
            sends: What is ordered of them.
            spans: Theirs.
            hooks: How often a layer of attention calls the hook; those that are missing do so once.

        Returns:
            For each layer: what had been put of each region of the first request when the layer's hook was over.
        """
        seen = []
        for name, kind in self.kinds.items():
            for base, first, end in spans:
                blocks = range(first // BLOCK_TOKENS, -(-end // BLOCK_TOKENS))
                if kind is GroupKind.STATE:
                    blocks = range((end - 1) // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS + 1)
                for block in blocks:
                    self.memory[name][base + block] = self.rng.integers(0, 256, PAGE_BYTES, np.uint8)
            for _ in range(0 if kind is GroupKind.STATE else (hooks or {}).get(name, 1)):
                self.producer.save_layer(sends, name)
            transfer = self.sender.transfers.get(sends[0].ticket.transfer_id)
            seen.append(dict(transfer.there) if transfer is not None else {})
        self.producer.end_step(sends)
        return seen

    def region(self, name: str) -> int:
        return next(region.index for region in self.layout.regions if region.layer_name == name)


def ticket_of(num_tokens: int) -> Ticket:
    return Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=num_tokens,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=60,
    )


def send(model: Model, ticket: Ticket, base: int, first: int, end: int) -> SendOrder:
    """As the connector's scheduler makes it for the chunk [first, end)."""
    final = end == ticket.num_tokens
    streamed, closing = [], []
    for group in model.groups:
        moving = group.moving_blocks(ticket.num_tokens, 0)
        if group.kind is not GroupKind.STATE:
            stop = moving.stop if final else end // BLOCK_TOKENS
            moving = range(max(moving.start, first // BLOCK_TOKENS), stop)
        run = BlockRun(group.index, moving.start, tuple(base + block for block in moving))
        (closing if group.kind is GroupKind.STATE else streamed).append(run)
    return SendOrder(
        ticket.transfer_id.hex(), ticket, "sealed", tuple(streamed), tuple(closing) if final else (), final, 7
    )


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=9).filter(
        lambda kinds: GroupKind.FULL in kinds
    ),
    num_tokens=st.integers(2, BLOCKS * BLOCK_TOKENS - 1),
    cuts=st.sets(st.integers(1, BLOCKS - 1), max_size=3),
    ordered=st.booleans(),
    requests=st.integers(1, 2),
    data=st.data(),
)
def test_what_leaves_is_final_and_leaves_as_soon_as_it_can(
    kinds: list[GroupKind], num_tokens: int, cuts: set[int], ordered: bool, requests: int, data: st.DataObject
) -> None:
    """Whatever the order of layers and chunks: also a request whose prefill ends in the same step as another's.

    Some attention modules never call the hook, and none does in a graph that is replayed whole, as that of a decode
    batch with a chunk of one token; a drafter's layer calls it once for each draft token.
    """
    model = Model(kinds, ordered=ordered)
    tickets = {1 + BLOCKS * number: ticket_of(num_tokens) for number in range(requests)}
    edges = [0, *sorted(cut * BLOCK_TOKENS for cut in cuts if cut * BLOCK_TOKENS < num_tokens), num_tokens]
    seen: list[dict[int, int]] = []
    names = list(model.kinds)
    hooks: dict[str, int] = {}
    for first, end in pairwise(edges):
        sends = [send(model, ticket, base, first, end) for base, ticket in tickets.items()]
        replayed = data.draw(st.booleans(), label="replayed whole")
        hooks = {name: 0 if replayed else data.draw(st.sampled_from((1, 0, 3)), label=name) for name in names}
        seen = model.step(sends, [(base, first, end) for base in tickets], hooks)
        # At the end of each step all has left that it has completed.
        for region in model.layout.regions if end < num_tokens else ():
            if region.group.kind is not GroupKind.STATE:
                complete = range(region.group.first_block(num_tokens, 0), end // BLOCK_TOKENS)
                there = [transfer.there.get(region.index, 0) for transfer in model.sender.transfers.values()]
                assert there == [len(complete) * PAGE_BYTES] * requests
    for base, ticket in tickets.items():
        transfer = model.sender.transfers[ticket.transfer_id]
        assert transfer.has_ended
        for name in names:
            region = model.layout.regions[model.region(name)]
            moving = region.group.moving_blocks(num_tokens, 0)
            expected = model.memory[name][base + moving.start : base + moving.stop].tobytes()
            assert bytes(transfer.regions[region.index]) == expected
            assert transfer.there[region.index] == len(expected), "each byte once"
        closing = {model.region(name) for name, kind in model.kinds.items() if kind is not GroupKind.FULL}
        assert transfer.urgent == closing
    # The last chunk: behind each hook, all of the layers before it has left; its own window too.
    for place, name in enumerate(names):
        if model.kinds[name] is GroupKind.STATE or not hooks[name]:
            continue
        gone = [each for each in names[:place] if model.kinds[each] is not GroupKind.FULL] if ordered else []
        gone.append(name)
        assert all(model.region(each) in seen[place] for each in gone)
    assert model.sender.cached_tokens == 7


def test_a_window_without_a_hook_waits_for_an_attention_layer_behind_it() -> None:
    """In the last chunk, of a model without states too."""
    model = Model([GroupKind.FULL, GroupKind.WINDOW, GroupKind.FULL])
    order = send(model, ticket_of(2), 1, 0, 2)
    _, silent, behind = model.step([order], [(1, 0, 2)], {"model.layers.1.window": 0})
    window = model.region("model.layers.1.window")
    assert window not in silent and behind[window] == PAGE_BYTES


def test_a_state_waits_for_an_attention_layer_behind_it() -> None:
    model = Model([GroupKind.STATE, GroupKind.FULL, GroupKind.STATE])
    ticket = ticket_of(40)
    seen = model.step([send(model, ticket, 1, 0, 40)], [(1, 0, 40)])
    first, last = model.region("model.layers.0.state"), model.region("model.layers.2.state")
    assert first not in seen[0] and first in seen[1]
    assert last not in seen[2]
    assert last in model.sender.transfers[ticket.transfer_id].there


def test_of_layers_with_the_same_number_nobody_knows_which_is_first() -> None:
    model = Model([GroupKind.FULL, GroupKind.STATE, GroupKind.FULL], numbers=[0, 1, 1])
    ticket = ticket_of(40)
    model.step([send(model, ticket, 1, 0, 20)], [(1, 0, 20)])
    seen = model.step([send(model, ticket, 1, 16, 40)], [(1, 16, 40)])
    state = model.region("model.layers.1.state")
    assert state not in seen[2]
    assert state in model.sender.transfers[ticket.transfer_id].there


def places(names: Sequence[str], built: Sequence[str]) -> dict[str, int]:
    group = EngineGroup(0, GroupKind.FULL, BLOCK_TOKENS, 0, tuple(names))
    pages = HostPages(torch.zeros(1, 8, dtype=torch.uint8))
    return dict(KvLayout([group], {name: [pages] for name in names}, built).places)


@pytest.mark.parametrize(
    ("names", "built", "expected"),
    [
        (["l.2.a", "l.0.m", "l.1.m"], ["l.0.m", "l.0.moe", "l.1.m", "l.2.a"], [2, 0, 1]),
        (["l.0.m", "l.0.a", "l.1.a"], ["l.0.m", "l.0.a", "l.1.a"], [0, 0, 1]),
        (["l.0.m", "l.1.a"], ["l.1.a", "l.0.m"], None),
        (["l.0.m", "l.1.a"], ["l.0.m"], None),
        (["l.0.m.1", "l.1.a"], ["l.0.m.1", "l.1.a"], None),
        (["m", "l.1.a"], ["m", "l.1.a"], None),
        (["l.0.m", "l.1.a"], [], None),
    ],
)
def test_places_are_known_only_where_names_and_building_agree(
    names: list[str], built: list[str], expected: list[int] | None
) -> None:
    assert places(names, built) == ({} if expected is None else dict(zip(names, expected, strict=True)))
