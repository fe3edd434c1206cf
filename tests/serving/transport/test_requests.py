"""COPY and PULL: their frames mean the same on both sides, absurd ones are refused, and only pools obey them."""

import asyncio
import json
from array import array
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.region_layout import AskedTransfers
from prfaas.serving.transport.protocol.requests import (
    MAX_COPIED_TOKENS,
    MAX_PULLED_PAGES,
    PAGE_ID_BYTES,
    CopyOrder,
    CopyResult,
    PeerRequest,
    PullAnswer,
    PullOrder,
)
from prfaas.serving.transport.protocol.wire import (
    MAX_COPY_BYTES,
    MAX_OPEN_BYTES,
    FrameType,
    TransferPhase,
    WireError,
    body_of,
    pack_control,
    parse_control,
    read_body,
    unpack_header,
)

from .harness import FAST_RECEIVER, FINGERPRINT, KEY, World, await_over, await_true, make_sender, make_ticket

texts = st.text(max_size=20)
page_ids = st.lists(
    st.binary(min_size=PAGE_ID_BYTES, max_size=PAGE_ID_BYTES), min_size=1, max_size=20, unique=True
)
orders = st.builds(
    CopyOrder.of,
    ticket=texts,
    token_ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=50).map(lambda ids: array("I", ids)),
    salt=texts,
    adapter=texts,
) | st.builds(PullOrder.of, ticket=texts, geometry=st.binary(max_size=32), page_ids=page_ids.map(tuple))


@st.composite
def answers(draw: st.DrawFn) -> PullAnswer:
    ranks = draw(st.integers(1, 8))
    checksum = st.integers(0, (1 << 64) - 1)
    page = st.none() | st.tuples(*[checksum] * ranks)
    return PullAnswer.of(tuple(draw(st.lists(page, max_size=20))), draw(texts))


def over_the_wire(kind: FrameType, body: dict[str, Any]) -> dict[str, Any]:
    frame = pack_control(kind, bytes(16), body)
    return parse_control(unpack_header(frame[:56]), frame[56:])


@given(order=orders)
def test_an_order_is_read_as_it_was_written(order: CopyOrder | PullOrder) -> None:
    assert read_body(type(order), over_the_wire(order.kind, body_of(order))) == order


@given(answer=answers())
def test_an_answer_of_a_pool_is_read_as_it_was_written(answer: PullAnswer) -> None:
    assert read_body(PullAnswer, over_the_wire(FrameType.PULLED, body_of(answer))) == answer


def test_the_largest_frames_fit() -> None:
    order = CopyOrder.of("t" * 1024, array("I", [(1 << 32) - 1]) * MAX_COPIED_TOKENS, "s" * 1024, "a" * 1024)
    assert len(json.dumps(body_of(order))) < MAX_COPY_BYTES
    answer = PullAnswer.of((((1 << 64) - 1,) * 64,) * MAX_PULLED_PAGES)
    assert len(json.dumps(body_of(answer))) < MAX_OPEN_BYTES
    result = CopyResult(12, 34, "gone: something")
    assert read_body(CopyResult, over_the_wire(FrameType.COPIED, body_of(result))) == result
    assert result.word == "gone"


fields = [
    "ticket",
    "tokens",
    "salt",
    "adapter",
    "geometry",
    "pages",
    "reason",
    "have",
    "ranks",
    "checksums",
    "bytes",
]
junk = (
    st.none()
    | st.integers(-1, 70)
    | st.text(max_size=8)
    | st.sampled_from(["", "0", "1", "01", "AAAA", "====", "ff"])
)


@settings(max_examples=300)
@given(body=st.dictionaries(st.sampled_from(fields), junk))
def test_what_makes_no_sense_is_a_wire_error(body: dict[str, Any]) -> None:
    for kind in (CopyOrder, PullOrder, PullAnswer, CopyResult):
        try:
            read_body(kind, body)
        except WireError:
            continue


def test_a_page_may_not_be_asked_for_twice_nor_too_many() -> None:
    page = bytes(PAGE_ID_BYTES)
    with pytest.raises(WireError, match="twice"):
        PullOrder.of("t", b"", (page, page))
    body = body_of(PullOrder.of("t", b"", (page,)))
    with pytest.raises(WireError, match="twice"):
        read_body(PullOrder, body | {"pages": b64encode(page * 2).decode()})
    many = tuple(number.to_bytes(PAGE_ID_BYTES, "big") for number in range(MAX_PULLED_PAGES + 1))
    with pytest.raises(WireError, match="length <="):
        read_body(PullOrder, body_of(PullOrder.of("t", b"", many)))
    with pytest.raises(WireError, match="length >="):
        read_body(PullOrder, body_of(PullOrder.of("t", b"", ())))


