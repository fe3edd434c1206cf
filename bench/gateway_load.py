"""Prompts of real text, and the load that is put on a gateway or on what it is compared with."""

import asyncio
import dataclasses
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

STREAMS = 32
STREAM_CHUNKS = 300
STREAM_CHUNK_S = 0.01
Form = Callable[[str], Any]

_HEADERS = {"Content-Type": "application/json"}
_VOCABULARY = 32_000
_TRAINING_FILES = 150


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts of one kind: `warm` to begin with, then `each` per round. `goal`: which of the goals is meant for it."""

    name: str
    goal: str
    prompts: list[Any]
    warm: int
    each: int
    concurrency: int
    path: str = "/v1/completions"

    def bodies(self, turn: int | None) -> list[bytes]:
        """Request bodies of a round, None: of the warm-up. None comes twice."""
        begin, count = (0, self.warm) if turn is None else (self.warm + turn * self.each, self.each)
        field = "messages" if self.path.endswith("chat/completions") else "prompt"
        chosen = self.prompts[begin : begin + count]
        return [orjson.dumps({"model": "stand-in", field: prompt}) for prompt in chosen]


@dataclasses.dataclass(frozen=True)
class Server:
    """Something that answers like a gateway."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Seconds on a CPU of all its live threads (Linux keeps them in nanoseconds)."""
        tasks = Path(f"/proc/{self.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


class Texts:
    """Program text of Python's own library: long, no two pieces alike, with the words that text repeats."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        files = [file for file in files if "site-packages" not in file.parts]
        random.Random(0).shuffle(files)
        self._training = files[:_TRAINING_FILES]
        self._text = "".join(map(_read, files[_TRAINING_FILES:]))
        self._at = 0

    def tokenizer(self) -> Tokenizer:
        """A byte-level BPE tokenizer trained on text that no prompt has."""
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(map(_read, self._training), trainer)
        return tokenizer

    def take(self, chars: int) -> str:
        """The next `chars` characters; from the beginning again when all are used up."""
        if self._at + chars > len(self._text):
            self._at = 0
        self._at += chars
        return self._text[self._at - chars : self._at]


def cases_of(tokenizer: Tokenizer, texts: Texts, requests: int, rounds: int) -> list[Case]:
    """`requests`: short ones per round; of 32K and 128K tokens there are fewer."""
    sample = texts.take(400_000)
    chars_per_token = len(sample) / len(tokenizer.encode_batch_fast([sample])[0].ids)

    def case(name: str, goal: str, tokens: int, each: int, concurrency: int, form: Form) -> Case:
        warm = 2 * concurrency
        chars = int(tokens * chars_per_token)
        prompts = [form(f"{i} {texts.take(chars)}") for i in range(warm + each * rounds)]
        path = "/v1/chat/completions" if form is _chat else "/v1/completions"
        return Case(name, goal, prompts, warm, each, concurrency, path)

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode_batch_fast([text])[0].ids
        return encoded

    return [
        case("short text", "short", 40, requests, 1, str),
        case("short text, 8 at once", "short", 40, requests, 8, str),
        case("short chat, 8 at once", "short", 40, requests, 8, _chat),
        case("32K-token text", "32K", 32_000, 4, 1, str),
        case("128K-token text", "128K", 128_000, 3, 1, str),
        case("32K token ids", "32K", 32_000, 4, 1, ids),
        case("128K token ids", "128K", 128_000, 3, 1, ids),
    ]


async def put(server: Server, case: Case, turn: int | None) -> tuple[float, float, str]:
    """CPU and wall-clock milliseconds per request of one round, and the route that its requests took."""
    bodies = case.bodies(turn)
    routes: set[str] = set()

    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client:

        async def worker(todo: Iterator[bytes]) -> None:
            for body in todo:
                async with client.post(case.path, data=body, headers=_HEADERS) as response:
                    await response.read()
                    response.raise_for_status()
                    routes.add(response.headers.get("x-prfaas-route", "both").split(";")[0])

        todo = iter(bodies)
        before_s, start_s = server.cpu_s(), time.perf_counter()
        await asyncio.gather(*(worker(todo) for _ in range(case.concurrency)))
        used_s, wall_s = server.cpu_s() - before_s, time.perf_counter() - start_s
    return used_s / len(bodies) * 1e3, wall_s / len(bodies) * 1e3, "+".join(sorted(routes))


async def put_streams(server: Server, chunks: int) -> float:
    """CPU seconds of many streams at once, each of so many chunks that come some milliseconds apart, as tokens do."""
    body = orjson.dumps({"model": "stand-in", "prompt": [5] * 10, "stream": True, "max_tokens": chunks})

    async def stream(client: aiohttp.ClientSession) -> None:
        async with client.post("/v1/completions", data=body, headers=_HEADERS) as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", connector=connector) as client:
        before_s = server.cpu_s()
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        return server.cpu_s() - before_s


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _read(file: Path) -> str:
    return file.read_text(errors="ignore")
