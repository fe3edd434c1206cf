"""The trust boundary: what of a client's body reaches an engine, and what of an engine's answer the client."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway import bodies
from prfaas.serving.gateway.bodies import (
    ApiError,
    check_values,
    decode_body,
    parse_body,
    prefill_body,
    strip_owned,
    without_transfer_params,
)

STEERING = (
    "kv_transfer_params",
    "ec_transfer_params",
    "cache_salt",
    "priority",
    "request_id",
    "nvext",
    "bootstrap_host",
    "bootstrap_room",
    "x-prfaas-route",
    "data_parallel_rank",
    "extra_args",
    "session_id",
)
CONTAINERS = ("vllm_xargs", "sampling_params", "extra_body")


def _odd(name: str) -> st.SearchStrategy[str]:
    cased = st.tuples(*(st.sampled_from((c.lower(), c.upper())) for c in name)).map("".join)
    return st.one_of(cased, cased.map(lambda n: n.replace("_", "-")), cased.map(lambda n: f" {n}\t"))


KEYS = st.one_of(
    st.text(max_size=8),
    st.sampled_from((*STEERING, *CONTAINERS, "messages", "prompt", "prfaas", "prompt_token_ids")),
    st.sampled_from((*STEERING, *CONTAINERS)).flatmap(_odd),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.text(max_size=8),
        st.just("client-bytes"),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=25,
)
BODIES = st.dictionaries(KEYS, VALUES, max_size=8)


def _names(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(name for inner in value.values() for name in _names(inner))]
    if isinstance(value, list):
        return [name for inner in value for name in _names(inner)]
    return []


def _stripped(body: dict[str, Any]) -> dict[str, Any] | None:
    """None, if it steers an engine from within a container, and that is what the refusal names."""
    inside = {
        name.strip().lower().replace("-", "_")
        for key, value in body.items()
        if key.strip().lower().replace("-", "_") in CONTAINERS
        for name in _names(value)
    }
    try:
        stripped = strip_owned(body)
    except ApiError as error:
        assert error.status == 400 and error.param is not None and error.param in error.message
        assert error.param.rsplit(".", 1)[1].strip().lower().replace("-", "_") in inside
        return None
    assert not inside & {s.replace("-", "_") for s in STEERING}
    return stripped


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=60)
@given(BODIES, st.one_of(st.none(), st.just([1, 2, 3])), st.booleans())
def test_nothing_of_the_client_reaches_the_transfer_parameters(
    body: dict[str, Any], ids: list[int] | None, ticketed: bool
) -> None:
    stripped = _stripped(parse_body(orjson.dumps(body)))
    if stripped is None:
        return
    sent = orjson.loads(decode_body(stripped, {"prfaas": "sealed"} if ticketed else {}, ids))
    ours = ({"prfaas": "sealed"} if ticketed else {}) | ({"prompt_token_ids": ids} if ids else {})
    assert sent.pop("kv_transfer_params", {}) == ours
    for key, value in sent.items():
        assert key.strip().lower().replace("-", "_") not in {s.replace("-", "_") for s in STEERING}
        if key.strip().lower().replace("-", "_") in CONTAINERS:
            names = {name.strip().lower().replace("-", "_") for name in _names(value)}
            assert not names & {s.replace("-", "_") for s in STEERING}


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None)
@given(BODIES)
def test_everything_else_passes_unchanged(body: dict[str, Any]) -> None:
    stripped = _stripped(body)
    if stripped is None:
        return
    sent = orjson.loads(decode_body(stripped, {}))
    for key, value in sent.items():
        assert key in body
        assert value == body[key]
    for key in ("messages", "prompt", "prompt_token_ids"):
        assert (key in sent) == (key in body)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=5))
def test_a_prefill_request_is_made_of_ours_alone(ids: list[int]) -> None:
    sent = orjson.loads(prefill_body("m", ids, "sealed"))
    assert sent == {
        "model": "m",
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "kv_transfer_params": {"prfaas": "sealed"},
    }


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params": null, "kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"kv_transfer_p\\u0061rams": {"remote_host": "evil"}}',
    ],
)
def test_disguises_are_seen_through(raw: bytes) -> None:
    assert b"evil" not in decode_body(strip_owned(parse_body(raw)), {})


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b'{"vllm_xargs": {"kv_transfer_params": "evil"}}', "vllm_xargs.kv_transfer_params"),
        (b'{"vllm_xargs": {"x": [{"EXTRA_ARGS": 1}]}}', "vllm_xargs.x.EXTRA_ARGS"),
        (b'{"vllm_xargs": {"kv_cache_report_mode": "full"}}', "vllm_xargs.kv_cache_report_mode"),
        (b'{"vllm-xargs": {"KV-Cache-Report_Mode": "full"}}', "vllm-xargs.KV-Cache-Report_Mode"),
        (b'{"sampling_params": {"extra_args": {"a": 1}}}', "sampling_params.extra_args"),
    ],
)
def test_who_steers_an_engine_from_within_is_told_by_which_field(raw: bytes, named: str) -> None:
    with pytest.raises(ApiError, match="steers the engine") as refusal:
        strip_owned(parse_body(raw))
    assert (refusal.value.status, refusal.value.param) == (400, named)


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _values(value: Any) -> int:
    return 1 + sum(map(_values, _inner(value)))


def _empty(value: Any) -> int:
    """Lists and objects without anything in them: each looks as if it had a value."""
    return (value == [] or value == {}) + sum(map(_empty, _inner(value)))


JSONS = st.recursive(
    st.one_of(st.none(), st.integers(-99, 99), st.text(alphabet='a,[{}]"\\:', max_size=12)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8), st.dictionaries(st.text('",\\[', max_size=3), inner, max_size=8)
    ),
)


@settings(deadline=None)
@given(JSONS, st.integers(0, 40), st.integers(1, 9))
def test_bodies_with_too_many_values_are_refused_before_they_become_objects(
    value: Any, most: int, piece_bytes: int
) -> None:
    raw = orjson.dumps(value)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bodies, "_SCANNED_BYTES", piece_bytes)
            check_values(raw, most)
    except ApiError as error:
        assert error.status == 413 and _values(value) - 1 + _empty(value) > most
    else:
        assert _values(value) - 1 + _empty(value) <= most


def test_long_text_and_token_ids_are_few_values() -> None:
    text = orjson.dumps({"prompt": 'say "a, [b], {c}" ' * 500})
    check_values(text, 4)
    parse_body(orjson.dumps({"prompt": list(range(20_000))}), most_values=4)
    with pytest.raises(ApiError, match="values"):
        parse_body(orjson.dumps({"prompt": ["a"] * 20_000}), most_values=10_000)


def test_the_same_words_are_left_alone_where_they_are_the_clients_data() -> None:
    body = {
        "messages": [{"role": "user", "content": "x", "priority": 1}],
        "tools": [{"priority": {"type": "string"}}],
    }
    assert strip_owned(body) == body


def test_answers_lose_transfer_parameters_and_only_those() -> None:
    plain = b'{"choices":[{"text":"say \\"kv_transfer_params\\":{}"}],"kv_transfer_params":null}'
    assert without_transfer_params(plain) == plain
    telling = orjson.dumps({"id": "a", "kv_transfer_params": {"host": "secret"}, "ec_transfer_params": [1]})
    cleaned = orjson.loads(without_transfer_params(telling))
    assert cleaned == {"id": "a", "kv_transfer_params": None, "ec_transfer_params": None}
