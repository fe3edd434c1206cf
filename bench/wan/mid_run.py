"""The rate of a line falls to a tenth under load, and comes back: what capacity, threshold and requests do."""

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prfaas.core.deployment import Deployment
from prfaas.serving.engines.synthetic.pace import Pace
from wan.laboratory import Laboratory, LineSettings
from wan.load import LinkLoad, LinkReading, LinkRequest, random_ids, synthetic_model
from wan.stack import FAR, GATEWAY_HOST, HOME, WanStack, engines_of, write_deployment

RTT_S = 0.030
RATE_BITS_PER_S = 200e6
FACTOR = 10
POLICIES = ("paper", "tilted")
WARM_S, LOW_S, AFTER_S = 40.0, 30.0, 25.0
REQUESTS_PER_S = 1.4
LENGTHS = (2_000, 24_000)
MAX_MODEL_LEN = 32_768
# So slow that most prompts are worth the line, and so many engines that home can do without it.
_HOME_SPEEDUP = 0.5
_FAR_ENGINES = 2
_HOME_PREFILLS = 4
# The first layers of a long prompt are on the line then, and the last ones are not computed.
INTO_LONG_S = 1.0
# Smaller changes of a threshold are the search's own grid.
_CHANGED = 0.05
_TRUE_WITHIN = 0.25

# Goals: seconds, changes, and shares of the time.
MOVES_WITHIN_S = 3.0
MOST_CHANGES = 2
BACK_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class MidRun:
    """What one policy made of it. Times are counted from the fall of the rate, or from its return."""

    policy: str
    requests: int
    outcomes: Mapping[str, int]
    offloaded_before: int
    offloaded_low: int
    offloaded_after: int
    threshold_before: float
    threshold_moved_s: float
    """When it had first changed after the fall."""
    threshold_changes: int
    """From the fall to the return."""
    threshold_low: float
    """At the end of the low rate."""
    capacity_believed_s: float
    """When the capacity was first within a quarter of the truth."""
    capacity_true_share: float
    """Of the readings from then to the return, those within a quarter of the truth."""
    longest_wait_ratio: float
    """Waiting for the link after the prefill, over what the local prefill of the same request takes; the longest."""
    waits_above_local: int
    capacity_back_s: float
    """After the return: within a quarter of the truth."""
    offload_back_s: float
    """After the return: the first request is sent that is offloaded."""
    longest_ttft_s: float


