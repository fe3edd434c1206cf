"""Shadow prices: what one more instance or Gbit/s buys."""

from dataclasses import replace

from prfaas.planner.network import NetworkPlan
from prfaas.planner.plan import ShadowPrice
from prfaas.planner.plan_problem import PlanProblem
from prfaas.planner.point import ServiceModel
from prfaas.planner.search import best_point

GBIT = 1e9


def by_difference(problem: PlanProblem, rate: float, service: ServiceModel) -> tuple[ShadowPrice, ...]:
    """Two clusters: the exact search again, with one more of each. `rate` is the plan's Λ_max."""
    found = []

    def add(resource: str, unit: str, changed: PlanProblem) -> None:
        gain = max(best_point(changed, service).lambda_max - rate, 0.0)
        found.append(ShadowPrice(resource, unit, gain, gain / rate if rate > 0 else 0.0, "finite difference"))

    for prfaas in problem.prfaas:
        add(
            prfaas.name,
            "instance",
            replace(problem, prfaas=(replace(prfaas, instances=prfaas.instances + 1),)),
        )
    for pd in problem.pd:
        add(pd.name, "instance", replace(problem, pd=(replace(pd, instances=pd.instances + 1),)))
    for link in problem.links:
        faster = replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s + GBIT)
        links = tuple(faster if other == link else other for other in problem.links)
        add(link.name, "Gbit/s", replace(problem, links=links))
    return tuple(found)


def by_duals(problem: PlanProblem, plan: NetworkPlan) -> tuple[ShadowPrice, ...]:
    """The general case: the programme's duals at the chosen roles. A PD instance takes the role that pays more."""
    rate, duals = plan.point.lambda_max, plan.prices
    found = []

    def add(resource: str, unit: str, gain: float) -> None:
        gain = max(gain, 0.0)
        found.append(ShadowPrice(resource, unit, gain, gain / rate if rate > 0 else 0.0, "dual"))

    for prfaas in problem.prfaas:
        add(prfaas.name, "instance", duals.get(("prefill", prfaas.name), 0.0))
    for pd in problem.pd:
        gains = [duals.get((kind, pd.name), 0.0) for kind in ("prefill", "decode")]
        add(pd.name, "instance", max(gains))
    for link in problem.links:
        add(link.name, "Gbit/s", duals.get(("link", link.name), 0.0) * GBIT)
    return tuple(found)
