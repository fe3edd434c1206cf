"""The case study, and ways to drive it."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import OperatingPoint, best_operation, problem_of
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import LengthDistribution
from prfaas.core.workload.traffic import IndependentTraffic, RequestChunk
from prfaas.lab.simulator.capacity import Steps
from prfaas.lab.simulator.scenario import Scenario, scenario_of

PAPER = Path(__file__).parents[3] / "examples" / "paper.yaml"


class CaseStudy:
    """examples/paper.yaml with its plan, but on one rank: what links carry is all that there is."""

    def __init__(self) -> None:
        changes = {f"clusters[{number}].tensor_parallel": 1.0 for number in range(2)}
        self.planned: PlannedDeployment = load_planned(PAPER, changes=changes)
        self.problem = problem_of(self.planned)
        self.optimum: OperatingPoint = best_operation(self.problem)

    @property
    def lengths(self) -> LengthDistribution:
        return self.problem.workload.lengths

    def still(self, **options: Any) -> Scenario:
        """Thresholds and roles stay as they are."""
        return scenario_of(self.planned, adapts=False, allocation=False, **options)

    def poisson(self, rate_per_s: float, seed: int) -> Iterator[RequestChunk]:
        """Endless independent requests of the case study."""
        outputs = fixed(self.problem.workload.output_tokens)
        return IndependentTraffic(Poisson(rate_per_s), self.lengths, outputs).chunks(
            np.random.default_rng(seed)
        )


@pytest.fixture(scope="session")
def case_study() -> CaseStudy:
    return CaseStudy()


def chunk_of(
    arrivals_s: Sequence[float],
    tokens: Sequence[int],
    answers: Sequence[int] | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
    block_tokens: int = 512,
) -> RequestChunk:
    """A few requests, told one by one; without `blocks` no two begin alike."""
    if blocks is None:
        starts, blocks = 0, []
        for length in tokens:
            count = math.ceil(length / block_tokens)
            blocks = [*blocks, range(starts, starts + count)]
            starts += count
    counts = [len(each) for each in blocks]
    return RequestChunk(
        np.array(arrivals_s, dtype=np.float64),
        np.array(tokens, dtype=np.int64),
        np.array(answers if answers is not None else [10] * len(tokens), dtype=np.int64),
        np.array([block for each in blocks for block in each], dtype=np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        block_tokens,
    )


def outages(bits_per_s: float, mean_up_s: float, mean_down_s: float, changes: int = 400) -> Steps:
    """A link that is up and down in turn, for exponentially distributed times."""
    rng = np.random.default_rng(1)
    means_s = np.tile([mean_up_s, mean_down_s], changes // 2)
    times_s = np.concatenate([[0.0], np.cumsum(rng.exponential(means_s))])
    return Steps(tuple((float(at_s), 0.0 if n % 2 else bits_per_s) for n, at_s in enumerate(times_s)))