def run(directory: Path, policies: Sequence[str], *, encryption: bool) -> list[dict[str, Any]]:
    """One run per policy."""
    rows = []
    for policy in policies:
        folder = directory / f"mid-run-{policy}"
        folder.mkdir(parents=True)
        with standing_in(folder, policy, encryption=encryption) as stack:
            rows.append(asdict(one_run(stack, policy, folder)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


@contextlib.contextmanager
def standing_in(
    folder: Path,
    policy: str,
    *,
    encryption: bool,
    far: int = _FAR_ENGINES,
    home_prefills: int = _HOME_PREFILLS,
    home_speedup: float = _HOME_SPEEDUP,
    threshold_tokens: int | None = None,
) -> Iterator[WanStack]:
    """Stand-ins at both ends, each in a process and a namespace of its own, and the gateway."""
    line = LineSettings.of_round_trip(RATE_BITS_PER_S, RTT_S)
    engines = engines_of(far, [*[("prefill",)] * home_prefills, ("decode",)])
    with Laboratory({FAR: far, HOME: home_prefills + 1}, line) as laboratory:
        deployment = write_deployment(
            folder,
            laboratory,
            engines,
            model=synthetic_model(folder / "model"),
            max_model_len=MAX_MODEL_LEN,
            bandwidth_bits_per_s=line.goodput_bits_per_s,
            rtt_s=RTT_S,
            encryption=encryption,
            clusters={
                FAR: {"hardware": "synthetic", "profile": "internal-1t-h200", "speedup": 1},
                HOME: {"hardware": "synthetic", "profile": "internal-1t-h20", "speedup": home_speedup},
            },
            routing={"policy": policy}
            | ({} if threshold_tokens is None else {"threshold_tokens": threshold_tokens}),
            control={"allocation": False},
            slo={"tokens_per_s": 40},
            engine={
                "max_num_batched_tokens": 2048,
                "max_num_seqs": 20,
                "kv_cache_gib": 1,
                "staging": "256 MiB",
                "transfer_block": "256 KiB",
            },
        )
        stack = WanStack(laboratory, deployment, engines)
        with stack.started():
            yield stack


def one_run(stack: WanStack, policy: str, folder: Path) -> MidRun:
    async def drive() -> tuple[LinkLoad, float, float]:
        async with LinkLoad(stack).running() as load:
            await load.poisson(REQUESTS_PER_S, LENGTHS, WARM_S, seed=1)
            # What falls in an idle moment can't be seen until something is sent.
            load.send(random_ids(random.Random(0), LENGTHS[1]))
            await asyncio.sleep(INTO_LONG_S)
            stack.laboratory.change(rate_bits_per_s=RATE_BITS_PER_S / FACTOR)
            fell_s = time.monotonic()
            await load.poisson(REQUESTS_PER_S, LENGTHS, LOW_S, seed=2)
            stack.laboratory.change(rate_bits_per_s=RATE_BITS_PER_S)
            back_s = time.monotonic()
            await load.poisson(REQUESTS_PER_S, LENGTHS, AFTER_S, seed=3)
            await load.drained()
            return load, fell_s, back_s

    with stack.laboratory.inside(GATEWAY_HOST):
        load, fell_s, back_s = asyncio.run(drive())
    recorded = {
        "fell_s": fell_s,
        "back_s": back_s,
        "readings": [asdict(reading) for reading in load.readings],
        "requests": [asdict(request) for request in load.requests],
    }
    (folder / "recorded.json").write_text(json.dumps(recorded))
    return conclude(policy, stack.deployment, load.requests, load.readings, fell_s, back_s)


def conclude(
    policy: str,
    deployment: Deployment,
    requests: Sequence[LinkRequest],
    readings: Sequence[LinkReading],
    fell_s: float,
    back_s: float,
) -> MidRun:
    """The figures of a run whose rate fell at `fell_s` and was back at `back_s`."""
    goodput_bits_per_s = LineSettings.of_round_trip(RATE_BITS_PER_S, RTT_S).goodput_bits_per_s
    low = [each for each in readings if fell_s <= each.at_s < back_s]
    after = [each for each in readings if each.at_s >= back_s]
    threshold_before = [each.threshold_tokens for each in readings if each.at_s < fell_s][-1]
    changes_s = threshold_changes(threshold_before, low)
    believed_s = first_s(low, lambda each: is_near(each.capacity_bits_per_s, goodput_bits_per_s / FACTOR))
    judged = [each for each in low if each.at_s >= believed_s]
    waits = [
        each.link_wait_s / local_prefill_s(deployment, each)
        for each in requests
        if each.ended_s > fell_s and each.sent_s < back_s and each.is_offloaded
    ]
    return MidRun(
        policy=policy,
        requests=len(requests),
        outcomes={
            name: sum(each.outcome == name for each in requests)
            for name in ("right", "wrong", "refused", "none")
        },
        offloaded_before=sum(each.is_offloaded for each in requests if each.sent_s < fell_s),
        offloaded_low=sum(each.is_offloaded for each in requests if fell_s <= each.sent_s < back_s),
        offloaded_after=sum(each.is_offloaded for each in requests if each.sent_s >= back_s),
        threshold_before=threshold_before,
        threshold_moved_s=changes_s[0] - fell_s if changes_s else math.inf,
        threshold_changes=len(changes_s),
        threshold_low=low[-1].threshold_tokens,
        capacity_believed_s=believed_s - fell_s,
        capacity_true_share=sum(
            is_near(each.capacity_bits_per_s, goodput_bits_per_s / FACTOR) for each in judged
        )
        / max(len(judged), 1),
        longest_wait_ratio=max(waits, default=0.0),
        waits_above_local=sum(wait > 1 for wait in waits),
        capacity_back_s=first_s(after, lambda each: is_near(each.capacity_bits_per_s, goodput_bits_per_s))
        - back_s,
        offload_back_s=min(
            (each.sent_s for each in requests if each.sent_s >= back_s and each.is_offloaded),
            default=math.inf,
        )
        - back_s,
        longest_ttft_s=max(each.ttft_s for each in requests),
    )


def threshold_changes(before: float, readings: Sequence[LinkReading]) -> list[float]:
    """When the threshold became another one, by more than a twentieth."""
    changes_s = []
    for reading in readings:
        if not is_same(before, reading.threshold_tokens):
            changes_s.append(reading.at_s)
            before = reading.threshold_tokens
    return changes_s


def is_same(one: float, other: float) -> bool:
    if math.isinf(one) or math.isinf(other):
        return one == other
    return abs(one - other) <= _CHANGED * max(one, other)


def is_near(value: float, truth: float) -> bool:
    return abs(value - truth) <= _TRUE_WITHIN * truth


def first_s(readings: Sequence[LinkReading], is_wanted: Any) -> float:
    """The time of the first such reading; infinite if there is none."""
    return next((each.at_s for each in readings if is_wanted(each)), math.inf)


def local_prefill_s(deployment: Deployment, request: LinkRequest) -> float:
    """What the engines at home take for its prefill, without waiting."""
    home = deployment.cluster(HOME)
    assert home.profile is not None
    return Pace(home.profile, home.speedup).prefill_s(request.tokens)


def goals(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One per column of the issue's row."""
    name = f"rate / {FACTOR}, {row['policy']}"
    judged = (
        ("threshold moves", row["threshold_moved_s"], "s", MOVES_WITHIN_S),
        ("threshold changes", row["threshold_changes"], "changes", MOST_CHANGES),
        ("longest wait for the link over local prefill", row["longest_wait_ratio"], "", 1.0),
        ("offloading is back", row["offload_back_s"], "s", BACK_WITHIN_S),
    )
    return [
        {"name": f"{name}: {what}", "value": value, "unit": unit, "goal": goal, "met": value <= goal}
        for what, value, unit, goal in judged
    ]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        print(
            f"rate / {FACTOR}, {row['policy']}\n"
            f"  threshold: {row['threshold_before']:.0f}, then {row['threshold_low']:.0f}; moved after "
            f"{row['threshold_moved_s']:.1f} s; {row['threshold_changes']} changes\n"
            f"  capacity: believed after {row['capacity_believed_s']:.1f} s, then right in "
            f"{row['capacity_true_share']:.0%} of the time; back after {row['capacity_back_s']:.1f} s\n"
            f"  offloading: back after {row['offload_back_s']:.1f} s; {row['offloaded_before']} requests before, "
            f"{row['offloaded_low']} meanwhile, {row['offloaded_after']} afterwards, of {row['requests']}\n"
            f"  waits for the link: at most {row['longest_wait_ratio']:.2f} of the local prefill, "
            f"{row['waits_above_local']} above 1; longest TTFT {row['longest_ttft_s']:.1f} s; {row['outcomes']}"
        )
