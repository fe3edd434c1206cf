"""The index against a reference model of engines: it never claims what they don't hold, and misses nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.prefix.digested import HearingIndex
from tests.core.prefix.engine_model import Batch, EngineModel, Holdings, Prefix, Shape

from prfaas.core.prefix.events import decode_batch
from prfaas.core.prefix.index import PrefixHit

SHAPES = {
    "dense": Shape(),
    "another block": Shape(block_tokens=3),
    "hybrid": Shape(linear_groups=2),
    "hybrid, larger state blocks": Shape(linear_groups=1, state_blocks=2),
    "windows": Shape(windows=(4, 7)),
    "larger window blocks": Shape(windows=(5,), window_blocks=2),
    "everything": Shape(linear_groups=1, windows=(3,)),
    "looks ahead": Shape(lookahead=1),
    "looks far ahead, hybrid": Shape(lookahead=3, linear_groups=1),
}
SEEDS = st.integers(0, 10**9)
TENANTS = [("", ""), ("a tenant", ""), ("a tenant", "a lora"), ("", "a lora")]
ENGINES = 3


@dataclass
class Follower:
    """Applies an engine's batches to the index as a reader would, without a replay: a gap costs the holdings."""

    index: HearingIndex
    name: str
    next: int = 0
    seen: Holdings | None = None
    process: int = 0

    def hear_anything(self, batch: Batch) -> None:
        """Late batches of an old process are none of this connection."""
        if batch.process >= self.process:
            self.hear(batch)

    def hear(self, batch: Batch) -> None:
        if batch.process > self.process or batch.sequence > self.next:
            # The connection tells of a new process.
            self.index.drop(self.name)
            self.process, self.next = batch.process, batch.sequence
        if batch.sequence == self.next:
            self.next += 1
            self.index.apply(self.name, decode_batch(batch.payload).events)
            self.seen = batch.after

    def truth(self, prompt: Prefix, salt: str = "", adapter: str = "") -> PrefixHit:
        if self.seen is None:
            return PrefixHit(0, 0)
        return PrefixHit(
            self.seen.servable_tokens(salt, adapter, prompt),
            self.seen.attention_tokens(salt, adapter, prompt),
        )


class World:
    """Engines that serve a few prompts with common prefixes, and an index that hears of it."""

    def __init__(self, shapes: list[Shape], seed: int, index: HearingIndex) -> None:
        self.random = Random(seed)
        self.index = index
        self.engines = [EngineModel(shape, self.random) for shape in shapes]
        self.followers = [Follower(index, f"engine {place}") for place in range(len(shapes))]
        first = tuple(self.random.choices(range(9), k=14))
        self.prompts = [first, (*first[:6], *range(8)), (*first[:9], *range(5)), tuple(range(14))]

    def run(self, steps: int) -> Iterator[tuple[int, Batch]]:
        """Anything happens anywhere; (engine, batch) of every step that has ended."""
        for _ in range(steps):
            place = self.random.randrange(len(self.engines))
            engine = self.engines[place]
            self._act(engine)
            if self.random.random() < 0.7:
                engine.end_step()
            for batch in engine.take():
                yield place, batch

    def claimed(self, place: int, prompt: Prefix, salt: str = "", adapter: str = "") -> PrefixHit:
        chains = self.index.chains(prompt, salt, adapter)
        return self.index.match(chains).get(self.followers[place].name, PrefixHit(0, 0))

    def _act(self, engine: EngineModel) -> None:
        prompt = self.random.choice(self.prompts)[: self.random.randint(1, 14)]
        chunk_blocks = self.random.randint(1, 4)
        match self.random.choices(range(8), [8, 4, 20, 2, 2, 1, 0.3, 0.3])[0]:
            case 0:
                engine.serve(prompt, chunk_blocks=chunk_blocks)
            case 1:
                engine.serve(prompt, chunk_blocks=chunk_blocks, again=True)
            case 2:
                engine.evict()
            case 3:
                engine.load(prompt)
            case 4:
                salt, adapter = self.random.choice(TENANTS[1:3])
                engine.serve(prompt, chunk_blocks=chunk_blocks, salt=salt, adapter=adapter)
            case 5:
                engine.serve_image(prompt)
            case 6:
                engine.clear()
            case 7:
                engine.restart()


def new_index(shape: Shape, capacity_blocks: int = 1000) -> HearingIndex:
    return HearingIndex(
        seed=3,
        capacity_blocks=capacity_blocks,
        needs_states=shape.linear_groups > 0,
        needs_windows=bool(shape.windows),
    )


@pytest.mark.slow("a property over many random systems")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(deadline=None, max_examples=40)
@given(SEEDS, st.lists(st.booleans(), min_size=ENGINES, max_size=ENGINES))
def test_with_nothing_lost_the_index_knows_exactly_what_engines_can_serve(
    shape: Shape, seed: int, drop: list[bool]
) -> None:
    """Some engines draft from hidden states, and reuse one block of attention less than they hold."""
    shapes = [replace(shape, drops_last_block=drops) for drops in drop]
    world = World(shapes, seed, new_index(shape))
    for follower, drops in zip(world.followers, drop, strict=True):
        world.index.learn_drop(follower.name, drops_last_block=drops)
    for place, batch in world.run(60):
        world.followers[place].hear(batch)
        for prompt in world.prompts:
            for who, follower in enumerate(world.followers):
                assert world.claimed(who, prompt) == follower.truth(prompt)
            for tenant in TENANTS:
                assert world.claimed(place, prompt, *tenant) == world.followers[place].truth(prompt, *tenant)


