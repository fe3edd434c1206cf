"""Sentences about peers, as an engine reports them to observers."""

from collections.abc import Mapping

from prfaas.serving.transport.handshake import MAX_SENTENCE_CHARS, legible

# What all sentences of one report may take: it shares a STATS frame of 64 KiB with others.
_ALL_SENTENCES_CHARS = 16 << 10
_MIN_SENTENCE_CHARS = 60


def bounded_sentences(sentences: Mapping[str, str]) -> dict[str, str]:
    """Peer → sentence as it is reported: the more peers, the shorter each; at most some hundred."""
    most = _ALL_SENTENCES_CHARS // _MIN_SENTENCE_CHARS
    each_chars = max(
        _MIN_SENTENCE_CHARS, min(MAX_SENTENCE_CHARS, _ALL_SENTENCES_CHARS // (len(sentences) or 1))
    )
    return {peer: legible(sentence, each_chars) for peer, sentence in list(sentences.items())[:most]}
