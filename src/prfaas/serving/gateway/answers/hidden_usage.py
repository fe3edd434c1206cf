"""Usage without what engines held before a request: it would tell a client which prompts others have sent."""

import re

import orjson

# In generated text the quotes would be escaped. Such an object has at most one more level in it.
_DETAILS = re.compile(rb'("(?:prompt|input)_tokens_details":\s?)(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_MESSAGE_USAGE = re.compile(rb'("usage":\s?)(\{[^{}]*"cache_[^{}]*\})')
_NUMBER = re.compile(rb"\d+")
_LONGEST_BYTES = 1024


def without_cached_tokens(answer: bytes) -> bytes:
    """An answer, or whole events of it, as of an engine that does not count cached tokens of prompts."""
    if b'"cache' not in answer:
        return answer
    return _MESSAGE_USAGE.sub(_whole_input, _DETAILS.sub(_nothing_cached, answer))


def safe_end(event: bytes) -> int:
    """Where an event may be cut so that no usage is, in case that it goes on."""
    found = event.find(b'_tokens_details"', max(len(event) - 2 * _LONGEST_BYTES, 0))
    return max((len(event) if found < 0 else found) - _LONGEST_BYTES, 0)


def _nothing_cached(match: re.Match[bytes]) -> bytes:
    # Responses have these numbers always.
    return match[1] + (_NUMBER.sub(b"0", match[2]) if match[1].startswith(b'"input') else b"null")


def _whole_input(match: re.Match[bytes]) -> bytes:
    """Messages count cached tokens beside the others."""
    try:
        usage = orjson.loads(match[2])
    except ValueError:
        # Not an engine's: theirs has no braces in strings.
        return match[0]
    for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
        usage["input_tokens"] = usage.get("input_tokens", 0) + (usage.pop(name, 0) or 0)
    return match[1] + orjson.dumps(usage)
