"""The largest rate that a deployment carries under one seed's requests, by bisection."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.studies.study import Key, Run, StudyOutcome

LARGEST_RPS = "largest_stable_rps"
"""The number that comes out."""

STEP = 0.005
"""Of the guess: how near to the largest rate the search comes."""

# The first step away from the guess is this many of those; each further one is twice as long.
_FIRST_STEPS = 4
# Of the guess: where a search ends that found nothing.
_LOWEST, _HIGHEST = 0.2, 2.0
# About how many simulations one search takes.
_USUAL_RUNS = 6


@dataclass(frozen=True, slots=True)
class RateSearch:
    """A `StudyRun` that simulates the same requests again and again, closer together in time or further apart."""

    run: Run
    """Of Poisson arrivals of independent requests; their rate does not matter."""
    guess_rps: float
    """Where the search begins."""

    @property
    def key(self) -> Key:
        """See `StudyRun`."""
        return self.run.key

    @property
    def expected_requests(self) -> float:
        """See `StudyRun`."""
        return _USUAL_RUNS * self.run.requests

    def outcome(self) -> StudyOutcome:
        """`LARGEST_RPS`, None where `largest_factor` is."""
        started_s = time.perf_counter()
        factor = largest_factor(self._grows)
        found = None if factor is None else factor * self.guess_rps
        return StudyOutcome({LARGEST_RPS: found}, time.perf_counter() - started_s)

    def _grows(self, factor: float) -> bool:
        """Near the limit a run is too short to call it stable; what counts here is that its queues don't grow."""
        traffic = self.run.traffic
        if not isinstance(traffic, IndependentTraffic):
            raise TypeError(
                f"a rate is searched with independent requests, not with {type(traffic).__name__}"
            )
        at_rate = replace(traffic, arrivals=Poisson(factor * self.guess_rps))
        return replace(self.run, traffic=at_rate).outcome().verdict == "grows"


def largest_factor(grows_at: Callable[[float], bool]) -> float | None:
    """The factor at which queues begin to grow, between two that are `STEP` apart.

    Returns:
        The middle of the two; None if it is not between 0.2 and 2.
    """
    step = _FIRST_STEPS * STEP
    calm, grows = (-math.inf, 1.0) if grows_at(1.0) else (1.0, math.inf)
    while grows - calm > 1.5 * STEP:
        if math.isinf(grows):
            factor, step = min(calm + step, _HIGHEST), 2 * step
        elif math.isinf(calm):
            factor, step = max(grows - step, _LOWEST), 2 * step
        else:
            factor = (calm + grows) / 2
        if factor in (calm, grows):
            return None
        calm, grows = (calm, factor) if grows_at(factor) else (factor, grows)
    return (calm + grows) / 2


def hidden_overload(requests: int, warmup_share: float = 0.1) -> float:
    """The overload that a run of so many Poisson arrivals can't tell from chance, as a share of its rate.

    1 %, or two standard deviations of a random walk over the three fifths of the counted arrivals that the simulator's
    verdict looks at (`prfaas.lab.simulator.result.is_stable`), whichever is more.
    """
    return max(0.01, 2 / math.sqrt(0.6 * (1 - warmup_share) * requests))
