"""What `fidelity.py` measures on the running deployment: profiles and overheads, then traffic at several loads."""

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from fidelity_stack import EAST, EAST_PREFILL, HOME, HOME_DECODE, HOME_PREFILL, MeasuredStack, machine_cpu_s
from prfaas.core.latency.files import profile_text
from prfaas.core.workload.requests import TracedRequest
from prfaas.tools.profiling.endpoint import ProfiledEndpoint
from prfaas.tools.profiling.measure import Measurement, MeasurePlan, measure
from prfaas.tools.replay import ReplayOptions, replay
from prfaas.tools.replay.client import find_target

PLACES_S = 5
PROBE_TOKENS = 4096
_PROBES = 4


@dataclass(frozen=True)
class Depth:
    """How thoroughly profiles are measured."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 12288)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 3


QUICK = Depth(lengths=(1024, 4096, 12288), batches=(1, 4), repeats=1)


async def profiled(stack: MeasuredStack, depth: Depth) -> dict[str, Any]:
    """Profiles of both clusters, one request at a time; what two prefills do to each other; and what the gateway and
    the second hop add to short prompts."""
    async with (
        AsyncExitStack() as opened,
        ProfiledEndpoint(stack.url(HOME_PREFILL)) as home,
        ProfiledEndpoint(stack.url(HOME_DECODE)) as decode,
    ):
        plan = MeasurePlan(depth.lengths, (), depth.repeats)
        with stack.near(EAST_PREFILL):
            east = await opened.enter_async_context(ProfiledEndpoint(stack.url(EAST_PREFILL)))
            measured = {EAST: await measure(east, plan, _say)}
        measured[HOME] = await measure(home, plan, _say)
        # The shortest lengths are only there because a measurement needs some.
        steps = await measure(decode, MeasurePlan((16, 32), depth.batches, depth.repeats, 1, 256), _say)
        middle = depth.lengths[len(depth.lengths) // 2]
        alone: list[float] = []
        both: list[float] = []
        for _ in range(depth.repeats):
            _say(f"prefill of {middle} tokens, alone and on both at once")
            alone += [await east.prefill_s(middle), await home.prefill_s(middle)]
            both += await asyncio.gather(east.prefill_s(middle), home.prefill_s(middle))
        medians = await first_tokens_s(stack, (1, *depth.lengths), max(depth.repeats, 2))
    local = [sample for sample in measured[HOME].prefill if sample.at <= OFFLOADED_ABOVE]
    step_s = steps.decode[0].median_s
    return {
        "profiles": {
            EAST: _profile_text(EAST, measured[EAST], None),
            HOME: _profile_text(HOME, measured[HOME], steps),
        },
        "together": {"tokens": middle, "alone_s": alone, "both_s": both},
        "idle_ttft_s": medians,
        "request_s": max(medians["1"] - step_s, 0.0),
        "hop_s": max(
            statistics.median(medians[str(each.at)] - each.median_s - medians["1"] for each in local), 0.0
        ),
    }


async def driven(stack: MeasuredStack, requests: Sequence[TracedRequest]) -> dict[str, Any]:
    """The requests through the gateway, each at its time, and what every process worked meanwhile.

    `strangers_cpu_s`: what others used of this machine; a run with much of it is worth nothing.
    """
    async with aiohttp.ClientSession() as session:
        target = await find_target(session, stack.gateway_url)
    before, machine_s, began_s = stack.cpu_s(), machine_cpu_s(), time.monotonic()
    result = await replay(target, requests, ReplayOptions(), lambda _: _dot())
    lasted_s, after, machine_s = time.monotonic() - began_s, stack.cpu_s(), machine_cpu_s() - machine_s
    used = {name: after[name] - before[name] for name in after}
    print(file=sys.stderr)
    return {
        "lasted_s": lasted_s,
        "cpu_s": used,
        "strangers_cpu_s": max(machine_s - sum(used.values()), 0.0),
        "behind_s": result.max_behind_s,
        "columns": [
            "arrival_s", "input_tokens", "output_tokens", "first_token_s", "last_token_s", "route", "error",
        ],
        "requests": [
            [
                _rounded(record.arrival_s),
                record.input_tokens,
                record.output_tokens,
                _rounded(record.first_token_s),
                _rounded(record.last_token_s),
                record.route,
                record.error,
            ]
            for record in result.records
        ],
    }  # fmt: skip


async def probes(stack: MeasuredStack) -> list[float]:
    """Seconds of prefills of `PROBE_TOKENS` tokens, one after the other, on both prefill engines in turn.

    Taken before and after a drive: the machine itself is faster at one time than at another.
    """
    async with AsyncExitStack() as opened:
        home = await opened.enter_async_context(ProfiledEndpoint(stack.url(HOME_PREFILL)))
        with stack.near(EAST_PREFILL):
            east = await opened.enter_async_context(ProfiledEndpoint(stack.url(EAST_PREFILL)))
            return [await engine.prefill_s(PROBE_TOKENS) for _ in range(_PROBES) for engine in (east, home)]


async def first_tokens_s(stack: MeasuredStack, lengths: Sequence[int], repeats: int) -> dict[str, float]:
    """Seconds to the first token through the gateway, by tokens: medians of one request at a time."""
    medians: dict[str, float] = {}
    async with ProfiledEndpoint(stack.gateway_url) as gateway:
        for tokens in lengths:
            _say(f"{tokens} tokens through the gateway")
            runs = [await _first_s(gateway, tokens) for _ in range(repeats)]
            medians[str(tokens)] = statistics.median(runs)
    return medians


async def _first_s(gateway: ProfiledEndpoint, tokens: int) -> float:
    start_s = time.monotonic()
    answer = await gateway.decode(tokens, 1)
    return answer.first_s - start_s


OFFLOADED_ABOVE = 3000
"""The threshold while profiles are measured, tokens."""


def _profile_text(cluster: str, prefill: Measurement, decode: Measurement | None) -> str:
    joined = prefill if decode is None else Measurement(
        prefill.url, prefill.model, decode.plan, prefill.prefill, decode.decode, ()
    )  # fmt: skip
    return profile_text(
        joined.profile(
            name=f"fidelity-{cluster}",
            hardware="cpu",
            gpus_per_instance=1,
            source="bench/fidelity.py profile: medians, one request at a time",
        )
    )


def profile_files(texts: Mapping[str, str], directory: Path) -> dict[str, Path]:
    """The measured profiles as files, by cluster."""
    paths = {name: directory / f"profile-{name}.yaml" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    return paths


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, PLACES_S)


def _say(what: str) -> None:
    print(f"\r{what:70}", end="", file=sys.stderr, flush=True)


def _dot() -> None:
    print(".", end="", file=sys.stderr, flush=True)
