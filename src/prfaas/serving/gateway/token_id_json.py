"""Token ids in a request body that are never made into Python's integers, nor written anew.

For 128K ids, parsing them into a list, checking each and writing the list again takes three times as long as this.
"""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

# What a token id takes in JSON, about.
JSON_BYTES_PER_TOKEN = 5

# What a token id takes in JSON, about.
JSON_BYTES_PER_TOKEN = 5

# Below it the plain way through a JSON parser costs as little.
MIN_BYTES = 8 << 10
# A piece at a time: the arrays in between stay in the processor's cache, and a thread that parses lets others run.
_PIECE_BYTES = 64 << 10
_KEY = b'"prompt"'
_SPACE = b" \t\r\n"
_ZERO, _COMMA = np.uint8(ord("0")), np.uint8(ord(","))
_TRUE = np.array([True])
# Stands in for the ids while the rest is parsed. No client can know it, so only our cut can have put it there.
_STAND_IN = secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class WrittenIds:
    """`json` is the canonical JSON array of `ids` (uint32): no spaces, no leading zeros."""

    ids: "array[int]"
    json: bytes


def parse_with_ids(raw: bytes) -> object | None:
    """What `orjson.loads(raw)` gives, with the array of ids under the top-level key "prompt" as WrittenIds.

    None where that can't be had this way (no such array, other numbers in it, an odd spelling): parse it plainly then.
    Raises orjson.JSONDecodeError when `raw` is not JSON.
    """
    key = raw.find(_KEY)
    colon = _skip_space(raw, key + len(_KEY))
    start = _skip_space(raw, colon + 1)
    if key < 0 or raw[colon : colon + 1] != b":" or raw[start : start + 1] != b"[":
        return None
    end = raw.find(b"]", start)
    written = _parse(raw[start + 1 : end]) if end > 0 else None
    if written is None:
        return None
    body = orjson.loads(b'%b"%b"%b' % (raw[:start], _STAND_IN.encode(), raw[end + 1 :]))
    # Anything else than the effective "prompt" of the top level was cut: nested, or given twice.
    if not isinstance(body, dict) or body.get("prompt") != _STAND_IN:
        return None
    body["prompt"] = written
    return body


def ids_json(ids: Sequence[int]) -> bytes:
    """The canonical JSON array of `ids`; quickest for an `array("I")`."""
    if isinstance(ids, array) and ids.typecode == "I":
        return orjson.dumps(np.frombuffer(ids, np.uint32), option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.dumps(ids)


def _skip_space(raw: bytes, at: int) -> int:
    while raw[at : at + 1] and raw[at] in _SPACE:
        at += 1
    return at


def _parse(text: bytes) -> WrittenIds | None:
    """The ids between the brackets; None unless all are plain decimal numbers within 0 .. 2^32 - 1."""
    text = text.strip(_SPACE)
    if b" " in text:
        text = text.replace(b", ", b",")
    if not text or text.endswith(b","):
        return None
    ids = array("I")
    at = 0
    while at < len(text):
        end = text.find(b",", at + _PIECE_BYTES)
        piece = text[at : end if end >= 0 else len(text)]
        if not _is_canonical(piece):
            return None
        # What is too large for 64 bits becomes the largest number of 64 bits.
        values = np.fromstring(piece, dtype=np.int64, sep=",")
        if int(values.max()) >= 1 << 32:
            return None
        ids.frombytes(values.astype(np.uint32).tobytes())
        at += len(piece) + 1
    return WrittenIds(ids, b"[%b]" % text)


def _is_canonical(text: bytes) -> bool:
    """Whether `text` is decimal numbers without leading zeros and single commas in between."""
    if not text:
        return False
    characters = np.frombuffer(text, np.uint8)
    is_comma = characters == _COMMA
    # Unsigned: what comes before "0" becomes large.
    if not np.all(is_comma | (characters - _ZERO < 10)):
        return False
    # As if a comma stood before and after.
    after_comma = np.concatenate((_TRUE, is_comma))
    before_comma = np.concatenate((is_comma, _TRUE))
    if np.any(after_comma & before_comma):
        return False
    leading_zero = after_comma[:-1] & (characters == _ZERO) & ~before_comma[1:]
    return not np.any(leading_zero)
