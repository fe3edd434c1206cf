"""Ranks of a prefill engine die in the middle: a decode rank goes on from what it has of all of them."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.serving.engines.vllm.ranked_world import (
    Keeping,
    Model,
    RankedPair,
    Truth,
    ranked_pair,
    until,
)

from prfaas.core.kv.groups import checkpoint_step_tokens
from prfaas.core.kv.rank_shares import paired_ranks
from prfaas.serving.engines.vllm.metadata import SendOrder
from prfaas.serving.transport.protocol import region_layout
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import Ticket, part_id
from prfaas.serving.transport.protocol.wire import TransferPhase

TOKENS = 100
MODEL = Model()
TWO, ONE = Keeping(2, is_dense=True), Keeping(1, is_dense=True)
# Blocks of 24 tokens, and latents of 16 that only the first rank sends.
ODD = Keeping(1, 24, is_dense=True)


def has_come(pair: RankedPair, ticket: Ticket, tokens: Mapping[int, int]) -> None:
    """Wait until so many tokens of each producer's rank have come, with their digests."""
    for memory, receiver in zip(pair.home, pair.receivers, strict=True):
        ranks = paired_ranks(memory.rank, len(pair.home), len(pair.east))
        for part, rank in enumerate(ranks):
            if rank in tokens:
                until(
                    lambda to=receiver, its=part_id(ticket.transfer_id, part), least=tokens[rank]: (
                        usable(to, its) >= least
                    )
                )


def usable(receiver: object, transfer_id: bytes) -> int:
    table = receiver.transfers.table  # type: ignore[attr-defined]
    transfer = table._transfers.get(transfer_id)
    if transfer is None:
        return 0
    if transfer.phase is TransferPhase.COMPLETE:
        return int(transfer.ticket.num_tokens)
    return region_layout.resume_points(table._open_check.layout, transfer.ticket, transfer.covered_end).tokens


def arrived(pair: RankedPair, ticket: Ticket, tokens: int) -> None:
    """Wait until all that was sent of full attention up to so many tokens has come, of every part."""
    for memory, receiver in zip(pair.home, pair.receivers, strict=True):
        for part in range(len(paired_ranks(memory.rank, len(pair.home), len(pair.east)))):
            transfer = receiver.transfers.table._transfers[part_id(ticket.transfer_id, part)]
            layout = receiver.transfers.table._open_check.layout
            step = tokens - tokens % checkpoint_step_tokens(memory.groups)
            until(
                lambda its=transfer, by=layout, end=step: (
                    region_layout.resume_points(by, its.ticket, its.covered_end, [end]).tokens == end
                )
            )


def killed(pair: RankedPair) -> None:
    for sender in pair.senders:
        sender.close()


def content(pair: RankedPair) -> list[dict[str, torch.Tensor]]:
    return [{name: seen.clone() for name, seen in memory.seen.items()} for memory in pair.home]


