"""A toy deployment for the allocator: work flows through prefill and decode like water; meters are noisy."""

from dataclasses import dataclass, field

import numpy as np
from tests.core.planner.problems import best_of_side, rate_of

from prfaas.core.planner import PlanProblem
from prfaas.core.planner.fixed_roles import even_spread, prefill_sides
from prfaas.core.scheduling.allocation import Allocator, Conversion, PdInstance, PdLoad, StageLoad


@dataclass
class Fluid:
    """PD clusters with `prefill[cluster]` prefill instances; the others decode. Requests come at `rate`."""

    problem: PlanProblem
    prefill: dict[str, int]
    rate: float
    noise: float = 0.0
    seed: int = 0
    waiting: dict[tuple[str, str], float] = field(default_factory=dict)
    roles: dict[str, dict[str, bool]] = field(default_factory=dict)
    known: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        for pd in self.problem.pd:
            names = [f"{pd.name}{i:02}" for i in range(pd.instances)]
            self.roles[pd.name] = {name: i < self.prefill[pd.name] for i, name in enumerate(names)}

    def step(self, seconds: float) -> list[PdLoad]:
        """What the PD clusters measured in that time."""
        spread = even_spread(self.problem, self.prefill)
        capacity = self._capacity(spread)
        output = self.problem.workload.output_tokens
        loads = []
        for pd in self.problem.pd:
            part = spread[pd.name]
            decode = (pd.instances - self.prefill[pd.name]) * pd.decode_rate(output)
            first, used_first = self._stage(pd.name, "prefill", self.rate * part, capacity * part, seconds)
            _, used_second = self._stage(pd.name, "decode", first, decode, seconds)
            loads.append(
                PdLoad(
                    pd.name,
                    tuple(
                        PdInstance(name, is_prefill, not is_prefill, busy=float(self.rng.random()))
                        for name, is_prefill in self.roles[pd.name].items()
                    ),
                    StageLoad(self._noisy(used_first), self.waiting[pd.name, "prefill"]),
                    StageLoad(self._noisy(used_second), self.waiting[pd.name, "decode"]),
                )
            )
        return loads

    def convert(self, conversion: Conversion) -> None:
        to_prefill = conversion.to_role == "prefill"
        assert self.roles[conversion.cluster][conversion.instance] is not to_prefill
        self.roles[conversion.cluster][conversion.instance] = to_prefill
        self.prefill[conversion.cluster] += 1 if to_prefill else -1

    def run(self, allocator: Allocator, evaluations: int, period_s: float = 60.0) -> list[Conversion]:
        found = []
        for i in range(evaluations):
            conversion = allocator.decide(self.step(period_s), self.problem, i * period_s)
            if conversion is not None:
                self.convert(conversion)
                found.append(conversion)
            for pd in self.problem.pd:
                assert 1 <= self.prefill[pd.name] <= pd.instances - 1
        return found

    def _capacity(self, spread: dict[str, float]) -> float:
        """What prefill and links can do with the best thresholds."""
        key = (id(self.problem), *self.prefill.values())
        if key not in self.known:
            sides = prefill_sides(self.problem, self.prefill, spread)
            self.known[key] = min(rate_of(side, best_of_side(side)) / side.part for side in sides.values())
        return self.known[key]

    def _stage(
        self, cluster: str, stage: str, arriving: float, capacity: float, seconds: float
    ) -> tuple[float, float]:
        """Requests per second that come out, and the part of the time that the stage worked."""
        key = (cluster, stage)
        there = self.waiting.get(key, 0.0) + arriving * seconds
        done = min(there, capacity * seconds)
        self.waiting[key] = there - done
        return done / seconds, done / (capacity * seconds) if capacity > 0 else 1.0

    def _noisy(self, utilisation: float) -> float:
        return float(np.clip(utilisation + self.noise * self.rng.standard_normal(), 0, 1))
