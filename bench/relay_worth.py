"""Where relayed tokens pay: the same traffic simulated with and without them, for a dense and for a hybrid model.

    python bench/relay_worth.py [--requests N] [--load SHARE ...] [--tokens K ...] [--json]

Example: python bench/relay_worth.py --load 0.5 --tokens 0 64

examples/dense.yaml is bound by its link, examples/paper.yaml is not. First tokens come from the prefill. Roles and
thresholds stay as planned. The estimate of `prfaas plan` stands beside what was simulated.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from prfaas.core.deployment import load_planned
from prfaas.core.deployment.examples import example_path
from prfaas.core.planner import make_plan, problem_of
from prfaas.core.workload import fixed
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator import scenario_of, simulate

EXAMPLES = {"dense": "dense.yaml", "hybrid": "paper.yaml"}
SEED = 1


def row(model: str, load: float, tokens: int, requests: int) -> dict[str, Any]:
    """One simulation, and the plan's estimate for it."""
    planned = load_planned(example_path(EXAMPLES[model]))
    planned = replace(planned, first_token="prefill", relay=replace(planned.relay, tokens=tokens))
    problem = replace(problem_of(planned), load=load)
    plan = make_plan(problem)
    traffic = IndependentTraffic(
        Poisson(load * plan.optimum.lambda_max),
        problem.workload.lengths,
        fixed(problem.workload.output_tokens),
    )
    scenario = scenario_of(planned, policy="static_threshold", adapts=False, allocation=False)
    chunks = traffic.chunks(np.random.default_rng(SEED))
    found = simulate(scenario, chunks, requests=requests, seed=SEED).summary()
    return {
        "model": model,
        "load": load,
        "relay_tokens": tokens,
        "ttft_mean_s": found["ttft_mean_s"],
        "longest_gap_p90_s": found["longest_gap_p90_s"],
        "longest_gap_p99_s": found["longest_gap_p99_s"],
        "relayed_fraction": found.get("relayed_fraction", 0.0),
        "relayed_tokens_mean": found.get("relayed_tokens_mean"),
        "throughput_rps": found["throughput_rps"],
        "stable": found["stable"],
        "prefill_utilisation": found["utilisation"]["prefill_utilisation_east"],
        "plan": None if plan.relay_estimate is None else asdict(plan.relay_estimate),
    }


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4000, metavar="N", help="of each simulation")
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.8], help="shares of Λ_max")
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 64, 1024], help="gateway.relay_tokens")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    asked = parser.parse_args()
    figures = [
        row(model, load, tokens, asked.requests)
        for model in EXAMPLES
        for load in asked.load
        for tokens in asked.tokens
    ]
    if asked.json:
        print(json.dumps({"figures": figures, "goals": goals_of(figures)}, indent=2))
        return
    for each in figures:
        plan = each["plan"] or {}
        print(
            f"{each['model']:>7}, load {each['load']:g}, {each['relay_tokens']:>5,} tokens: longest gap P90 "
            f"{each['longest_gap_p90_s']:.3f} s, P99 {each['longest_gap_p99_s']:.3f} s, TTFT "
            f"{each['ttft_mean_s']:.3f} s, relayed {each['relayed_fraction']:.1%} (plan "
            f"{plan.get('relayed_fraction', 0.0):.1%}), by {each['relayed_tokens_mean'] or 0:.0f} tokens, prefill "
            f"busy {each['prefill_utilisation']:.1%}"
        )


def goals_of(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the most tokens, longest gaps of the dense model's streams are a fraction of those without any."""
    found = []
    for load in sorted({each["load"] for each in figures}):
        rows = [each for each in figures if each["model"] == "dense" and each["load"] == load]
        bare, most = (pick(rows, key=lambda each: each["relay_tokens"]) for pick in (min, max))
        value = most["longest_gap_p90_s"] / bare["longest_gap_p90_s"]
        found.append(
            {
                "name": f"dense, load {load:g}: P90 of the longest gaps with relay / without",
                "value": value,
                "unit": "",
                "goal": 0.5,
                "met": value <= 0.5,
            }
        )
    return found


if __name__ == "__main__":
    main()