def goes_on(pair: RankedPair, truth: Truth, ticket: Ticket, tokens: int) -> None:
    """The broken load says from where, and another one loads exactly that."""
    for consuming in pair.consuming:
        assert consuming.take_usable()["d"].tokens == tokens
    for memory in pair.home:
        for seen in memory.seen.values():
            seen.fill_(-1)
    assert pair.load(ticket, 0, tokens) == [({"d"}, set())] * len(pair.home)
    for memory in pair.home:
        memory.assert_has(truth, tokens, 0)
        for group in memory.groups:
            for name in group.layer_names:
                for token in range(-(-tokens // group.block_tokens) * group.block_tokens, TOKENS):
                    assert all((kept == -1).all() for kept in memory.token(name, group, token)), (name, token)
    assert pair.total("loads_resumed") == len(pair.home)
    assert pair.total("digest_mismatches") == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("keepings", "chunk_ends", "come", "tokens"),
    [
        ((TWO, ONE), {0: [37, 64], 1: [37]}, {0: 64, 1: 32}, 32),
        ((TWO, ONE), {0: [37], 1: [37, 64, 90]}, {0: 32, 1: 80}, 32),
        # One part is complete.
        ((TWO, ONE), {0: [37, TOKENS], 1: [37, 70]}, {0: TOKENS, 1: 64}, 64),
        ((TWO, ONE), {0: [70], 1: [TOKENS]}, {0: 64, 1: TOKENS}, 64),
        # A place where the blocks of every part end.
        ((TWO, ODD), {0: [97], 1: [81]}, {0: 96, 1: 72}, 48),
        (
            (Keeping(4, is_dense=True), Keeping(2, is_dense=True)),
            {rank: [70] for rank in range(4)},
            {3: 64},
            64,
        ),
    ],
)
def test_a_rank_goes_on_from_what_has_come_of_every_part(
    keepings: tuple[Keeping, Keeping],
    chunk_ends: Mapping[int, Sequence[int]],
    come: Mapping[int, int],
    tokens: int,
    when: str,
) -> None:
    """`when`: the load is ordered before or after the ranks die."""
    truth = Truth(MODEL, 4)
    with ranked_pair(MODEL, *keepings) as pair:
        pair.connected()
        for memory in pair.east:
            memory.compute(truth, TOKENS)
        ticket = pair.prefill(TOKENS, 0, [], chunk_ends)
        has_come(pair, ticket, {rank: come.get(rank, tokens) for rank in range(keepings[0].ranks)})
        if when == "before":
            pair.order(ticket, 0)
            killed(pair)
            assert pair.results() == [({"d"}, {"d"})] * len(pair.home)
        else:
            killed(pair)
            assert pair.load(ticket, 0) == [({"d"}, {"d"})] * len(pair.home)
        goes_on(pair, truth, ticket, tokens)


def test_a_part_that_still_arrives_is_ended_where_another_one_broke() -> None:
    truth = Truth(MODEL, 5)
    with ranked_pair(MODEL, TWO, ONE) as pair:
        pair.connected()
        for memory in pair.east:
            memory.compute(truth, TOKENS)
        ticket = pair.prefill(TOKENS, 0, [], {0: [70], 1: [50]})
        has_come(pair, ticket, {0: 64, 1: 48})
        pair.senders[0].close()
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        # Rank 1 lives, and is told.
        transfer = pair.producing[1]._open_sends["p"][0].transfer
        until(lambda: transfer.phase.terminal)
        assert "another part of the KV did not arrive" in transfer.reason
        goes_on(pair, truth, ticket, 48)


def test_where_a_part_has_brought_nothing_nothing_is_kept() -> None:
    with ranked_pair(MODEL, TWO, ONE) as pair:
        pair.connected()
        ticket = pair.prefill(TOKENS, 0, [], {0: [70], 1: [10]})
        has_come(pair, ticket, {0: 64})
        second = part_id(ticket.transfer_id, 1)
        until(lambda: pair.receivers[0].transfers.state(second) is not None)
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        assert pair.consuming[0].take_usable() == {}
        for each in (ticket.transfer_id, second):
            state = pair.receivers[0].transfers.state(each)
            assert state is not None and not state.usable_tokens


def test_a_rank_that_sends_only_copies_does_not_count() -> None:
    """Its share of the layers is empty: nothing of it can be missing."""
    model = Model(1, 1, 1, 1)
    truth = Truth(model, 6)
    with ranked_pair(model, TWO, ONE) as pair:
        pair.connected()
        for memory in pair.east:
            memory.compute(truth, TOKENS)
        ticket = pair.prefill(TOKENS, 0, [70])
        has_come(pair, ticket, {0: 64})
        second = part_id(ticket.transfer_id, 1)
        # While it waits for staging nobody knows that it brings nothing.
        begun = (TransferPhase.RECEIVING, TransferPhase.COMPLETE)
        until(
            lambda: (state := pair.receivers[0].transfers.state(second)) is not None and state.phase in begun
        )
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        goes_on(pair, truth, ticket, 64)


def test_a_load_that_waits_too_long_goes_on_from_what_has_come() -> None:
    """Nothing has broken: the prefill engine is slow."""
    truth = Truth(MODEL, 6)
    with ranked_pair(MODEL, TWO, ONE, load_wait_s=0.0) as pair:
        pair.connected()
        for memory in pair.east:
            memory.compute(truth, TOKENS)
        ticket = pair.prefill(TOKENS, 0, [70])
        has_come(pair, ticket, {0: 64, 1: 64})
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        goes_on(pair, truth, ticket, 64)


@pytest.mark.parametrize(
    ("keepings", "checkpoints", "tokens"),
    [
        ((Keeping(2), Keeping(1)), {0: [32, 64], 1: [32, 64]}, 64),
        # The last one of a rank has no like: both go back to the one before.
        ((Keeping(2), Keeping(1)), {0: [32, 64], 1: [32]}, 32),
        ((Keeping(2), Keeping(1)), {0: [32], 1: [32, 64]}, 32),
        ((Keeping(4), Keeping(2)), {rank: [32, 64] for rank in range(4)}, 64),
        ((Keeping(1), Keeping(2)), {0: [32, 64]}, 64),
        # Blocks of the decode engine that end at 48 and 96.
        ((Keeping(2), Keeping(1, 24, 48)), {0: [48, 64], 1: [48, 64]}, 48),
    ],
)
def test_with_states_and_windows_it_goes_on_from_a_checkpoint_that_all_parts_have(
    keepings: tuple[Keeping, Keeping], checkpoints: Mapping[int, Sequence[int]], tokens: int
) -> None:
    truth = Truth(MODEL, 7)
    with ranked_pair(MODEL, *keepings) as pair:
        pair.connected()
        ticket = pair.prefill(TOKENS, 0, [16, 32, 48, 64, 80], truth=truth, checkpoints=checkpoints)
        each_to = max(keepings[1].ranks // keepings[0].ranks, 1)
        sent = each_to * sum(len(ends) for ends in checkpoints.values())
        until(lambda: sum(each.stats()["checkpoints"] for each in pair.receivers) == sent)
        arrived(pair, ticket, 80)
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})] * len(pair.home)
        goes_on(pair, truth, ticket, tokens)


