"""A gateway with more to do than it can: thousands of streams at once, and twice the requests its engines can serve.

    python bench/overload.py [--only streams|prefill|decode|cut] [--streams N] [--seconds S] [--json FILE]

`prfaas up` runs stand-in engines and the gateway; the load comes from this process.

streams  3,000 streams are opened at the same moment and stay open together; none may fail.
prefill  Prompts of 8K tokens: prefill engines are what limits. First at 0.9 and 1.0 of what the engines' profiles
         carry, then at twice that. Goodput is whole answers per second whose first token came before the deadline,
         which every request names in `x-request-timeout`.
decode   The same with short prompts and long answers: places in the decode batch are what limits.

cut      As prefill, but the load stays at 0.9 and the cluster elsewhere is drained: half of the prefill engines are out
         of reach at the planned load. What home carries alone is what is to be left.

Ends with 1 if a stream failed, an overloaded request had another end than an answer or 429, goodput under overload was
less than 0.9 of the best before, or the P99 of the time to the first token of admitted requests was over the deadline.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from burst_deployment import running
from ports import free_ports
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.sse import SseParser

MODEL = "qwen3-next"
SCENARIOS = ("streams", "prefill", "decode", "cut")
REFERENCES = (0.9, 1.0)
OVERLOAD = 2.0
LEAST_GOODPUT = 0.9
DEADLINE_S = 10.0
STREAM_TOKENS = 56
_PREFILLS, _DECODES = 2, 2
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A scenario's requests and engines. Prefill times are of the file's profiles, divided by `speedup`."""

    prompt_tokens: int
    answer_tokens: int
    speedup: float
    slots: int
    """Requests that decode together on one engine."""


SHAPES = {
    "streams": Shape(80, STREAM_TOKENS, 0.25, 4096),
    "prefill": Shape(8000, 24, 5.0, 64),
    "decode": Shape(300, 160, 2.0, 20),
    "cut": Shape(8000, 24, 5.0, 64),
}


@dataclass(slots=True)
class Asked:
    """One request; times are seconds since it was due."""

    ttft_s: float | None = None
    took_s: float = 0.0
    status: int | None = None
    tokens: int = 0
    error: str = ""
    behind_s: float = 0.0
    at_s: float = 0.0
    """When it was due, since the phase began."""


@dataclass(frozen=True, slots=True)
class Found:
    """One phase of load."""

    scenario: str
    load: float
    """Of what the profiles say the engines carry; 0 for the streams."""
    per_s: float
    seconds: float
    asked: list[Asked]
    open_at_once: int = 0
    settled_s: float = 0.0
    """Goodput counts from here on: before, an empty queue takes on more than engines carry."""

    @property
    def admitted(self) -> list[Asked]:
        return [each for each in self.asked if each.status == 200]

    @property
    def good(self) -> list[Asked]:
        return [
            each
            for each in self.admitted
            if not each.error and each.ttft_s is not None and each.ttft_s <= DEADLINE_S
        ]

    @property
    def goodput_per_s(self) -> float:
        good = sum(each.at_s >= self.settled_s for each in self.good)
        return good / (self.seconds - self.settled_s)

    @property
    def refused(self) -> int:
        return sum(each.status == 429 for each in self.asked)

    @property
    def errors(self) -> Counter[str]:
        return Counter(each.error for each in self.asked if each.error and each.status != 429)

    @property
    def ttft_p99_s(self) -> float:
        """Of admitted requests; infinite if one of a hundred had no token."""
        times = sorted(math.inf if each.ttft_s is None else each.ttft_s for each in self.admitted)
        return times[min(int(0.99 * len(times)), len(times) - 1)] if times else math.inf

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "load": self.load,
            "per_s": self.per_s,
            "seconds": self.seconds,
            "requests": len(self.asked),
            "admitted": len(self.admitted),
            "refused": self.refused,
            "errors": dict(self.errors),
            "goodput_per_s": self.goodput_per_s,
            "ttft_p99_s": self.ttft_p99_s,
            "open_at_once": self.open_at_once,
            "late_s": max(each.behind_s for each in self.asked),
        }


