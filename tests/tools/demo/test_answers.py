"""Answers for people: on one line each, and nothing in them that a terminal would obey."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.tools.demo.display import on_one_line


@given(st.text())
def test_one_line_that_only_prints(text: str) -> None:
    shown = on_one_line(text)
    assert shown.isprintable()
    assert "  " not in shown and shown == shown.strip()


@given(st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1), min_size=1))
def test_words_stay(words: list[str]) -> None:
    assert on_one_line("\n".join(words)) == " ".join(words)
