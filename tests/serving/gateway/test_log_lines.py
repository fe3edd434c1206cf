"""What the gateway logs of requests: a line for each, and nothing that a client sent in a body or a header."""

import asyncio
import contextlib
import io
import json
import logging
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.logs import LogSettings, set_up_logging

from .world import World, running_world

SECRET = "s3cr3tpr0mpt"
SHORT, LONG = SECRET * 2, SECRET * 30
# Ids that no figure of a log line has by chance.
IDS = [70_000 + each for each in range(300)]


class Setting:
    """A world that lasts for a test's examples, and what is logged in it."""

    def __init__(self, home: Path) -> None:
        self.log = io.StringIO()
        handler = set_up_logging(LogSettings("text", "debug"), whole_process=True, stream=self.log)
        # No warning may be spared the check.
        handler.filters.clear()
        for name in ("aiohttp", "asyncio"):
            logging.getLogger(name).setLevel(logging.DEBUG)
        self.runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self.world: World = self.runner.run(
            self._stack.enter_async_context(
                running_world(home, spare=True, third=True, tenant_header="x-tenant")
            )
        )

    def close(self) -> None:
        self.runner.run(self._stack.aclose())
        self.runner.close()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    ours, root = logging.getLogger("prfaas"), logging.getLogger()
    before = (ours.handlers[:], ours.level, ours.propagate, root.handlers[:], root.level)
    made = Setting(tmp_path_factory.mktemp("log-lines"))
    try:
        yield made
    finally:
        made.close()
        ours.handlers[:], ours.level, ours.propagate = before[0], before[1], before[2]
        root.handlers[:], root.level = before[3], before[4]
        for name in ("aiohttp", "asyncio"):
            logging.getLogger(name).setLevel(logging.NOTSET)


marked = st.text(st.characters(codec="utf-8"), max_size=20).map(lambda text: SECRET + text)
header_values = st.text(string.ascii_letters + string.punctuation + " \té", max_size=20).map(
    lambda text: (SECRET + text).strip().encode()
)
headers = st.dictionaries(
    st.sampled_from(
        [
            "x-tenant",
            "Authorization",
            "Cookie",
            "X-Request-Id",
            "traceparent",
            "User-Agent",
            "Referer",
            "X-" + SECRET,
        ]
    ),
    header_values,
    max_size=4,
)
bodies = st.one_of(
    st.just(json.dumps({"prompt": IDS}).encode()),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt": st.one_of(
                st.just(IDS), st.sampled_from([SHORT, LONG, [IDS, IDS], [SHORT], []]), marked, st.none()
            ),
            "input": st.one_of(marked, st.lists(marked, max_size=1)),
            "instructions": marked,
            "previous_response_id": marked,
            "system": marked,
            "max_tokens": st.just(5),
            "tokens": st.one_of(st.just(IDS), marked),
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(["user", SECRET]), "content": marked}),
                max_size=2,
            ),
            "model": st.one_of(st.just("stand-in"), marked),
            "stream": st.booleans(),
            "n": st.one_of(st.integers(-1, 2), marked),
            "stop": marked,
            "user": marked,
            "cache_salt": marked,
            "kv_transfer_params": st.dictionaries(marked, marked, max_size=1),
            "vllm_xargs": st.dictionaries(marked, marked, max_size=1),
            SECRET: marked,
        },
    ).map(lambda body: json.dumps(body).encode()),
    marked.map(lambda text: text.encode()),
    marked.map(lambda text: b'{"prompt": "' + text.encode()),
)
failures = st.fixed_dictionaries(
    {
        "remote": st.sampled_from([None, None, 400, 500]),
        "decode": st.sampled_from(
            [
                None,
                None,
                "before-headers",
                "after-headers",
                "mid-stream",
                "mid-event",
                "http-500",
                "in-body",
                "error-event",
            ]
        ),
    }
)
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
paths = st.sampled_from(
    [*(endpoint.path for endpoint in Endpoint), "/v1/completions", "/v1/completions", "/v1/nothing"]
)


async def send(world: World, path: str, raw: bytes, head: dict[str, bytes]) -> None:
    given_headers = {"Content-Type": "application/json"}
    given_headers |= {name: value.decode("utf-8", "surrogateescape") for name, value in head.items()}
    with contextlib.suppress(aiohttp.ClientError, ValueError):
        async with world.client.post(path, data=raw, headers=given_headers) as response:
            await response.read()


async def complete(world: World, ids: list[int], failing: int | None = None) -> str:
    """The request's id. The plane must want to prefill it at `remote`, so nobody may have its ids cached."""
    world.remote.fails, world.decode.dies = failing, None
    while not all(world.plane.is_up(engine.name) for engine in world.engines):
        await asyncio.sleep(0.01)
    async with world.client.post("/v1/completions", json={"prompt": ids}) as response:
        await response.read()
        return response.headers["X-Request-Id"]


