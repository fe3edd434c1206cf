"""What `prfaas simulate` sends into the simulated deployment: made-up requests, at one rate."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prfaas.cli.errors import CliError

if TYPE_CHECKING:
    from prfaas.planner import PlanProblem
    from prfaas.workload.traffic import Arrivals, Traffic

CALM, CALM_S = 0.7, 60.0
BURST, BURST_S = 2.2, 15.0
"""Phases of `--bursts`: shares of the mean rate, and how long they last on average. Their mean is 1 by time."""


@dataclass(frozen=True, slots=True)
class SimulatedTraffic:
    """`described`: the same in JSON. `words`: one line for people. `notes`: what was done to a trace, and whatever
    else one should know.
    """

    traffic: "Traffic"
    described: dict[str, Any]
    words: str
    notes: tuple[str, ...] = ()


def made_up(problem: "PlanProblem", rate_rps: float, *, bursts: bool) -> SimulatedTraffic:
    """Prompts from the deployment file's lengths, all answers of its mean length."""
    from prfaas.workload import fixed
    from prfaas.workload.traffic import IndependentTraffic, Mmpp, Phase, Poisson

    workload = problem.workload
    arrivals: Arrivals = Poisson(rate_rps)
    described: dict[str, Any] = {"process": "poisson"}
    words = "Poisson arrivals"
    if bursts:
        calm, burst = Phase(CALM * rate_rps, CALM_S), Phase(BURST * rate_rps, BURST_S)
        arrivals = Mmpp((calm, burst))
        described = {
            "process": "mmpp",
            "phases": [{"rate_rps": each.rate_per_s, "mean_s": each.dwell_s} for each in (calm, burst)],
        }
        words = f"bursts: {CALM:g} × the mean rate for {CALM_S:g} s on average, then {BURST:g} × for {BURST_S:g} s"
    lengths = workload.uncached
    described |= {
        "mean_input_tokens": lengths.mean(),
        "mean_output_tokens": workload.output_tokens,
    }
    words += (
        f"; prompts of {lengths.mean():,.0f} tokens on average as in the file, "
        f"answers of {workload.output_tokens:,.0f}"
    )
    notes = []
    if workload.prefix_hit_ratio:
        notes.append(
            f"Prompts are what a prefix_hit_ratio of {workload.prefix_hit_ratio:g} leaves of the file's lengths, in "
            "transfers too."
        )
    if any(cluster.prefix_hit_ratio is not None for cluster in problem.clusters):
        notes.append("A cluster's own prefix_hit_ratio plays no part: no two made-up prompts begin alike.")
    traffic = IndependentTraffic(arrivals, lengths, fixed(workload.output_tokens))
    return SimulatedTraffic(traffic, described, words, tuple(notes))


def check_rate(rate_rps: float, option: str) -> None:
    """Raise CliError unless something arrives."""
    import math

    if not (math.isfinite(rate_rps) and rate_rps > 0):
        raise CliError(f"{option}: must be a number above 0, not {rate_rps:g}")
