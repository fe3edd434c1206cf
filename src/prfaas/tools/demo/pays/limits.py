"""When it would not pay: the paper's case planned again with other models, prompts and prices."""

from dataclasses import dataclass, replace

from prfaas.core.deployment import load_planned
from prfaas.core.kv.dtypes import DEFAULT_DTYPES
from prfaas.core.kv.published import published_model
from prfaas.core.planner import KvSize, PlanProblem, make_plan, problem_of
from prfaas.core.shipped import example_path
from prfaas.core.workload.empirical import fixed

_CASE = "paper.yaml"
_DENSE = "minimax-m2.5"
_SHORT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PayLimits:
    """The planner's limits for the paper's case. Ratios: throughput per money over that of the homogeneous cluster.

    None: it can't be said.
    """

    equal_cost_ratio: float | None
    dense_ratio: float | None
    """With the KVCache of a dense model, as published, over the same link."""
    short_ratio: float | None
    """If every prompt had `short_tokens` tokens."""
    break_even_per_gb: float | None
    """The price of egress from which on nothing is left, in the file's currency, where a GPU-hour of H20 is 1."""
    dense_title: str = ""
    short_tokens: int = _SHORT_TOKENS


def pay_limits() -> PayLimits:
    """Plans examples/paper.yaml as it is and twice changed; about a second.

    Raises:
        FileNotFoundError: the examples are not installed.
    """
    problem = problem_of(load_planned(example_path(_CASE)))
    dense = published_model(_DENSE)
    as_it_is = make_plan(problem)
    return PayLimits(
        equal_cost_ratio=as_it_is.equal_cost_ratio,
        dense_ratio=_ratio(replace(problem, kv_bytes=KvSize(dense.kept_in(DEFAULT_DTYPES)))),
        short_ratio=_ratio(
            replace(problem, workload=replace(problem.workload, lengths=fixed(_SHORT_TOKENS)))
        ),
        break_even_per_gb=as_it_is.egress_break_even_per_gb,
        dense_title=dense.title,
    )


def _ratio(problem: PlanProblem) -> float | None:
    return make_plan(problem).equal_cost_ratio