def write_deployment(home: Path, shape: Shape) -> Deployment:
    """Two engines for each of: prefill elsewhere, prefill at home, decode."""
    port, admin_port, *others = free_ports(2 + 2 * (2 * _PREFILLS + _DECODES))
    ports = iter(others)

    def instances(cluster: str, *groups: tuple[str, int]) -> list[dict[str, Any]]:
        return [
            {
                "name": f"{cluster}-{role}-{number}",
                "roles": [role],
                "host": "127.0.0.1",
                "http_port": next(ports),
                "kv_port": next(ports),
            }
            for role, count in groups
            for number in range(count)
        ]

    def cluster(name: str, kind: str, profile: str, *groups: tuple[str, int]) -> dict[str, Any]:
        return {
            "name": name,
            "kind": kind,
            "hardware": "synthetic",
            "profile": profile,
            "speedup": shape.speedup,
            "instances": instances(name, *groups),
        }

    # Times of its own: short prompts cost nothing, and a batch of thousands has a step of half a second.
    profile = {
        "name": "quick",
        "model": "made up",
        "hardware": "made up",
        "gpus_per_instance": 1,
        "source": "made up for bench/overload.py",
        "prefill": {
            "interpolation": "linear",
            "points": [[64, 0.002], [8192, 0.8], [16384, 1.6]],
            "range_tokens": [64, 16384],
        },
        "decode": {"points": [[20, 0.025], [2000, 0.5]]},
    }
    (home / "quick.yaml").write_text(json.dumps(profile))
    document = {
        "name": "overload",
        "model": {"served_name": MODEL, "tiny": MODEL, "max_model_len": 16384},
        "clusters": [
            cluster("far", "prfaas", "quick.yaml", ("prefill", _PREFILLS)),
            cluster("home", "pd", "quick.yaml", ("prefill", _PREFILLS), ("decode", _DECODES)),
        ],
        "links": [{"source": "far", "target": "home", "bandwidth": "4 Gbit/s", "connections": 2}],
        "control": {"allocation": False},
        "gateway": {"host": "127.0.0.1", "port": port, "admin": {"port": admin_port}},
        "engine": {
            "max_num_batched_tokens": 2048,
            "max_num_seqs": shape.slots,
            "kv_cache_gib": 64,
            "staging": "256 MiB",
            "transfer_block": "256 KiB",
        },
    }
    path = home / "overload.yaml"
    path.write_text(json.dumps(document))
    return load_deployment(path, state_dir=home / "home")


def carried_per_s(deployment: Deployment, shape: Shape) -> float:
    """Requests per second that prefill engines and decode engines carry by their profiles."""
    profile = deployment.clusters[0].profile
    assert profile is not None
    prefill_s = profile.prefill_s(shape.prompt_tokens) / shape.speedup
    step_s = profile.decode_step_s(shape.slots) / shape.speedup
    return min(
        2 * _PREFILLS / prefill_s,
        _DECODES * shape.slots / (shape.answer_tokens * step_s),
    )


def cut_off(deployment: Deployment) -> None:
    """Nothing is prefilled elsewhere any more."""
    for number in range(_PREFILLS):
        words = ["drain", f"far-prefill-{number}", str(deployment.path)]
        subprocess.run(
            [sys.executable, "-m", "prfaas.cli.main", *words],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PRFAAS_HOME": str(deployment.path.parent / "home")},
        )


