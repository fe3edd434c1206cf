"""Long lists of token ids: read by their type, to the same object as a JSON parser makes, and written alike."""

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.bodies import (
    _PIECE_BYTES,
    MIN_BYTES,
    ApiError,
    decode_body,
    ids_json,
    parse_body,
    prefill_body,
    strip_owned,
)
from prfaas.serving.gateway.prompts.prompt import Endpoint, TokenPrompt, prompt_of

IDS = st.lists(st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 11)), min_size=1, max_size=40)
OTHERS = st.dictionaries(
    st.sampled_from(("model", "max_tokens", "x", 'a"prompt', "prompt2", "nested", "é")),
    st.one_of(
        st.integers(0, 9),
        st.just('"prompt":[1,2]'),
        st.fixed_dictionaries({"prompt": st.lists(st.integers(0, 9), max_size=3)}),
        st.text(max_size=5),
    ),
    max_size=4,
)
SPACE = st.sampled_from((b"", b" ", b"\n", b"\t \r\n"))
# Behind it the way of long bodies is taken.
LONG = b" " * MIN_BYTES


def plain(body: Any) -> Any:
    """`body` with a list where it has an array."""
    return {**body, "prompt": body["prompt"].tolist()} if isinstance(body.get("prompt"), array) else body


def long(ids: Sequence[int]) -> list[int]:
    return list(ids) * (MIN_BYTES // len(ids) + 1)


@settings(deadline=None)
@given(IDS, OTHERS, OTHERS, SPACE, SPACE, SPACE, st.sampled_from((b",", b", ")))
def test_a_long_body_is_the_same_object(
    ids: list[int], before: dict[str, Any], after: dict[str, Any], a: bytes, b: bytes, c: bytes, comma: bytes
) -> None:
    array_text = b"[" + c + comma.join(str(i).encode() for i in ids) + a + b"]"
    head, tail = orjson.dumps(before)[:-1], orjson.dumps(after)[1:]
    raw = head + (b"," if before else b"") + b'"prompt"' + a + b":" + b + array_text
    raw += (b"," if after else b"") + LONG + tail
    found = parse_body(raw)
    assert isinstance(found["prompt"], array) and plain(found) == orjson.loads(raw)


@settings(deadline=None, max_examples=400)
@given(
    st.lists(
        st.sampled_from((*'0123456789,, -.e[]"{}', "00", ", ", ",0", "4294967296", "9" * 30)), max_size=12
    )
)
def test_an_odd_list_is_read_as_a_json_parser_reads_it(pieces: list[str]) -> None:
    raw = b'{"prompt":[%b]%b}' % ("".join(pieces).encode(), LONG)
    try:
        expected = orjson.loads(raw)
    except orjson.JSONDecodeError:
        with pytest.raises(ApiError, match="not valid JSON"):
            parse_body(raw)
        return
    assert plain(parse_body(raw)) == expected


@pytest.mark.parametrize(
    ("raw", "is_array"),
    [
        (b'{"prompt":[1,2],"prompt":[3,4]', True),
        (b'{"prompt":[1,2],"pr\\u006fmpt":"x"', False),
        (b'{"a":{"prompt":[1,2]}', False),
        (b'{"a":{"prompt":[1,2]},"prompt":[3]', True),
        (b'{"a\\"prompt":[1,2],"prompt":[3]', True),
        (b'{"prompt":[1,-2]', False),
        (b'{"prompt":[1,4294967296]', False),
        (b'{"prompt":[99999999999999999999]', False),
        (b'{"prompt":[1.5]', False),
        (b'{"prompt":[]', False),
        (b'{"prompt":[[1,2]]', False),
        (b'{"prompt":["a"]', False),
        (b'{"prompt":[true]', False),
        (b'{"prompt":null', False),
        (b'{"prompt":"1,2"', False),
    ],
)
def test_only_ids_at_the_top_become_an_array(raw: bytes, is_array: bool) -> None:
    raw += LONG + b"}"
    found = parse_body(raw)
    assert isinstance(found.get("prompt"), array) is is_array
    assert plain(found) == orjson.loads(raw)


def test_a_long_list_is_checked_to_its_end() -> None:
    ids = [7] * 200_000
    good = orjson.dumps({"prompt": ids})
    assert plain(parse_body(good)) == {"prompt": ids}
    assert isinstance(parse_body(good.replace(b"]", b",4294967296]"))["prompt"], list)
    for bad in (b",]", b",07]", b",,7]", b",7 7]"):
        with pytest.raises(ApiError, match="not valid JSON"):
            parse_body(good.replace(b"]", bad))
    # The comma too many is where a piece ends.
    for pieces in range(1, 4):
        for count in range((_PIECE_BYTES // 2) * pieces - 1, (_PIECE_BYTES // 2) * pieces + 3):
            with pytest.raises(ApiError, match="not valid JSON"):
                parse_body(b'{"prompt":[' + b"7," * count + b"]}")


def test_a_broken_rest_is_refused_as_ever() -> None:
    for broken in (b',"a":}', b',"a":"\xff"}', b',"a":1', b',"a":1}x'):
        with pytest.raises(ApiError, match="not valid JSON"):
            parse_body(orjson.dumps({"prompt": long([1])})[:-1] + broken)


def test_other_values_are_counted_beside_ids() -> None:
    raw = orjson.dumps({"prompt": long([1]), "a": [1] * 50})
    assert len(parse_body(raw, 60)["a"]) == 50
    with pytest.raises(ApiError, match="more than 40 JSON values"):
        parse_body(raw, 40)


@settings(deadline=None)
@given(IDS, OTHERS, st.booleans(), st.booleans())
def test_bodies_with_arrays_say_what_bodies_with_lists_say(
    ids: list[int], others: dict[str, Any], spaced: bool, ticketed: bool
) -> None:
    body = {"kv_transfer_params": {"evil": 1}, **others, "prompt": long(ids), "model": "m"}
    raw = json.dumps(body).encode() if spaced else orjson.dumps(body)
    parsed = parse_body(raw)
    try:
        prompt_of(Endpoint.COMPLETIONS, body)
    except ApiError as refused:
        with pytest.raises(ApiError, match=re.escape(str(refused))):
            prompt_of(Endpoint.COMPLETIONS, parsed)
        return
    prompt = prompt_of(Endpoint.COMPLETIONS, parsed)
    assert isinstance(prompt, TokenPrompt) and prompt.token_ids == array("I", body["prompt"])
    params = {"prfaas": "sealed"} if ticketed else {}
    written = decode_body(strip_owned(parsed), params, None, "salt")
    assert orjson.loads(written) == orjson.loads(decode_body(strip_owned(body), params, None, "salt"))
    assert ids_json(prompt.token_ids) == orjson.dumps(body["prompt"])
    assert orjson.loads(prefill_body("m", prompt.token_ids[:-1], "t"))["prompt"] == body["prompt"][:-1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_ids_are_written_alike_from_lists_and_arrays(ids: list[int]) -> None:
    assert ids_json(ids) == ids_json(array("I", ids)) == orjson.dumps(ids)
