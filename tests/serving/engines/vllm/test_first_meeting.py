"""The first transfer to an engine that keeps KV differently, over a link that is connected on demand."""

import threading
import time
from collections.abc import Iterator

import pytest
from tests.serving.engines.vllm.ranked_world import Keeping as RankedKeeping
from tests.serving.engines.vllm.ranked_world import Model, Truth, ranked_pair
from tests.serving.engines.vllm.test_unlike_pages import (
    FULL_LAYERS,
    KEEPINGS,
    SIXTEEN,
    STATE_LAYERS,
    WINDOW_LAYERS,
    Pair,
    assert_moved,
    pair_of,
)

from prfaas.serving.engines.vllm import producer
from prfaas.serving.engines.vllm.metadata import BlockRun, SendOrder
from prfaas.serving.engines.vllm.producer import PostponedSends
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.protocol.outgoing import SendPhase


@pytest.fixture
def greeted(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Producers learn how a peer keeps its KV once this is set."""
    event, note = threading.Event(), PeerLayouts.note

    def late(layouts: PeerLayouts, peer: str, told: object, *, sends: bool) -> str | None:
        if sends:
            event.wait(60)
        return note(layouts, peer, told, sends=sends)

    monkeypatch.setattr(PeerLayouts, "note", late)
    yield event
    event.set()


def soon(event: threading.Event, after_s: float = 0.1) -> None:
    threading.Timer(after_s, event.set).start()


def load(pair: Pair, ticket: object, num_tokens: int) -> None:
    before = {name: tensor.clone() for name, tensor in pair.home.tensors.items()}
    assert pair.load(ticket, 0) == ({"d"}, set())  # type: ignore[arg-type]
    assert_moved(pair, before, num_tokens, 0)


@pytest.mark.parametrize("keepings", KEEPINGS)
def test_the_first_transfer_is_laid_out_once_the_engines_have_met(keepings: str) -> None:
    with pair_of(*KEEPINGS[keepings], on_demand=True) as pair:
        ticket = pair.prefill(100, 0, [10, 37, 64, 100])
        load(pair, ticket, 100)
        assert pair.consuming.stats.data["sends_completed"] == 1


def test_prefill_goes_on_while_they_meet(greeted: threading.Event) -> None:
    with pair_of(*KEEPINGS["order and size"], on_demand=True) as pair:
        ticket = pair.ticket(100, 0)
        began_s = time.monotonic()
        pair.compute(ticket, [10, 37, 64, 100])
        pair.producing.hold({"p": False})
        assert pair.producing.finished() == set()
        assert time.monotonic() - began_s < producer.MEET_TIMEOUT_S / 2
        assert pair.receiver.transfers.state(ticket.transfer_id) is None
        greeted.set()
        pair.until(lambda: bool(pair.producing.finished()))
        load(pair, ticket, 100)


def test_a_step_after_they_have_met_sends_what_was_postponed(greeted: threading.Event) -> None:
    with pair_of(*KEEPINGS["16 to 8"], on_demand=True) as pair:
        ticket = pair.ticket(100, 0)
        pair.compute(ticket, [37])
        greeted.set()
        pair.connected()
        pair.compute(ticket, [64, 100], begun=37)
        assert "p" in pair.producing._open_sends
        pair.producing.hold({"p": False})
        pair.until(lambda: bool(pair.producing.finished()))
        load(pair, ticket, 100)


def test_an_engine_that_decodes_on_waits_before_it_writes_over_states(greeted: threading.Event) -> None:
    with pair_of(*KEEPINGS["order and size"], on_demand=True) as pair:
        east = pair.east
        computed = {name: tensor.clone() for name, tensor in east.tensors.items()}

        def decode_on() -> None:
            for name in (*STATE_LAYERS, *WINDOW_LAYERS):
                east.tensors[name].bitwise_not_()

        soon(greeted)
        ticket = pair.prefill(100, 0, [45, 100], decode_on)
        before = {name: tensor.clone() for name, tensor in pair.home.tensors.items()}
        assert pair.load(ticket, 0) == ({"d"}, set())
        for name, tensor in east.tensors.items():
            tensor.copy_(computed[name])
        assert_moved(pair, before, 100, 0)


def test_what_was_postponed_of_a_preempted_request_is_copied_before_others_have_its_blocks(
    greeted: threading.Event,
) -> None:
    with pair_of(*KEEPINGS["32 to 128"], on_demand=True) as pair:
        east, ticket = pair.east, pair.ticket(100, 0)
        pair.compute(ticket, [64])
        soon(greeted)
        pair.producing.detach(["p"])
        full = {name: east.tensors[name].clone() for name in FULL_LAYERS}
        for name in FULL_LAYERS:
            east.tensors[name][east.tables[east.full.index][:2]] = 0
        pair.compute(ticket, [100], begun=64)
        pair.producing.hold({"p": False})
        pair.until(lambda: bool(pair.producing.finished()))
        for name in FULL_LAYERS:
            east.tensors[name].copy_(full[name])
        load(pair, ticket, 100)


def test_an_aborted_prefill_ends_before_they_have_met(greeted: threading.Event) -> None:
    with pair_of(*KEEPINGS["16 to 8"], on_demand=True) as pair:
        ticket = pair.ticket(100, 0)
        pair.compute(ticket, [37])
        pair.producing.hold({"p": True})
        assert pair.producing.finished() == {"p"}
        assert "p" not in pair.producing._postponed
        greeted.set()
        pair.connected()
        assert pair.receiver.transfers.state(ticket.transfer_id) is None


def test_a_peer_that_cannot_be_met_fails_the_transfer(
    greeted: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "MEET_TIMEOUT_S", 0.1)
    with pair_of(*KEEPINGS["16 to 8"], on_demand=True) as pair:
        pair.prefill(100, 0, [100])
        assert pair.consuming.stats.data["sends_failed"] == 1
        greeted.set()


def test_between_equal_engines_that_have_met_nothing_is_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair_of(SIXTEEN, SIXTEEN) as pair:
        pair.connected()
        ticket = pair.ticket(100, 0)
        pair.compute(ticket, [37])
        (open_send,) = pair.producing._open_sends["p"]
        assert open_send.transfer.phase is not SendPhase.FAILED and open_send.wire.mark == ""
        pair.producing.hold({"p": True})
        pair.until(lambda: bool(pair.producing.finished()))


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_unlike_ranks_meet_before_the_first_transfer(ranks: tuple[int, int]) -> None:
    model = Model()
    truth = Truth(model, 2)
    with ranked_pair(model, RankedKeeping(ranks[0]), RankedKeeping(ranks[1]), on_demand=True) as pair:
        for memory in pair.east:
            memory.compute(truth, 100)
        ticket = pair.prefill(100, 0, [37, 100])
        pair.sent()
        assert pair.load(ticket, 0) == [({"d"}, set())] * ranks[1]
        for memory in pair.home:
            memory.assert_has(truth, 100, 0)


def test_a_postponed_chunk_tells_where_its_checkpoint_was_ordered_and_sends_none() -> None:
    """By then states are those of another chunk; other ranks may have sent theirs, and the next one is for all."""
    with ranked_pair(Model(), RankedKeeping(1), RankedKeeping(1)) as pair:
        pair.connected()
        (producing,) = pair.producing
        ticket = pair.prefill(100, 0, [16], truth=Truth(Model(), 3), checkpoints={0: [64]})
        order = SendOrder("p", ticket, "", (), (), final=False, checkpoint_tokens=32, checkpoint=(SOME,))
        sends = PostponedSends(Unmet())  # type: ignore[arg-type]
        assert sends.is_needed(order)
        sends.add(order)
        (late,) = sends.take("p")
        producing.end_step([late])
        assert producing.ready_for_checkpoints() == {("p", 32): 1}
        assert pair.total("checkpoints_sent") == 0


class Unmet:
    """A sender whose consumers have told nothing."""

    def meet(self, instance: str, timeout_s: float = 0.0) -> bool:
        return False


SOME = BlockRun(0, 0, (1,))
