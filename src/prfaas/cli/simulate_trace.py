"""What `prfaas simulate --trace` sends into the simulated deployment: a recorded trace, at one rate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.cli.simulate_traffic import SimulatedTraffic

if TYPE_CHECKING:
    from prfaas.deployment import PlannedDeployment
    from prfaas.planner import PlanProblem
    from prfaas.workload import RequestTrace
    from prfaas.workload.traffic import ReplayedTraffic


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace that fits a deployment: no prompt has more than `most_tokens`, to which `cut` of them were cut.

    Λ_max in requests per second for the trace's lengths: nothing cached, and behind a cache that forgets nothing.
    """

    trace: "RequestTrace"
    most_tokens: int
    cut: int
    lambda_max_rps: float
    lambda_max_cached_rps: float


def recording(deployment: "PlannedDeployment", problem: "PlanProblem", path: Path) -> Recording:
    """Read a trace and plan for it.

    Raises:
        WorkloadError: the trace can't be read.
    """
    from prfaas.workload import read_requests

    most = int(min(cluster.profile.range_tokens[1] for cluster in deployment.clusters))
    least = max(cluster.profile.range_tokens[0] for cluster in deployment.clusters)
    trace = read_requests(path)
    cut = sum(each.input_tokens > most for each in trace.requests)
    trace = trace.cut_to(most)
    plain, cached = (
        _lambda_max(problem, trace, least, most, are_cached=are_cached) for are_cached in (False, True)
    )
    return Recording(trace, most, cut, plain, cached)


def recorded(recording: Recording, name: str, rate_rps: float) -> SimulatedTraffic:
    """A trace again and again, its times scaled so that the mean rate is `rate_rps`. Arrivals are spread over the step
    of a coarse clock.

    Raises:
        WorkloadError: the trace has no duration and so no rate.
    """
    from prfaas.workload.traffic import ReplayedTraffic

    trace = recording.trace
    jitter_s = trace.quantum_s
    speed = rate_rps / ReplayedTraffic(trace, jitter_s=jitter_s, rounds=None).mean_per_s
    traffic = ReplayedTraffic(trace, speed=speed, jitter_s=jitter_s, rounds=None)
    described = {
        "process": "trace",
        "trace": name,
        "trace_requests": len(trace.requests),
        "trace_span_s": trace.span_s,
        "speed_factor": speed,
        "jitter_s": jitter_s,
        "round_s": traffic.round_s,
        "cut_to_tokens": recording.most_tokens,
        "cut_requests": recording.cut,
        "empty_requests": trace.empty,
        "mean_input_tokens": _mean([each.input_tokens for each in trace.requests]),
        "mean_output_tokens": _mean([each.output_tokens for each in trace.requests]),
        "lambda_max_of_trace_rps": recording.lambda_max_rps,
        "lambda_max_of_trace_cached_rps": recording.lambda_max_cached_rps,
    }
    words = (
        f"the trace {name} ({len(trace.requests):,} requests in {trace.span_s:,.0f} s), {speed:.4g} times as "
        f"fast as recorded; prompts of {described['mean_input_tokens']:,.0f} tokens on average, answers of "
        f"{described['mean_output_tokens']:,.0f}"
    )
    return SimulatedTraffic(traffic, described, words, tuple(_notes(trace, traffic, described)))


def _notes(trace: "RequestTrace", traffic: "ReplayedTraffic", described: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Units of {described['trace']}: {trace.units}. It is repeated every {traffic.round_s:,.0f} simulated "
        "seconds as often as needed, each time with other prefixes."
    )
    if trace.quantum_s:
        yield (
            f"Its clock has steps of {trace.quantum_s:g} s: every arrival is moved by an even 0 to "
            f"{trace.quantum_s:g} s of the trace's time."
        )
    if described["cut_requests"]:
        share = described["cut_requests"] / len(trace.requests)
        yield (
            f"{described['cut_requests']:,} prompts ({share:.2%}) longer than {described['cut_to_tokens']:,} tokens, "
            "the end of a profile's range, are cut to that."
        )
    if trace.empty:
        yield f"{trace.empty:,} requests without a prompt are left out."
    yield (
        f"The load is a share of the {described['lambda_max_of_trace_rps']:.4g} requests/s that the planner finds for "
        f"the trace's lengths with nothing cached; behind a prefix cache that forgets nothing it finds "
        f"{described['lambda_max_of_trace_cached_rps']:.4g}."
    )


def _lambda_max(
    problem: "PlanProblem", trace: "RequestTrace", least: float, most: float, *, are_cached: bool
) -> float:
    """What the planner finds for the trace's lengths, or for what an endless cache leaves of them."""
    from prfaas.planner import best_operation
    from prfaas.workload import Empirical, Workload

    lengths = Empirical(_uncached(trace) if are_cached else [each.input_tokens for each in trace.requests])
    answers = _mean([each.output_tokens for each in trace.requests])
    workload = Workload(lengths.clipped(least, most), max(answers, 1.0))

    def without_hits(cluster: Any) -> Any:
        return replace(cluster, prefix_hit_ratio=None)

    plain = replace(
        problem,
        prfaas=tuple(map(without_hits, problem.prfaas)),
        pd=tuple(map(without_hits, problem.pd)),
        workload=workload,
    )
    return best_operation(plain).lambda_max


def _uncached(trace: "RequestTrace") -> list[int]:
    """Tokens per request that no earlier request of the trace began with; at least 1, which is always computed."""
    seen: set[int] = set()
    uncached = []
    for each in trace.requests:
        known = 0
        while known < len(each.block_ids) and each.block_ids[known] in seen:
            known += 1
        seen.update(each.block_ids)
        uncached.append(max(each.input_tokens - known * each.block_tokens, 1))
    return uncached


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
