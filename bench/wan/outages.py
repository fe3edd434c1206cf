"""Interruptions of the line under load: what clients, the transport and the next transfer notice of them."""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prfaas.core.deployment import Deployment
from wan.load import LinkLoad, LinkRequest, random_ids
from wan.mid_run import INTO_LONG_S, local_prefill_s, standing_in
from wan.stack import GATEWAY_HOST, WanStack

PROMPT_TOKENS = 8_000
LONG_TOKENS = 24_000
REQUESTS_PER_S = 1.0
BEFORE_S, AFTER_S = 8.0, 12.0
THRESHOLD_TOKENS = 1_000
# Home can take the whole load at once, so that what a fallback costs is not hidden behind a queue.
_HOME_PREFILLS, _HOME_SPEEDUP = 2, 4.0
_DECODE = f"home-{_HOME_PREFILLS}"

# Goals.
FALLBACK_WITHIN_S = 3.0
SLOWER_AT_MOST = 1.2
_LOSS, _LOSSY_S = 0.02, 8.0


@dataclass(frozen=True, slots=True)
class Outage:
    """One kind of interruption."""

    name: str
    stays_dark: bool = False
    """It lasts longer than a transfer may wait."""


OUTAGES = (
    Outage("freeze-5"),
    Outage("freeze-20", stays_dark=True),
    Outage("kill-1"),
    Outage("kill-4"),
    Outage("stop-5"),
    Outage("lossy"),
)


@dataclass(frozen=True, slots=True)
class OutageResult:
    """What one interruption cost."""

    outage: str
    outcomes: Mapping[str, int]
    fallbacks: int
    """Requests that were prefilled at home after all."""
    latest_fallback_s: float
    """From the interruption, or from the request's arrival if that was later, until its local prefill began."""
    ttft_before_s: float
    """Median."""
    ttft_longest_s: float
    """Of requests that were open in the interruption."""
    transfer_before_s: float
    """Median over the offloaded requests of the same length, from the prefill's start to the last byte."""
    transfer_after_s: float
    """Of the first offloaded request that was sent after the interruption."""
    offload_back_s: float
    """From the end of the interruption until that one was sent."""
    killed: int


def run(directory: Path, outages: Sequence[Outage], *, encryption: bool) -> list[dict[str, Any]]:
    """All interruptions one after the other on the same engines."""
    if not outages:
        return []
    folder = directory / "outages"
    folder.mkdir(parents=True)
    rows = []
    with fixed_threshold(folder, encryption=encryption) as stack:
        for number, outage in enumerate(outages):
            with stack.laboratory.inside(GATEWAY_HOST):
                result = asyncio.run(one_outage(stack, outage, number, folder))
            rows.append(asdict(result))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


@contextlib.contextmanager
def fixed_threshold(folder: Path, *, encryption: bool) -> Iterator[WanStack]:
    """One producer, and at home one engine for prefill and one for decode."""
    with standing_in(
        folder,
        "static_threshold",
        encryption=encryption,
        far=1,
        home_prefills=_HOME_PREFILLS,
        home_speedup=_HOME_SPEEDUP,
        threshold_tokens=THRESHOLD_TOKENS,
    ) as stack:
        yield stack


async def one_outage(stack: WanStack, outage: Outage, seed: int, folder: Path) -> OutageResult:
    killed = 0

    async def interrupt() -> None:
        nonlocal killed
        laboratory = stack.laboratory
        kind, _, number = outage.name.partition("-")
        if kind == "freeze":
            laboratory.change(blackhole=True)
            await asyncio.sleep(float(number))
            laboratory.change(blackhole=False)
        elif kind == "kill":
            port = stack.deployment.instance(_DECODE).kv_port
            killed = laboratory.kill_connections(int(number), port)
        elif kind == "stop":
            group = stack.running[_DECODE].pid(_DECODE)
            os.killpg(group, signal.SIGSTOP)
            await asyncio.sleep(float(number))
            os.killpg(group, signal.SIGCONT)
        else:
            laboratory.change(loss=_LOSS)
            await asyncio.sleep(_LOSSY_S)
            laboratory.change(loss=0.0)

    async with LinkLoad(stack).running() as load:
        began_s, over_s = await steady_load(load, interrupt, seed)
    recorded = {"began_s": began_s, "over_s": over_s, "requests": [asdict(each) for each in load.requests]}
    recorded["readings"] = [asdict(each) for each in load.readings]
    (folder / f"{outage.name}.json").write_text(json.dumps(recorded))
    return conclude(outage, stack.deployment, load.requests, began_s, over_s, killed)


