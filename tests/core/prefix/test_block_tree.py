"""The tree of blocks against plain sets, whatever is evicted: heads before tails, branches, several instances."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.prefix.block_tree import NO_PARENT, BlockTree, held_bit

# A small forest: the number of a block says its ancestors (27 is the second child of the first child of 1 ...).
BRANCHES, DEPTH = 2, 5


def ancestors(block: int) -> list[int]:
    chain = []
    while block:
        chain.append(block)
        block //= BRANCHES
    return chain[::-1]


LEAVES = range(BRANCHES ** (DEPTH - 1), BRANCHES**DEPTH)


def check(tree: BlockTree, slots: list[int], held: list[set[int]]) -> None:
    for leaf in LEAVES:
        chain = ancestors(leaf)
        found = dict.fromkeys(slots, 0)
        lengths = tree.lengths(chain)
        assert [blocks for _, blocks in lengths] == sorted((blocks for _, blocks in lengths), reverse=True)
        for bits, blocks in lengths:
            for slot in slots:
                if bits & held_bit(slot):
                    assert found[slot] == 0
                    found[slot] = blocks
        for slot, mine in zip(slots, held, strict=True):
            missing = (place for place, block in enumerate(chain) if block not in mine)
            assert found[slot] == next(missing, len(chain))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**9))
def test_lengths_are_what_a_scan_finds(seed: int) -> None:
    random = Random(seed)
    tree = BlockTree()
    slots = [tree.open_slot() for _ in range(3)]
    held: list[set[int]] = [set(), set(), set()]
    for _ in range(60):
        who = random.randrange(3)
        slot, mine = slots[who], held[who]
        if random.random() < 0.4:
            chain = ancestors(random.choice(LEAVES))
            start = next((place for place, block in enumerate(chain) if block not in mine), len(chain))
            start = random.choice(
                [place for place in range(start + 1) if not place or chain[place - 1] in mine]
            )
            run = chain[start : random.randint(start + 1, len(chain) + 1)]
            if run:
                already = tree.store(slot, chain[start - 1] if start else NO_PARENT, run)
                assert already == [place for place, block in enumerate(run) if block in mine]
                mine.update(run)
        elif mine:
            # Mostly as engines do, from a tail on; sometimes anything.
            leaving = [random.choice(sorted(mine))]
            if random.random() < 0.5:
                leaving = [block for block in reversed(ancestors(leaving[0])) if block in mine]
                leaving = leaving[: random.randint(1, len(leaving))]
            tree.remove(slot, [(block // BRANCHES, block) for block in leaving])
            mine.difference_update(leaving)
        check(tree, slots, held)
    # One is cleared, one leaves and another comes in its place, one lets go of everything block by block.
    tree.clear(slots[0], sorted(held[0]))
    held[0].clear()
    tree.close_slot(slots[1], sorted(held[1]))
    held[1].clear()
    check(tree, slots, held)
    assert tree.open_slot() == slots[1]
    check(tree, slots, held)
    leaving = random.sample(sorted(held[2]), len(held[2]))
    tree.remove(slots[2], [(block // BRANCHES, block) for block in leaving])
    assert len(tree) == 0


def test_more_instances_than_a_machine_word_has_bits() -> None:
    tree = BlockTree()
    slots = [tree.open_slot() for _ in range(100)]
    for place, slot in enumerate(slots):
        tree.store(slot, NO_PARENT, list(range(1, place + 2)))
    lengths = tree.lengths(range(1, 101))
    assert lengths == [(held_bit(slot), place + 1) for place, slot in reversed(list(enumerate(slots)))]
