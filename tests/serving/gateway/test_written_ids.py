"""Ids that go through as written: the same object as a JSON parser makes of the same bytes, or no short cut."""

import contextlib
import json
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
    WrittenIds,
    decode_body,
    ids_json,
    parse_body,
    parse_with_ids,
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


def plain(body: Any) -> Any:
    """`body` with lists where there are written ids."""
    if isinstance(body, dict) and isinstance(body.get("prompt"), WrittenIds):
        written = body["prompt"]
        assert orjson.loads(written.json) == written.ids.tolist()
        return {**body, "prompt": written.ids.tolist()}
    return body


def long(ids: Sequence[int]) -> list[int]:
    return list(ids) * (MIN_BYTES // len(ids) + 1)


@settings(deadline=None)
@given(IDS, OTHERS, OTHERS, SPACE, SPACE, SPACE, st.sampled_from((b",", b", ")))
def test_the_short_cut_parses_to_the_same_object(
    ids: list[int], before: dict[str, Any], after: dict[str, Any], a: bytes, b: bytes, c: bytes, comma: bytes
) -> None:
    array_text = b"[" + c + comma.join(str(i).encode() for i in ids) + a + b"]"
    head, tail = orjson.dumps(before)[:-1], orjson.dumps(after)[1:]
    raw = head + (b"," if before else b"") + b'"prompt"' + a + b":" + b + array_text
    raw += (b"," if after else b"") + tail
    found = parse_with_ids(raw)
    assert found is None or plain(found) == orjson.loads(raw)
    if not before and not after:
        assert found is not None


@settings(deadline=None, max_examples=400)
@given(
    st.lists(
        st.sampled_from((*'0123456789,, -.e[]"{}', "00", ", ", ",0", "4294967296", "9" * 30)), max_size=12
    )
)
def test_an_odd_array_is_read_as_a_json_parser_reads_it(pieces: list[str]) -> None:
    raw = f'{{"prompt":[{"".join(pieces)}]}}'.encode()
    try:
        expected = orjson.loads(raw)
    except orjson.JSONDecodeError:
        with contextlib.suppress(orjson.JSONDecodeError):
            assert parse_with_ids(raw) is None
        return
    found = parse_with_ids(raw)
    assert found is None or plain(found) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":[1,2],"prompt":[3,4]}',
        b'{"prompt":[1,2],"pr\\u006fmpt":"x"}',
        b'{"a":{"prompt":[1,2]}}',
        b'{"a":{"prompt":[1,2]},"prompt":[3]}',
        b'{"a\\"prompt":[1,2],"prompt":[3]}',
        b'[{"prompt":[1,2]}]',
        b'{"prompt":[01,2]}',
        b'{"prompt":[1,,2]}',
        b'{"prompt":[1,2,]}',
        b'{"prompt":[,1]}',
        b'{"prompt":[1 2,3]}',
        b'{"prompt":[1,-2]}',
        b'{"prompt":[1,4294967296]}',
        b'{"prompt":[99999999999999999999]}',
        b'{"prompt":[1.5]}',
        b'{"prompt":[]}',
        b'{"prompt":[[1,2]]}',
        b'{"prompt":["a"]}',
        b'{"prompt":[1,2',
        b'{"prompt"',
        b'{"prompt":',
        b"{}",
    ],
)
def test_anything_but_plain_ids_at_the_top_is_left_to_the_parser(raw: bytes) -> None:
    assert parse_with_ids(raw) is None


def test_a_long_array_is_checked_to_its_end() -> None:
    ids = [7] * 200_000
    good = orjson.dumps({"prompt": ids})
    assert plain(parse_with_ids(good)) == {"prompt": ids}
    for bad in (b",]", b",4294967296]", b",07]", b",,7]", b",7 7]", b",1e3]"):
        assert parse_with_ids(good.replace(b"]", bad)) is None
    # The comma too many is where a piece ends.
    for pieces in range(1, 4):
        count = (_PIECE_BYTES // 2 + 1) * pieces
        assert parse_with_ids(b'{"prompt":[' + b"7," * count + b"]}") is None


def test_a_broken_rest_is_refused_as_ever() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_body(orjson.dumps({"prompt": long([1])})[:-1] + b',"a":}')


@settings(deadline=None)
@given(IDS, OTHERS, st.booleans(), st.booleans())
def test_the_spliced_bodies_say_what_bodies_written_anew_say(
    ids: list[int], others: dict[str, Any], spaced: bool, ticketed: bool
) -> None:
    body = {"kv_transfer_params": {"evil": 1}, **others, "prompt": long(ids), "model": "m"}
    raw = json.dumps(body).encode() if spaced else orjson.dumps(body)
    parsed = parse_body(raw)
    prompt = prompt_of(Endpoint.COMPLETIONS, parsed)
    assert isinstance(prompt, TokenPrompt) and prompt.token_ids == array("I", body["prompt"])
    params = {"prfaas": "sealed"} if ticketed else {}
    spliced = decode_body(strip_owned(parsed), params, None, "salt")
    assert orjson.loads(spliced) == orjson.loads(decode_body(strip_owned(body), params, None, "salt"))
    assert spliced.count(b'"prompt":') == orjson.dumps(body).count(b'"prompt":')
    assert orjson.loads(prefill_body("m", prompt.token_ids[:-1], "t"))["prompt"] == body["prompt"][:-1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_ids_are_written_alike_from_lists_and_arrays(ids: list[int]) -> None:
    assert ids_json(ids) == ids_json(array("I", ids)) == orjson.dumps(ids)
