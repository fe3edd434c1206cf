"""What a request loads from the pool: beside its own hit, beside a transfer, in place of its own hit."""

import secrets
from typing import Any

import pytest
from tests.serving.engines.vllm.pool_world import (
    Blocks,
    BlockState,
    ConnectorOutput,
    DictPool,
    Output,
    Request,
    stored,
)

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.keys import KeyChain, page_id
from prfaas.serving.engines.vllm.connector_scheduler import ConnectorScheduler
from prfaas.serving.engines.vllm.metadata import PoolLoadTime, StepReports, TransferMetadata
from prfaas.serving.engines.vllm.pool_scheduler import PIN_S, PoolScheduler
from prfaas.serving.pool.protocol import PageRef
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest

KEY = b"k" * 32
FULL = KvGroup(0, GroupKind.FULL, 16, 0)
STATE = KvGroup(1, GroupKind.STATE, 16, 0)
GROUPS = (FULL, STATE)
BYTES = {0: 1000, 1: 5000}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """One engine's scheduler side and its machine's pool."""

    def __init__(self, name: str = "home") -> None:
        self.clock = Clock()
        self.pool = DictPool(GROUPS, 16)
        self.side = PoolScheduler(self.pool, GROUPS, BYTES, 1 << 20, self.clock)  # type: ignore[arg-type]
        self.connector = ConnectorScheduler(name, KEY, GROUPS, self.side, now_s=lambda: 1000.0)

    def fill(self, tokens: list[int], attention: int, states: tuple[int, ...] = (), salt: str = "") -> None:
        chain = KeyChain(16, salt)
        chain.extend(tokens)
        for group, ends in ((0, range(16, attention + 1, 16)), (1, states)):
            for end in ends:
                self.pool.pages[page_id(chain.key_at(end), group)] = PageRef(end + group, 64 * end)

    def new(self, request: Request) -> Request:
        self.connector.on_new_request(request)  # type: ignore[arg-type]
        return request

    def ask(self, request: Request, local: int) -> int | None:
        return self.connector.num_external_tokens(request, local)  # type: ignore[arg-type]

    def alloc(self, request: Request, external: int) -> None:
        table = tuple([1000 * (group + 1) + block for block in range(40)] for group in range(2))
        self.connector.update_after_alloc(request, Blocks(table), external)  # type: ignore[arg-type]

    def step(
        self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None
    ) -> TransferMetadata:
        tables = {
            name: tuple([1000 * (group + 1) + block for block in range(40)] for group in range(2))
            for name in scheduled or {}
        }
        output = Output(scheduled or {}, BlockState(tables), preempted or set())
        return self.connector.build_metadata(output)  # type: ignore[arg-type]

    def report(self, request: Request, failed: bool = False, times: Any = None) -> None:
        names = {request.request_id}
        self.side.update(ConnectorOutput(names, names if failed else set(), times))  # type: ignore[arg-type]


PROMPT = list(range(200))


def ticket_for(num_tokens: int, skip: int) -> dict[str, Any]:
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        num_tokens=num_tokens,
        skip_tokens=skip,
        prompt_digest=prompt_digest(PROMPT[:num_tokens]),
        expires_at_s=1000.0 + 60,
        producer="east",
        consumer="home",
    )
    return {"prfaas": ticket.seal(KEY)}


def test_the_pool_adds_to_the_own_hit() -> None:
    world = World()
    world.fill(PROMPT, 160, states=(96, 144))
    request = world.new(Request("r", PROMPT))
    assert world.ask(request, 32) == 144 - 32
    world.alloc(request, 112)
    (load,) = world.step().pool_loads
    assert [(part.group, part.first_block, len(part.pages)) for part in load.parts] == [(0, 2, 7), (1, 8, 1)]
    assert load.parts[0].block_ids == tuple(range(1002, 1009))
    assert load.parts[1].block_ids == (2008,)
    assert load.parts[1].pages == (PageRef(145, 64 * 144),)
    assert world.pool.pins == {load.pin}
    world.report(request)
    assert not world.pool.pins


