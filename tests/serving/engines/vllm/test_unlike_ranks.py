"""Engines that are divided among unlike numbers of ranks exchange KV: heads are parted and joined."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.engines.vllm.ranked_world import (
    KEY,
    Keeping,
    Model,
    RankMemory,
    Truth,
    ranked_pair,
    ranks_wires,
    until,
)

from prfaas.core.kv.groups import region_bytes
from prfaas.serving.engines.page_digests import page_sums
from prfaas.serving.engines.vllm.wire_layout import WireRegion, wire_layouts
from prfaas.serving.transport.io.sibling_staging import SiblingStaging
from prfaas.serving.transport.protocol.ticket import part_id

SIZES = [(1, 1), (2, 2), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4), (8, 2), (1, 8)]
HEADS = [1, 2, 4, 8]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Model, Keeping, Keeping]:
    ours, theirs = draw(st.sampled_from(SIZES))
    stages = draw(st.sampled_from([1, 1, 2, 3]))
    model = Model(
        full_heads=draw(st.sampled_from(HEADS)),
        window_heads=draw(st.sampled_from(HEADS)),
        state_keys=(keys := draw(st.sampled_from(HEADS))),
        state_heads=keys * draw(st.sampled_from([1, 2])),
        is_mamba2=draw(st.booleans()),
    )
    channels_outside, shares = draw(st.booleans()), draw(st.booleans())
    keepings = [
        Keeping(
            ranks,
            draw(st.sampled_from([4, 8, 16, 24])),
            draw(st.sampled_from([8, 16])),
            draw(st.sampled_from([8, 32])),
            draw(st.sampled_from(["HND", "NHD"])),
            channels_outside,
            shares=shares,
            drafts=draw(st.sampled_from([0, 1, 3])),
            # Engines with stages have none, whoever drafts at the other side.
            drafter="" if own_stages > 1 else draw(st.sampled_from(["", "mtp", "eagle"])),
            stages=own_stages,
        )
        for ranks, own_stages in ((ours, stages), (theirs, 1))
    ]
    return model, keepings[0], keepings[1]


@pytest.mark.slow("a property over many pairs of engines")
@settings(deadline=None, max_examples=60)
@given(world=worlds(), num_tokens=st.integers(1, 100), skip_share=st.floats(0, 1))
def test_every_rank_gets_its_heads_and_each_byte_once(
    world: tuple[Model, Keeping, Keeping], num_tokens: int, skip_share: float
) -> None:
    model, ours, theirs = world
    skip = int(skip_share * num_tokens)
    truth = Truth(model, 1)
    east = [RankMemory(model, ours, number, 100 + number) for number in range(ours.grid.count)]
    home = [RankMemory(model, theirs, number, 200 + number) for number in range(theirs.grid.count)]
    for memory in east:
        memory.compute(truth, num_tokens)
    extent = (num_tokens, skip)
    loadings, sendings = ranks_wires("home", home), ranks_wires("east", east)
    staged: dict[tuple[int, int], dict[int, memoryview]] = {}
    receives = [0] * theirs.ranks
    for memory, loading in zip(home, loadings, strict=True):
        for rank in theirs.grid.paired(memory.rank, ours.grid):
            sending = sendings[rank]
            assert sending.note(f"home/{memory.rank}", loading.reported, sends=True) is None
            assert loading.note(f"east/{rank}", sending.reported, sends=False) is None
            sent, kept = (
                sending.agreed(f"home/{memory.rank}", is_sent=True),
                loading.agreed(f"east/{rank}", is_sent=False),
            )
            assert (sent.mark, sent.part, sent.parts) == (kept.mark, kept.part, kept.parts)
            assert sent.region_bytes(*extent) == kept.region_bytes(*extent)
            receives[memory.rank] += sum(sent.kv_region_bytes(*extent))
            came = staged.setdefault((memory.rank, kept.part), {})
            for here, there in zip(sent.regions, kept.regions, strict=True):
                assert (here.layer_name, here.index) == (there.layer_name, there.index)
                run = here.run(east[rank].moving(east[rank].groups[here.group.index], *extent), *extent)
                came[here.index] = memoryview(bytearray(len(run.block_ids) * here.page_bytes))
                here.pages.read(np.array(run.block_ids, dtype=np.int64), 0, came[here.index])
                sums = here.pages.sums(run.block_ids).wait()
                assert sums.tolist() == sums_of(came[here.index], here.page_bytes)
                load(memory, there, came[here.index], extent)
    for memory, loading in zip(home, loadings, strict=True):
        for rank in theirs.grid.paired(memory.rank, ours.grid):
            for place, wire in loading.agreed(f"east/{rank}", is_sent=False).borrowed.items():
                for region in wire.regions:
                    load(memory, region, staged[place][region.index], extent)
        memory.assert_has(truth, num_tokens, skip, ours.drafter)
        # No byte twice: at most what the coarser blocks of this rank take.
        assert receives[memory.rank] <= max(
            sum(region_bytes(_as_kept(memory, keeping).layout.regions, num_tokens, skip))
            for keeping in (ours, theirs)
        )
    # Readers and lenders know of each other.
    for memory, loading in zip(home, loadings, strict=True):
        for rank in theirs.grid.paired(memory.rank, ours.grid):
            wire = loading.agreed(f"east/{rank}", is_sent=False)
            readers = {
                other.rank
                for other, theirs_too in zip(home, loadings, strict=True)
                for each in theirs.grid.paired(other.rank, ours.grid)
                if (memory.rank, wire.part) in theirs_too.agreed(f"east/{each}", is_sent=False).borrowed
            }
            assert set(wire.readers) == readers


def load(memory: RankMemory, region: WireRegion, came: memoryview, extent: tuple[int, int]) -> None:
    run = region.run(memory.moving(memory.groups[region.group.index], *extent), *extent)
    assert len(came) == len(run.block_ids) * region.page_bytes
    region.pages.write_run(run.block_ids, [came])
    sums = region.pages.sums(run.block_ids).wait()
    assert sums.tolist() == sums_of(came, region.page_bytes)


def sums_of(content: memoryview, page_bytes: int) -> list[int]:
    pages = np.frombuffer(content, dtype=np.uint8).reshape(-1, page_bytes)
    found: list[int] = page_sums(np.pad(pages, ((0, 0), (0, -page_bytes % 8))).view(np.int64)).tolist()
    return found


def _as_kept(memory: RankMemory, blocks: Keeping) -> RankMemory:
    keeping = replace(
        memory.keeping,
        full_tokens=max(memory.keeping.full_tokens, blocks.full_tokens),
        window_tokens=max(memory.keeping.window_tokens, blocks.window_tokens),
    )
    return RankMemory(memory.model, keeping, memory.rank, 1)


WORLDS = {
    "2 to 1": (Model(), Keeping(2), Keeping(1)),
    "1 to 2": (Model(), Keeping(1), Keeping(2)),
    "4 to 2": (Model(), Keeping(4), Keeping(2)),
    "2 to 4, other blocks and order": (Model(), Keeping(2, 32, 32, 32), Keeping(4, 8, 16, 8, "NHD")),
    "4 to 1, other blocks": (Model(), Keeping(4, 16, 16, 16), Keeping(1, 24, 8, 32)),
    "4 to 1, copied heads": (Model(2, 1, 4, 4), Keeping(4), Keeping(1)),
    "1 to 4, copied heads": (Model(2, 1, 4, 4), Keeping(1), Keeping(4)),
    "2 to 2": (Model(), Keeping(2), Keeping(2)),
    "2 to 2, copied heads": (Model(1, 1, 4, 4), Keeping(2), Keeping(2)),
    "4 to 4, copied heads": (Model(2, 1, 4, 4), Keeping(4), Keeping(4)),
    "2 to 4, copied heads, other blocks": (Model(1, 1, 4, 4), Keeping(2, 32), Keeping(4, 8)),
    "2 to 2, each its own": (Model(1, 1, 4, 4), Keeping(2, shares=False), Keeping(2, shares=False)),
    "one drafter": (Model(), Keeping(1, drafts=1, drafter="mtp"), Keeping(1, drafts=3, drafter="mtp")),
    "the decode engine drafts": (Model(), Keeping(1), Keeping(1, drafts=2, drafter="mtp")),
    "the prefill engine drafts": (Model(), Keeping(2, drafts=1, drafter="mtp"), Keeping(1)),
    "2 stages to 1": (Model(), Keeping(1, stages=2), Keeping(1)),
    "3 stages of 2 to 1, other blocks": (Model(), Keeping(2, 32, stages=3), Keeping(1, 16, 16, 8)),
    "2 stages to 2, copied heads": (Model(1, 1, 4, 4), Keeping(1, stages=2), Keeping(2)),
    "2 stages of 2 to 4, copied heads": (Model(2, 1, 4, 4), Keeping(2, stages=2), Keeping(4)),
    "2 stages, the decode engine drafts": (
        Model(),
        Keeping(1, stages=2),
        Keeping(1, drafts=2, drafter="mtp"),
    ),
    "unlike drafters": (Model(), Keeping(1, drafter="mtp"), Keeping(2, drafter="eagle")),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("num_tokens", "skip", "chunk_ends"), [(100, 0, [37, 64, 100]), (129, 48, [129]), (7, 0, [7])]
)
def test_the_decode_ranks_have_every_token(
    world: str, num_tokens: int, skip: int, chunk_ends: list[int]
) -> None:
    model, ours, theirs = WORLDS[world]
    truth = Truth(model, 2)
    with ranked_pair(model, ours, theirs) as pair:
        pair.connected()
        for memory in pair.east:
            memory.compute(truth, num_tokens)
        ticket = pair.prefill(num_tokens, skip, chunk_ends)
        pair.sent()
        assert pair.load(ticket, skip) == [({"d"}, set())] * theirs.ranks
        for memory in pair.home:
            memory.assert_has(truth, num_tokens, skip, ours.drafter)
        assert pair.total("bytes_sent") == pair.total("bytes_loaded") > 0
        assert pair.total("digest_mismatches") == 0
        assert pair.total("sends_completed") == ours.stages * max(ours.ranks, theirs.ranks)


def test_latents_and_copied_heads_are_sent_by_one_rank_each() -> None:
    model = Model(1, 1, 2, 2)
    with ranked_pair(model, Keeping(2), Keeping(1)) as pair:
        pair.connected()
        moved = [
            {region.layer_name for region in wires.agreed("home/0", is_sent=True).regions}
            for wires in pair.wires["east"]
        ]
        assert moved == [{"a0", "m0", "g0"}, {"a1", "w0", "g0"}]


@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (1, 2), (2, 1), (4, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize("heads", [1, 2])
def test_what_ranks_keep_alike_crosses_once(ours: int, theirs: int, heads: int) -> None:
    """Full attention of one or two heads, and latents: as many bytes as between engines of one rank each."""
    model, sent = Model(full_heads=heads), []
    for ranks in ((1, 1), (ours, theirs)):
        east, home = (Keeping(count, is_dense=True) for count in ranks)
        truth = Truth(model, 4)
        with ranked_pair(model, east, home) as pair:
            pair.connected()
            for memory in pair.east:
                memory.compute(truth, 129)
            ticket = pair.prefill(129, 16, [64, 129])
            pair.sent()
            assert pair.load(ticket, 16) == [({"d"}, set())] * home.ranks
            for memory in pair.home:
                memory.assert_has(truth, 129, 16)
            sent.append(pair.total("bytes_sent"))
            assert pair.total("bytes_loaded") == sent[-1]
    assert sent[0] == sent[1]


def test_a_rank_that_has_only_copies_ends_its_transfer_all_the_same() -> None:
    """Four ranks, three layers, all of which each rank has."""
    model = Model(1, 1, 1, 1)
    truth = Truth(model, 3)
    with ranked_pair(model, Keeping(4, is_dense=True), Keeping(1, is_dense=True)) as pair:
        pair.connected()
        assert pair.wires["east"][3].agreed("home/0", is_sent=True).regions == ()
        for memory in pair.east:
            memory.compute(truth, 50)
        ticket = pair.prefill(50, 0, [50])
        pair.sent()
        assert pair.load(ticket, 0) == [({"d"}, set())]
        pair.home[0].assert_has(truth, 50, 0)


def test_a_transfer_is_lent_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer may be complete before the thread that lends it has run."""
    lend = SiblingStaging._lend_begun

    def late(siblings: SiblingStaging) -> None:
        time.sleep(0.2)
        lend(siblings)

    monkeypatch.setattr(SiblingStaging, "_lend_begun", late)
    model, keeping = Model(1, 1, 1, 1), Keeping(2, is_dense=True)
    truth = Truth(model, 5)
    with ranked_pair(model, keeping, keeping) as pair:
        pair.connected()
        for memory in pair.east:
            memory.compute(truth, 50)
        ticket = pair.prefill(50, 0, [50])
        pair.sent()
        assert pair.load(ticket, 0) == [({"d"}, set())] * 2
        for memory in pair.home:
            memory.assert_has(truth, 50, 0)


