"""What an engine's steps put into the pool, driven as vLLM 0.32 drives a connector."""

from hypothesis import given
from hypothesis import strategies as st
from tests.serving.engines.vllm.pool_world import BlockState, DictPool, Output, Request, stored

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.keys import KeyChain, page_id
from prfaas.serving.engines.vllm.metadata import PoolStore
from prfaas.serving.engines.vllm.pool_stores import PooledRequest, PoolStores, StoreProgress

FULL = KvGroup(0, GroupKind.FULL, 16, 0)
STATE = KvGroup(1, GroupKind.STATE, 16, 0)
WINDOW = KvGroup(2, GroupKind.WINDOW, 8, 20)
EVERY = 64


class Engine:
    """One request's way through a scheduler: its block tables, states at chunk ends, freed windows."""

    def __init__(self, groups: tuple[KvGroup, ...], pool: DictPool, request: Request) -> None:
        self.groups = groups
        self.pool = pool
        self.request = request
        self.pooled = PooledRequest.of(request, 8 if WINDOW in groups else 16)  # type: ignore[arg-type]
        self.stores = PoolStores(pool, groups, EVERY)  # type: ignore[arg-type]

    def step(self, tokens: int, *, offered: bool = True, drafts: int = 0, taken: int = 0) -> list[PoolStore]:
        """Of so many drafts behind its tokens a step takes some."""
        request = self.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + tokens + drafts
        table: tuple[list[int], ...] = tuple([] for _ in range(3))
        for group in self.groups:
            first = 0
            if group.kind is GroupKind.WINDOW:
                first = max(0, start - group.window_tokens + 1) // group.block_tokens
            count = -(-end // group.block_tokens)
            table[group.index].extend(
                0 if block < first or group.kind is GroupKind.STATE else 1000 * group.index + 7 + block
                for block in range(count)
            )
        offers = {}
        boundary = end // 16 * 16
        if STATE in self.groups and boundary > start and offered:
            offers = {request.request_id: [(1, 500 + boundary, boundary)]}
        output = Output(
            {request.request_id: tokens + drafts}, BlockState({request.request_id: table}, offers)
        )
        if drafts:
            output.scheduled_spec_decode_tokens = {request.request_id: [7] * drafts}
        orders = self.stores.order({request.request_id: self.pooled}, output)  # type: ignore[arg-type]
        request.num_computed_tokens = end - drafts + taken
        return orders

    def answer(self, tokens: int) -> list[list[PoolStore]]:
        orders = []
        for token in range(tokens):
            self.request.all_token_ids.append(5000 + token)
            orders.append(self.step(1))
        return orders


def engine(*groups: KvGroup, prompt: int = 100, salt: str = "") -> Engine:
    pool = DictPool(groups, 8 if WINDOW in groups else 16)
    return Engine(groups, pool, Request("r", list(range(prompt)), cache_salt=salt or None))


def name(request: Request, end: int, group: int, step: int = 16) -> bytes:
    chain = KeyChain(step, request.cache_salt or "")
    chain.extend(request.all_token_ids)
    return page_id(chain.key_at(end), group)


def test_attention_blocks_go_as_steps_complete_them() -> None:
    world = engine(FULL)
    assert stored(world.step(40)) == {0: [0, 1]}
    (store,) = world.step(60)
    assert not store.urgent
    assert store.epoch == 1
    assert store.parts[0].block_ids == (7 + 2, 7 + 3, 7 + 4, 7 + 5)
    assert [stored(orders) for orders in world.answer(30)] == [
        {0: [6]} if i == 11 else {0: [7]} if i == 27 else {} for i in range(30)
    ]


@given(data=st.data(), prompt=st.integers(1, 300), answer=st.integers(0, 60))
def test_every_whole_attention_block_goes_once_whatever_the_chunks(
    data: st.DataObject, prompt: int, answer: int
) -> None:
    world = engine(FULL, STATE, WINDOW, prompt=prompt)
    orders = []
    while world.request.num_computed_tokens < prompt:
        left = prompt - world.request.num_computed_tokens
        orders += world.step(data.draw(st.integers(1, left)))
    for steps in world.answer(answer):
        orders += steps
    assert stored(orders).get(0, []) == list(range((prompt + answer) // 16))
    assert len(world.pool.calls) <= 2 * (1 + (prompt + answer) // 8)


@given(data=st.data(), prompt=st.integers(1, 100), steps=st.integers(0, 40))
def test_of_a_step_with_drafts_nothing_goes_that_may_be_written_over(
    data: st.DataObject, prompt: int, steps: int
) -> None:
    world = engine(FULL, STATE, prompt=prompt)
    went = stored(world.step(prompt))
    for _ in range(steps):
        request, drafts = world.request, data.draw(st.integers(0, 5))
        taken = data.draw(st.integers(0, drafts))
        request.all_token_ids.append(5000 + len(request.all_token_ids))
        computed = request.num_computed_tokens
        for group, blocks in stored(world.step(1, drafts=drafts, taken=taken)).items():
            # With no draft a step is final.
            assert all((block + 1) * 16 <= computed + (not drafts) for block in blocks)
            assert group == 0 or not drafts
            went.setdefault(group, []).extend(blocks)
        request.all_token_ids += [6000 + len(request.all_token_ids)] * taken
    left = world.request.num_computed_tokens
    world.request.all_token_ids.append(1)
    went.setdefault(0, []).extend(stored(world.step(1)).get(0, []))
    assert went[0] == list(range((left + 1) // 16))


def test_identities_say_what_lead_pages_stand_for() -> None:
    world = engine(FULL, STATE, salt="tenant")
    world.step(100)
    request = world.request
    first = world.pool.identities[name(request, 16, 0)]
    assert first.parent == b""
    assert first.salt == "tenant"
    second = world.pool.identities[name(request, 32, 0)]
    assert second.parent == name(request, 16, 0)[:-1]
    assert second.token_ids == b"".join(token.to_bytes(4, "little") for token in range(16, 32))
    assert name(request, 96, 1) not in world.pool.identities
    assert len(set(world.pool.tenants.values())) == 1


def test_states_go_at_the_prompts_end_and_every_so_many_tokens() -> None:
    world = engine(FULL, STATE, prompt=201)
    orders = [stored(world.step(tokens)) for tokens in (32, 48, 16, 48, 48, 8)]
    # Ends at 32, 80, 96, 144, 192, 200: 80 and 144 are the first ones behind 64 and 128; 192 is the prompt's end.
    assert [each.get(1) for each in orders] == [None, [4], None, [8], [11], None]
    assert all(store.urgent for store in world.step(1) if 1 in stored([store]))


def test_a_state_lies_where_vllm_says_not_where_the_table_does() -> None:
    world = engine(FULL, STATE, prompt=97)
    state = next(store for store in world.step(96) if store.urgent)
    assert state.parts[0].block_ids == (500 + 96,)
    assert state.parts[0].first_block == 5


def test_states_that_are_not_offered_do_not_go() -> None:
    world = engine(FULL, STATE, prompt=97)
    assert stored(world.step(96, offered=False)) == {0: list(range(6))}


def test_a_junction_gets_a_state() -> None:
    world = engine(FULL, STATE, prompt=60)
    world.request.shared_prefix_boundary = 32
    assert stored(world.step(32)) == {0: [0, 1], 1: [1]}


def test_the_newest_end_of_an_answer_supersedes_the_one_before() -> None:
    world = engine(FULL, STATE, prompt=33)
    world.step(32)
    world.step(1)
    world.answer(63)
    request = world.request
    # 32 is the prompt's end and 64 a checkpoint: they stay. 80 is the newest; 48 was.
    held = {end for end in (32, 48, 64, 80, 96) if name(request, end, 1) in world.pool.pages}
    assert held == {32, 64, 96}
    assert world.pool.discarded == [name(request, 48, 1), name(request, 80, 1)]


def test_the_last_state_before_a_prompts_end_is_kept_where_its_own_has_none() -> None:
    world = engine(FULL, STATE, prompt=60)
    world.step(32)
    world.step(28, offered=False)
    world.answer(30)
    held = [end for end in (32, 48, 64, 80) if name(world.request, end, 1) in world.pool.pages]
    # 64 is a checkpoint.
    assert held == [32, 64, 80]
    other = engine(FULL, STATE, prompt=60)
    other.step(32)
    other.step(16)
    assert other.pool.discarded == [name(other.request, 32, 1)]


def test_an_end_that_found_no_room_supersedes_nothing() -> None:
    world = engine(FULL, STATE, prompt=17)
    world.step(16)
    world.step(1)
    world.answer(16)
    assert name(world.request, 32, 1) in world.pool.pages
    world.pool.room = 0
    world.answer(20)
    assert world.pool.discarded == []


def test_windows_alone_have_ends_too() -> None:
    world = engine(FULL, WINDOW, prompt=100)
    # Ends at 64 (a checkpoint) and 96 (the prompt's): 20 tokens reach back to blocks 5 and 9.
    orders = world.step(100)
    assert stored(orders)[2] == [5, 6, 7, 9, 10, 11]
    assert {store.urgent for store in orders if 2 in stored([store])} == {True}
    world.answer(30)
    kept = [block for block in range(16) if name(world.request, block * 8 + 8, 2, 8) in world.pool.pages]
    # The answer's newest end is 128, a checkpoint, which stays; 112 went by.
    assert kept == [5, 6, 7, 9, 10, 11, 13, 14, 15]


@given(data=st.data(), prompt=st.integers(2, 300), answer=st.integers(0, 80))
def test_a_repeated_prompt_and_the_next_turn_find_their_ends(
    data: st.DataObject, prompt: int, answer: int
) -> None:
    for groups in ((FULL,), (FULL, WINDOW)):
        world = engine(*groups, prompt=prompt)
        while world.request.num_computed_tokens < prompt:
            left = prompt - world.request.num_computed_tokens
            world.step(data.draw(st.integers(1, left)))
        world.answer(answer)
        request = world.request
        step = 8 if WINDOW in groups else 16
        for length in (prompt, prompt + answer):
            chain = KeyChain(step)
            chain.extend(request.all_token_ids)
            limit = length - 1 if length == prompt else length
            match = world.pool.match(
                chain.packed(0, limit // step), 0, limit, whole=True, tenant=b"", pin=True
            )
            assert match is not None
            assert match.usable_tokens == limit // 16 * 16


def test_blocks_that_the_engine_has_lost_do_not_go() -> None:
    world = engine(FULL, WINDOW, prompt=97)
    world.request.num_computed_tokens = 96
    world.pooled.progress = None
    # The window before 96 reaches back to block 9; only what a step behind 96 still sees is there.
    assert 2 not in stored(world.step(1))


def test_of_a_window_that_came_by_a_transfer_what_is_there_goes() -> None:
    world = engine(FULL, WINDOW, prompt=101)
    world.request.num_computed_tokens = 100
    world.pooled.progress = StoreProgress(80, 80)
    # The end at 96 needs block 9 too, which no step behind 100 sees: vLLM's table has the null block there.
    assert stored(world.step(1)) == {0: [5], 2: [10, 11]}


def test_an_own_hit_is_not_stored_again_unless_the_pool_lacks_its_end() -> None:
    world = engine(FULL, prompt=200)
    world.request.num_computed_tokens = 96
    assert stored(world.step(50)) == {0: [5, 6, 7, 8]}
    # Block 5 of the hit was missing: so may be those before it.
    assert stored(world.step(3)) == {0: [0, 1, 2, 3, 4]}
    assert stored(world.step(47)) == {0: [9, 10, 11]}
    again = Engine(world.groups, world.pool, Request("s", list(range(200))))
    again.request.num_computed_tokens = 96
    calls = len(world.pool.calls)
    assert stored(again.step(104)) == {}
    assert len(world.pool.calls) == calls + 1


def test_a_dead_daemon_costs_nothing_and_is_caught_up_with() -> None:
    world = engine(FULL, STATE, prompt=100)
    world.pool.epoch = 0
    assert world.step(50) == []
    assert world.pool.calls == []
    world.pool.epoch = 2
    orders = world.step(50)
    assert stored(orders)[0] == [2, 3, 4, 5]
    assert orders[0].epoch == 2


def test_a_step_without_a_new_block_asks_nothing() -> None:
    world = engine(FULL, STATE, prompt=100)
    world.step(100)
    calls = len(world.pool.calls)
    world.answer(11)
    assert len(world.pool.calls) == calls


def test_tokens_that_are_not_known_yet_wait() -> None:
    """A step that runs ahead computes a token before its id is known."""
    world = engine(FULL, prompt=31)
    world.step(31)
    assert world.step(1) == []
    world.request.all_token_ids.append(9)
    assert stored(world.step(1)) == {0: [1]}
