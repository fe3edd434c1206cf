"""One request of a replay: it is sent to the target, its answer is read as it comes, and a record says all of it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import aiohttp
import orjson

from prfaas.core.route_header import ROUTE_HEADER, split_route
from prfaas.core.sse import SseParser
from prfaas.core.workload.requests import TracedRequest
from prfaas.core.workload.traffic import prompt_ids
from prfaas.serving.bounded_answer import read_bounded
from prfaas.tools.http_client import AnswerError, base_url, json_object, served_models


class BadAnswerError(Exception):
    """An answer that breaks off, that is an error, or that can't be read."""


class ReplayAnswer:
    """Fed with a stream's bytes (`feed`) or a whole body (`whole`)."""

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.answered_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._parser = SseParser()
        self._is_whole = False

    def feed(self, data: bytes, now_s: float) -> None:
        """The next bytes of a stream of events. Raises BadAnswerError."""
        try:
            found = self._parser.feed(data)
        except ValueError as error:
            raise BadAnswerError(str(error)) from None
        for event in found:
            self._take(_object(event), now_s)
        self._is_whole = self._parser.ended

    def whole(self, body: bytes) -> None:
        """A whole answer in one. Raises BadAnswerError."""
        document = _object(body)
        self._count(document)
        self._is_whole = bool(document.get("choices"))

    def check(self, wanted_tokens: int | None) -> None:
        """Raise BadAnswerError unless this was all; `wanted_tokens` is checked if the server has counted."""
        if not self._is_whole:
            raise BadAnswerError("the answer breaks off")
        if wanted_tokens is not None and self.answered_tokens not in (None, wanted_tokens):
            raise BadAnswerError(f"the answer has {self.answered_tokens} of {wanted_tokens} tokens")

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        if event.get("choices"):
            if self.first_token_s is None:
                self.first_token_s = now_s
            self.last_token_s = now_s
        self._count(event)

    def _count(self, document: dict[str, Any]) -> None:
        if "error" in document:
            error = document["error"]
            raise BadAnswerError(str(error.get("message", error) if isinstance(error, dict) else error)[:200])
        usage = document.get("usage")
        if not isinstance(usage, dict):
            return
        self.answered_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = details.get("cached_tokens")


