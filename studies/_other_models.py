"""The file's machines and prompts with other models: those of which it is known how fast the PrfaaS hardware is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from prfaas.core.deployment import DeploymentError, PlannedDeployment
from prfaas.core.kv.model import KvModel
from prfaas.core.kv.published import published_model
from prfaas.core.latency.files import load_profile, profile_names
from prfaas.core.latency.profile import Curve, DecodeCurve, Evidence, LatencyProfile
from prfaas.core.planner import Baseline, best_operation, problem_of
from prfaas.core.planner.comparisons import Rival, homogeneous, homogeneous_at_equal_cost
from prfaas.core.planner.cost import cost_per_hour
from prfaas.lab.studies.context import StudyContext
from studies._variants import pd_only

# Of a curve that is another one times a ratio: enough that it is right between them.
_POINTS = 24


@dataclass(frozen=True, slots=True)
class ModelFleet:
    """A deployment of one model, and what the same money buys without PrfaaS."""

    context: StudyContext
    """Of the deployment with this model."""
    alone: PlannedDeployment
    """PD instances for the same money by the file's prices, or as many GPUs where it has none."""
    baseline: Baseline
    """The plan of `alone`."""
    is_assumed: bool
    """Whether nobody knows how fast the PD cluster's hardware is with this model: see `other_models`."""

    @property
    def model(self) -> KvModel:
        """As the KVCache sees it."""
        return self.context.planned.kv_model

    @property
    def label(self) -> str:
        """The model's name, with a star where the PD cluster's times are assumed."""
        return f"{self.model.name}*" if self.is_assumed else self.model.name


# Several studies have them, both to be run and to be told.
@lru_cache(maxsize=1)
def other_models(context: StudyContext) -> Mapping[str, ModelFleet]:
    """The file's model, and every model with a profile of the PrfaaS cluster's hardware for all of its prompts.

    Where a model has no profile of the PD cluster's hardware, it is taken to be slower there by as much as the file's
    model is, in prefill at every length and in decode.
    """
    planned, low, high = context.planned, *context.range_tokens
    prfaas, pd = planned.prfaas_clusters[0], planned.pd_clusters[0]
    profiles = [load_profile(name) for name in profile_names()]
    found = {planned.kv_model.name: _fleet(context, is_assumed=False)}
    for fast in profiles:
        if (
            fast.hardware != prfaas.hardware
            or fast.model in found
            or not fast.prefill.covers(low, high)
            or fast.decode is None
        ):
            continue
        known = [each for each in profiles if (each.model, each.hardware) == (fast.model, pd.hardware)]
        slow = known[0] if known else _slower(fast, prfaas.profile, pd.profile, (low, high))
        clusters = tuple(
            replace(cluster, profile=fast if cluster.kind == "prfaas" else slow)
            for cluster in planned.clusters
        )
        other = replace(
            planned,
            kv_model=published_model(fast.model).kv_model,
            wire_model=None,
            kv_copies=1.0,
            clusters=clusters,
        )
        try:
            problem = problem_of(other)
        except DeploymentError:
            continue  # too slow for the file's limit of a decode step
        here = replace(context, planned=other, problem=problem, optimum=best_operation(problem))
        if here.lambda_max > 0:
            found[fast.model] = _fleet(here, is_assumed=not known)
    return found


def _fleet(context: StudyContext, *, is_assumed: bool) -> ModelFleet:
    problem = context.problem
    same_gpus = homogeneous(problem)
    rival = Rival(cost_per_hour(problem, context.optimum))
    baseline = homogeneous_at_equal_cost(problem, same_gpus, rival) or same_gpus
    alone = pd_only(context.planned, max(baseline.instances, 2))
    return ModelFleet(context, alone, baseline, is_assumed)


def _slower(
    fast: LatencyProfile,
    known_fast: LatencyProfile,
    known_slow: LatencyProfile,
    range_tokens: tuple[float, float],
) -> LatencyProfile:
    """A model's profile of the slow hardware, where `fast` is that of the fast one and of another model both are known.

    The ratio of decode steps is that at the largest batch of which both are known, 1 if there is none.
    """
    assert fast.decode is not None
    lengths = np.geomspace(*range_tokens, _POINTS)
    # Rounding must not leave the range.
    lengths[0], lengths[-1] = range_tokens
    seconds = fast.prefill_s(lengths) * known_slow.prefill_s(lengths) / known_fast.prefill_s(lengths)
    steps = fast.decode.curve
    ratio = _step_ratio(known_fast, known_slow)
    return replace(
        fast,
        name=f"{fast.model}-{known_slow.hardware}",
        hardware=known_slow.hardware,
        gpus_per_instance=known_slow.gpus_per_instance,
        prefill=Curve.through_points(tuple(zip(lengths.tolist(), seconds.tolist(), strict=True))),
        decode=DecodeCurve(
            Curve.through_points(tuple((batch, step_s * ratio) for batch, step_s in steps.points), "linear"),
            fast.decode.context_tokens,
            evidence=Evidence("estimated"),
        ),
        source=f"{fast.name} times {known_slow.name} over {known_fast.name}",
        evidence=Evidence("estimated"),
    )


def _step_ratio(known_fast: LatencyProfile, known_slow: LatencyProfile) -> float:
    if known_fast.decode is None or known_slow.decode is None:
        return 1.0
    batch = min(known_fast.range_batch[1], known_slow.range_batch[1])
    if not all(
        each.decode is not None and each.decode.curve.covers(batch) for each in (known_fast, known_slow)
    ):
        return 1.0
    return known_slow.decode_step_s(batch) / known_fast.decode_step_s(batch)