@pytest.mark.parametrize(("whole", "broken"), [(0, 1), (1, 0)])
def test_a_part_that_is_complete_has_checkpoints_for_one_that_broke(whole: int, broken: int) -> None:
    truth = Truth(MODEL, 8)
    with ranked_pair(MODEL, Keeping(2), Keeping(1)) as pair:
        pair.connected()
        ends = {whole: [16, 32, 64, TOKENS], broken: [16, 32, 64, 80]}
        ticket = pair.prefill(TOKENS, 0, [], ends, truth=truth, checkpoints={0: [32, 64], 1: [32, 64]})
        until(lambda: pair.receivers[0].stats()["checkpoints"] == 4)
        parts = [part_id(ticket.transfer_id, part) for part in (0, 1)]
        transfers = pair.receivers[0].transfers.table._transfers
        until(lambda: transfers[parts[whole]].phase is TransferPhase.COMPLETE)
        until(lambda: usable_with(pair, parts[broken]) == 64)
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        goes_on(pair, truth, ticket, 64)
        until(lambda: pair.receivers[0].stats()["staging_used_blocks"] == 0)


def test_where_a_complete_part_has_lost_its_checkpoint_the_load_fails_at_once() -> None:
    truth = Truth(MODEL, 8)
    with ranked_pair(MODEL, Keeping(2), Keeping(1)) as pair:
        pair.connected()
        ends = {0: [16, 64, TOKENS], 1: [16, 64, 80]}
        ticket = pair.prefill(TOKENS, 0, [], ends, truth=truth, checkpoints={0: [64], 1: [64]})
        until(lambda: pair.receivers[0].stats()["checkpoints"] == 2)
        table = pair.receivers[0].transfers.table
        whole = table._transfers[part_id(ticket.transfer_id, 0)]
        until(lambda: whole.phase is TransferPhase.COMPLETE)
        until(lambda: usable_with(pair, part_id(ticket.transfer_id, 1)) == 64)
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        assert pair.consuming[0].take_usable()["d"].tokens == 64
        with pair.receivers[0].transfers:
            assert table._checkpoints.make_room(whole)
        assert whole.status().resume_points == ResumePoints()
        assert pair.load(ticket, 0, 64) == [({"d"}, {"d"})]
        assert pair.consuming[0].take_usable() == {}
        until(lambda: pair.receivers[0].stats()["staging_used_blocks"] == 0)


