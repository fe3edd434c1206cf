"""An OpenAI-compatible server as the tools ask it: JSON in, JSON out, and the models that it serves."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from prfaas.core.sse import SseParser
from prfaas.serving.bounded_answer import read_bounded

_JSON = {"Content-Type": "application/json"}
_MESSAGE_CHARACTERS = 300
_PLAIN: Mapping[str, Any] = {}


class AnswerError(ValueError):
    """An answer that is no success. The text is what the server says itself, in one line."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(error_message(content))
        self.status = status


def base_url(url: str) -> str:
    """A server's URL as users write it, without "/v1" and a slash at its end."""
    return url.rstrip("/").removesuffix("/v1")


def greedy_body(model: str, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A completion that leaves nothing to chance: of exactly so many tokens, with their ids; `more` fields beside."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


async def get_json(
    session: aiohttp.ClientSession,
    url: str,
    *,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    https: Mapping[str, Any] = _PLAIN,
) -> dict[str, Any]:
    """The JSON object at `url`; without `timeout_s` the session's limits count. `https`: as `https_options` makes it.

    Raises:
        AnswerError: a status other than 200.
        ValueError: no JSON object.
        aiohttp.ClientError, TimeoutError: no whole answer.
    """
    timeout = session.timeout if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
    asked = session.get(url, timeout=timeout, headers=headers, allow_redirects=False, **https)
    async with asked as response:
        return await _json_of(response)


async def post_json(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, https: Mapping[str, Any] = _PLAIN
) -> dict[str, Any]:
    """The JSON object that answers `body`. `https` and what it raises: as `get_json`."""
    asked = session.post(url, data=orjson.dumps(body), headers=_JSON, allow_redirects=False, **https)
    async with asked as response:
        return await _json_of(response)


@contextlib.asynccontextmanager
async def streamed(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> "AsyncIterator[tuple[Mapping[str, str], AsyncIterator[dict[str, Any]]]]":
    """The headers of the answer to `body`, and the events of its stream as they come.

    Raises:
        AnswerError: a status other than 200.
        ValueError: an event says what went wrong, or is no JSON object.
        aiohttp.ClientError, TimeoutError: no whole answer.
    """
    asked = session.post(url, data=orjson.dumps(body), headers=_JSON, allow_redirects=False)
    async with asked as response:
        if response.status != 200:
            raise AnswerError(response.status, await read_bounded(response))
        yield response.headers, _events(response)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    parser = SseParser()
    async for piece in response.content.iter_any():
        for data in parser.feed(piece):
            event = json_object(data)
            if "error" in event:
                raise ValueError(f"the stream ended in an error: {error_message(data)}")
            yield event


async def served_models(
    session: aiohttp.ClientSession,
    url: str,
    *,
    timeout_s: float | None = None,
    https: Mapping[str, Any] = _PLAIN,
) -> dict[str, int | None]:
    """Name → `max_model_len` (None: not reported) of every model that the server at `url` (without /v1) lists.

    Raises:
        As `get_json`; ValueError, too, where the answer is no list of models.
    """
    document = await get_json(session, f"{url}/v1/models", timeout_s=timeout_s, https=https)
    try:
        lengths = {str(card["id"]): card.get("max_model_len") for card in document["data"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{url}/v1/models is no list of models") from error
    return {name: length if isinstance(length, int) else None for name, length in lengths.items()}


def json_object(content: bytes) -> dict[str, Any]:
    """Parsed JSON. Raises ValueError unless it is an object."""
    value = orjson.loads(content)
    if not isinstance(value, dict):
        raise ValueError("the answer is no JSON object")
    return value


def error_message(content: bytes) -> str:
    """The message of an error answer in one line."""
    try:
        document = json_object(content)
        error = document.get("error", document)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        text = content.decode("utf-8", "replace")
    return " ".join(text.split())[:_MESSAGE_CHARACTERS] or "nothing"


async def _json_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    content = await read_bounded(response)
    if response.status != 200:
        raise AnswerError(response.status, content)
    return json_object(content)
