"""Request bodies: what comes in from a client, and what goes out to an engine.

The trust boundary runs through this file. A body is parsed once and written anew for every hop, so duplicate
keys and odd encodings end here; fields that could steer an engine never get past `strip_owned`.

A long list of token ids is never made into Python's integers: it is an array from here on, which engines get as it
was written.
"""

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from http.client import responses
from typing import Any

import msgspec
import numpy as np
import orjson

from prfaas.core.deployment.model import ModelRef
from prfaas.serving.transport.protocol.ticket import PREFIX_TICKET_PARAMETER, TICKET_PARAMETER

_REASONS = {
    404: "unknown-model",
    405: "method",
    413: "too-large",
    429: "overload",
    503: "unavailable",
    504: "deadline",
}


def reason_of(status: int) -> str:
    """Why a request is refused with an HTTP status, as one word for metrics."""
    return _REASONS.get(status, "invalid")


class ApiError(Exception):
    """An error answer for the client: HTTP status, one sentence, and the parameter that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        """`retry_after_s`: when the same request may be taken; None: nothing is known of that.

        `reason`: one word for metrics; None: what the status says.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.reason = reason or reason_of(status)

    def headers(self) -> dict[str, str]:
        """What belongs into the answer's head."""
        if self.retry_after_s is None:
            return {}
        # RFC 9110 (10.2.3) knows whole seconds only.
        return {"Retry-After": str(max(math.ceil(self.retry_after_s), 1))}

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`, the types as vLLM names them."""
        return error_body(self.status, self.message, self.param)


FAILED = "The gateway failed on this request; its log says how."


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON of an error answer with HTTP `status`."""
    # An engine may answer with a number that means nothing.
    phrase = responses.get(status, "Error").title()
    kind = phrase.replace(" ", "").replace("-", "").removesuffix("Error") + "Error"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def unknown_model(name: str, model: ModelRef) -> ApiError:
    """The refusal of a request for a model that is not served."""
    known = ", ".join(f"`{each}`" for each in (model.served_name, *model.adapters))
    return ApiError(404, f"The model `{name[:200]}` does not exist; there is {known}.", param="model")


Json = dict[str, Any]

MOST_VALUES = 1_000_000
_BEFORE_VALUES = (b",", b"[", b"{")
_SCANNED_BYTES = 256 << 10

# Compared after `_normal`: engines read exact names, but a name that only looks like one of these has no
# business here.
OWNED_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "cache_salt",
        "priority",
        "request_id",
        "nvext",
        "extra_args",
        "data_parallel_rank",
        # It is of any length and stands in each KV event of a prompt's blocks, for nobody who reads it.
        "session_id",
    }
)
OWNED_PREFIXES = ("bootstrap_", "x_prfaas", "prfaas")
# What vLLM 0.32 takes from a request's extra arguments and acts on as an engine does (`v1/request.py`): the two
# transfers above, and how its prefix cache is reported. "full" has it announce cache hits as if they were new blocks.
STEERING_ARGS = OWNED_FIELDS | {"kv_cache_report_mode"}
# Objects whose content an engine merges into its own parameters; anywhere else (messages, tools, JSON
# schemas) the same words are the client's data.
_STEERING_CONTAINERS = frozenset({"vllm_xargs", "sampling_params", "extra_body"})
_MAX_DEPTH = 64


def parse_body(raw: bytes, most_values: int = MOST_VALUES) -> Json:
    """The JSON object in `raw`. Its "prompt" is WrittenIds (uint32) if that is a long list of token ids.

    Args:
        most_values: other JSON values that it may have. Each becomes an object of Python, whose making nothing can
            interrupt: 40 MB of short strings take 1.5 GB and hold the whole gateway up for 3 s.

    Raises:
        ApiError: 400, when it is no JSON object, or nested too deeply; 413, when it has more values.
    """
    try:
        ids, rest = _long_ids(raw)
        check_values(rest, most_values)
        body = orjson.loads(rest)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The request body must be a JSON object, not {_kind(body)}.")
    _check_depth(body)
    return body if ids is None else {**body, "prompt": ids}


# Below it the plain way through a JSON parser costs as little.
MIN_BYTES = 8 << 10
# A piece at a time: the arrays in between stay in the processor's cache, and a thread that parses lets others run.
_PIECE_BYTES = 64 << 10
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class WrittenIds(array):  # type: ignore[type-arg]
    """Token ids that know their JSON, so that it need not be written for each engine. They never change."""

    json: bytes


def _long_ids(raw: bytes) -> tuple[WrittenIds | None, bytes]:
    """The token ids that are the prompt of a long body, and the body without them; None and all of it else.

    They are never Python's integers: for 128K of them, making these takes longer than all else.
    """
    if len(raw) < MIN_BYTES:
        return None, raw
    try:
        fields = _FIELDS.decode(raw)
        listed = bytes(fields.pop("prompt"))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, RecursionError):
        return None, raw
    if not listed.startswith(b"["):
        return None, raw
    if any(blank in listed for blank in b" \t\r\n"):
        listed = listed.translate(None, b" \t\r\n")
    ids, at = WrittenIds("I"), 1
    ids.json = listed
    while at < len(listed) - 1:
        end = listed.find(b",", at + _PIECE_BYTES)
        piece = listed[at : end if end >= 0 else -1]
        # It is JSON, so whatever is made of these alone is plain numbers.
        if piece.translate(None, b"0123456789,"):
            return None, raw
        # What is too large for 64 bits becomes the largest number of 64 bits. With a sign, it takes longer.
        values = np.fromstring(piece, dtype=np.uint64, sep=",")
        if int(values.max()) >= 1 << 32:
            return None, raw
        ids.frombytes(values.astype(np.uint32).tobytes())
        at += len(piece) + 1
    rest = b",".join(orjson.dumps(name) + b":" + bytes(value) for name, value in fields.items())
    return (ids, b"{%b}" % rest) if ids else (None, raw)


def _check_depth(body: Json) -> None:
    """Raises ApiError 400 where it is deeper than what engines and their templates can walk through."""
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    raise ApiError(400, f"The request body is nested too deeply: it may have {_MAX_DEPTH} levels.")


def dump_body(body: Mapping[str, Any]) -> bytes:
    """`body` as JSON."""
    return orjson.dumps(body, default=_as_written, option=orjson.OPT_PASSTHROUGH_DATACLASS)


def check_values(raw: bytes, most_values: int) -> None:
    """Raises ApiError 413 when the JSON in `raw` has more than `most_values` values."""
    # Every value follows one of these. They stand in text too, but most bodies have few enough in all. A piece at a
    # time, so that others run in between.
    found = 0
    for at in range(0, len(raw), _SCANNED_BYTES):
        found += sum(raw.count(mark, at, at + _SCANNED_BYTES) for mark in _BEFORE_VALUES)
        if found > most_values:
            break
    else:
        return
    in_string, found, at = False, 0, 0
    while at < len(raw):
        end = at + _SCANNED_BYTES
        if raw[end - 1 : end] == b"\\":
            rest = raw[end:]
            end += len(rest) - len(rest.lstrip(b"\\")) + 1
        # Backslashes stand only in strings. From the first of a run on, each escapes what follows it.
        parts = raw[at:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b" ".join(parts[in_string::2])
        found += sum(map(outside.count, _BEFORE_VALUES))
        if found > most_values:
            sentence = f"The request body has more than {most_values} JSON values; send less in one request."
            raise ApiError(413, sentence)
        in_string ^= len(parts) % 2 == 0
        at = end


def strip_owned(body: Json) -> Json:
    """`body` without the fields that could steer an engine.

    Raises:
        ApiError: 400, when such a field is inside a container whose content vLLM merges into its own parameters.
    """
    return {
        key: _checked_args(value, key) if _normal(key) in _STEERING_CONTAINERS else value
        for key, value in body.items()
        if not _owned(key)
    }


def prefill_body(
    model: str,
    prompt: Sequence[int],
    sealed_ticket: str,
    *,
    salt: str = "",
    sealed_from: str | None = None,
    sampling: Json | None = None,
) -> bytes:
    """The producer's request: what it is to prefill, one token out, and the ticket of what it sends.

    `salt`: the tenant's, empty without tenants. `sealed_from`: the ticket of a prefix that it loads first.
    `sampling`: how the token is sampled; None: in the cheapest way.
    """
    tickets = {TICKET_PARAMETER: sealed_ticket}
    if sealed_from is not None:
        tickets[PREFIX_TICKET_PARAMETER] = sealed_from
    ours: Json = {"cache_salt": salt} if salt else {}
    return dump_body(
        {
            "model": model,
            "prompt": orjson.Fragment(ids_json(prompt)),
            "max_tokens": 1,
            "stream": False,
            **({"temperature": 0} if sampling is None else sampling),
            "kv_transfer_params": tickets,
            **ours,
        }
    )


def media_prefill_body(stripped: Json, sealed_ticket: str, limit: str, salt: str) -> bytes:
    """The same for a prompt with media, which the producer renders itself: the client's body for one token of answer.

    `stripped` comes from `strip_owned`. `limit`: the field that limits its answers.
    """
    asked = {name: value for name, value in stripped.items() if name not in _ANSWER_FIELDS}
    asked |= {limit: 1, "stream": False}
    return decode_body(asked, {TICKET_PARAMETER: sealed_ticket}, None, salt)


_ANSWER_FIELDS = frozenset(
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "stream_options", "logprobs",
     "top_logprobs")
)  # fmt: skip


def decode_body(
    stripped: Json, kv_params: Json, reuse_ids: Sequence[int] | None = None, salt: str = ""
) -> bytes:
    """The decode engine's request: the client's body and, as the only content of `kv_transfer_params`, ours.

    `stripped` comes from `strip_owned`. `kv_params`: what the engine is told of KV that waits for it.
    `reuse_ids`: the whole prompt's ids, which vLLM's chat endpoint takes from there instead of tokenizing again.
    `salt`: the tenant's, empty without tenants.
    """
    params = kv_params
    if reuse_ids is not None:
        params = {**params, "prompt_token_ids": orjson.Fragment(ids_json(reuse_ids))}
    ours: Json = {}
    if params:
        ours["kv_transfer_params"] = params
    if salt:
        ours["cache_salt"] = salt
    return dump_body({**stripped, **ours} if ours else stripped)


def without_transfer_params(answer: bytes) -> bytes:
    """A whole JSON answer in which an engine's own transfer parameters, if there are any, are null."""
    # A quote inside a JSON string is escaped, so these bytes can only be a key; vLLM always writes it, mostly
    # null.
    if all(
        answer.count(key) == answer.count(key + b"null")
        for key in (b'"kv_transfer_params":', b'"ec_transfer_params":')
    ):
        return answer
    try:
        parsed = orjson.loads(answer)
        if isinstance(parsed, dict):
            # An event of `/v1/responses` has the whole answer in it.
            for answered in (parsed, parsed.get("response")):
                for field in ("kv_transfer_params", "ec_transfer_params"):
                    if isinstance(answered, dict) and field in answered:
                        answered[field] = None
        return orjson.dumps(parsed)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        # No JSON, or more levels of it than can be written.
        return answer


# In generated text the quotes would be escaped. The usage stands at the end.
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s?(\d{1,9})')
USAGE_BYTES = 2048


def cached_tokens_of(answer: bytes) -> int | None:
    """Tokens of the prompt that the engine reused, by the usage of a whole answer; None if it does not say."""
    found = _CACHED_TOKENS.search(answer, max(len(answer) - USAGE_BYTES, 0))
    return int(found.group(1)) if found is not None else None


def _as_written(value: object) -> orjson.Fragment:
    if isinstance(value, array):
        return orjson.Fragment(ids_json(value))
    raise TypeError(f"{type(value).__name__} has no place in a body")


def _normal(name: str) -> str:
    return name.strip().casefold().replace("-", "_")


def _owned(name: str) -> bool:
    normal = _normal(name)
    return normal in OWNED_FIELDS or normal.startswith(OWNED_PREFIXES)


def _checked_args(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            where = f"{path}.{key}"
            if _owned(key) or _normal(key) in STEERING_ARGS:
                sentence = f"`{where[:200]}` steers the engine, which clients can't do; leave it out."
                raise ApiError(400, sentence, param=where[:200])
            _checked_args(inner, where)
    elif isinstance(value, list):
        for inner in value:
            _checked_args(inner, path)
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "another value")


# What a token id takes in JSON, about.
JSON_BYTES_PER_TOKEN = 5


def ids_json(ids: Sequence[int]) -> bytes:
    """The canonical JSON array of `ids`; quickest for an `array("I")`, and known for WrittenIds."""
    if isinstance(ids, WrittenIds):
        return ids.json
    if isinstance(ids, array) and ids.typecode == "I":
        return orjson.dumps(np.frombuffer(ids, np.uint32), option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.dumps(ids)
