"""The load of `faults.py`: requests whose right answers are known, and what became of each."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from faults_stack import MODEL, FaultStack
from prfaas.core.deployment import Deployment
from prfaas.core.sse import SseParser
from prfaas.serving.engines.synthetic.content import TokenChain
from prfaas.serving.engines.synthetic.layout import SyntheticLayout
from prfaas.serving.engines.synthetic.text import Text

TIMEOUT_S = 75.0
"""A request without a whole answer by then has none."""
_PREFIXES = 24
_PREFIX_TOKENS = (1500, 9000)
_TAIL_TOKENS = (20, 1500)
_ANSWER_TOKENS = (20, 400)

Outcome = Literal["right", "refused", "wrong", "none"]
_HEADERS = {"Content-Type": "application/json"}


@dataclass(slots=True)
class SentRequest:
    """Times are the monotonic clock's."""

    sent_s: float
    prompt_tokens: int
    stream: bool
    ended_s: float = 0.0
    outcome: Outcome = "none"
    status: int | None = None
    detail: str = ""
    retried: bool = False
    route: str = ""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.sent_s


class Answers:
    """What a stand-in says to a prompt when nothing went wrong: a function of the prompt alone."""

    def __init__(self, deployment: Deployment) -> None:
        model = deployment.model.kv_model()
        self._block_tokens = SyntheticLayout.of_model(model).block_tokens
        self._text = Text(deployment.model.path)
        self._vocabulary = self._text.vocabulary

    def of(self, prompt: Sequence[int], max_tokens: int) -> str:
        chain = TokenChain(prompt, self._block_tokens)
        chain.extend(max_tokens, 0, self._vocabulary)
        return self._text.decode(list(chain.ids[len(prompt) :]))


class _BadAnswerError(Exception):
    """Not a whole answer."""


class _RefusedError(Exception):
    """The gateway said no, and when to come again."""


@dataclass(slots=True)
class FaultLoad:
    """Requests at random times, `per_s` on average. Half of them share long prefixes, half of them are streamed."""

    stack: FaultStack
    answers: Answers
    per_s: float
    seed: int
    done: list[SentRequest] = field(default_factory=list)
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Until cancelled; then `drained` is to be awaited."""
        rng = random.Random(self.seed)
        prefixes = [_ids(rng, rng.randint(*_PREFIX_TOKENS)) for _ in range(_PREFIXES)]
        due_s = time.monotonic()
        while True:
            due_s += rng.expovariate(self.per_s)
            tail = _ids(rng, rng.randint(*_TAIL_TOKENS))
            prefix = rng.choice(prefixes) if rng.random() < 0.5 else _ids(rng, rng.randint(*_PREFIX_TOKENS))
            prompt = tail if rng.random() < 0.3 else prefix[: rng.randint(1, len(prefix))] + tail
            count = int(math.exp(rng.uniform(*map(math.log, _ANSWER_TOKENS))))
            stream = rng.random() < 0.5
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.create_task(self._request(prompt, count, stream=stream))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    @property
    def open(self) -> int:
        return len(self._open)

    async def drained(self) -> None:
        """Every request has ended."""
        while self._open:
            await asyncio.wait(self._open)

    async def _request(self, prompt: list[int], count: int, *, stream: bool) -> None:
        sent = SentRequest(time.monotonic(), len(prompt), stream)
        body = orjson.dumps(
            {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
                "stream": stream,
            }
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                text = await self._answered(sent, body)
            expected = self.answers.of(prompt, count)
            sent.outcome = "right" if text == expected else "wrong"
            if text != expected:
                pairs = zip(text, expected, strict=False)
                same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(text))
                sent.detail = f"{len(text)} of {len(expected)} characters, the first {same} are right"
        except _RefusedError as error:
            sent.outcome, sent.detail = "refused", str(error)
        except TimeoutError:
            sent.detail = f"no whole answer within {TIMEOUT_S:g} s"
        except (_BadAnswerError, aiohttp.ClientError, OSError, ValueError) as error:
            sent.detail = f"{type(error).__name__}: {error}"[:300]
        sent.ended_s = time.monotonic()
        self.done.append(sent)

    async def _answered(self, sent: SentRequest, body: bytes) -> str:
        """Once more if the gateway was restarted meanwhile, as its clients are told to do."""
        try:
            return await self._exchange(sent, body)
        except (_BadAnswerError, aiohttp.ClientError, OSError, ValueError):
            # The connection may break a moment before the restart is known here.
            await asyncio.sleep(0.3)
            if not self.stack.restarted_within(sent.sent_s, time.monotonic()):
                raise
        while self.stack.is_gateway_away:
            await asyncio.sleep(0.05)
        sent.retried = True
        return await self._exchange(sent, body)

    async def _exchange(self, sent: SentRequest, body: bytes) -> str:
        url = f"{self.stack.gateway_url}/v1/completions"
        async with self.stack.session.post(url, data=body, headers=_HEADERS) as response:
            sent.status = response.status
            sent.route = response.headers.get("x-prfaas-route", "")
            if response.status != 200:
                text = (await response.text())[:200]
                if response.status in (429, 503) and "Retry-After" in response.headers:
                    raise _RefusedError(f"{response.status}: {text}")
                raise _BadAnswerError(f"status {response.status}: {text}")
            if response.content_type != "text/event-stream":
                return _text_of(orjson.loads(await response.read()))
            parser, text = SseParser(), ""
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    text += _text_of(orjson.loads(event))
            if not parser.ended:
                raise _BadAnswerError(f"the stream breaks off after {len(text)} characters")
            return text


def _text_of(document: dict[str, Any]) -> str:
    if "error" in document:
        raise _BadAnswerError(f"an error in the answer: {document['error']}"[:200])
    return "".join(choice["text"] for choice in document.get("choices", ()))


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(256), k=count)
