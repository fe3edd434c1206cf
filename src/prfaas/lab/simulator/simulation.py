"""Run a scenario on a stream of requests."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas.core.arrays import FloatArray, IntArray
from prfaas.core.units import SECONDS_PER_HOUR
from prfaas.core.workload.traffic import RequestChunk
from prfaas.lab.simulator.control_loops import HotCopies, SlowLoops
from prfaas.lab.simulator.faults import Faults
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.time_series import TimeSeries
from prfaas.lab.simulator.world import World

_NO_BLOCKS: list[int] = []
# An empty deployment has filled after this many times what an answer takes.
_WARMUP_ANSWERS = 3
# But that is never more than this share of the run.
_MOST_WARMUP = 0.5

MOST_REQUESTS = 10_000_000
"""Of one simulation: a GB or two of memory, and minutes to hours."""
MOST_DAYS = 366
"""Of one simulation: its slow loops go on, however little arrives."""

_Arrived = tuple[FloatArray, IntArray, IntArray, Mapping[str, NDArray[Any]]]
"""Arrivals, input and output tokens of a chunk, and the trace's other columns."""


def check_length(rate_rps: float, requests: int | None, duration_s: float | None) -> None:
    """Raise ValueError for more than memory or patience hold: so many requests at a rate, or those of a duration."""
    count = float(rate_rps * (duration_s or 0.0) if requests is None else requests)
    if count > MOST_REQUESTS:
        raise ValueError(f"at most {MOST_REQUESTS:,} requests are simulated at once, not {count:.4g}")
    days = (duration_s or count / rate_rps) / (24 * SECONDS_PER_HOUR)
    if days > MOST_DAYS:
        raise ValueError(
            f"at most {MOST_DAYS} days are simulated at once, not the {days:.4g} of {count:.4g} requests"
        )