def test_equal_sizes_move_the_engines_own_pages() -> None:
    alone = Keeping(2, shares=False)
    with ranked_pair(Model(), alone, alone) as pair:
        pair.connected()
        for rank, memory in enumerate(pair.east):
            wire = pair.wires["east"][rank].agreed(f"home/{rank}", is_sent=True)
            assert wire is pair.wires["east"][rank].alike
            assert [region.pages for region in wire.regions] == [
                region.pages for region in memory.layout.regions
            ]


def test_a_part_that_does_not_come_fails_the_load_and_frees_the_others() -> None:
    model = Model()
    with ranked_pair(model, Keeping(2), Keeping(1)) as pair:
        pair.connected()
        ticket = pair.prefill(100, 0, [100])
        second = part_id(ticket.transfer_id, 1)
        until(lambda: pair.receivers[0].transfers.state(second) is not None)
        until(lambda: pair.receivers[0].transfers.state(ticket.transfer_id) is not None)
        pair.receivers[0].transfers.drop(second, "a test")
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        state = pair.receivers[0].transfers.state(ticket.transfer_id)
        assert state is not None and (state.taken or state.reason == "another part of the KV did not arrive")
        pair.sent()


def test_what_nobody_will_load_is_dropped_whole() -> None:
    with ranked_pair(Model(), Keeping(4), Keeping(1)) as pair:
        pair.connected()
        ticket = pair.prefill(100, 0, [100])
        ids = [part_id(ticket.transfer_id, part) for part in range(4)]
        for each in ids:
            until(lambda each=each: pair.receivers[0].transfers.state(each) is not None)
        pair.consuming[0].order([], [(ticket.transfer_id, "a test")])
        for each in ids:
            state = pair.receivers[0].transfers.state(each)
            assert state is not None and state.reason.endswith("a test")
        pair.sent()


