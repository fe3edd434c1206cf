"""The demo's clients against a server that answers as vLLM and the gateway do, and as they shouldn't."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
import pytest
from aiohttp import web

from prfaas.tools.demo.client import RequestFailedError, stream_completion
from prfaas.tools.demo.reference import complete_alike

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROUTE = {"x-prfaas-route": "offload; prefill=a; decode=b; cached=2; bytes=10; hidden=0.5"}


def _ask(handler: Handler, client: Callable[[aiohttp.ClientSession, str], Awaitable[T]]) -> T:
    async def run() -> T:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            async with aiohttp.ClientSession() as session:
                return await client(session, f"http://127.0.0.1:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def _streaming(*events: object, headers: dict[str, str] = ROUTE) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        return response

    return handler


def _chunk(*token_ids: int) -> dict[str, object]:
    return {"choices": [{"text": "x" * len(token_ids), "token_ids": list(token_ids)}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def test_a_streamed_answer() -> None:
    handler = _streaming(_chunk(1), _chunk(2, 3), USAGE, "[DONE]")
    answer = _ask(handler, lambda session, url: stream_completion(session, url, "m", "prompt", 3))
    assert answer.token_ids == (1, 2, 3)
    assert answer.text == "xxx"
    assert answer.prompt_tokens == 7
    assert answer.route.cached_tokens == 2
    assert answer.ttft_s > 0


@pytest.mark.parametrize(
    ("handler", "complaint"),
    [
        (_streaming(_chunk(1), USAGE, "[DONE]"), "1 of 3 tokens"),
        (_streaming(_chunk(1, 2, 3), "[DONE]"), "0 prompt tokens"),
        (_streaming(_chunk(1), {"error": {"message": "gone"}}), "gone"),
        (_streaming(_chunk(1), "not json"), "can't be read"),
        (_streaming(_chunk(1, 2, 3), USAGE, headers={}), "must begin with local or offload"),
    ],
)
def test_a_wrong_stream_is_no_answer(handler: Handler, complaint: str) -> None:
    with pytest.raises(RequestFailedError, match=complaint):
        _ask(handler, lambda session, url: stream_completion(session, url, "m", "prompt", 3))


def test_an_error_status_is_no_answer() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=503, text="no decode instance")

    with pytest.raises(RequestFailedError, match="503: no decode instance"):
        _ask(handler, lambda session, url: stream_completion(session, url, "m", "prompt", 3))


def _plain_engine(
    answer_ids: list[int], asked: list[dict[str, object]], metrics: Callable[[int], str] | None = None
) -> Handler:
    """`metrics`: the page of an engine that has answered so many requests; without it there is none."""

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            if metrics is None:
                return web.Response(status=404)
            return web.Response(text=metrics(len(asked)))
        if request.path == "/tokenize":
            return web.json_response({"tokens": [10, 11, 12]})
        asked.append(await request.json())
        top = [{f"token_id:{token}": -0.1, "token_id:999": -3.0} for token in answer_ids]
        return web.json_response({"choices": [{"token_ids": answer_ids, "logprobs": {"top_logprobs": top}}]})

    return handler


def test_the_reference_splits_off_the_last_prompt_token() -> None:
    asked: list[dict[str, object]] = []
    handler = _plain_engine([12, 5, 6], asked)
    answer = _ask(handler, lambda session, url: complete_alike(session, url, "m", "prompt", 2))
    assert answer.token_ids == (5, 6)
    assert answer.top_logits == ({5: -0.1, 999: -3.0}, {6: -0.1, 999: -3.0})
    assert asked[0]["prompt"] == [10, 11]
    assert asked[0]["max_tokens"] == 3
    assert asked[0]["vllm_xargs"] == {"forced_first_tokens": [12]}


def test_the_reference_of_an_answer_for_which_nothing_moved_is_not_split() -> None:
    asked: list[dict[str, object]] = []
    answer = _ask(
        _plain_engine([5, 6], asked),
        lambda session, url: complete_alike(session, url, "m", "prompt", 2, last_token_alone=False),
    )
    assert answer.token_ids == (5, 6)
    assert asked[0]["prompt"] == [10, 11, 12]
    assert asked[0]["max_tokens"] == 2
    assert asked[0]["vllm_xargs"] == {"forced_first_tokens": []}


def test_a_reference_that_did_not_force_the_token_is_refused() -> None:
    with pytest.raises(RequestFailedError, match=r"must answer with tokens \[12\]"):
        _ask(
            _plain_engine([4, 5, 6], []),
            lambda session, url: complete_alike(session, url, "m", "prompt", 2),
        )


def _histogram(count: int, sum_s: float) -> str:
    name = "vllm:time_to_first_token_seconds"
    return (
        f"# TYPE {name} histogram\n"
        f'{name}_bucket{{le="+Inf",model_name="m"}} {count}\n'
        f'{name}_count{{model_name="m"}} {count}\n'
        f'{name}_sum{{model_name="m"}} {sum_s}\n'
    )


@pytest.mark.parametrize(
    ("metrics", "ttft_s"),
    [
        (lambda answered: _histogram(7 + answered, 3.0 + 0.25 * answered), 0.25),
        # An engine that has answered nothing yet has no series.
        (lambda answered: _histogram(1, 0.5) if answered else "", 0.5),
        # Somebody else asked it too.
        (lambda answered: _histogram(7 + 2 * answered, 3.0 + answered), None),
        (lambda answered: "no metrics at all {", None),
        (None, None),
    ],
)
def test_the_reference_tells_its_time_to_the_first_token(
    metrics: Callable[[int], str] | None, ttft_s: float | None
) -> None:
    handler = _plain_engine([12, 5, 6], [], metrics)
    answer = _ask(handler, lambda session, url: complete_alike(session, url, "m", "prompt", 2))
    assert answer.ttft_s == ttft_s and answer.token_ids == (5, 6)