def test_an_engine_refuses_what_only_a_pool_does(world: World) -> None:
    async def main() -> None:
        observer, pool = (
            Observer(name, KEY, "127.0.0.1", world.receiver.port, "c/0") for name in ("gateway", "a-pool")
        )
        try:
            copied = await observer.request(bytes(16), CopyOrder.of("t", [1, 2], "", ""), 10.0)
            assert read_body(CopyResult, copied) == CopyResult(0, 0, "refused: there is no pool here")
            pulled = await pool.request(bytes(16), PullOrder.of("t", b"", (bytes(17),)), 10.0)
            assert read_body(PullAnswer, pulled).reason == "refused: there is no pool here"
            assert (await observer.stats())["opened"] == 0
        finally:
            await observer.close()
            await pool.close()

    asyncio.run(main())


def asking_receiver(asked: AskedTransfers, requests: list[PeerRequest] | None = None) -> Receiver:
    receiver = Receiver(
        name="c/0",
        key=KEY,
        host="127.0.0.1",
        port=0,
        arena=StagingArena(1 << 20, 1 << 16),
        layout=asked,
        fingerprint=FINGERPRINT,
        options=FAST_RECEIVER,
        on_request=(requests if requests is not None else []).append,
    )
    receiver.start()
    return receiver


def test_a_request_is_answered_later_and_fails_with_its_connection() -> None:
    requests: list[PeerRequest] = []
    receiver = asking_receiver(AskedTransfers(), requests)

    async def main() -> None:
        observer, pool = (
            Observer(name, KEY, "127.0.0.1", receiver.port, "c/0") for name in ("gateway", "a-pool")
        )
        first = asyncio.create_task(observer.request(b"1" * 16, CopyOrder.of("t", [1], "", ""), 10.0))
        second = asyncio.create_task(pool.request(b"2" * 16, PullOrder.of("t", b"", (bytes(17),)), 10.0))
        await asyncio.to_thread(await_true, lambda: len(requests) == 2, 5.0, lambda: str(requests))
        by_id = {request.transfer_id: request for request in requests}
        assert {request.peer for request in requests} == {"gateway", "a-pool"}
        by_id[b"2" * 16].answer(PullAnswer.of((None, (7,))))
        assert read_body(PullAnswer, await second) == PullAnswer.of((None, (7,)))
        assert not first.done()
        with pytest.raises(TimeoutError):
            await observer.request(b"3" * 16, CopyOrder.of("t", [1], "", ""), 0.05)
        await asyncio.to_thread(receiver.close)
        with pytest.raises(ConnectionError):
            await first
        await observer.close()
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("announced", "reason"),
    [
        ([900], ""),
        ([1000], ""),
        ([1001], "asked for"),
        ([0], "asked for"),
        ([500, 500], "asked for"),
        ([], "asked for"),
    ],
)
def test_a_transfer_that_was_asked_for_may_be_smaller(announced: list[int], reason: str) -> None:
    asked = AskedTransfers()
    receiver = asking_receiver(asked)
    sender = make_sender(receiver.port)
    try:
        ticket = make_ticket(1)
        asked.ask(ticket.transfer_id, 1000)
        transfer = sender.open(ticket, ticket.seal(KEY), announced)
        for region, nbytes in enumerate(announced):
            transfer.put(region, 0, BytesSource(bytes(nbytes)))
        transfer.end()
        await_over(transfer)
        assert reason in transfer.reason
        status = receiver.transfers.state(ticket.transfer_id)
        assert status is not None
        assert status.phase is (TransferPhase.FAILED if reason else TransferPhase.COMPLETE)
    finally:
        sender.close()
        receiver.close()


def test_a_transfer_that_nobody_asked_for_is_refused() -> None:
    asked = AskedTransfers()
    receiver = asking_receiver(asked)
    sender = make_sender(receiver.port)
    try:
        for once_asked in (False, True):
            ticket = make_ticket(1)
            if once_asked:
                asked.ask(ticket.transfer_id, 1000)
                asked.forget(ticket.transfer_id)
            transfer = sender.open(ticket, ticket.seal(KEY), [10])
            await_over(transfer)
            assert "asked for no such transfer" in transfer.reason
    finally:
        sender.close()
        receiver.close()
