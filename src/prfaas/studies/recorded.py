"""The recorded trace as traffic of a study."""

from dataclasses import replace

from prfaas.planner import best_operation
from prfaas.studies.setting import Setting
from prfaas.workload import Empirical, Workload
from prfaas.workload.traffic import ReplayedTraffic


def replayed(setting: Setting, rate_rps: float) -> ReplayedTraffic:
    """The trace again and again, its times scaled to a mean rate and its prompts cut to what profiles cover."""
    trace = setting.trace.cut_to(int(setting.range_tokens[1]))
    recorded_rps = ReplayedTraffic(trace, jitter_s=trace.quantum_s, rounds=None).mean_per_s
    return ReplayedTraffic(trace, speed=rate_rps / recorded_rps, jitter_s=trace.quantum_s, rounds=None)


def capacity_of(setting: Setting) -> float:
    """Λ_max in requests per second that the planner finds for the trace's lengths, if nothing is cached."""
    requests = setting.trace.requests
    lengths = Empirical([each.input_tokens for each in requests]).clipped(*setting.range_tokens)
    answers = sum(each.output_tokens for each in requests) / len(requests)
    problem = replace(setting.problem, workload=Workload(lengths, max(answers, 1.0)))
    return best_operation(problem).lambda_max
