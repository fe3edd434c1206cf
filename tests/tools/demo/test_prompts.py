"""The demo's prompts are what the table says of them."""

from itertools import combinations

import pytest

from prfaas.tools.demo.prompts import corpus, demo_prompts

LENGTHS = (100, 600, 2300, 1200, 3430, 4000)
# A word and the spaces before it.
LONGEST_WORD = 40


def test_lengths_in_byte_tokens() -> None:
    assert tuple(len(prompt.text.encode()) for prompt in demo_prompts()) == LENGTHS


@pytest.mark.parametrize("chars_per_token", [3.6, 4.0])
def test_where_tokens_are_longer_each_ends_with_a_word(chars_per_token: float) -> None:
    for prompt, tokens in zip(demo_prompts(chars_per_token), LENGTHS, strict=True):
        assert 0 <= tokens * chars_per_token - len(prompt.text) <= 2 * LONGEST_WORD
        end = prompt.text[-60:]
        assert any(f"{end}{space}" in corpus() for space in (" ", "\n"))


def _shared(one: str, other: str) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_exactly_two_share_a_long_beginning() -> None:
    texts = [prompt.text for prompt in demo_prompts()]
    shared = {(i, j): _shared(texts[i], texts[j]) for i, j in combinations(range(len(texts)), 2)}
    assert shared.pop((2, 4)) == 1280
    # Less than any engine's block, so that nothing is reused by accident.
    assert max(shared.values()) < 16


def test_the_same_every_time_and_all_english() -> None:
    corpus.cache_clear()
    first = demo_prompts()
    corpus.cache_clear()
    assert demo_prompts() == first
    for prompt in first:
        words = prompt.text.lower().split()
        assert sum(word in {"the", "a", "is", "of", "to", "and", "in"} for word in words) > len(words) / 12


def test_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"too few at 100\.0 per token"):
        demo_prompts(100.0)
