"""The demo's client: streams one completion and takes the time as a user would."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from prfaas.core.route_header import ROUTE_HEADER, RouteHeader
from prfaas.tools.demo.compare import MovedPages
from prfaas.tools.http_client import AnswerError, greedy_body, streamed

_REQUEST_TIMEOUT_S = 900.0


class RequestFailedError(Exception):
    """A prompt got no proper answer."""


@asynccontextmanager
async def answering(whom: str) -> AsyncIterator[None]:
    """While `whom` is asked: what goes wrong, and an answer that does not come in time, is a RequestFailedError."""
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            yield
    except TimeoutError:
        raise RequestFailedError(f"{whom} gave no whole answer within {_REQUEST_TIMEOUT_S:.0f} s") from None
    except AnswerError as error:
        raise RequestFailedError(f"{whom} answered {error.status}: {error}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise RequestFailedError(f"the answer of {whom} can't be read: {error}") from error


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One streamed answer, and how long it took."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    route: RouteHeader
    ttft_s: float
    """From sending the request to the first token."""

    tokens_per_s: float | None
    """Rate of the tokens after the first; None if all came at once."""
    pool_tokens: int = 0
    """That engines loaded from pools for it, on the prefill and the decode side together."""

    @property
    def moved(self) -> MovedPages:
        """The transfer: of all but the last prompt token, which the decode engine computes itself."""
        return MovedPages(self.prompt_tokens - 1, self.route.cached_tokens, self.route.kv_bytes)


async def stream_completion(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, max_tokens: int
) -> DemoAnswer:
    """Greedy completion of `prompt` by the gateway at `url`, exactly `max_tokens` tokens.

    Raises:
        RequestFailedError: an error status, a stream that breaks off or lacks what was asked for, or no answer in time.
    """
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    body = greedy_body(model, prompt, max_tokens, **shown)
    token_ids: list[int] = []
    text: list[str] = []
    prompt_tokens = 0
    first_s = last_s = None
    sent_s = time.monotonic()
    async with (
        answering("the gateway"),
        streamed(session, f"{url}/v1/completions", body) as (headers, events),
    ):
        route = RouteHeader.parse(headers.get(ROUTE_HEADER, ""))
        async for event in events:
            for choice in event.get("choices", ()):
                new_ids = choice.get("token_ids") or ()
                if new_ids:
                    last_s = time.monotonic()
                    first_s = first_s or last_s
                token_ids.extend(new_ids)
                text.append(choice.get("text") or "")
            prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    if len(token_ids) != max_tokens or first_s is None or last_s is None or prompt_tokens == 0:
        raise RequestFailedError(
            f"the stream ended with {len(token_ids)} of {max_tokens} tokens and {prompt_tokens} prompt tokens"
        )
    decode_s = last_s - first_s
    return DemoAnswer(
        token_ids=tuple(token_ids),
        text="".join(text),
        prompt_tokens=prompt_tokens,
        route=route,
        ttft_s=first_s - sent_s,
        tokens_per_s=(max_tokens - 1) / decode_s if decode_s > 0 else None,
    )
