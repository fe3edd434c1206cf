"""From a deployment file, or from a recorded trace for it, to a planning problem."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from prfaas.core.arrays import FloatArray, Int32Array, IntArray, OfLength, np
from prfaas.core.deployment import DeploymentError, Link, PlannedCluster, PlannedDeployment
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    FixedLengths,
    LogNormalLengths,
    TraceLengths,
    UniformLengths,
)
from prfaas.core.kv.model import KvModel
from prfaas.core.latency.profile import ProfileError
from prfaas.core.planner.equations import KvSize
from prfaas.core.planner.problem import (
    PdCluster,
    PlanError,
    PlanLink,
    PlanProblem,
    PrfaasCluster,
    TtftTarget,
    all_paths,
)
from prfaas.core.workload.empirical import Empirical, divisible, fixed
from prfaas.core.workload.lengths import (
    LengthDistribution,
    TruncatedLogNormal,
    Uniform,
    Workload,
    WorkloadError,
)
from prfaas.core.workload.requests import RequestTrace, read_requests
from prfaas.core.workload.trace_columns import TraceColumns


def problem_of(deployment: PlannedDeployment) -> PlanProblem:
    """The planning problem that a deployment file states.

    Raises:
        DeploymentError: a profile doesn't cover the lengths or has no decode times, an SLO that not even a batch
            of one keeps, a trace that can't be read; one sentence with file, line and field.
    """
    workload = _workload(deployment)
    curves = [cluster.profile for cluster in deployment.clusters]
    # Clusters with equal profiles share one curve: the planner knows equal clusters by it.
    prefill_s = {
        cluster.name: curves[curves.index(cluster.profile)].extended_prefill_s
        for cluster in deployment.clusters
    }
    narrower, slo = link_sizes(deployment.link_models), deployment.slo
    try:
        problem = PlanProblem(
            name=deployment.name,
            prfaas=tuple(
                PrfaasCluster(
                    cluster.name,
                    cluster.hardware,
                    cluster.instance_count,
                    cluster.gpus_per_instance,
                    prefill_s[cluster.name],
                    prefix_hit_ratio=cluster.prefix_hit_ratio,
                )
                for cluster in deployment.prfaas_clusters
            ),
            pd=tuple(
                _pd(deployment, index, cluster, prefill_s[cluster.name])
                for index, cluster in enumerate(deployment.clusters)
                if cluster.kind == "pd"
            ),
            links=tuple(
                PlanLink(
                    link.source,
                    link.target,
                    link.bandwidth_bits_per_s,
                    link.egress_per_gb,
                    link.rtt_s,
                    transfer_limit_bits_per_s=mapping_bits_per_s(deployment, link),
                    kv_bytes=narrower.get(link.name),
                    streamed_token_bytes=float(deployment.sent_over(link.name).token_bytes),
                )
                for link in deployment.links
            ),
            workload=workload,
            kv_bytes=KvSize(deployment.sent_model),
            prices=deployment.prices,
            load=deployment.workload.load,
            ttft_target=None if slo.ttft_s is None else TtftTarget(slo.ttft_s, slo.ttft_statistic),
            first_token=deployment.first_token,
            streamed_token_bytes=float(deployment.sent_model.token_bytes),
        )
    except PlanError as error:
        raise deployment.error((), str(error)) from None
    _check_range(deployment, problem)
    return problem


def link_sizes(models: Mapping[str, KvModel]) -> dict[str, KvSize]:
    """S_kv by link, from models by link; equal models share one."""
    sizes = {model: KvSize(model) for model in models.values()}
    return {link: sizes[model] for link, model in models.items()}


def mapping_bits_per_s(deployment: PlannedDeployment, link: Link) -> float:
    """The rate at which a link's ends map one transfer; infinite where they are alike, or the file does not say."""
    if link.mapping_bits_per_s is None or not deployment.has_unlike_ends(link):
        return math.inf
    return link.mapping_bits_per_s