def _object(data: bytes) -> dict[str, Any]:
    try:
        return json_object(data)
    except ValueError:
        raise BadAnswerError(f"the answer can't be read: {data[:80]!r}") from None


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How requests are sent."""

    stream: bool = True
    """Answers as events; without them there is no time of a first token."""
    vocabulary_size: int = 256
    """Token ids of made-up prompts are below it; 256 suits every model."""
    ignore_eos: bool = True
    """Answers have exactly as many tokens as the request says (an extension of vLLM's)."""
    max_connections: int = 4096
    """Requests that can be open at once; more wait, and the result says so."""
    timeout_s: float = 600.0
    """A request without its whole answer by then is lost."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request."""


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """The record of one request. Times are seconds since the beginning of the replay; None: it did not happen."""

    index: int
    arrival_s: float
    """When the request was due."""
    input_tokens: int
    """Tokens of its prompt."""
    output_tokens: int
    """Tokens that it asked for."""
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    answered_tokens: int | None = None
    """Tokens of the answer as the server counts them; None if it doesn't."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server had in a cache, by its own count; None if not reported."""
    status: int | None = None
    request_id: str = ""
    route: str = ""
    """What `x-prfaas-route` begins with; empty for other servers."""
    route_fields: Mapping[str, str] = field(default_factory=dict)
    """The header's fields as text."""
    error: str | None = None
    """Why there was no whole answer; None if there was."""

    @property
    def is_lost(self) -> bool:
        """True without a whole answer."""
        return self.error is not None

    @property
    def behind_s(self) -> float | None:
        """How late it was sent."""
        return None if self.sent_s is None else self.sent_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """From when it was due, as its user would count, to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first."""
        if self.first_token_s is None or self.last_token_s is None or (self.answered_tokens or 0) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / ((self.answered_tokens or 0) - 1)

    @property
    def e2e_s(self) -> float | None:
        """From when it was due to the end of the answer; None if it is lost."""
        return None if self.ended_s is None or self.is_lost else self.ended_s - self.arrival_s

    def to_json(self) -> dict[str, Any]:
        """One line of a file of records."""
        return asdict(self)


class ReplayError(Exception):
    """The endpoint can't be used; what happens to single requests is in their records."""


_ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server that requests are sent to, and the model that it serves."""

    url: str
    """Without a trailing slash and without /v1."""
    model: str
    max_model_len: int | None = None
    """None if the server does not report it."""


async def find_target(session: aiohttp.ClientSession, url: str, model: str | None = None) -> Target:
    """Ask an OpenAI-compatible server for `model`, or the first one it names.

    Raises:
        ReplayError: it doesn't answer, or has no such model.
    """
    base = base_url(url)
    if not base.startswith(("http://", "https://")):
        raise ReplayError(f"{url!r} is no address of a server; write for example http://127.0.0.1:8000")
    try:
        lengths = await served_models(session, base, timeout_s=_ASK_TIMEOUT_S)
    except AnswerError as error:
        raise ReplayError(
            f"{base}/v1/models answers {error.status}; is it an OpenAI-compatible server?"
        ) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ReplayError(
            f"{base} doesn't answer ({error or type(error).__name__}); is the server up?"
        ) from error
    except ValueError as error:
        raise ReplayError(f"{base}/v1/models doesn't answer with a list of models") from error
    if not lengths or (model is not None and model not in lengths):
        raise ReplayError(
            f"{base} doesn't serve {model or 'any model'}; it has {', '.join(lengths) or 'none'}"
        )
    name = model or next(iter(lengths))
    return Target(base, name, lengths[name])


_JSON = {"Content-Type": "application/json"}


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: TracedRequest,
    due: ReplayedRequest,
    options: ReplayOptions,
    clock: Callable[[], float],
) -> ReplayedRequest:
    """Completes the record `due`; whatever goes wrong is in it. `clock`: seconds since the replay began."""
    answer = ReplayAnswer()
    sent_s = clock()
    status, request_id, error = None, "", None
    route, fields = "", dict[str, str]()
    try:
        async with (
            asyncio.timeout(options.timeout_s),
            session.post(
                f"{target.url}/v1/completions",
                data=body_of(target, request, options),
                headers={**_JSON, **options.headers},
                allow_redirects=False,
            ) as response,
        ):
            status = response.status
            request_id = response.headers.get("X-Request-Id", "")
            route, fields = split_route(response.headers.get(ROUTE_HEADER, ""))
            if response.content_type == "text/event-stream":
                async for data in response.content.iter_any():
                    answer.feed(data, clock())
            else:
                answer.whole(await read_bounded(response))
            answer.check(max(request.output_tokens, 1) if options.ignore_eos else None)
    except BadAnswerError as reason:
        error = str(reason)
    except TimeoutError:
        error = f"no whole answer within {options.timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as reason:
        error = f"{type(reason).__name__}: {reason}"[:200]
    if error is None and status != 200:
        error = "an answer that is no success"
    return replace(
        due,
        sent_s=sent_s,
        first_token_s=answer.first_token_s,
        last_token_s=answer.last_token_s,
        ended_s=clock(),
        answered_tokens=answer.answered_tokens,
        cached_tokens=answer.cached_tokens,
        status=status,
        request_id=request_id,
        route=route,
        route_fields=fields,
        error=error if status in (None, 200) else f"status {status}: {error}",
    )


def body_of(target: Target, request: TracedRequest, options: ReplayOptions) -> bytes:
    """A greedy completion whose prompt is made from the request's blocks. One without an answer asks for 1 token."""
    body = {
        "model": target.model,
        "prompt": prompt_ids(
            request.block_ids, request.block_tokens, request.input_tokens, options.vocabulary_size
        ),
        "max_tokens": max(request.output_tokens, 1),
        "temperature": 0,
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
