"""Sentences about peers, as an engine reports them to observers."""

from collections.abc import Mapping

MAX_SENTENCE_CHARS = 400
# Most characters of one report's sentences, which share a STATS frame of 64 KiB with others.
_ALL_SENTENCES_CHARS = 16 << 10
_MIN_SENTENCE_CHARS = 60


def legible(text: str, max_chars: int = MAX_SENTENCE_CHARS) -> str:
    """Make a peer's text fit for a log line: printable ASCII without line ends, at most `max_chars`."""
    escaped = text[:max_chars].encode("unicode_escape").decode("ascii")
    return escaped if len(escaped) <= max_chars else escaped[: max_chars - 3] + "..."


def bounded_sentences(sentences: Mapping[str, str]) -> dict[str, str]:
    """Bound the sentences of a report, by peer: the more peers, the shorter each; at most some hundred."""
    most = _ALL_SENTENCES_CHARS // _MIN_SENTENCE_CHARS
    each_chars = max(
        _MIN_SENTENCE_CHARS, min(MAX_SENTENCE_CHARS, _ALL_SENTENCES_CHARS // (len(sentences) or 1))
    )
    return {peer: legible(sentence, each_chars) for peer, sentence in list(sentences.items())[:most]}
