"""Keys name prefixes: equal ones exactly where tokens, salt and adapter are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.pool.keys import KEY_BYTES, KeyChain, page_id

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def chain(tokens: list[int], step: int = 4, salt: str = "", adapter: str = "") -> KeyChain:
    keys = KeyChain(step, salt, adapter)
    keys.extend(tokens)
    return keys


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 70), max_size=4), step=st.integers(1, 9))
def test_a_chain_does_not_depend_on_how_the_tokens_came(
    tokens: list[int], cuts: list[int], step: int
) -> None:
    grown = KeyChain(step)
    for cut in sorted(cuts):
        grown.extend(tokens[:cut])
    grown.extend(tokens)
    whole = chain(tokens, step)
    assert grown.keys == whole.keys
    assert len(whole.keys) == len(tokens) // step
    assert whole.num_tokens == len(whole.keys) * step


@given(tokens=TOKENS, more=TOKENS, place=st.integers(0, 69))
def test_keys_are_equal_as_far_as_the_prefixes_are(tokens: list[int], more: list[int], place: int) -> None:
    one, longer = chain(tokens), chain(tokens[: len(tokens) // 4 * 4] + more)
    assert longer.keys[: len(one.keys)] == one.keys
    if place < len(one.keys) * 4:
        changed = [*tokens]
        changed[place] ^= 1
        other = chain(changed).keys
        assert other[: place // 4] == one.keys[: place // 4]
        assert not set(other[place // 4 :]) & set(one.keys)


def test_tenants_and_adapters_share_nothing() -> None:
    chains = [
        chain([1, 2, 3, 4], salt=salt, adapter=adapter)
        for salt, adapter in (
            ("", ""),
            ("a", ""),
            ("", "a"),
            ("ab", "c"),
            ("a", "bc"),
            ("1:a", ""),
            ("", "1:a"),
        )
    ]
    assert len({each.keys[0] for each in chains}) == len(chains)


def test_key_at_and_packed_are_the_keys() -> None:
    keys = chain(list(range(10)))
    assert keys.packed(0, 2) == b"".join(keys.keys)
    assert keys.packed(1, 2) == keys.key_at(8) == keys.keys[1]
    assert len(keys.key_at(4)) == KEY_BYTES
    for end in (0, 3, 10, 12, -4):
        with pytest.raises(ValueError, match="no key at token"):
            keys.key_at(end)


def test_keys_stay_what_they_are() -> None:
    """Pages on disk are found by them after an upgrade: another value needs another fingerprint of the pool."""
    assert (
        chain([1, 2, 3, 4], salt="tenant", adapter="lora").keys[0].hex() == "dd1321de85e1a1346904a07b453448e5"
    )


def test_a_page_is_named_by_key_and_group() -> None:
    key = chain([1, 2, 3, 4]).keys[0]
    assert page_id(key, 3) == key + b"\x03"
    assert len(page_id(key, 0)) == KEY_BYTES + 1


def test_what_is_not_a_token_id_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KeyChain(0)
    with pytest.raises(OverflowError):
        chain([1, 2, 3, -1])