def test_hit_tokens_are_counted_by_where_the_pool_has_them() -> None:
    world = World()
    world.fill(PROMPT, 160, states=(96, 144))
    world.pool.on_ssd_behind = 80
    request = world.new(Request("r", PROMPT))
    assert world.ask(request, 32) == 112
    assert world.side.take_stats() is None
    world.alloc(request, 112)
    stats = world.side.take_stats()
    assert stats is not None
    assert (stats.data["pool_hit_tokens_memory"], stats.data["pool_hit_tokens_ssd"]) == (48, 64)
    assert world.side.take_stats() is None


def test_one_token_is_always_computed() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(96, 192))
    assert world.ask(world.new(Request("r", PROMPT[:96])), 0) == 0
    assert world.ask(world.new(Request("s", PROMPT[:97])), 0) == 96


def test_a_waiting_request_asks_once() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(192,))
    request = world.new(Request("r", PROMPT))
    assert [world.ask(request, 0) for _ in range(5)] == [192] * 5
    assert world.pool.calls == ["match"]
    assert len(world.pool.pins) == 1
    # Another own hit, another daemon, or a long time make it ask anew.
    world.ask(request, 16)
    world.pool.epoch = 2
    world.ask(request, 16)
    world.clock.now_s += PIN_S + 0.1
    world.ask(request, 16)
    assert world.pool.calls == ["match"] * 4
    assert len(world.pool.pins) == 1


def test_a_request_that_finds_nothing_asks_once_and_pins_nothing() -> None:
    world = World()
    world.fill(PROMPT, 160)
    request = world.new(Request("r", PROMPT))
    assert [world.ask(request, 0) for _ in range(3)] == [0, 0, 0]
    assert world.pool.calls == ["match"]
    assert not world.pool.pins


def test_a_dead_daemon_is_not_asked() -> None:
    world = World()
    world.pool.epoch = 0
    request = world.new(Request("r", PROMPT))
    assert world.ask(request, 0) == 0
    assert world.step({"r": 200}).pool_stores == []
    assert world.pool.calls == []


def test_a_failed_load_bars_the_pool_for_that_request() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(192,))
    request, other = world.new(Request("r", PROMPT)), world.new(Request("s", PROMPT))
    world.alloc(request, world.ask(request, 0) or 0)
    world.step()
    world.report(request, failed=True)
    assert not world.pool.pins
    assert world.ask(request, 0) == 0
    assert world.ask(other, 0) == 192


@pytest.mark.parametrize("when", ["waiting", "loading", "preempted"])
def test_no_pin_outlives_its_request(when: str) -> None:
    world = World()
    world.fill(PROMPT, 192, states=(192,))
    request = world.new(Request("r", PROMPT))
    tokens = world.ask(request, 0)
    if when == "loading":
        world.alloc(request, tokens or 0)
    if when == "preempted":
        world.step(preempted={"r"})
        assert not world.pool.pins
    held = world.connector.request_finished(request, aborted=True)  # type: ignore[arg-type]
    assert not held
    if when == "loading":
        # The copy may be running: its pages stay until it is reported.
        assert len(world.pool.pins) == 1
        world.report(request)
    assert not world.pool.pins


def test_a_request_that_goes_on_without_the_pool_gives_its_pin_back() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(192,))
    request = world.new(Request("r", PROMPT))
    world.ask(request, 0)
    world.alloc(request, 0)
    assert not world.pool.pins


def test_tenants_adapters_and_prompts_that_are_no_tokens_stay_apart() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(192,), salt="one")
    assert world.ask(world.new(Request("a", PROMPT)), 0) == 0
    assert world.ask(world.new(Request("b", PROMPT, cache_salt="two")), 0) == 0
    assert world.ask(world.new(Request("c", PROMPT, cache_salt="one")), 0) == 192
    for field in ({"mm_features": [1]}, {"prompt_embeds": 1}, {"resumable": True}, {"pooling_params": 1}):
        request = world.new(Request("d", PROMPT, cache_salt="one", **field))  # type: ignore[arg-type]
        assert world.ask(request, 0) == 0
        assert world.step({"d": 200}).pool_stores == []
    assert (
        world.ask(world.new(Request("e", PROMPT, cache_salt="one", skip_reading_prefix_cache=True)), 0) == 0
    )