def test_a_part_must_be_the_one_of_its_rank() -> None:
    with ranked_pair(Model(), Keeping(2), Keeping(1)) as pair:
        pair.connected()
        ticket = pair.prefill(100, 0, [40])
        wire = pair.wires["east"][1].agreed("home/0", is_sent=True)
        transfer = pair.senders[1].open(
            replace(ticket, transfer_id=b"o" * 16),
            replace(ticket, transfer_id=b"o" * 16).seal(KEY),
            wire.region_bytes(100, 0),
            "home/0",
            form=wire.mark,
            part=0,
        )
        until(lambda: transfer.phase.terminal)
        assert "sends part 0 of a transfer, where part 1 was agreed" in transfer.reason
        for producing in pair.producing:
            producing.hold({"p": True})


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        (Keeping(2), Keeping(1), ""),
        (
            Keeping(3),
            Keeping(2),
            "the KV layout that home/0 tells east/0 can't be read: rank 0 of 3 and rank 0 of 2 have no heads in "
            "common",
        ),
        (
            Keeping(2),
            Keeping(1, channels_outside=False),
            "KV layout differs in 'rows' of linear_state layers: east/0 has 4, home/0 has 3",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(ours: Keeping, theirs: Keeping, sentence: str) -> None:
    model = Model(6, 6, 6, 6)
    sending = wire_layouts(RankMemory(model, ours, 0, 1).layout, "east", 0, ours.ranks)
    told = wire_layouts(RankMemory(model, theirs, 0, 2).layout, "home", 0, theirs.ranks).reported
    assert (sending.note("home/0", told, sends=True) or "") == sentence


def test_other_heads_are_refused_with_both_numbers() -> None:
    ours = wire_layouts(RankMemory(Model(8), Keeping(2), 0, 1).layout, "east", 0, 2)
    theirs = wire_layouts(RankMemory(Model(6), Keeping(1), 0, 2).layout, "home", 0, 1)
    assert ours.note("home/0", theirs.reported, sends=True) == (
        "KV layout differs in 'heads' of full_attention layers on 2 and 1 ranks: east/0 has 4, home/0 has 6"
    )
    assert theirs.note("east/0", ours.reported, sends=False) == (
        "KV layout differs in 'heads' of full_attention layers on 2 and 1 ranks: east/0 has 4, home/0 has 6"
    )