class Client:
    """Asks for streamed answers to prompts that are all different, with another seed from those of others too."""

    def __init__(self, url: str, shape: Shape, session: aiohttp.ClientSession, seed: int = 0) -> None:
        self._url = f"{url}/v1/completions"
        self._shape = shape
        self._session = session
        self._random = random.Random(seed)
        self.open = 0
        self.most_open = 0

    def body(self) -> bytes:
        """Made before it is due, so that this costs no time then."""
        return orjson.dumps(
            {
                "model": MODEL,
                "prompt": self._random.choices(range(256), k=self._shape.prompt_tokens),
                "max_tokens": self._shape.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    async def ask(
        self, body: bytes, due_s: float, headers: dict[str, str], limit_s: float, at_s: float = 0.0
    ) -> Asked:
        asked = Asked(behind_s=time.monotonic() - due_s, at_s=at_s)
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.post(self._url, data=body, headers=_HEADERS | headers) as response,
            ):
                asked.status = response.status
                if response.status != 200:
                    asked.error = f"{response.status}: {(await response.text())[:120]}"
                    if response.status == 429 and "Retry-After" not in response.headers:
                        asked.status, asked.error = 0, "429 without Retry-After"
                else:
                    await self._read(response, asked, due_s)
        except TimeoutError:
            asked.error = f"no whole answer within {limit_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            asked.error = f"{type(error).__name__}: {error}"[:120]
        asked.took_s = time.monotonic() - due_s
        return asked

    async def _read(self, response: aiohttp.ClientResponse, asked: Asked, due_s: float) -> None:
        parser = SseParser()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    document = orjson.loads(event)
                    if "error" in document:
                        asked.error = f"in the stream: {document['error']}"[:120]
                    if document.get("choices") and asked.ttft_s is None:
                        asked.ttft_s = time.monotonic() - due_s
                    if document.get("usage"):
                        asked.tokens = document["usage"]["completion_tokens"]
        finally:
            self.open -= 1
        if not asked.error and not (parser.ended and asked.tokens == self._shape.answer_tokens):
            asked.error = "the stream breaks off"


async def all_at_once(deployment: Deployment, shape: Shape, count: int) -> Found:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(deployment.gateway.url, shape, session)
        bodies = [client.body() for _ in range(count)]
        now_s = time.monotonic()
        asked = await asyncio.gather(*(client.ask(body, now_s, {}, 240.0) for body in bodies))
        return Found("streams", 0.0, count, time.monotonic() - now_s, asked, client.most_open)


async def at_rate(
    deployment: Deployment,
    scenario: str,
    load: float,
    per_s: float,
    seconds: float,
    seed: int,
    settled_s: float = 0.0,
) -> Found:
    """Requests at random times, whether or not those before have ended."""
    rng = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(deployment.gateway.url, SHAPES[scenario], session, seed)
        headers = {"x-request-timeout": f"{DEADLINE_S:g}"}
        tasks = []
        began_s = due_s = time.monotonic()
        while (due_s := due_s + rng.expovariate(per_s)) < began_s + seconds:
            body = client.body()
            await asyncio.sleep(due_s - time.monotonic())
            at_s = due_s - began_s
            tasks.append(asyncio.create_task(client.ask(body, due_s, headers, 3 * DEADLINE_S, at_s)))
        asked = await asyncio.gather(*tasks)
        return Found(scenario, load, per_s, seconds, asked, client.most_open, settled_s)


async def phases(deployment: Deployment, scenario: str, options: argparse.Namespace) -> list[Found]:
    """The gateway is tried with a few requests first: tokenizers and connections are there then."""
    shape = SHAPES[scenario]
    await at_rate(deployment, scenario, 0.1, 5.0, 3.0, seed=9)
    if scenario == "streams":
        return [await all_at_once(deployment, shape, options.streams)]
    carried = carried_per_s(deployment, shape)
    found = []
    if scenario == "cut":
        load = REFERENCES[0]
        found.append(await at_rate(deployment, scenario, load, load * carried, options.seconds / 2, 0))
        await asyncio.to_thread(cut_off, deployment)
        per_s, settled_s = load * carried, min(2 * DEADLINE_S, options.seconds / 2)
        found.append(await at_rate(deployment, scenario, load, per_s, options.seconds, 1, settled_s))
        return found
    for seed, load in enumerate((*REFERENCES, OVERLOAD)):
        seconds = options.seconds if load == OVERLOAD else options.seconds / 2
        found.append(await at_rate(deployment, scenario, load, load * carried, seconds, seed))
        await asyncio.sleep(1.0)
    return found


Verdict = tuple[bool, str]


def verdicts(found: Sequence[Found]) -> list[Verdict]:
    scenario = found[0].scenario
    last = found[-1]
    # Of those, too, whose KVCache was on the line.
    failed = sum(sum(each.errors.values()) for each in (found if scenario == "cut" else found[-1:]))
    if scenario == "streams":
        return [
            (
                not failed and not last.refused and last.open_at_once == len(last.asked),
                f"streams: {failed + last.refused} of {len(last.asked)} failed, "
                f"{last.open_at_once} were open at the same moment",
            )
        ]
    best = max(each.goodput_per_s for each in found[:-1])
    if scenario == "cut":
        # Two of four prefill engines are left.
        best = min(best, found[0].per_s / found[0].load / 2)
    ratio = last.goodput_per_s / best if best else 0.0
    return [
        (not failed, f"{scenario}: {failed} of {len(last.asked)} ended with neither an answer nor 429"),
        (
            ratio >= LEAST_GOODPUT,
            f"{scenario}: goodput at {last.load:g} times the load is {last.goodput_per_s:.1f}/s, "
            f"{ratio:.2f} of {'what is left' if scenario == 'cut' else 'the best'} ({best:.1f}/s)",
        ),
        (
            last.ttft_p99_s <= DEADLINE_S,
            f"{scenario}: P99 of the time to the first token of {len(last.admitted)} admitted requests "
            f"{_seconds(last.ttft_p99_s)}, deadline {DEADLINE_S:g} s",
        ),
    ]


def table_of(found: Sequence[Found]) -> Table:
    table = Table()
    for name in (
        "scenario",
        "load",
        "per s",
        "requests",
        "refused",
        "errors",
        "goodput/s",
        "TTFT P50",
        "P99",
        "open",
    ):
        table.add_column(name, justify="left" if name == "scenario" else "right")
    for each in found:
        times = [asked.ttft_s for asked in each.admitted if asked.ttft_s is not None]
        table.add_row(
            each.scenario,
            f"{each.load:g}" if each.load else "at once",
            f"{each.per_s:.1f}" if each.load else "",
            str(len(each.asked)),
            str(each.refused),
            str(sum(each.errors.values())),
            f"{each.goodput_per_s:.1f}",
            _seconds(statistics.median(times)) if times else "",
            _seconds(each.ttft_p99_s),
            str(each.open_at_once),
        )
    return table


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f} s"


