"""What all studies of one call share: the deployment, its plan, and how much to simulate.

Other lengths than the file's: longer, shorter, mixed.

Bursts of any height at the same mean rate.

The recorded trace as traffic of a study.

Traffic that differs in nothing but how much of its prompts is shared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.kv import KvModel
from prfaas.core.planner import OperatingPoint, PlanProblem, best_operation, problem_of
from prfaas.core.workload import Empirical, LengthDistribution, RequestTrace, Workload, fixed
from prfaas.core.workload.arrivals import Arrivals, Mmpp, Phase, Poisson
from prfaas.core.workload.traffic import IndependentTraffic, ReplayedTraffic, RequestChunk, Traffic
from prfaas.lab.simulator import CacheOptions

_BINS = 2048


def stretched(lengths: LengthDistribution, factor: float, low_tokens: float, high_tokens: float) -> Empirical:
    """factor × L; what leaves [low, high], the lengths that profiles cover, counts as the nearest that does not."""
    bins = lengths.scaled(factor).bins(_BINS)
    return Empirical(np.clip(bins.lengths, low_tokens, high_tokens), bins.weights)


def mixed(first: Empirical, second: Empirical, share_of_second: float) -> Empirical:
    """Either, by chance."""
    return Empirical(
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate([first.probabilities * (1 - share_of_second), second.probabilities * share_of_second]),
    )


CALM_S, BURST_S = 60.0, 15.0


def bursts(rate_rps: float, peak: float) -> Arrivals:
    """Bursts of `peak` × the mean rate for 15 s on average, between calms of 60 s; peak 1 is a Poisson process.

    Raises:
        ValueError: a peak below 1, or above what even silence between bursts allows (5).
    """
    share = BURST_S / (CALM_S + BURST_S)
    calm = (1 - share * peak) / (1 - share)
    if not (peak >= 1 and calm > -1e-9):
        raise ValueError(f"a peak is from 1 to {1 / share:g} times the mean rate, not {peak!r}")
    if peak == 1:
        return Poisson(rate_rps)
    return Mmpp((Phase(max(calm, 0.0) * rate_rps, CALM_S), Phase(peak * rate_rps, BURST_S)))


# Of `--quick`: enough to see that everything works, too few to believe.
_QUICK_SHARE = 0.05
_QUICK_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """`optimum`: the planner's best operation of the deployment. `trace`: recorded traffic for what needs prefixes."""

    planned: PlannedDeployment
    problem: PlanProblem
    optimum: OperatingPoint
    trace: RequestTrace
    seed: int = 0
    is_quick: bool = False

    @property
    def lambda_max(self) -> float:
        """Requests per second at most, by the planner."""
        return self.optimum.lambda_max

    @property
    def trace_name(self) -> str:
        """The trace's file, without folders."""
        return Path(self.trace.name).name

    @property
    def pd(self) -> str:
        """The name of the PD cluster."""
        return self.problem.pd[0].name

    @property
    def range_tokens(self) -> tuple[float, float]:
        """The lengths that every profile covers."""
        ranges = [cluster.profile.range_tokens for cluster in self.planned.clusters]
        return max(low for low, _ in ranges), min(high for _, high in ranges)

    def requests(self, count: int) -> int:
        """How many to simulate where a study in earnest has `count`."""
        return max(int(count * _QUICK_SHARE), 50) if self.is_quick else count

    def seeds(self, count: int) -> range:
        """As many seeds from the setting's own on; fewer if it is quick."""
        return range(self.seed, self.seed + (min(count, _QUICK_SEEDS) if self.is_quick else count))

    def poisson(self, load: float) -> IndependentTraffic:
        """The file's lengths at a share of Λ_max."""
        return self.traffic(Poisson(load * self.lambda_max))

    def traffic(self, arrivals: Arrivals, lengths: LengthDistribution | None = None) -> IndependentTraffic:
        """The file's workload (or other lengths), arriving as a process says."""
        workload = self.problem.workload
        return IndependentTraffic(
            arrivals, workload.uncached if lengths is None else lengths, fixed(workload.output_tokens)
        )


def setting_of(
    planned: PlannedDeployment, trace: RequestTrace, *, seed: int = 0, is_quick: bool = False
) -> Setting:
    """The setting of a deployment with one PrfaaS and one PD cluster.

    Raises:
        ValueError: another number of clusters, PD instances too few to divide, or nothing can be served.
        DeploymentError, PlanError: as the planner.
    """
    if len(planned.prfaas_clusters) != 1 or len(planned.pd_clusters) != 1 or len(planned.links) != 1:
        raise ValueError("studies are for one prfaas and one pd cluster with one link between them")
    if planned.pd_clusters[0].instance_count < 2:
        raise ValueError("studies need a pd cluster of two instances or more, to prefill and to decode")
    problem = problem_of(planned)
    optimum = best_operation(problem)
    if optimum.lambda_max <= 0:
        raise ValueError("by `prfaas plan` it can serve nothing")
    return Setting(planned, problem, optimum, trace, seed, is_quick)


def with_bandwidth(planned: PlannedDeployment, bits_per_s: float) -> PlannedDeployment:
    """The deployment with another link."""
    links = tuple(replace(link, bandwidth_bits_per_s=bits_per_s) for link in planned.links)
    return replace(planned, links=links)


def times(planned: PlannedDeployment, factor: int) -> PlannedDeployment:
    """So many times the instances and the link."""
    return replace(
        planned,
        clusters=tuple(
            replace(cluster, instance_count=cluster.instance_count * factor) for cluster in planned.clusters
        ),
        links=tuple(
            replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s * factor) for link in planned.links
        ),
    )


def pd_only(planned: PlannedDeployment, instances: int) -> PlannedDeployment:
    """Only the PD cluster, with so many instances."""
    pd = replace(planned.pd_clusters[0], instance_count=instances)
    return replace(planned, clusters=(pd,), links=())


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


@dataclass(frozen=True, slots=True)
class SharedPrefixes(Traffic):
    """`base` where every prompt's first `share`, in whole blocks, is the beginning of one of `documents` texts.

    Document k = 1, 2, … is asked about in proportion to 1 / k (Zipf's law). Arrivals, lengths and documents are the
    same for every share.
    """

    base: IndependentTraffic
    share: float
    documents: int

    @property
    def mean_per_s(self) -> float:
        return self.base.mean_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; without end."""
        of_requests, of_documents = rng.spawn(2)
        weights = 1 / np.arange(1, self.documents + 1)
        # Room for the longest prompt in every document; what nobody shares comes after them all.
        room = -(-int(self.base.inputs.high) // self.base.block_tokens) + 1
        for chunk in self.base.chunks(of_requests):
            document = of_documents.choice(self.documents, size=len(chunk), p=weights / weights.sum())
            counts = np.diff(chunk.block_starts)
            places = np.arange(len(chunk.block_ids)) - np.repeat(chunk.block_starts[:-1], counts)
            shared = (self.share * chunk.input_tokens).astype(np.int64) // chunk.block_tokens
            own = chunk.block_ids + self.documents * room
            ids = np.where(
                places < np.repeat(shared, counts), np.repeat(document * room, counts) + places, own
            )
            yield RequestChunk(
                chunk.arrival_s,
                chunk.input_tokens,
                chunk.output_tokens,
                ids,
                chunk.block_starts,
                chunk.block_tokens,
            )


def cache_of(model: KvModel, num_bytes: int) -> CacheOptions | None:
    """A prefix cache of so many bytes on every instance; None for 0, and for models without KV that grows."""
    return CacheOptions.of_memory(model, num_bytes) if model.token_bytes and num_bytes else None
