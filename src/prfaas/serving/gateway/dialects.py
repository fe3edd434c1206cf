"""What differs between the APIs that the gateway speaks: how a stream ends, and the form of an error."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from prfaas.serving.gateway.bodies import error_body, without_transfer_params
from prfaas.serving.gateway.prompts.prompt import Endpoint

END_OF_EVENT = b"\n\n"
DATA = b"data: "
LAST_EVENT = b"data: [DONE]\n\n"
# A line of this begins an event: generated text is inside of JSON, where line ends are escaped.
_ERROR_LINE = b"event: error\n"
_RESPONSE_ENDS = re.compile(rb"event: response\.(?:completed|incomplete|failed)\n")
# What comes before anything is generated: a role, or that an answer and its first part begin. Comments too.
_PREFACE = rb"(?::[^\n]*\n\n|%b)*"
_ROLE = re.compile(
    _PREFACE % rb'data: [^\n]*"delta":\{"role":"[a-z]*","content":""\}[^\n]*"finish_reason":null[^\n]*\n\n'
)
_RESPONSE_PREFACE = re.compile(
    _PREFACE
    % rb"event: response\.(?:created|queued|in_progress|output_item\.added|[a-z_]+_part\.added)\ndata: [^\n]*\n\n"
)
_MESSAGE_PREFACE = re.compile(
    _PREFACE % rb"event: (?:message_start|content_block_start|ping)\ndata: [^\n]*\n\n"
)
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s?(\d{1,9})\b')
_PARAMS = b'_transfer_params":{'

# What Anthropic documents (2023-06-01) for the statuses that the gateway answers with.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# vLLM 0.32 says "internal_error" of every failure in a stream; these are a client's fault for certain.
_CLIENT_FAULTS = frozenset(
    {"BadRequestError", "NotFoundError", *(kind for status, kind in _ANTHROPIC_TYPES.items() if status < 500)}
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API's way to write what is no answer."""

    ends: Callable[[bytes], object]
    """Whether the last event of a stream begins in some events."""
    error_mark: bytes
    """Begins an event of an error. Quotes and line ends in generated text are escaped, so nothing else has it."""
    error_status: Callable[[dict[str, Any]], int]
    """The HTTP status that the data of such an event means."""
    error_event: Callable[[int, str, bytes], bytes]
    """An event that ends a stream with an error, from the status, a sentence, and the events before it."""
    refusal: Callable[[bytes], bytes]
    """An error answer in OpenAI's form (`error_body`), in this API's form."""
    is_preface: Callable[[bytes], object]
    """Whether some events are only such as come before anything is generated."""
    nests_params: bool = False
    """Whether events carry a whole answer, which may have an engine's transfer parameters in it."""

    def status_in(self, event: bytes) -> int | None:
        """The status that an event with `error_mark` at its beginning means; None when it means none."""
        try:
            data = orjson.loads(event[event.index(DATA) + len(DATA) :])
            return self.error_status(data)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def cleaned(self, events: bytes) -> bytes:
        """`events` without an engine's transfer parameters."""
        if not self.nests_params or _PARAMS not in events:
            return events
        return b"\n".join(
            DATA + without_transfer_params(line[len(DATA) :]) if line.startswith(DATA) else line
            for line in events.split(b"\n")
        )


def _openai_status(data: dict[str, Any]) -> int:
    code = data["error"]["code"]
    if not isinstance(code, int):
        raise TypeError(code)
    return code


def _named_status(data: dict[str, Any]) -> int:
    said = data.get("error") or data
    kind = said.get("type") if said is not data else said.get("code")
    return 400 if kind in _CLIENT_FAULTS else 500


def _openai_event(status: int, sentence: str, _before: bytes) -> bytes:
    return DATA + error_body(status, sentence) + END_OF_EVENT


def _responses_event(status: int, sentence: str, before: bytes) -> bytes:
    numbers = _SEQUENCE_NUMBER.findall(before)
    event = {
        "type": "error",
        "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        "code": "server_error" if status >= 500 else "invalid_request_error",
        "message": sentence,
        "param": None,
    }
    return _ERROR_LINE + DATA + orjson.dumps(event) + END_OF_EVENT


def _anthropic_error(status: int, sentence: str) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": sentence}})


def _messages_event(status: int, sentence: str, _before: bytes) -> bytes:
    return _ERROR_LINE + DATA + _anthropic_error(status, sentence) + END_OF_EVENT


def _anthropic_refusal(body: bytes) -> bytes:
    error = orjson.loads(body)["error"]
    return _anthropic_error(error.get("code") or HTTPStatus.INTERNAL_SERVER_ERROR, error["message"])


OPENAI = Dialect(
    ends=lambda events: LAST_EVENT in events,
    # vLLM ends a stream like this when its engine has died and its HTTP server lives.
    error_mark=b'data: {"error":',
    error_status=_openai_status,
    error_event=_openai_event,
    refusal=lambda body: body,
    is_preface=_ROLE.fullmatch,
)
RESPONSES = Dialect(
    ends=_RESPONSE_ENDS.search,
    error_mark=_ERROR_LINE,
    error_status=_named_status,
    error_event=_responses_event,
    refusal=lambda body: body,
    is_preface=_RESPONSE_PREFACE.fullmatch,
    nests_params=True,
)
ANTHROPIC = Dialect(
    ends=lambda events: b"event: message_stop\n" in events,
    error_mark=_ERROR_LINE,
    error_status=_named_status,
    error_event=_messages_event,
    refusal=_anthropic_refusal,
    is_preface=_MESSAGE_PREFACE.fullmatch,
)


def dialect_of(path: str) -> Dialect:
    """The form of what a path answers, which may be none that the gateway serves."""
    if path.startswith(Endpoint.MESSAGES.path):
        return ANTHROPIC
    return RESPONSES if path == Endpoint.RESPONSES.path else OPENAI