def with_deployment(scenario: str, options: argparse.Namespace) -> list[Found]:
    with tempfile.TemporaryDirectory(prefix="prfaas-overload-") as name:
        directory = Path(name)
        deployment = write_deployment(directory, SHAPES[scenario])
        with running(deployment.path, directory):
            found = uvloop.run(phases(deployment, scenario, options))
        if options.keep_logs is not None:
            options.keep_logs.mkdir(parents=True, exist_ok=True)
            (options.keep_logs / f"{scenario}.log").write_text((directory / "up.log").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SCENARIOS)
    parser.add_argument("--streams", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload; the others take half of it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR")
    options = parser.parse_args()
    chosen = SCENARIOS if options.only is None else (options.only,)
    results = [with_deployment(scenario, options) for scenario in chosen]
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    for found in results:
        console.print(table_of(found))
        for phase in found:
            for error, count in phase.errors.most_common(4):
                console.print(f"{phase.scenario}, load {phase.load:g}: {count} x {error}", markup=False)
    late_s = max(each.behind_s for found in results for phase in found for each in phase.asked)
    console.print(
        f"requests were sent up to {_seconds(late_s)} late; {os.cpu_count()} cores had "
        f"{os.getloadavg()[0]:.1f} processes to run in the last minute"
    )
    checks = [verdict for found in results for verdict in verdicts(found)]
    for good, sentence in checks:
        print(f"{'yes' if good else 'NO '}  {sentence}")
    if options.json is not None:
        document = {
            "deadline_s": DEADLINE_S,
            "phases": [phase.to_json() for found in results for phase in found],
            "verdicts": [{"good": good, "text": sentence} for good, sentence in checks],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(good for good, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
