"""The packed translation of engine hashes against a dict, through growth and removal."""

from array import array
from random import Random

import pytest

from prfaas.core.prefix.hashing import WORDS, PackedHashMap


def engine_hashes(kind: str, random: Random) -> int:
    """Random ones, and the worst: neighbours, alike in their low or in their high bits."""
    match kind:
        case "random":
            return random.getrandbits(64)
        case "counted":
            return random.randrange(1 << 17)
        case _:
            return random.randrange(1 << 17) << 47


@pytest.mark.parametrize("kind", ["random", "counted", "shifted"])
def test_pairs_are_a_dict(kind: str) -> None:
    random = Random(5)
    pairs, model = PackedHashMap(), dict[int, tuple[int, int]]()
    for _ in range(350):
        run = list({engine_hashes(kind, random) for _ in range(random.randrange(1, 80))} - model.keys())
        parent = random.getrandbits(60)
        hashes = [random.getrandbits(60) for _ in run]
        if run:
            pairs.add(array(WORDS, run), parent, hashes)
            model.update(zip(run, zip([parent, *hashes], hashes, strict=False), strict=True))
        for each in random.sample(list(model), min(len(model), random.choice((0, 5, 40)))):
            assert pairs.pop_each([each]) == [model.pop(each)]
            assert pairs.get(each) is None
        for each in random.sample(list(model), min(len(model), 5)):
            assert pairs.get(each) == model[each][1]
        assert pairs.get(engine_hashes("random", random)) is None
        assert len(pairs) == len(model)
    assert sorted(pairs.hashes()) == sorted(found for _, found in model.values())
    unknown = [random.getrandbits(64) for _ in range(100)]
    some = random.sample(list(model), 100)
    assert pairs.pop_each([*unknown, *some]) == [model[each] for each in some]
    assert pairs.pop_each(sorted(model)) == [model[each] for each in sorted(model) if each not in some]
    assert len(pairs) == 0
    assert pairs.hashes() == []
