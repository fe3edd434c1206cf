"""What is expected somewhere: found while it lives, forgotten after, never more than was sent."""

from typing import NoReturn

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.prefix.hashing import PromptChains
from prfaas.serving.control.prefix_knowledge import PendingPrefixes

BLOCK = 16


def chains(*hashes: int) -> PromptChains:
    return PromptChains(len(hashes) * BLOCK + 1, {BLOCK: hashes})


def test_found_until_it_expires() -> None:
    expected = PendingPrefixes(lifetime_s=4.0)
    expected.add("a", chains(1, 2, 3), 100.0)
    assert expected.match(chains(1, 2, 9), 104.0) == {"a": 2 * BLOCK}
    assert expected.match(chains(5, 2), 100.0) == {}
    assert expected.match(chains(1, 2, 3), 106.1) == {}
    assert len(expected) == 0


def test_dropped_with_its_instance() -> None:
    expected = PendingPrefixes()
    expected.add("a", chains(1, 2), 0.0)
    expected.add("b", chains(1), 0.0)
    expected.drop("a")
    assert expected.match(chains(1, 2), 0.0) == {"b": BLOCK}


def test_bounded() -> None:
    expected = PendingPrefixes(most_blocks=10)
    for start in range(0, 1000, 10):
        expected.add("a", chains(*range(start, start + 8)), 0.0)
        assert len(expected) <= 30
    assert expected.match(chains(*range(990, 998)), 0.0) == {"a": 8 * BLOCK}


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def hashed(prompt: list[int]) -> tuple[int, ...]:
    """Equal hashes mean equal prefixes, as with real ones."""
    return tuple(hash(tuple(prompt[: end + 1])) for end in range(len(prompt)))


@given(st.lists(st.tuples(st.sampled_from("abc"), PROMPTS), max_size=12), PROMPTS, st.sampled_from("abcd"))
def test_match_is_the_longest_common_prefix(
    sent: list[tuple[str, list[int]]], prompt: list[int], dropped: str
) -> None:
    expected = PendingPrefixes()
    for instance, what in sent:
        expected.add(instance, chains(*hashed(what)), 0.0)
    expected.drop(dropped)
    wanted: dict[str, int] = {}
    for instance, what in sent:
        common = sum(1 for _ in common_prefix(what, prompt))
        if common and instance != dropped:
            wanted[instance] = max(wanted.get(instance, 0), common * BLOCK)
    assert expected.match(chains(*hashed(prompt)), 1.0) == wanted


def common_prefix(one: list[int], other: list[int]) -> list[int]:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


class NotSearched(dict[int, int]):
    def items(self) -> NoReturn:
        raise AssertionError("searched")


def test_who_was_sent_nothing_is_forgotten_at_once_however_often() -> None:
    expected = PendingPrefixes()
    expected.add("b", chains(1), 0.0)
    for _ in range(100):
        expected.add("a", chains(1, 2), 0.0)
        expected.drop("a")
    assert expected.match(chains(1, 2), 0.0) == {"b": BLOCK}
    # Its place is taken again: a mask has a bit for each instance, not for each time.
    assert max(block.bit_length() for each in expected._generations for block in each.values()) <= 2
    expected._generations = [NotSearched(each) for each in expected._generations]
    expected.drop("a")
    expected.drop("nobody")
    assert expected.match(chains(1, 2), 0.0) == {"b": BLOCK}
