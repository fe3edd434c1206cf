"""Sends one request and records what becomes of it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import orjson

from prfaas.replay.answer import Answer, BadAnswerError
from prfaas.replay.options import ReplayOptions
from prfaas.replay.record import ROUTE_HEADER, RequestRecord, parse_route
from prfaas.replay.target import Target
from prfaas.workload import TracedRequest
from prfaas.workload.traffic import prompt_ids

_JSON = {"Content-Type": "application/json"}


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: TracedRequest,
    due: RequestRecord,
    options: ReplayOptions,
    clock: Callable[[], float],
) -> RequestRecord:
    """Completes the record `due`; whatever goes wrong is in it. `clock`: seconds since the replay began."""
    answer = Answer()
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
            ) as response,
        ):
            status = response.status
            request_id = response.headers.get("X-Request-Id", "")
            route, fields = parse_route(response.headers.get(ROUTE_HEADER, ""))
            if response.content_type == "text/event-stream":
                async for data in response.content.iter_any():
                    answer.feed(data, clock())
            else:
                answer.whole(await response.read())
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