def range_tokens(deployment: PlannedDeployment) -> tuple[float, float]:
    """The shortest and the longest uncached length in tokens that the profiles of all clusters cover."""
    ranges = [cluster.profile.range_tokens for cluster in deployment.clusters]
    return max(low for low, _ in ranges), min(high for _, high in ranges)


_BINS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True)
class UsualPrefill:
    """T(u) times what prefixes add: for arrays of uncached tokens, of the same shape.

    A plan knows how long prompts are without their prefixes, and no more. So of every half octave of uncached lengths
    it gets what those of a sample take with their prefixes, over what they would take without. Equal ones are equal
    values.
    """

    prefill_s: OfLength
    """T: seconds without a cached prefix."""
    log_tokens: tuple[float, ...]
    """Natural logarithms of lengths, ascending."""
    ratios: tuple[float, ...]
    """What prefixes add there, as a factor of 1 or more; between two of them it is interpolated."""
    _arrays: "tuple[FloatArray, FloatArray]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_arrays", (np.array(self.log_tokens), np.array(self.ratios)))

    @classmethod
    def of_prompts(
        cls,
        prefill_s: OfLength,
        uncached_tokens: FloatArray,
        reused_tokens: FloatArray,
        low_tokens: float,
    ) -> "UsualPrefill":
        """From a sample of prompts.

        Args:
            prefill_s: T, known from `low_tokens` on.
            uncached_tokens: Of every prompt, what is computed.
            reused_tokens: Of every prompt, what its cache has.
            low_tokens: Shorter ones count as long.
        """
        low = low_tokens
        uncached = np.maximum(uncached_tokens, low)
        whole = uncached + reused_tokens
        alone_s = prefill_s(uncached)
        # As `after_prefix_s`; a prefix below the range counts as long as its end, which takes from what it adds.
        longer_s = prefill_s(whole) - prefill_s(np.maximum(reused_tokens, low))
        taken_s = np.where(reused_tokens > 0, np.maximum(longer_s, alone_s), alone_s)
        bins = (np.log2(uncached / low) * _BINS_PER_OCTAVE).astype(np.int64)
        weight_s = np.bincount(bins, alone_s)
        some = weight_s > 0
        logs = np.bincount(bins, alone_s * np.log(uncached))[some] / weight_s[some]
        ratios = np.bincount(bins, taken_s)[some] / weight_s[some]
        return cls(prefill_s, tuple(logs.tolist()), tuple(ratios.tolist()))

    def __call__(self, tokens: FloatArray) -> FloatArray:
        seconds: FloatArray = self.prefill_s(tokens) * np.interp(np.log(tokens), *self._arrays)
        return seconds


def problem_of_trace(
    problem: PlanProblem,
    trace: RequestTrace,
    low_tokens: float,
    uncached_tokens: "Sequence[int] | IntArray | Int32Array | None" = None,
) -> PlanProblem:
    """The problem of the same clusters for a trace's lengths.

    Args:
        problem: The deployment's own. Hit ratios that it gives to clusters are left out.
        trace: Its prompts and the mean of its answers.
        low_tokens: Shorter prompts take as long as this one.
        uncached_tokens: Of every prompt, what a cache leaves to compute. Prefills take what they take behind their
            prefixes. None: nothing is cached.
    """
    lengths = trace.lengths
    if uncached_tokens is not None:
        uncached = np.asarray(uncached_tokens)
        problem = _with_prefixes(problem, uncached, trace.input_tokens - uncached, low_tokens)
        lengths = Empirical(uncached)
    return replace(
        problem,
        prfaas=tuple(replace(cluster, prefix_hit_ratio=None) for cluster in problem.prfaas),
        pd=tuple(replace(cluster, prefix_hit_ratio=None) for cluster in problem.pd),
        workload=Workload(lengths, max(trace.mean_output_tokens, 1.0)),
    )


