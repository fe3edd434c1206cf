"""On an accelerator every copy waits for what it needs: tried on a device whose streams run as late as they may."""

from collections.abc import Callable, Iterator
from contextlib import closing
from random import Random

import numpy as np
import pytest
import torch
from tests.serving.engines.vllm.late_device import CUDA, LateDevice, late_device
from tests.serving.engines.vllm.test_producer_consumer import (
    assert_moved,
    copy_of,
    load,
    make_ends,
    memory,
    new_ticket,
    sends,
)

from prfaas.serving.engines.page_digests import byte_sums
from prfaas.serving.engines.vllm.arena_pages import ArenaPages
from prfaas.serving.engines.vllm.device_pages import DevicePages, _DeviceSums, _Lane
from prfaas.serving.engines.vllm.metadata import TransferMetadata

BLOCKS, PAGE_BYTES = 24, 64


@pytest.fixture(params=["late", "1", "2", "3"])
def device(request: pytest.FixtureRequest) -> Iterator[LateDevice]:
    with late_device(None if request.param == "late" else Random(int(request.param))) as made:
        yield made


class Engine:
    """Blocks of KV that an engine's steps write."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.memory = torch.zeros((BLOCKS, PAGE_BYTES), dtype=torch.uint8)
        self.pages = DevicePages(device.memory(self.memory))
        self.steps = 0

    def step(self) -> np.ndarray:
        """Queue a step that writes every block; returns what will be there."""
        self.steps += 1
        will_be = np.random.default_rng(self.steps).integers(0, 256, (BLOCKS, PAGE_BYTES), dtype=np.uint8)
        self.device.queue(lambda: self.memory.copy_(torch.from_numpy(will_be)))
        return will_be


def reads(engine: Engine) -> None:
    blocks = np.array([7, 3, 4, 19])
    for _ in range(3):
        will_be = engine.step()
        engine.pages.mark_written()
        out = bytearray(150)
        engine.pages.read(blocks, 40, memoryview(out))
        assert bytes(out) == will_be[blocks].tobytes()[40:190]
        (view,) = engine.pages.views(np.arange(5, 9), 0, 4 * PAGE_BYTES)
        assert bytes(view) == will_be[5:9].tobytes()


def stores(engine: Engine) -> None:
    arena = np.zeros(4096, dtype=np.uint8)
    will_be = engine.step()
    engine.pages.mark_written()
    engine.pages.store_to(ArenaPages(arena, [2, 9, 11], [0, 1024, 512]), 16)
    assert arena[1040 : 1040 + PAGE_BYTES].tobytes() == will_be[9].tobytes()


def digests(engine: Engine) -> None:
    will_be = engine.step()
    sums = engine.pages.sums([1, 8])
    engine.step()
    assert (sums.wait() == byte_sums(will_be[[1, 8]])).all()


def last_pages(engine: Engine) -> None:
    will_be = engine.step()
    copy = engine.pages.copied(5)
    engine.step()
    assert bytes(copy.view(8, 30)) == will_be[5, 8:38].tobytes()


def loads(engine: Engine) -> None:
    engine.step()
    engine.pages.mark_written()
    staged = np.random.default_rng(99).integers(0, 256, 3 * PAGE_BYTES, dtype=np.uint8)
    wanted = staged.copy()
    sums = engine.pages.write_summed([4, 17, 5], [memoryview(staged[:100]), memoryview(staged[100:])])
    engine.pages.flush()
    # The staging is another transfer's from here on, and whatever the engine had to do is done.
    staged[:] = 0
    engine.device.synchronize()
    assert engine.memory[[4, 17, 5]].numpy().tobytes() == wanted.tobytes()
    assert (sums.wait() == byte_sums(wanted.reshape(3, -1))).all()


def pool_loads(engine: Engine) -> None:
    arena = np.random.default_rng(98).integers(0, 256, 4096, dtype=np.uint8)
    wanted = arena[16 + 1024 :][:PAGE_BYTES].tobytes()
    engine.pages.load_from(ArenaPages(arena, [2, 9, 11], [0, 1024, 512]), 16)
    engine.pages.flush()
    arena[:] = 0
    assert engine.memory[9].numpy().tobytes() == wanted


WAYS = [reads, stores, digests, last_pages, loads, pool_loads]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_taken_before_it_is_there(way: Callable[[Engine], None], device: LateDevice) -> None:
    way(Engine(device))


def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Lane, "wait", lambda lane: None)


def no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DevicePages, "_after_writes", lambda pages: None)


def no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DevicePages, "mark_written", lambda pages: None)


def no_wait_for_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_DeviceSums, "wait", lambda sums: sums._host.numpy().view(np.uint64))


@pytest.mark.parametrize(
    ("lost", "way"),
    [
        (no_wait, reads),
        (no_wait, stores),
        (no_wait, last_pages),
        (no_wait, loads),
        (no_wait, pool_loads),
        (no_order, reads),
        (no_order, stores),
        (no_order, last_pages),
        (no_order, loads),
        (no_mark, reads),
        (no_mark, last_pages),
        (no_wait_for_sums, digests),
    ],
)
def test_a_wait_that_is_missing_shows(
    lost: Callable[[pytest.MonkeyPatch], None],
    way: Callable[[Engine], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the tests above would show nothing."""
    lost(monkeypatch)
    with late_device() as device, pytest.raises(AssertionError):
        way(Engine(device))


@pytest.mark.parametrize("chunk_ends", [[100], [10, 37, 64, 100]])
def test_a_transfer_is_of_what_the_engine_was_to_compute(device: LateDevice, chunk_ends: list[int]) -> None:
    world = make_ends(seen_as=lambda pages: DevicePages(device.memory(pages)))
    ends = next(world)
    with closing(world):
        ticket, before = new_ticket(chunk_ends[-1]), copy_of(ends.home)
        will_be = memory(3)
        for orders in sends(ticket, chunk_ends):
            for name, pages in ends.east.items():
                device.queue(lambda pages=pages, name=name: np.copyto(pages, will_be[name]))
            ends.step(orders)
        ends.step(TransferMetadata(held={"p": False}))
        assert ends.finished() == {"p"}
        # The engine gives the blocks to others.
        for pages in ends.east.values():
            device.queue(lambda pages=pages: pages.fill(0))
        ends.order(load(ticket, 0))
        assert ends.results() == ({"d"}, set())
        ends.east.update(will_be)
        assert_moved(ends, ticket, 0, before)


def test_the_device_is_one_to_the_code() -> None:
    with late_device() as device:
        assert device.memory(torch.zeros(3)).device == CUDA
