"""Who sends next: nothing lost or doubled, tenants by weight, the background last, the nearest to its slot first."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.protocol.chunk_schedule import ChunkSchedule
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.outgoing import Chunk, OutgoingTransfer, SendPhase
from prfaas.serving.transport.protocol.ticket import TransferClass

CHUNK = 100
RATE = 8e3  # 1,000 bytes per second


@dataclass
class _Bench:
    schedule: ChunkSchedule = field(default_factory=ChunkSchedule)
    numbers: int = 0

    def open(self, tenant: int = 0, weight: int = 1, *, background: bool = False) -> OutgoingTransfer:
        self.numbers += 1
        service = TransferClass(bytes([tenant] * 8), weight, background)
        transfer = OutgoingTransfer(self.numbers.to_bytes(16, "big"), Offer("", (1 << 20,)), service)
        transfer.begin(0.0, self.numbers)
        transfer.phase = SendPhase.SENDING
        return transfer

    def put(self, transfer: OutgoingTransfer, nbytes: int, *, urgent: bool = False) -> None:
        start = transfer.put_bytes
        transfer.put_bytes += nbytes
        self.numbers += 1
        source = BytesSource(bytes(nbytes))
        self.schedule.add(
            Chunk(transfer, self.numbers, 0, start, start + nbytes, start, source, urgent=urgent)
        )

    def take(self) -> Chunk:
        chunk = self.schedule.take(CHUNK)
        assert chunk is not None
        return chunk


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 7), st.integers(1, 450), st.booleans()),
        st.tuples(st.just("take"), st.integers(1, 200)),
        st.tuples(st.just("end"), st.integers(0, 7), st.floats(0, 100)),
        st.tuples(st.just("again")),
        st.tuples(st.just("drop"), st.integers(0, 7)),
    ),
    max_size=120,
)


@settings(max_examples=200)
@given(_steps)
def test_every_byte_leaves_once_and_the_background_last(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    bench = _Bench()
    transfers = [bench.open(n % 3, 1 + n % 3, background=n >= 5) for n in range(8)]
    waiting: list[set[int]] = [set() for _ in transfers]
    last: Chunk | None = None

    def taken(nbytes: int) -> Chunk | None:
        chunk = bench.schedule.take(nbytes)
        if chunk is None:
            assert not any(waiting)
            return None
        which = transfers.index(chunk.transfer)
        if chunk.transfer.service.background:
            assert not any(waiting[:5])
        sent = set(range(chunk.start, chunk.end))
        assert sent <= waiting[which]
        waiting[which] -= sent
        return chunk

    for step in steps:
        if step[0] == "put":
            _, which, nbytes, urgent = step
            start = transfers[which].put_bytes
            bench.put(transfers[which], nbytes, urgent=urgent)
            waiting[which] |= set(range(start, start + nbytes))
        elif step[0] == "take":
            last = taken(step[1]) or last
        elif step[0] == "end":
            transfers[step[1]].ends(step[2], RATE)
            bench.schedule.place(transfers[step[1]])
        elif step[0] == "drop":  # as a transfer that failed
            transfers[step[1]].queued.clear()
            waiting[step[1]].clear()
            if last is not None and last.transfer is transfers[step[1]]:
                last = None
        elif last is not None:  # its connection was lost
            waiting[transfers.index(last.transfer)] |= set(range(last.start, last.end))
            bench.schedule.add(last)
            last = None
    while taken(CHUNK):
        pass


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.data())
def test_tenants_share_within_a_chunk_of_their_weights(weights: list[int], data: st.DataObject) -> None:
    bench = _Bench()
    transfers = [bench.open(tenant, weight) for tenant, weight in enumerate(weights)]
    for transfer in transfers:
        bench.put(transfer, 100_000)
    first = data.draw(st.integers(0, 40))  # a tenant that comes late is owed nothing
    late = bench.open(len(weights), 2)
    for _ in range(first):
        bench.take()
    bench.put(late, 100_000)
    transfers.append(late)
    weights = [*weights, 2]
    sent = [0.0] * len(weights)
    for _ in range(data.draw(st.integers(1, 200))):
        chunk = bench.schedule.take(data.draw(st.integers(1, CHUNK)))
        assert chunk is not None
        sent[transfers.index(chunk.transfer)] += chunk.nbytes
        for one, his in zip(sent, weights, strict=True):
            for other, its in zip(sent, weights, strict=True):
                assert abs(one / his - other / its) <= CHUNK / his + CHUNK / its + 1e-6


def test_a_burst_of_one_tenant_delays_another_by_a_chunk() -> None:
    bench = _Bench()
    for _ in range(50):
        bench.put(bench.open(1), 1000)
    for _ in range(20):
        bench.take()
    other = bench.open(2)
    bench.put(other, 1000)
    leaves = [bench.take().transfer is other for _ in range(20)]
    assert sum(leaves) >= 9 and any(leaves[:2])


def test_who_waits_for_nothing_else_leaves_first() -> None:
    bench = _Bench()
    first, second, third = (bench.open() for _ in range(3))
    for transfer in (first, second, third):
        bench.put(transfer, 200)
    assert bench.take().transfer is first  # in the order of their prefills
    second.ends(10.0, RATE)
    bench.schedule.place(second)
    assert [bench.take().transfer for _ in range(2)] == [second] * 2
    assert bench.take().transfer is first
    assert [bench.take().transfer for _ in range(2)] == [third] * 2


def test_a_short_one_overtakes_a_long_one_but_not_for_ever() -> None:
    bench = _Bench()
    long, short, later = (bench.open() for _ in range(3))
    long.total_bytes, short.total_bytes, later.total_bytes = 4000, 1000, 1000
    for transfer in (long, short, later):
        bench.put(transfer, 300)
    for transfer, at_s in ((long, 0.0), (short, 1.0), (later, 3.5)):  # due at 4, 2 and 4.5 s
        transfer.ends(at_s, RATE)
        bench.schedule.place(transfer)
    assert [bench.take().transfer for _ in range(9)] == [short] * 3 + [long] * 3 + [later] * 3


def test_urgent_chunks_lead_their_own_transfer_only() -> None:
    bench = _Bench()
    first, second = bench.open(), bench.open()
    bench.put(first, 100)
    bench.put(second, 100)
    bench.put(second, 100, urgent=True)
    bench.put(first, 50, urgent=True)
    order = [bench.take() for _ in range(4)]
    assert [(chunk.transfer is first, chunk.urgent) for chunk in order] == [
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    ]


def test_nothing_leaves_before_the_consumer_accepts() -> None:
    bench = _Bench()
    transfer = bench.open()
    transfer.phase = SendPhase.OPENING
    bench.put(transfer, 100)
    assert bench.schedule.take(CHUNK) is None
    assert transfer.waiting_bytes == 100
    transfer.phase = SendPhase.SENDING
    bench.schedule.place(transfer)
    assert bench.take().transfer is transfer


def test_tenants_that_have_left_are_forgotten() -> None:
    bench = _Bench()
    steady = bench.open(0)
    bench.put(steady, 1 << 19)
    for number in range(2000):
        service = TransferClass(number.to_bytes(8, "big"))
        transfer = OutgoingTransfer(number.to_bytes(16, "big"), Offer("", (CHUNK,)), service)
        transfer.begin(0.0, 10_000 + number)
        transfer.phase = SendPhase.SENDING
        bench.put(transfer, CHUNK)
        bench.take()
        bench.take()
    assert len(bench.schedule._foreground._flows) < 200


def test_the_end_of_a_transfer_is_shared_by_the_connections() -> None:
    """Large chunks while there is much to send; no connection is left with all of the rest."""
    bench = _Bench()
    transfer = bench.open()
    bench.put(transfer, 40 << 20)
    sizes = []
    while (chunk := bench.schedule.take(4 << 20, 4)) is not None:
        sizes.append(chunk.nbytes)
        transfer.acked_bytes += chunk.nbytes
    assert sizes[:7] == [4 << 20] * 7
    assert sizes[7] == 3 << 20
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-2] == 256 << 10
    assert sum(sizes) == 40 << 20