def simulate(
    scenario: Scenario,
    traffic: Iterable[RequestChunk],
    *,
    seed: int = 0,
    requests: int | None = None,
    duration_s: float | None = None,
    warmup_share: float = 0.1,
    on_event: Callable[[World], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Send requests through a scenario; after the last arrival what is under way ends, but does not count in rates.

    Args:
        scenario: What to simulate.
        traffic: The requests, in the order of arrival.
        seed: Of the links alone; the traffic has its own.
        requests: At most so many; None: all.
        duration_s: Only those that come before; None: all.
        warmup_share: Requests in this first share of the time don't count, nor those of the first three answers'
            time; but at most half of the time. 0: all count.
        on_event: Called with the world after every event, to look at what must always hold.
        progress: Called with the number of requests that came, every some thousand.

    Raises:
        ValueError: no requests, or a policy or parameter that doesn't exist.
    """
    if not 0 <= warmup_share < 1:
        raise ValueError(f"the warm-up is a share of the run in [0, 1), not {warmup_share!r}")
    chunks = _limited(traffic, requests, duration_s)
    first = next(chunks, None)
    if first is None:
        raise ValueError("there is no request to simulate")
    world = World(scenario, np.random.default_rng(seed), first.block_tokens)
    if on_event is not None:
        world.events.watch = lambda: on_event(world)
    loops = SlowLoops(world)
    copies = None if world.pools is None else HotCopies(world, first.block_tokens)
    Faults(world)
    series = TimeSeries(world)
    arrived: list[_Arrived] = []
    count = 0
    was_collecting = gc.isenabled()
    # Nothing here is cyclic garbage, and looking for it takes a third of the time.
    gc.disable()
    try:
        for chunk in chain([first], chunks):
            _feed(world, chunk, count)
            count += len(chunk)
            # Not its blocks, which are most of a chunk.
            arrived.append((chunk.arrival_s, chunk.input_tokens, chunk.output_tokens, chunk.own))
            if progress is not None:
                progress(count)
        loops.is_over = True
        while world.open:
            # The sampler of the series is always in the heap.
            world.events.run(world.events.heap[0][0])
        series.is_over = True
    finally:
        if was_collecting:
            gc.enable()
    changes = loops.changes() | (copies.changes() if copies is not None else {})
    return _result(world, arrived, series, changes, warmup_share)


def _feed(world: World, chunk: RequestChunk, start: int) -> None:
    world.columns.grow(len(chunk))
    events, arrive = world.events, world.arrive
    are_kept = world.caches is not None or world.pools is not None
    blocks = chunk.block_ids.tolist() if are_kept else None
    starts = chunk.block_starts.tolist()
    columns = zip(
        chunk.arrival_s.tolist(), chunk.input_tokens.tolist(), chunk.output_tokens.tolist(), strict=True
    )
    for index, (arrival_s, tokens, answer_tokens) in enumerate(columns):
        events.run(arrival_s)
        own = _NO_BLOCKS if blocks is None else blocks[starts[index] : starts[index + 1]]
        arrive(start + index, tokens, answer_tokens, own)
        if events.watch is not None:
            events.watch()


def _limited(
    traffic: Iterable[RequestChunk], requests: int | None, duration_s: float | None
) -> Iterator[RequestChunk]:
    """The traffic, cut where it is to end."""
    left = requests if requests is not None else math.inf
    until_s = duration_s if duration_s is not None else math.inf
    for chunk in traffic:
        here = int(min(np.searchsorted(chunk.arrival_s, until_s), left, len(chunk)))
        if here > 0:
            yield chunk if here == len(chunk) else _head(chunk, here)
        left -= here
        if here < len(chunk) or left <= 0:
            return


def _head(chunk: RequestChunk, count: int) -> RequestChunk:
    return RequestChunk(
        chunk.arrival_s[:count],
        chunk.input_tokens[:count],
        chunk.output_tokens[:count],
        chunk.block_ids[: chunk.block_starts[count]],
        chunk.block_starts[: count + 1],
        block_tokens=chunk.block_tokens,
        own={name: words[:count] for name, words in chunk.own.items()},
    )


def _result(
    world: World, arrived: list[_Arrived], series: TimeSeries, changes: dict[str, Any], warmup_share: float
) -> Result:
    columns, scenario = world.columns, world.scenario
    arrival_s: FloatArray = np.concatenate([arrival_s for arrival_s, *_ in arrived])
    outputs = np.concatenate([output_tokens for _, _, output_tokens, _ in arrived])
    ttft_s, e2e_s = np.array(columns.ttft_s), np.array(columns.e2e_s)
    after_first = np.maximum(outputs - 1, 1) if scenario.overheads.first_step else outputs
    second_token_s = longest_gap_s = None
    if columns.first_from_prefill:
        second_token_s, longest_gap_s = np.array(columns.second_token_s), np.array(columns.longest_gap_s)
        # The decode instance had one token less to write.
        after_first = np.where(columns.prefilled_first, np.maximum(outputs - 1, 1), after_first)
    inputs = np.concatenate([input_tokens for _, input_tokens, *_ in arrived])
    end_s = float(arrival_s[-1])
    answer_s = _answer_s(scenario, float(inputs.mean()), float(outputs.mean()))
    start_s = warmup_share * end_s
    if warmup_share:
        start_s = max(start_s, min(_WARMUP_ANSWERS * answer_s, _MOST_WARMUP * end_s))
    return Result(
        arrival_s=arrival_s,
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        tpot_s=(e2e_s - ttft_s) / np.maximum(after_first, 1),
        input_tokens=inputs,
        output_tokens=outputs,
        uncached_tokens=np.array(columns.uncached_tokens, dtype=np.int64),
        hit_tokens=np.array(columns.hit_tokens, dtype=np.int64),
        tier_tokens={tier: np.array(tokens, dtype=np.int64) for tier, tokens in columns.tier_tokens.items()},
        offloaded=np.array(columns.offloaded, dtype=bool),
        reason=np.array(columns.reason, dtype=np.int64),
        reasons=tuple(columns.reason_codes),
        retries=np.array(columns.retries, dtype=np.int64),
        link_bytes=np.array(columns.link_bytes),
        counted=arrival_s >= start_s,
        start_s=start_s,
        end_s=end_s,
        events=world.events.number,
        slo=scenario.slo,
        series=series.arrays(end_s),
        changes=changes,
        answer_s=answer_s,
        second_token_s=second_token_s,
        longest_gap_s=longest_gap_s,
        more=_more(world, arrived),
    )


def _more(world: World, arrived: list[_Arrived]) -> dict[str, NDArray[Any]]:
    """Instances, parts of TTFT, and the trace's own columns."""
    columns = world.columns
    names = np.array([*world.engines, ""], dtype=object)
    return {
        "prefill_instance": names[np.array(columns.prefilled_on)],
        "decode_instance": names[np.array(columns.decoded_on)],
        "prefill_from_s": np.array(columns.prefill_from_s),
        "prefill_to_s": np.array(columns.prefill_to_s),
        "kv_there_s": np.array(columns.kv_there_s),
        **{name: np.concatenate([own[name] for *_, own in arrived]) for name in arrived[0][3]},
    }


def _answer_s(scenario: Scenario, input_tokens: float, output_tokens: float) -> float:
    """Prefill and full decode batch of a request of these lengths, on the slowest instances there are."""
    prefill_s = max(cluster.curve.seconds(input_tokens) for cluster in scenario.clusters)
    return prefill_s + output_tokens * max(cluster.full_step_s for cluster in scenario.clusters)