def usable_with(pair: RankedPair, transfer_id: bytes) -> int:
    """From where the first rank could go on with a transfer and its checkpoints, were it to break now."""
    table = pair.receivers[0].transfers.table
    transfer = table._transfers[transfer_id]
    layout = table._open_check.layout
    return region_layout.resume_points(
        layout, transfer.ticket, transfer.covered_end, transfer.checkpoints
    ).tokens


def test_where_no_checkpoint_is_there_of_all_parts_nothing_is_kept() -> None:
    truth = Truth(MODEL, 8)
    with ranked_pair(MODEL, Keeping(2), Keeping(1)) as pair:
        pair.connected()
        ends = {0: [48, 64], 1: [32]}
        ticket = pair.prefill(TOKENS, 0, [16, 32, 48, 64], truth=truth, checkpoints=ends)
        until(lambda: pair.receivers[0].stats()["checkpoints"] == 3)
        arrived(pair, ticket, 64)
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})]
        assert pair.consuming[0].take_usable() == {}
        until(lambda: pair.receivers[0].stats()["staging_used_blocks"] == 0)


def test_a_checkpoint_leaves_to_all_ranks_or_to_none() -> None:
    """The other engine goes on from one that all its ranks have."""
    truth = Truth(MODEL, 9)
    with ranked_pair(MODEL, Keeping(1), Keeping(2)) as pair:
        pair.connected()
        (producing,) = pair.producing
        ticket = pair.prefill(TOKENS, 0, [16, 32], truth=truth, checkpoints={0: [32]})
        until(lambda: producing.ready_for_checkpoints() == {("p", 32): 1})
        # The second rank did not take the last one yet.
        checkpoint = producing._open_sends["p"][1].checkpoint
        assert checkpoint is not None
        ended, checkpoint.transfer.phase = checkpoint.transfer.phase, SendPhase.SENDING
        assert producing.ready_for_checkpoints() == {}
        order = SendOrder("p", None, "", (), (), final=False, checkpoint_tokens=64)  # type: ignore[arg-type]
        producing._put_checkpoints(order)
        checkpoint.transfer.phase = ended
        # That none was sent does not change where the last one was ordered.
        assert producing.ready_for_checkpoints() == {("p", 64): 1}
        assert pair.total("checkpoints_sent") == 2
        arrived(pair, ticket, 32)
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})] * 2
        goes_on(pair, truth, ticket, 32)


@pytest.mark.parametrize("keepings", [(4, 4), (2, 4), (4, 2)])
def test_ranks_that_read_each_others_staging_go_on(keepings: tuple[int, int]) -> None:
    """One head and one latent: of four ranks the last is sent states and windows alone."""
    model, truth = Model(1, 1, 4, 4), Truth(Model(1, 1, 4, 4), 8)
    ours, theirs = (Keeping(ranks) for ranks in keepings)
    with ranked_pair(model, ours, theirs) as pair:
        pair.connected()
        checkpoints = {rank: [32, 64] for rank in range(ours.ranks)}
        ticket = pair.prefill(TOKENS, 0, [16, 32, 48, 64, 80], truth=truth, checkpoints=checkpoints)
        sent = 2 * max(ours.ranks, theirs.ranks)
        until(lambda: sum(each.stats()["checkpoints"] for each in pair.receivers) == sent)
        arrived(pair, ticket, 80)
        killed(pair)
        assert pair.load(ticket, 0) == [({"d"}, {"d"})] * theirs.ranks
        goes_on(pair, truth, ticket, 64)