def _with_prefixes(
    problem: PlanProblem,
    uncached_tokens: "IntArray",
    reused_tokens: "IntArray",
    low_tokens: float,
) -> PlanProblem:
    """The same clusters, with prefills that take what those of these prompts take behind their prefixes."""
    uncached, reused = (each.astype(np.float64) for each in (uncached_tokens, reused_tokens))

    def usual(prefill_s: OfLength) -> UsualPrefill:
        return UsualPrefill.of_prompts(prefill_s, uncached, reused, low_tokens)

    return replace(
        problem,
        prfaas=tuple(replace(cluster, prefill_s=usual(cluster.prefill_s)) for cluster in problem.prfaas),
        pd=tuple(replace(cluster, prefill_s=usual(cluster.prefill_s)) for cluster in problem.pd),
    )


def _pd(deployment: PlannedDeployment, index: int, cluster: PlannedCluster, prefill_s: OfLength) -> PdCluster:
    step_limit_s = deployment.slo.tpot_s
    assert step_limit_s is not None  # checked with the file
    try:
        batch = cluster.profile.max_batch(step_limit_s)
        step_s = cluster.profile.decode_step_s(batch) if batch else 0.0
    except ProfileError as error:
        raise deployment.error(("clusters", index, "profile"), str(error)) from None
    if batch == 0:
        raise deployment.error(
            ("slo",),
            f"asks for a token every {step_limit_s * 1000:.3g} ms, which profile "
            f'"{cluster.profile.name}" does not keep with a single request in the batch',
        )
    return PdCluster(
        cluster.name,
        cluster.hardware,
        cluster.instance_count,
        cluster.gpus_per_instance,
        prefill_s,
        decode_batch=float(batch),
        decode_step_s=step_s,
        prefix_hit_ratio=cluster.prefix_hit_ratio,
        group_ranks=cluster.group_ranks,
    )


def _check_range(deployment: PlannedDeployment, problem: PlanProblem) -> None:
    """Every length that a cluster may be given must be in its profile's range, however much is cached.

    Of a trace, which is as it is, lengths may lie beyond.
    """
    if isinstance(deployment.workload.lengths, TraceLengths):
        return
    lengths = problem.workload.lengths
    used = all_paths(problem)
    for index, cluster in enumerate(deployment.clusters):
        shares = [path.share for path in used if path.prefill == cluster.name]
        if not shares:
            continue
        low, high = lengths.low * min(shares), lengths.high * max(shares)
        try:
            cluster.profile.require_range(low, high)
        except ProfileError as error:
            raise deployment.error(
                ("clusters", index, "profile"),
                f"{error}; the workload's uncached lengths go from {low:.6g} to {high:.6g}",
            ) from None


def _workload(deployment: PlannedDeployment) -> Workload:
    spec = deployment.workload
    try:
        lengths, output_tokens = _lengths(deployment)
        output = spec.output_tokens if spec.output_tokens is not None else output_tokens
        if output is None:
            raise deployment.error(
                ("workload", "output_tokens"), "is missing; give the mean length of answers"
            )
        return Workload(lengths, output, spec.prefix_hit_ratio)
    except DeploymentError:
        raise
    except WorkloadError as error:
        field = ("workload", "lengths", "path") if isinstance(spec.lengths, TraceLengths) else ("workload",)
        raise deployment.error(field, str(error)) from None


def _lengths(deployment: PlannedDeployment) -> tuple[LengthDistribution, float | None]:
    match deployment.workload.lengths:
        case LogNormalLengths(mu, sigma, low, high):
            return divisible(TruncatedLogNormal(mu, sigma, low, high)), None
        case UniformLengths(low, high):
            return divisible(Uniform(low, high)), None
        case FixedLengths(tokens):
            return fixed(tokens), None
        case EmpiricalLengths(lengths, weights):
            return Empirical(lengths, weights), None
        case TraceLengths(path, form, columns):
            trace = read_requests(path, form, None if columns is None else TraceColumns.of(columns))
            return trace.lengths, trace.mean_output_tokens
