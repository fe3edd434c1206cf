"""The index against a reference model of engines: it never claims what they don't hold, and misses nothing."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.engine_model import EngineModel, Holdings, Prefix, Shape

from prfaas.cache import GlobalIndex, Held, SequenceGuard, decode_batch

SHAPES = {
    "dense": Shape(),
    "another block": Shape(block_tokens=3),
    "hybrid": Shape(linear_groups=2),
    "hybrid, larger state blocks": Shape(linear_groups=1, state_blocks=2),
    "windows": Shape(windows=(4, 7)),
    "larger window blocks": Shape(windows=(5,), window_blocks=2),
    "everything": Shape(linear_groups=1, windows=(3,)),
}
PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=14).map(tuple)
ACTIONS = st.sampled_from(
    ["serve"] * 6
    + ["serve again"] * 3
    + ["evict"] * 10
    + ["load", "salted", "adapted", "image", "clear", "restart"]
)
STEPS = st.lists(st.tuples(st.integers(0, 2), ACTIONS, PROMPTS, st.integers(1, 4)), max_size=40)


@dataclass
class Follower:
    """Applies an engine's batches to the index as a reader would, without a replay: a gap costs the holdings."""

    index: GlobalIndex
    name: str
    guard: SequenceGuard = field(default_factory=SequenceGuard)
    seen: Holdings | None = None

    def hear(self, batch: tuple[int, float, bytes, Holdings]) -> None:
        sequence, at_s, payload, after = batch
        offer = self.guard.offer(sequence, at_s)
        if offer == "duplicate":
            return
        if offer == "restart":
            self.index.drop(self.name)
            self.hear(batch)
        elif offer != "apply":
            self.index.drop(self.name)
            self.guard.skip_to(sequence)
            self.hear(batch)
        else:
            self.index.apply(self.name, decode_batch(payload).events)
            self.seen = after


def act(engine: EngineModel, action: str, prompt: Prefix, chunk_blocks: int) -> None:
    match action:
        case "serve":
            engine.serve(prompt, chunk_blocks=chunk_blocks)
        case "serve again":
            engine.serve(prompt, chunk_blocks=chunk_blocks, again=True)
        case "salted":
            engine.serve(prompt, chunk_blocks=chunk_blocks, salt="a tenant")
        case "adapted":
            engine.serve(prompt, chunk_blocks=chunk_blocks, salt="a tenant", adapter="a lora")
        case "load":
            engine.load(prompt)
        case "image":
            engine.serve(prompt, image=True)
        case "evict":
            engine.evict()
        case "clear":
            engine.clear()
        case "restart":
            engine.restart()


def new_index(shapes: list[Shape]) -> GlobalIndex:
    return GlobalIndex(
        seed=3,
        needs_states=any(shape.linear_groups for shape in shapes),
        needs_windows=any(shape.windows for shape in shapes),
    )


def truth(holdings: Holdings | None, prompt: Prefix, salt: str = "", adapter: str = "") -> Held:
    if holdings is None:
        return Held(0, 0)
    return Held(
        holdings.servable_tokens(salt, adapter, prompt), holdings.attention_tokens(salt, adapter, prompt)
    )


def claimed(index: GlobalIndex, name: str, prompt: Prefix, salt: str = "", adapter: str = "") -> Held:
    return index.match(index.chains(prompt, salt, adapter)).get(name, Held(0, 0))


