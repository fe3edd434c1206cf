"""The demo's client: streams one completion and takes the time as a user would.

What the gateway says about a request in its `x-prfaas-route` header.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

ROUTE_HEADER = "x-prfaas-route"


@dataclass(frozen=True, slots=True)
class RouteReport:
    """`local` or `offload`, the instances, and the transfer. Times and shares are None where nothing was moved.

    `cached_tokens` were on the decode side already and did not move; `hidden_fraction` of the bytes had arrived when
    the prefill ended; `fallback` says why a prefill elsewhere failed, if one did.
    """

    route: str
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    kv_bytes: int = 0
    hidden_fraction: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    fallback: str | None = None
    other: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, header: str) -> "RouteReport":
        """From a header like `offload; prefill=east-0; decode=home-0; cached=0; bytes=6553600; hidden=0.83`.

        Raises:
            ValueError: it doesn't begin with a route, or a number in it is none.
        """
        route, *parts = (part.strip() for part in header.split(";"))
        if route not in ("local", "offload"):
            raise ValueError(f"{ROUTE_HEADER} must begin with local or offload, not {header!r}")
        fields = dict(part.split("=", 1) for part in parts if "=" in part)

        def number(name: str) -> float | None:
            return float(fields.pop(name)) if name in fields else None

        return cls(
            route=route,
            prefill=fields.pop("prefill", ""),
            decode=fields.pop("decode", ""),
            cached_tokens=int(fields.pop("cached", "0")),
            kv_bytes=int(fields.pop("bytes", "0")),
            hidden_fraction=number("hidden"),
            prefill_s=number("prefill_s"),
            transfer_s=number("transfer_s"),
            fallback=fields.pop("fallback", None),
            other=fields,
        )


REQUEST_TIMEOUT_S = 900.0


class RequestFailedError(Exception):
    """A prompt got no proper answer."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One streamed answer. `ttft_s` runs from sending to the first token; `tokens_per_s` counts what came after it."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    route: RouteReport
    ttft_s: float
    tokens_per_s: float | None


async def stream_completion(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, max_tokens: int
) -> DemoAnswer:
    """Greedy completion of `prompt` by the gateway at `url`, exactly `max_tokens` tokens.

    Raises:
        RequestFailedError: an error status, a stream that breaks off or lacks what was asked for, or no answer in time.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    token_ids: list[int] = []
    text: list[str] = []
    prompt_tokens = 0
    first_s = last_s = None
    sent_s = time.monotonic()
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            async with session.post(
                f"{url}/v1/completions", data=orjson.dumps(body), headers=_JSON
            ) as response:
                if response.status != 200:
                    raise RequestFailedError(
                        f"the gateway answered {response.status}: {await response.text()}"
                    )
                route = RouteReport.parse(response.headers.get(ROUTE_HEADER, ""))
                async for line in response.content:
                    event = _event(line)
                    if event is None:
                        continue
                    for choice in event.get("choices", ()):
                        new_ids = choice.get("token_ids") or ()
                        if new_ids:
                            last_s = time.monotonic()
                            first_s = first_s or last_s
                        token_ids.extend(new_ids)
                        text.append(choice.get("text") or "")
                    prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    except TimeoutError:
        raise RequestFailedError(
            f"the gateway at {url} gave no whole answer to a prompt of {len(prompt)} characters "
            f"within {REQUEST_TIMEOUT_S:.0f} s"
        ) from None
    except (aiohttp.ClientError, ValueError) as error:
        raise RequestFailedError(f"the answer can't be read: {error}") from error
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


_JSON = {"Content-Type": "application/json"}


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of one line of a server-sent event stream, None for other lines and the end mark."""
    if not line.startswith(b"data:"):
        return None
    data = line[len(b"data:") :].strip()
    if data == b"[DONE]":
        return None
    event = orjson.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event must be an object, not {data[:80]!r}")
    if "error" in event:
        raise RequestFailedError(f"the stream ended in an error: {event['error']}")
    return event
