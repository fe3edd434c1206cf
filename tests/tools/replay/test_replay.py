"""The open loop against a stub: nothing is sent early, nothing waits for answers, every request gets its record."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prfaas.core.workload.requests import TracedRequest
from prfaas.core.workload.traffic import prompt_ids
from prfaas.tools.replay import (
    ReplayedRequest,
    ReplayError,
    ReplayOptions,
    ReplayResult,
    Target,
    find_target,
    replay,
)
from replay.stub import Handler, Stub, served, streamed, usage, well


def request(arrival_s: float, prompt: int = 10, answer: int = 4, first_block: int = 0) -> TracedRequest:
    blocks = tuple(range(first_block, first_block - (-prompt // 8)))
    return TracedRequest(arrival_s, prompt, answer, blocks, 8)


def replayed(
    stub: Stub, requests: Sequence[TracedRequest], options: ReplayOptions | None = None
) -> ReplayResult:
    return asyncio.run(replay(Target(stub.url, "tiny"), requests, options))


def test_every_request_is_sent_once_and_recorded() -> None:
    requests = [request(0.01 * number, prompt=5 + number, answer=1 + number % 3) for number in range(30)]
    told: list[ReplayedRequest] = []
    due = 0

    def on_due() -> None:
        nonlocal due
        due += 1

    with served(well) as stub:
        result = asyncio.run(replay(Target(stub.url, "tiny"), requests, None, told.append, on_due))
    assert due == len(told) == len(stub.bodies) == 30 and result.lost == 0
    assert sorted(len(body["prompt"]) for body in stub.bodies) == list(range(5, 35))
    for number, record in enumerate(result.records):
        assert record.index == number and record.input_tokens == 5 + number
        assert record.answered_tokens == record.output_tokens == 1 + number % 3
        assert record.sent_s is not None and record.sent_s >= record.arrival_s == 0.01 * number
        assert record.first_token_s is not None and record.last_token_s is not None
        assert record.ended_s is not None
        assert record.sent_s <= record.first_token_s <= record.last_token_s <= record.ended_s
        assert (record.status, record.request_id, record.cached_tokens) == (200, "r1", 3)
        assert record.route == "offload" and record.route_fields["bytes"] == "10"
    assert result.duration_s >= 0.29


def test_the_body_is_a_greedy_completion_of_exact_length() -> None:
    with served(well) as stub:
        replayed(stub, [request(0, 20, 7)], ReplayOptions(vocabulary_size=50))
        replayed(stub, [request(0, 20, 0)], ReplayOptions(stream=False, ignore_eos=False))
    assert stub.bodies[0] == {
        "model": "tiny",
        "prompt": prompt_ids((0, 1, 2), 8, 20, 50).tolist(),
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # An answer of no tokens can't be asked for.
    assert stub.bodies[1]["max_tokens"] == 1
    assert not {"ignore_eos", "stream"} & stub.bodies[1].keys()


def test_headers_go_with_every_request() -> None:
    seen = []

    async def handler(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(asked.headers["x-tenant"])
        return await well(asked, body)

    with served(handler) as stub:
        replayed(stub, [request(0), request(0)], ReplayOptions(headers={"x-tenant": "a"}))
    assert seen == ["a", "a"]


def test_a_whole_answer_has_no_first_token() -> None:
    with served(well) as stub:
        result = replayed(stub, [request(0)], ReplayOptions(stream=False))
    record = result.records[0]
    assert record.ttft_s is None and record.tpot_s is None and record.e2e_s is not None
    assert (record.answered_tokens, record.cached_tokens, record.error) == (4, 3, None)


def test_nobody_waits_for_an_answer() -> None:
    """The server answers nobody until all have come: a closed loop would never end."""
    everybody = asyncio.Event()
    here = 0

    async def handler(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal here
        here += 1
        if here == 40:
            everybody.set()
        await everybody.wait()
        return await well(asked, body)

    with served(handler) as stub:
        result = replayed(stub, [request(0.001 * number) for number in range(40)])
    assert result.lost == 0 and stub.most_open == 40 and result.waited == 0


def test_it_says_when_connections_were_too_few() -> None:
    async def handler(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await well(asked, body)

    with served(handler) as stub:
        result = replayed(stub, [request(0) for _ in range(6)], ReplayOptions(max_connections=2))
    assert stub.most_open == 2 and result.waited == 4 and result.lost == 0
    assert result.behind >= 4 and result.max_behind_s >= 0.1
    # What a user would have waited counts from when the request was due.
    assert result.records[5].ttft_s is not None and result.records[5].ttft_s >= 0.2


async def refuses(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no room"}}, status=503)


async def breaks_off(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await streamed(asked, [{"choices": [{"text": "x"}]}])


async def fails_midway(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await streamed(asked, [{"choices": [{"text": "x"}]}, {"error": {"message": "died"}}, "[DONE]"])


async def says_too_little(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await streamed(asked, [{"choices": [], "usage": usage(10, 3)}, "[DONE]"])


async def is_no_json(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await streamed(asked, ["{"])


async def hangs_up(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert asked.transport is not None
    asked.transport.abort()
    return web.Response()


async def never_answers(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def html(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


@pytest.mark.parametrize(
    ("handler", "status", "says"),
    [
        (refuses, 503, "status 503: no room"),
        (breaks_off, 200, "breaks off"),
        (fails_midway, 200, "died"),
        (says_too_little, 200, "3 of 4 tokens"),
        (is_no_json, 200, "can't be read"),
        (hangs_up, None, "Disconnected"),
        (never_answers, None, "no whole answer within 0.3 s"),
        (html, 200, "can't be read"),
    ],
)
def test_a_request_without_a_whole_answer_is_lost(handler: Handler, status: int | None, says: str) -> None:
    with served(handler) as stub:
        result = replayed(stub, [request(0)], ReplayOptions(timeout_s=0.3))
    record = result.records[0]
    assert result.lost == 1 and record.is_lost and record.status == status
    assert record.error is not None and says in record.error
    assert result.errors == {record.error: 1} and record.e2e_s is None


def test_a_shorter_answer_is_whole_where_it_may_end_early() -> None:
    with served(says_too_little) as stub:
        result = replayed(stub, [request(0)], ReplayOptions(ignore_eos=False))
    assert result.lost == 0 and result.records[0].answered_tokens == 3


def test_nobody_there_loses_every_request() -> None:
    with served(well) as stub:
        pass
    result = replayed(stub, [request(0), request(0.01)])
    assert result.lost == 2 and result.records[0].status is None


def find(url: str, model: str | None = None) -> Target:
    async def found() -> Target:
        async with aiohttp.ClientSession() as session:
            return await find_target(session, url, model)

    return asyncio.run(found())


def test_the_target_is_asked_for_its_model() -> None:
    with served(well) as stub:
        assert find(stub.url) == find(f"{stub.url}/v1/") == Target(stub.url, "tiny", 4096)
        assert find(stub.url, "other") == Target(stub.url, "other", None)
        with pytest.raises(ReplayError, match="doesn't serve third; it has tiny, other"):
            find(stub.url, "third")
    with pytest.raises(ReplayError, match="doesn't answer"):
        find(stub.url)
    with pytest.raises(ReplayError, match="no address of a server"):
        find("localhost:8000")
