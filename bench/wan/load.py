"""Clients of a deployment of stand-ins in the laboratory, and what the control plane says of the link meanwhile."""

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from faults_load import Answers
from prfaas.core.route_header import ROUTE_HEADER, RouteHeader
from prfaas.core.sse import SseParser
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from wan.stack import ADMIN_PORT, GATEWAY_PORT, HOME, LINK, SERVED_NAME, WanStack

ANSWER_TOKENS = 8
_TIMEOUT_S = 90.0
_SAMPLE_S = 0.1
_VOCABULARY = 1 << 16
_JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class LinkRequest:
    """One request. Times are the monotonic clock's."""

    sent_s: float
    tokens: int
    first_s: float = math.inf
    """Of the first token."""
    ended_s: float = math.inf
    outcome: str = "none"
    """`right`, `wrong`, `refused`, or `none` where there was no whole answer."""
    detail: str = ""
    route: RouteHeader | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def is_offloaded(self) -> bool:
        return self.route is not None and self.route.route == "offload"

    @property
    def link_wait_s(self) -> float:
        """From the end of the prefill to the last byte; 0 for what was not offloaded."""
        if not self.is_offloaded or self.route is None:
            return 0.0
        return max((self.route.transfer_s or 0.0) - (self.route.prefill_s or 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class LinkReading:
    """What the control plane says at one time. A threshold that is infinite offloads nothing."""

    at_s: float
    up: bool
    capacity_bits_per_s: float
    egress_bits_per_s: float
    rtt_s: float
    threshold_tokens: float
    queued_bytes: int

    @classmethod
    def of_state(cls, state: Mapping[str, Any], at_s: float) -> "LinkReading":
        """What `GET /prfaas/state` said at a time."""
        link, threshold = state["links"][LINK], state["clusters"][HOME]["threshold_tokens"]
        return cls(
            at_s=at_s,
            up=link["up"],
            capacity_bits_per_s=link["capacity_bits_per_s"],
            egress_bits_per_s=link["egress_bits_per_s"],
            rtt_s=link["rtt_s"],
            threshold_tokens=math.inf if threshold is None else threshold,
            queued_bytes=link["queued_bytes"],
        )


def synthetic_model(directory: Path) -> Path:
    """The shape of the tiny Qwen3-Next, 1 KiB of KV per token and 402 KiB of state, for engines that run no model."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_config("qwen3-next")))
    write_tokenizer(directory, _VOCABULARY)
    return directory


class LinkLoad:
    """Requests through the gateway; lives in the event loop of a thread that is inside the gateway's namespace."""

    def __init__(self, stack: WanStack) -> None:
        self._stack = stack
        self._answers = Answers(stack.deployment)
        self._session: aiohttp.ClientSession
        self.requests: list[LinkRequest] = []
        self.readings: list[LinkReading] = []
        self._open: set[asyncio.Task[LinkRequest]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["LinkLoad"]:
        """The link is read ten times a second until the end."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            reader = asyncio.create_task(self._read_link())
            try:
                yield self
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    def send(self, prompt: Sequence[int]) -> "asyncio.Task[LinkRequest]":
        """One request, now."""
        task = asyncio.create_task(self._request(prompt))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def poisson(self, per_s: float, lengths: tuple[int, int], duration_s: float, seed: int) -> None:
        """Requests at random times; lengths are spread evenly over the logarithm of the range."""
        draw = random.Random(seed)
        due_s = time.monotonic()
        end_s = due_s + duration_s
        while (due_s := due_s + draw.expovariate(per_s)) < end_s:
            tokens = int(math.exp(draw.uniform(*map(math.log, lengths))))
            prompt = random_ids(draw, tokens)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.send(prompt)
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))

    async def drained(self) -> None:
        """Every request has ended."""
        while self._open:
            await asyncio.wait(self._open)

    async def state(self) -> Any:
        """`GET /prfaas/state`."""
        async with self._session.get(f"http://127.0.0.1:{ADMIN_PORT}/prfaas/state") as response:
            return await response.json()

    async def _read_link(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(2.0):
                    state = await self.state()
                self.readings.append(LinkReading.of_state(state, time.monotonic()))
            await asyncio.sleep(_SAMPLE_S)

    async def _request(self, prompt: Sequence[int]) -> LinkRequest:
        sent = LinkRequest(time.monotonic(), len(prompt))
        self.requests.append(sent)
        body = {
            "model": SERVED_NAME,
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                text = await self._exchange(sent, orjson.dumps(body))
            if sent.outcome != "refused":
                expected = self._answers.of(prompt, ANSWER_TOKENS)
                sent.outcome = "right" if text == expected else "wrong"
        except TimeoutError:
            sent.detail = f"no whole answer within {_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            sent.detail = f"{type(error).__name__}: {error}"[:300]
        sent.ended_s = time.monotonic()
        return sent

    async def _exchange(self, sent: LinkRequest, body: bytes) -> str:
        url = f"http://127.0.0.1:{GATEWAY_PORT}/v1/completions"
        async with self._session.post(url, data=body, headers=_JSON) as response:
            if response.status != 200:
                sent.detail = f"{response.status}: {(await response.text())[:200]}"
                if response.status in (429, 503):
                    sent.outcome = "refused"
                    return ""
                raise ValueError(sent.detail)
            sent.route = RouteHeader.parse(response.headers[ROUTE_HEADER])
            parser, text = SseParser(), ""
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    document = orjson.loads(event)
                    if "error" in document:
                        raise ValueError(f"an error in the answer: {document['error']}")
                    sent.first_s = min(sent.first_s, time.monotonic())
                    text += "".join(choice["text"] for choice in document.get("choices", ()))
            if not parser.ended:
                raise ValueError("the stream breaks off")
        return text


def random_ids(draw: random.Random, tokens: int) -> list[int]:
    """A prompt that shares no prefix with others."""
    return draw.choices(range(256), k=tokens)