def test_a_junction_in_the_pool_is_told_to_vllm() -> None:
    world = World()
    world.fill(PROMPT, 160, states=(64,))
    request = world.new(Request("r", PROMPT))
    assert world.ask(request, 0) == 64
    assert request.shared_prefix_boundary == 160
    # vLLM sets it back before it asks again.
    request.shared_prefix_boundary = 0
    world.ask(request, 0)
    assert request.shared_prefix_boundary == 160
    whole = world.new(Request("s", PROMPT[:65]))
    world.ask(whole, 0)
    assert whole.shared_prefix_boundary == 0


def test_the_pool_fills_what_a_transfer_leaves_out() -> None:
    world = World()
    world.fill(PROMPT, 96)
    request = world.new(Request("r", PROMPT, ticket_for(199, skip=96)))
    assert world.ask(request, 32) == 199 - 32
    assert world.ask(request, 32) == 199 - 32
    assert world.pool.calls == ["match"]
    world.alloc(request, 167)
    orders = world.step()
    (load,), (pooled,) = orders.loads, orders.pool_loads
    assert load.local_tokens == 96
    assert [(run.group, run.first_block, len(run.block_ids)) for run in load.runs] == [(0, 6, 7), (1, 12, 1)]
    assert [(part.group, part.first_block, part.block_ids) for part in pooled.parts] == [
        (0, 2, (1002, 1003, 1004, 1005))
    ]
    assert orders.drops == []
    world.report(request)
    request.num_computed_tokens = 199
    # What came by the transfer goes into the pool, what was there does not go again.
    assert stored(world.step({"r": 1}).pool_stores) == {0: [6, 7, 8, 9, 10, 11]}


def test_what_a_transfer_leaves_out_of_a_block_is_not_filled_by_the_pool() -> None:
    """An engine with other blocks begins to send inside one of this engine's, of which the pool has no part."""
    world = World()
    world.fill(PROMPT, 96)
    request = world.new(Request("r", PROMPT, ticket_for(199, skip=90)))
    assert world.ask(request, 32) == 0
    world.alloc(request, 0)
    orders = world.step()
    assert orders.loads == orders.pool_loads == []
    assert len(orders.drops) == 1
    held = world.new(Request("s", PROMPT, ticket_for(199, skip=90)))
    assert world.ask(held, 96) == 199 - 96


def test_an_own_hit_that_is_long_enough_needs_no_pool() -> None:
    world = World()
    request = world.new(Request("r", PROMPT, ticket_for(199, skip=96)))
    assert world.ask(request, 96) == 199 - 96
    world.alloc(request, 103)
    orders = world.step()
    assert world.pool.calls == []
    assert orders.loads[0].local_tokens == 96
    assert orders.pool_loads == []


def test_a_transfer_whose_rest_is_nowhere_is_dropped_for_what_the_pool_has() -> None:
    world = World()
    world.fill(PROMPT, 64, states=(64,))
    request = world.new(Request("r", PROMPT, ticket_for(199, skip=96)))
    assert [world.ask(request, 32) for _ in range(3)] == [32, 32, 32]
    assert world.pool.calls == ["match", "match"]
    world.alloc(request, 32)
    orders = world.step()
    assert orders.loads == []
    assert "lack" in orders.drops[0][1]
    assert [part.first_block for part in orders.pool_loads[0].parts] == [2, 3]


def test_a_lost_pool_page_of_a_transfers_rest_prefills_locally() -> None:
    world = World()
    request = world.new(Request("r", PROMPT, ticket_for(199, skip=96)))
    assert world.ask(request, 32) == 0
    world.alloc(request, 0)
    orders = world.step()
    assert orders.loads == orders.pool_loads == []
    assert len(orders.drops) == 1


