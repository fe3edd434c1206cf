"""The prompts of the demo: English prose that every Python installation carries, cut the same way every time.

The text is Python's own language reference as `help()` knows it (`pydoc_data.topics`).
"""

import functools
import re
from dataclasses import dataclass

# Tokens of a prompt that stands for itself, in the order of sending; 2,300 comes before what shares its beginning.
# Three are over the 2,000 uncached tokens of examples/local.yaml; slow cores prefill 600 tokens in a second.
_SHORT = (100, 600, 1200)
_FIRST_LONG = 2300
_SHARED, _OWN = 1280, 2150
LONGEST_TOKENS = 4000

_TYPOGRAPHIC = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "–": "-", "—": "--"})


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt's purpose, and its text."""

    label: str
    text: str


def demo_prompts(chars_per_token: float = 1.0) -> tuple[DemoPrompt, ...]:
    """Six prompts of 100 to 4,000 tokens, for a tokenizer that makes a token of `chars_per_token` characters.

    With a byte-level tokenizer (1.0) the lengths are exact; else each ends with a word, so it is a little shorter. Two
    prompts share their first 1,280 tokens; no others share anything.

    Raises:
        ValueError: `chars_per_token` is so large that the text doesn't suffice.
    """
    reader = _Reader(chars_per_token)
    shortest, short, medium = (reader.passage(tokens) for tokens in _SHORT)
    first = reader.passage(_FIRST_LONG)
    shared = reader.chars(_SHARED)
    # From the first character on that differs from the first document's, so that they share this much and no more.
    second = first[:shared] + reader.passage(_OWN, unlike=first[shared])
    longest = reader.passage(LONGEST_TOKENS)
    return (
        DemoPrompt("a question", shortest),
        DemoPrompt("a page", short),
        DemoPrompt("a long document", first),
        DemoPrompt("some pages", medium),
        DemoPrompt("its beginning, another end", second),
        DemoPrompt("the longest", longest),
    )


@functools.cache
def corpus() -> str:
    """All topics in the order of their names, in ASCII, so that a character is one byte."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return text.translate(_TYPOGRAPHIC).encode("ascii", "ignore").decode("ascii")


class _Reader:
    """Reads the corpus from front to back, each passage from the beginning of a paragraph."""

    def __init__(self, chars_per_token: float) -> None:
        self._chars_per_token = chars_per_token
        self._position = 0

    def chars(self, tokens: int) -> int:
        return round(tokens * self._chars_per_token)

    def passage(self, tokens: int, unlike: str = "") -> str:
        """The next passage; not one that begins with the character `unlike`."""
        text = corpus()
        while unlike and text[self._position : self._position + 1] == unlike:
            self._next_paragraph(self._position)
        end = self._position + self.chars(tokens)
        if end > len(text):
            raise ValueError(
                f"the demo's text has {len(text)} characters, too few at {self._chars_per_token:.1f} per token"
            )
        passage = text[self._position : end]
        if self._chars_per_token > 1:
            # Who can write words begins with one.
            passage = re.sub(r"\s+\S*$", "", text[self._position : end + 1])
        self._next_paragraph(end)
        return passage

    def _next_paragraph(self, position: int) -> None:
        paragraph = corpus().find("\n\n", position)
        self._position = len(corpus()) if paragraph < 0 else paragraph + 2