TENANTS = [("", ""), ("a tenant", ""), ("a tenant", "a lora"), ("", "a lora")]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(deadline=None, max_examples=150)
@given(steps=STEPS, asked=st.lists(PROMPTS, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_with_nothing_lost_the_index_knows_exactly_what_engines_can_serve(
    shape: Shape, steps: list[tuple[int, str, Prefix, int]], asked: list[Prefix], seed: int
) -> None:
    engines = [EngineModel(shape, Random(seed * 3 + place)) for place in range(3)]
    index = new_index([shape])
    followers = [Follower(index, f"engine {place}") for place in range(3)]
    asked = asked + [(*prompt, 0) for _, _, prompt, _ in steps[:5]]
    for place, action, prompt, chunk_blocks in steps:
        act(engines[place], action, prompt, chunk_blocks)
        for batch in engines[place].take():
            followers[place].hear(batch)
        for salt, adapter in TENANTS:
            for each in asked:
                for follower in followers:
                    held = claimed(index, follower.name, each, salt, adapter)
                    assert held == truth(follower.seen, each, salt, adapter)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(deadline=None, max_examples=100)
@given(
    steps=STEPS,
    asked=st.lists(PROMPTS, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    fates=st.lists(st.sampled_from(["heard"] * 8 + ["lost", "doubled", "late"]), min_size=1, max_size=30),
    capacity=st.sampled_from([3, 10, 1000]),
)
def test_whatever_is_lost_doubled_or_late_nothing_is_claimed_that_an_engine_does_not_hold(
    shape: Shape,
    steps: list[tuple[int, str, Prefix, int]],
    asked: list[Prefix],
    seed: int,
    fates: list[str],
    capacity: int,
) -> None:
    engines = [EngineModel(shape, Random(seed * 3 + place)) for place in range(3)]
    index = GlobalIndex(
        needs_states=shape.linear_groups > 0, needs_windows=bool(shape.windows), capacity_blocks=capacity
    )
    followers = [Follower(index, f"engine {place}") for place in range(3)]
    asked = asked + [(*prompt, 0) for _, _, prompt, _ in steps[:5]]
    late: list[tuple[int, tuple[int, float, bytes, Holdings]]] = []
    count = 0
    for place, action, prompt, chunk_blocks in steps:
        act(engines[place], action, prompt, chunk_blocks)
        for batch in engines[place].take():
            fate = fates[count % len(fates)]
            count += 1
            if fate == "late":
                late.append((place, batch))
                continue
            for _ in range({"heard": 1, "lost": 0, "doubled": 2}[fate]):
                followers[place].hear(batch)
            while late and fate != "lost":
                who, old = late.pop(0)
                followers[who].hear(old)
        for follower in followers:
            for each in asked:
                held, real = claimed(index, follower.name, each), truth(follower.seen, each)
                assert held.reusable_tokens <= real.reusable_tokens
                assert held.attention_tokens <= real.attention_tokens
        assert sum(index.blocks(follower.name) for follower in followers) <= capacity


@settings(deadline=None, max_examples=100)
@given(steps=STEPS, asked=PROMPTS, seed=st.integers(0, 99))
def test_engines_with_other_blocks_and_groups_live_side_by_side(
    steps: list[tuple[int, str, Prefix, int]], asked: Prefix, seed: int
) -> None:
    shapes = [Shape(block_tokens=2), Shape(block_tokens=3), Shape(block_tokens=3, linear_groups=1)]
    engines = [EngineModel(shape, Random(seed + place)) for place, shape in enumerate(shapes)]
    index = GlobalIndex()
    followers = [Follower(index, f"engine {place}") for place in range(3)]
    for place, action, prompt, chunk_blocks in steps:
        if action != "load":
            act(engines[place], action, prompt, chunk_blocks)
        for batch in engines[place].take():
            followers[place].hear(batch)
        for each in (asked, prompt):
            for follower in followers:
                assert claimed(index, follower.name, each) == truth(follower.seen, each)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, seed=st.integers(0, 99))
def test_after_everybody_has_left_nothing_is_kept(
    steps: list[tuple[int, str, Prefix, int]], seed: int
) -> None:
    shape = SHAPES["everything"]
    engines = [EngineModel(shape, Random(seed * 3 + place)) for place in range(3)]
    index = new_index([shape])
    followers = [Follower(index, f"engine {place}") for place in range(3)]
    for place, action, prompt, chunk_blocks in steps:
        act(engines[place], action, prompt, chunk_blocks)
        for batch in engines[place].take():
            followers[place].hear(batch)
    for follower in followers:
        index.drop(follower.name)
        index.drop(follower.name)
    stats = index.stats()
    assert (stats.instances, stats.blocks, stats.different_blocks, stats.block_sizes) == (0, 0, 0, ())
    assert index.chains(range(100)).by_block_tokens == {}
    # Nothing of them is left in the numbers that the next ones get either.
    for place, follower in enumerate(followers):
        engines[place].restart()
        fresh = Follower(index, follower.name)
        engines[place].serve(tuple(range(9)))
        for batch in engines[place].take():
            fresh.hear(batch)
        assert claimed(index, follower.name, tuple(range(9))) == truth(fresh.seen, tuple(range(9)))
        assert claimed(index, follower.name, (0,) * 9) == Held(0, 0)
