"""The planner's answer."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from prfaas.core.planner.operating_point import OperatingPoint, ServiceModel

NETWORK_BOUND = 1.001
"""Faster links must bring more than this factor to say that the network is the limit."""

Method = Literal["exact search", "linear programme"]


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """What one more unit of a resource buys: `gain_req_per_s` of lambda_max, `gain_ratio` of it in proportion.

    `unit` is "instance" or "Gbit/s". `method` says whether the plan was made again with one more
    ("finite difference") or the gain is the slope at fixed roles ("dual").
    """

    resource: str
    unit: str
    gain_req_per_s: float
    gain_ratio: float
    method: str


@dataclass(frozen=True, slots=True)
class Cost:
    """In the currency of the prices. Million tokens at lambda_max: of prompts and answers, and of answers alone."""

    per_hour: float
    per_million_tokens: float
    per_million_output_tokens: float


@dataclass(frozen=True, slots=True)
class TtftEstimate:
    """TTFT with waiting in M/G/k queues at `load` × lambda_max: an estimate, not a promise.

    `mean_s` and `p90_s` are None if some prefill pool has more work than time: by E[T(L)], which the paper's
    T(E[L]) understates. `busiest_utilisation` is that of the fullest prefill pool.
    """

    label: str
    load: float
    requests_per_s: float
    mean_s: float | None
    p90_s: float | None
    busiest_utilisation: float


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another way to spend the same GPUs. `cost_ratio` is the deployment's cost over the baseline's."""

    label: str
    point: OperatingPoint
    instances: int
    gpus: int
    hardware: str
    cost_ratio: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The best way to operate a deployment, what limits it, and how it compares.

    `lambda_max_by_length` is the best throughput if a stage's time is E[T(L)] in place of the paper's T(E[L]):
    the more cautious number. `bound_gap` is how far above `optimum.lambda_max` the true optimum could still be,
    in proportion (0 for exact search). `equal_cost_ratio` is `ratio_to_homogeneous` divided by the ratio of costs.
    """

    name: str
    method: Method
    service_model: ServiceModel
    optimum: OperatingPoint
    homogeneous: Baseline
    homogeneous_equal_cost: Baseline | None
    naive: Baseline | None
    ratio_to_homogeneous: float | None
    ratio_to_naive: float | None
    equal_cost_ratio: float | None
    lambda_max_by_length: float
    lambda_max_unlimited_links: float
    bound_gap: float
    shadow_prices: tuple[ShadowPrice, ...]
    cost: Cost | None
    ttft_estimate: TtftEstimate
    verdict: str

    @property
    def is_network_bound(self) -> bool:
        """True if faster links alone would raise lambda_max by more than 0.1 %."""
        return self.lambda_max_unlimited_links > self.optimum.lambda_max * NETWORK_BOUND

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; the optimum's and the baselines' fields lie flat in theirs."""
        optimum = self.optimum
        return {
            "name": self.name,
            "verdict": self.verdict,
            "method": self.method,
            "service_model": self.service_model,
            "optimum": optimum.to_json(),
            "homogeneous": _baseline(self.homogeneous),
            "homogeneous_equal_cost": _baseline(self.homogeneous_equal_cost),
            "naive": _baseline(self.naive),
            "ratio_to_homogeneous": self.ratio_to_homogeneous,
            "ratio_to_naive": self.ratio_to_naive,
            "equal_cost_ratio": self.equal_cost_ratio,
            "lambda_max_by_length": self.lambda_max_by_length,
            "lambda_max_unlimited_links": self.lambda_max_unlimited_links,
            "network_bound": self.is_network_bound,
            "bound_gap": self.bound_gap,
            "binding": list(optimum.binding),
            "shadow_prices": [asdict(price) for price in self.shadow_prices],
            "cost": asdict(self.cost) if self.cost else None,
            "ttft_estimate": asdict(self.ttft_estimate),
        }


def _baseline(baseline: Baseline | None) -> dict[str, Any] | None:
    if baseline is None:
        return None
    described = {
        "label": baseline.label,
        "instances": baseline.instances,
        "gpus": baseline.gpus,
        "hardware": baseline.hardware,
        "cost_ratio": baseline.cost_ratio,
    }
    return {**described, **baseline.point.to_json()}
