"""Pools in `prfaas plan`: their hits from a trace or as stated, and the worth of both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.common import CliError
from prfaas.cli.pool_options import POOLS, PoolsAsked, pools_asked

if TYPE_CHECKING:
    from prfaas.core.deployment import PlannedDeployment
    from prfaas.core.planner import PlanProblem
    from prfaas.core.workload import LengthDistribution
    from prfaas.lab.report.plan_pools import PoolPlan
    from prfaas.lab.simulator import PoolOptions
    from prfaas.lab.simulator.machine_pool import MachinePool

# Of a distribution of lengths that was scaled.
_BINS = 2048


@dataclass(frozen=True, slots=True)
class PlannedPoolsAsked(PoolsAsked):
    """The same, and where their hits are from."""

    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests to replay through the pools and to plan for, to see what they are worth.",
            rich_help_panel=POOLS,
        ),
    ] = None
    pool_hits: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            help="Part of all prompt tokens that the pools spare, in place of a trace.",
            show_default=False,
            rich_help_panel=POOLS,
        ),
    ] = None


def pool_plan(
    planned: "PlannedDeployment", problem: "PlanProblem", asked: PlannedPoolsAsked
) -> "PoolPlan | None":
    """The worth of pools to a deployment; None if it has none.

    Args:
        planned: The deployment.
        problem: What it states, pools aside.
        asked: On the command line.

    Raises:
        CliError: options that don't go together, or no sizes and rates.
        WorkloadError, DeploymentError: the trace can't be read, or lengths leave the profiles' range.
    """
    from prfaas.core.planner import range_tokens
    from prfaas.core.planner.pool_worth import pool_worth, tier_worths
    from prfaas.lab.report.plan_pools import PoolPlan

    trace, hit_ratio = asked.trace, asked.pool_hits
    if trace is not None and hit_ratio is not None:
        raise CliError("give --trace or --pool-hits, not both")
    pools = pools_asked(planned, asked)
    if not pools:
        if trace is not None or hit_ratio is not None:
            raise CliError("--trace and --pool-hits need pools: give --pool, or pools in the file")
        return None
    worth, hits = None, ""
    plain = problem
    if trace is not None:
        plain, cached, ratio = _replayed(planned, problem, pools, trace)
        worth, hits = (
            pool_worth(plain, cached, ratio),
            f"{trace.name}, replayed through the pools of all machines",
        )
    elif hit_ratio is not None:
        worth, hits = pool_worth(problem, _stated(planned, problem, hit_ratio), hit_ratio), "stated"
    bandwidths = {
        cluster.name: _bandwidths(pools[cluster.name], cluster.instance_count)
        for cluster in planned.clusters
        if cluster.name in pools
    }
    return PoolPlan(pools, hits, worth, tier_worths(plain, bandwidths, range_tokens(planned)))


def _bandwidths(options: "PoolOptions", instances: int) -> dict[str, float]:
    """Of each tier, for one of the instances that share it."""
    together = min(options.instances_per_machine, instances)
    found = {"memory": options.memory_bits_per_s / together}
    if options.ssd_bytes:
        found["SSD"] = options.ssd_bits_per_s / together
    if instances > together:
        found["other machines"] = options.network_bits_per_s / together
    return found


def _stated(planned: "PlannedDeployment", problem: "PlanProblem", hit_ratio: float) -> "PlanProblem":
    from prfaas.core.planner import range_tokens
    from prfaas.core.workload import Empirical

    if not 0 <= hit_ratio < 1:
        raise CliError(f"--pool-hits: must be a share in [0, 1), not {hit_ratio:g}")
    bins = problem.workload.lengths.scaled(1 - hit_ratio).bins(_BINS)
    return _left(problem, Empirical(bins.lengths, bins.weights).clipped(*range_tokens(planned)))


def _left(problem: "PlanProblem", lengths: "LengthDistribution") -> "PlanProblem":
    """The problem whose prompts are what the pools leave to compute."""
    from prfaas.core.workload import Workload

    return replace(
        problem,
        prfaas=tuple(replace(cluster, prefix_hit_ratio=None) for cluster in problem.prfaas),
        pd=tuple(replace(cluster, prefix_hit_ratio=None) for cluster in problem.pd),
        workload=Workload(lengths, problem.workload.output_tokens),
    )


def _replayed(
    planned: "PlannedDeployment", problem: "PlanProblem", pools: "Mapping[str, PoolOptions]", path: Path
) -> "tuple[PlanProblem, PlanProblem, float]":
    from prfaas.core.planner import problem_of_trace, range_tokens, with_prefixes
    from prfaas.core.workload import Empirical, read_requests
    from prfaas.lab.simulator.machine_pool import replayed

    lengths = range_tokens(planned)
    trace = read_requests(path).cut_to(int(lengths[1]))
    plain = problem_of_trace(problem, trace, lengths)
    reuses = list(replayed(trace.requests, _machines(planned, pools, trace.block_tokens)))
    left = [each.input_tokens - each.reused_tokens for each in reuses]
    ratio = 1 - sum(left) / sum(each.input_tokens for each in reuses)
    behind = with_prefixes(plain, left, [each.reused_tokens for each in reuses], lengths)
    return plain, _left(behind, Empirical(left).clipped(*lengths)), ratio


def _machines(
    planned: "PlannedDeployment", pools: "Mapping[str, PoolOptions]", block_tokens: int
) -> "list[MachinePool]":
    from prfaas.core.latency.service_curve import ServiceCurve
    from prfaas.lab.simulator.machine_pool import MachinePool

    machines: list[MachinePool] = []
    for cluster in planned.clusters:
        options = pools.get(cluster.name)
        if options is not None:
            between_s = ServiceCurve.of_profile(cluster.profile).between_s
            count = -(-cluster.instance_count // options.instances_per_machine)
            machines += [
                MachinePool(options, cluster.kv_model or planned.kv_model, block_tokens, between_s)
                for _ in range(count)
            ]
    return machines
