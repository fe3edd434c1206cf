"""Sentences about peers, as an engine reports them to observers."""

from collections.abc import Mapping

MAX_SENTENCE_CHARS = 400
# What all sentences of one report may take: it shares a STATS frame of 64 KiB with others.
_ALL_SENTENCES_CHARS = 16 << 10
_MIN_SENTENCE_CHARS = 60


def legible(text: str, max_chars: int = MAX_SENTENCE_CHARS) -> str:
    """Another side's text as it may stand in a log line: printable ASCII without line ends, not longer than that."""
    escaped = text[:max_chars].encode("unicode_escape").decode("ascii")
    return escaped if len(escaped) <= max_chars else escaped[: max_chars - 3] + "..."


def bounded_sentences(sentences: Mapping[str, str]) -> dict[str, str]:
    """Peer → sentence as it is reported: the more peers, the shorter each; at most some hundred."""
    most = _ALL_SENTENCES_CHARS // _MIN_SENTENCE_CHARS
    each_chars = max(
        _MIN_SENTENCE_CHARS, min(MAX_SENTENCE_CHARS, _ALL_SENTENCES_CHARS // (len(sentences) or 1))
    )
    return {peer: legible(sentence, each_chars) for peer, sentence in list(sentences.items())[:most]}