@pytest.mark.slow("a property over many random systems")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(deadline=None, max_examples=40)
@given(SEEDS, st.sampled_from([3, 10, 1000]))
def test_whatever_is_lost_doubled_or_late_nothing_is_claimed_that_an_engine_does_not_hold(
    shape: Shape, seed: int, capacity: int
) -> None:
    world = World([shape] * ENGINES, seed, new_index(shape, capacity))
    fates = Random(seed + 1)
    late: list[tuple[int, Batch]] = []
    for place, batch in world.run(60):
        match fates.choices(["heard", "lost", "doubled", "late"], [10, 1, 2, 2])[0]:
            case "heard":
                world.followers[place].hear_anything(batch)
            case "doubled":
                world.followers[place].hear_anything(batch)
                world.followers[place].hear_anything(batch)
            case "late":
                late.append((place, batch))
        if late and fates.random() < 0.5:
            who, old = late.pop(fates.randrange(len(late)))
            world.followers[who].hear_anything(old)
        for who, follower in enumerate(world.followers):
            for prompt in world.prompts:
                held, real = world.claimed(who, prompt), follower.truth(prompt)
                assert held.reusable_tokens <= real.reusable_tokens
                assert held.attention_tokens <= real.attention_tokens
        assert sum(world.index.blocks(follower.name) for follower in world.followers) <= capacity


@settings(deadline=None, max_examples=60)
@given(SEEDS)
def test_engines_with_other_blocks_and_groups_live_side_by_side(seed: int) -> None:
    shapes = [Shape(block_tokens=2), Shape(block_tokens=3), Shape(block_tokens=3, windows=(4,))]
    world = World(shapes, seed, HearingIndex())
    for place, batch in world.run(60):
        follower = world.followers[place]
        follower.hear(batch)
        if not (place == 2 and follower.seen and not follower.seen.groups.get(1)):
            for prompt in world.prompts:
                assert world.claimed(place, prompt) == follower.truth(prompt)


@settings(deadline=None, max_examples=30)
@given(SEEDS)
def test_after_everybody_has_left_nothing_is_kept(seed: int) -> None:
    shape = SHAPES["everything"]
    world = World([shape] * ENGINES, seed, new_index(shape))
    for place, batch in world.run(60):
        world.followers[place].hear(batch)
    for follower in world.followers:
        world.index.drop(follower.name)
        world.index.drop(follower.name)
    stats = world.index.stats()
    assert (stats.instances, stats.blocks, stats.different_blocks, stats.block_sizes) == (0, 0, 0, ())
    assert world.index.chains(range(100)).by_block_tokens == {}
    # Nothing of them is left in the numbers that the next ones get either.
    for engine, follower in zip(world.engines, world.followers, strict=True):
        engine.restart()
        follower.next, follower.seen = 0, None
        engine.serve(world.prompts[0])
        engine.end_step()
        for batch in engine.take():
            follower.hear(batch)
    for place, follower in enumerate(world.followers):
        for prompt in world.prompts:
            assert world.claimed(place, prompt) == follower.truth(prompt)


def test_what_an_engine_lets_go_of_leaves_nothing_behind() -> None:
    world = World([SHAPES["everything"]], 1, new_index(SHAPES["everything"]))
    (engine,), (follower,) = world.engines, world.followers
    for prompt in world.prompts:
        engine.serve(prompt)
        engine.serve(prompt, again=True)
    while any(count for keys in engine.holdings.groups.values() for count in keys.values()):
        engine.evict()
    engine.end_step()
    for batch in engine.take():
        follower.hear(batch)
    stats = world.index.stats()
    assert (stats.blocks, stats.different_blocks, stats.unlinked) == (0, 0, 0)


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.integers(14, 40))
def test_hits_announced_as_new_blocks_never_make_the_index_claim_too_much(seed: int, blocks: int) -> None:
    """As vLLM does, the engine evicts only when all its blocks are in use."""
    world = World([SHAPES["dense"]], seed, new_index(SHAPES["dense"]))
    (engine,), (follower,) = world.engines, world.followers
    world.index.learn_size(follower.name, blocks)
    for _ in range(60):
        prompt = world.random.choice(world.prompts)[: world.random.randint(1, 14)]
        if world.random.random() < 0.5:
            engine.announce_again(prompt)
        else:
            engine.serve(prompt, chunk_blocks=1, again=world.random.random() < 0.3, room=blocks)
        engine.end_step()
        for batch in engine.take():
            follower.hear(batch)
        for each in world.prompts:
            held, real = world.claimed(0, each), follower.truth(each)
            assert held.attention_tokens <= real.attention_tokens