def test_loads_that_take_longer_than_computing_are_not_made() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(32, 192))
    for name, tokens in (("r", 33), ("s", 200)):
        request = world.new(Request(name, PROMPT[:tokens]))
        found = world.ask(request, 0)
        world.alloc(request, found or 0)
        world.step()
        size = BYTES[0] * (found or 0) // 16 + BYTES[1]
        times = StepReports({name: PoolLoadTime(size, 0.0, 0.02, 0.02 + size / 1e6)})
        world.report(request, times=times)
    # A token takes a millisecond: 32 of them 32, their load 27.
    for tokens in (50, 100):
        world.step({"x": tokens})
        world.clock.now_s += tokens / 1000
        world.step({"x": 1})
        world.clock.now_s += 50.0  # idle
    assert world.ask(world.new(Request("t", PROMPT[:33])), 0) == 32
    assert world.side.worth.load_s(7000, 0) == pytest.approx(0.027, rel=0.01)
    assert world.side.worth.prefill_s(32) == pytest.approx(0.032, rel=0.01)
    world.clock.now_s += 1.0
    for tokens in (50, 100):
        for _ in range(40):
            world.step({"x": tokens})
            world.clock.now_s += tokens / 2000
            world.step({"x": 1})
    assert world.ask(world.new(Request("u", PROMPT[:33])), 0) == 0
    assert world.ask(world.new(Request("v", PROMPT)), 0) == 192
    assert len(world.pool.pins) == 2


def test_an_own_hit_without_its_state_makes_room_for_a_later_end() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(128,))
    world.side.reconciled_hit = lambda request: 32
    request = world.new(Request("r", PROMPT))
    # vLLM has attention up to 160, a state only at 32; the pool has one at 128.
    assert world.ask(request, 160) is None
    assert not request.skip_reading_prefix_cache, "vLLM would not wait for the next step"
    world.step()
    assert request.skip_reading_prefix_cache
    assert world.ask(request, 0) == 128
    assert not request.skip_reading_prefix_cache
    assert world.pool.calls == ["match", "match"]
    world.alloc(request, 128)
    (load,) = world.step().pool_loads
    assert [(part.first_block, len(part.pages)) for part in load.parts] == [(0, 8), (7, 1)]
    assert world.pool.pins == {load.pin}


def test_an_own_hit_makes_room_once_only() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(128,))
    world.side.reconciled_hit = lambda request: 32
    request = world.new(Request("r", PROMPT))
    assert world.ask(request, 160) is None
    world.step()
    assert world.ask(request, 0) == 128
    # There was no room for so many blocks.
    assert world.ask(request, 160) == 0
    world.alloc(request, 0)
    assert not world.pool.pins


def test_an_own_hit_that_made_room_for_nothing_comes_back() -> None:
    world = World()
    world.fill(PROMPT, 192, states=(128,))
    world.side.reconciled_hit = lambda request: 32
    request = world.new(Request("r", PROMPT))
    assert world.ask(request, 160) is None
    world.step()
    world.pool.epoch = 0
    assert world.ask(request, 0) is None
    assert not request.skip_reading_prefix_cache
    assert world.ask(request, 160) == 0


def test_an_own_hit_with_its_state_stays() -> None:
    world = World()
    world.fill(PROMPT, 160, states=(128,))
    world.side.reconciled_hit = lambda request: 160
    assert world.ask(world.new(Request("r", PROMPT)), 160) == 0
    world.side.reconciled_hit = lambda request: 144
    assert world.ask(world.new(Request("s", PROMPT)), 160) == 0
    assert not world.pool.pins


def test_blocks_are_held_while_copies_may_run() -> None:
    world = World()
    request = world.new(Request("r", PROMPT))
    world.ask(request, 0)
    world.alloc(request, 0)
    assert stored(world.step({"r": 200}).pool_stores) == {0: list(range(12))}
    assert world.step(preempted={"r"}).preempted == ["r"]
    assert world.connector.request_finished(request, aborted=False)  # type: ignore[arg-type]
    assert world.step().held == {"r": False}
    idle = world.new(Request("s", PROMPT))
    assert not world.connector.request_finished(idle, aborted=False)  # type: ignore[arg-type]


def test_after_a_preemption_everything_is_looked_at_again() -> None:
    world = World()
    world.new(Request("r", PROMPT))
    world.step({"r": 200})
    world.step(preempted={"r"})
    world.pool.pages.clear()
    assert stored(world.step({"r": 200}).pool_stores) == {0: list(range(12))}