async def send_raw(world: World, raw: bytes) -> None:
    assert world.client._base_url is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", world.client._base_url.port)
    writer.write(raw)
    with contextlib.suppress(ConnectionError):
        writer.write_eof()
        await reader.read()
    writer.close()


def check(log: io.StringIO) -> None:
    lines = log.getvalue().splitlines()
    log.seek(0)
    log.truncate()
    for line in lines:
        assert re.fullmatch(r"20\d\d-\S+Z (debug|info|warning|error) \S+ .*", line)
        for secret in (SECRET, "Traceback"):
            assert secret.lower() not in line.lower(), line
        # A token id by itself: the digits may be part of a request's random id.
        assert re.search(r"(?<![\w.])70001(?!\w)", line) is None, line


@settings(max_examples=100, deadline=None)
@given(path=paths, raw=bodies, head=headers, failing=failures)
def test_nothing_that_a_client_sent_is_logged(
    setting: Setting, path: str, raw: bytes, head: dict[str, bytes], failing: dict[str, Any]
) -> None:
    world = setting.world
    world.remote.fails, world.decode.dies, world.decode.dies_after = failing["remote"], failing["decode"], 1
    setting.runner.run(send(world, path, raw, head))
    assert "prfaas.access" in setting.log.getvalue()
    check(setting.log)


SECRET_BYTES = SECRET.encode()


@settings(max_examples=60, deadline=None)
@given(
    raw=st.one_of(
        st.sampled_from(
            [
                SECRET_BYTES + b"\r\n\r\n",
                b"GET /health " + SECRET_BYTES + b"\r\n\r\n",
                b"GET /health HTTP/1.1\r\n" + SECRET_BYTES + b"\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + SECRET_BYTES + b"\x00\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + SECRET_BYTES * 2000 + b"\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: " + SECRET_BYTES + b"\r\n\r\n",
                JSON_HEAD + b"Content-Length: 99\r\n\r\n" + SECRET_BYTES,
                JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + SECRET_BYTES,
                JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + SECRET_BYTES,
                JSON_HEAD + b"Expect: " + SECRET_BYTES + b"\r\nContent-Length: 2\r\n\r\n{}",
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: "
                + SECRET_BYTES
                + b"\r\nContent-Length: 2\r\n\r\n{}",
            ]
        ),
        st.binary(max_size=60).map(
            lambda noise: b"POST /v1/completions HTTP/1.1\r\nHost: " + noise + SECRET_BYTES
        ),
        st.binary(max_size=60).map(lambda noise: noise + SECRET_BYTES + b"\r\n\r\n" + noise),
    )
)
def test_what_is_no_request_is_not_quoted(setting: Setting, raw: bytes) -> None:
    # What comes in the target of a request that is well-formed is its path, and that is logged.
    setting.runner.run(send_raw(setting.world, raw))
    assert "exception=" not in setting.log.getvalue()
    check(setting.log)


def test_one_line_per_request(setting: Setting) -> None:
    request_id = setting.runner.run(complete(setting.world, [5, *IDS]))
    (line,) = [each for each in setting.log.getvalue().splitlines() if " prfaas.access " in each]
    shape = (
        rf"\S+ info prfaas.access request_id={request_id} peer=127.0.0.1 answered "
        r"method=POST path=/v1/completions status=200 route=offload "
        r"outcome=ok prompt_tokens=301 answer_tokens=16 ttft_s=0\.\d+ duration_s=0\.\d+"
    )
    assert re.fullmatch(shape, line), line
    check(setting.log)


def test_a_client_that_leaves_and_what_is_not_generating_have_a_line_too(setting: Setting) -> None:
    world = setting.world
    world.decode.chunks, world.decode.chunk_s = 1000, 0.01

    async def ask() -> None:
        async with world.client.post("/v1/completions", json={"prompt": IDS[:5], "stream": True}) as response:
            await response.content.readany()
        async with world.client.get("/health?key=" + SECRET):
            pass
        async with world.client.get("/a%0Ab%20c"):
            pass
        while "left by its client" not in setting.log.getvalue():
            await asyncio.sleep(0.01)

    setting.runner.run(ask())
    text = setting.log.getvalue()
    assert (
        "left by its client method=POST path=/v1/completions status=- " in text
        and "outcome=cancelled" in text
    )
    assert "answered method=GET path=/health status=200 duration_s=" in text
    assert "answered method=GET path=/a%0Ab%20c status=404 " in text
    check(setting.log)


def test_warnings_say_whose_request_it_was(setting: Setting) -> None:
    request_id = setting.runner.run(complete(setting.world, [6, *IDS], failing=500))
    (line,) = [each for each in setting.log.getvalue().splitlines() if " prefill at remote " in each]
    assert f"request_id={request_id} peer=127.0.0.1 prefill at remote for " in line
    assert line.endswith("failed: remote: answered /v1/completions with 500")
    check(setting.log)