async def steady_load(
    load: LinkLoad, interrupt: Callable[[], Awaitable[None]], seed: int
) -> tuple[float, float]:
    """Prompts of one length, one after the other's time, and a long one that is cut. When it began and was over."""
    draw = random.Random(seed)
    ended = asyncio.Event()

    async def clients() -> None:
        while not ended.is_set():
            load.send(random_ids(draw, PROMPT_TOKENS))
            await asyncio.sleep(1 / REQUESTS_PER_S)

    steady = asyncio.create_task(clients())
    await asyncio.sleep(BEFORE_S)
    load.send(random_ids(draw, LONG_TOKENS))
    await asyncio.sleep(INTO_LONG_S)
    began_s = time.monotonic()
    await interrupt()
    over_s = time.monotonic()
    await asyncio.sleep(AFTER_S)
    ended.set()
    await steady
    await load.drained()
    return began_s, over_s


def conclude(
    outage: Outage,
    deployment: Deployment,
    requests: Sequence[LinkRequest],
    began_s: float,
    over_s: float,
    killed: int,
) -> OutageResult:
    usual = [each for each in requests if each.tokens == PROMPT_TOKENS]
    before = [each for each in usual if each.ended_s < began_s and each.is_offloaded]
    after = [each for each in usual if each.sent_s >= over_s and each.is_offloaded]
    touched = [each for each in requests if each.sent_s < over_s + 1 and each.ended_s > began_s]
    fallen = [each for each in touched if each.route is not None and each.route.fallback]
    return OutageResult(
        outage=outage.name,
        outcomes={
            name: sum(each.outcome == name for each in requests)
            for name in ("right", "wrong", "refused", "none")
        },
        fallbacks=len(fallen),
        latest_fallback_s=max(
            (each.first_s - local_prefill_s(deployment, each) - max(began_s, each.sent_s) for each in fallen),
            default=0.0,
        ),
        ttft_before_s=statistics.median(each.ttft_s for each in before) if before else math.nan,
        ttft_longest_s=max((each.ttft_s for each in touched), default=0.0),
        transfer_before_s=statistics.median(transfer_s(each) for each in before) if before else math.nan,
        transfer_after_s=transfer_s(after[0]) if after else math.inf,
        offload_back_s=after[0].sent_s - over_s if after else math.inf,
        killed=killed,
    )


def transfer_s(request: LinkRequest) -> float:
    """From the prefill's start to the last byte."""
    return 0.0 if request.route is None else request.route.transfer_s or 0.0


def goals(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of one interruption."""
    name = row["outage"]
    outcomes = row["outcomes"]
    found = [
        {
            "name": f"{name}: requests without a right answer",
            "value": sum(outcomes.values()) - outcomes["right"],
            "unit": "requests",
            "goal": 0,
            "met": sum(outcomes.values()) == outcomes["right"],
        }
    ]
    if next(outage.stays_dark for outage in OUTAGES if outage.name == name):
        found.append(
            {
                "name": f"{name}: fallback after silence",
                "value": row["latest_fallback_s"],
                "unit": "s",
                "goal": FALLBACK_WITHIN_S,
                "met": row["latest_fallback_s"] <= FALLBACK_WITHIN_S,
            }
        )
    if name == "lossy":
        ratio = row["transfer_after_s"] / row["transfer_before_s"]
        found.append(
            {
                "name": "first transfer after a lossy spell over the ones before",
                "value": ratio,
                "unit": "",
                "goal": SLOWER_AT_MOST,
                "met": ratio <= SLOWER_AT_MOST,
            }
        )
    return found


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        print("outage      right/wrong/refused/none  fallbacks (latest s)  TTFT before, longest s", end="")
        print("  transfer before, after s  offload back s")
    for row in rows:
        counts = "/".join(str(row["outcomes"][name]) for name in ("right", "wrong", "refused", "none"))
        print(
            f"{row['outage']:10} {counts:>25}  {row['fallbacks']:9} ({row['latest_fallback_s']:8.2f})"
            f"  {row['ttft_before_s']:11.2f} {row['ttft_longest_s']:10.2f}"
            f"  {row['transfer_before_s']:15.2f} {row['transfer_after_s']:8.2f}  {row['offload_back_s']:14.1f}"
        )
