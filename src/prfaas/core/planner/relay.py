"""What relayed tokens would fill of the pauses after first tokens, and what that costs prefill instances."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.planner.problem import PlanProblem, PrfaasCluster
from prfaas.core.planner.ttft import PrefillPoolLoad, StageWork, wait_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

WORTH_STEPS = 3.0
"""A gap of fewer decode steps is hardly seen, and to leave one engine for another costs about a step."""

_MOST = 0.9
# A shorter wait is none.
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class RelayEstimate:
    """Relayed tokens at a rate of requests: an estimate, as that of the TTFT."""

    most_tokens: int
    """`gateway.relay_tokens`: of one answer."""
    pausing_fraction: float
    """Of all requests, those whose KV comes so late that relaying is worth it."""
    pause_p90_s: float | None
    """Of those: from the prefill's end until their KV is there; None where there are none."""
    needed_tokens: int | None
    """What fills nine of ten of these pauses; None where there are none."""
    relayed_fraction: float
    """Of all requests: where prefills leave an instance the time."""
    relayed_tokens_mean: float
    """Of a relayed answer; 0 where there are none."""
    filled_fraction: float
    """Of the relayed answers, those whose tokens last until the KV is there."""
    prefill_loss: float
    """Of the time of PrfaaS instances, the part that prefills take longer: a decode step after each of their chunks, as
    long as something is relayed. The most of all clusters, and the most it can cost."""


def relay_estimate(problem: PlanProblem, work: StageWork, requests_per_s: float) -> RelayEstimate:
    """Relayed tokens at roles and routes that are given and keep up, as if every request allowed them.

    An answer is relayed by the rule of `core.scheduling.relay`: at least `WORTH_STEPS` decode steps before its KV is
    there, and with less than that of other prefills waiting. Waits are those of `ttft.wait_of`, links are shared
    evenly. Live, the rule knows what is ahead on the link, and not what will join: it relays less than is told here.

    """
    import numpy as np

    remote = {cluster.name: cluster for cluster in problem.prfaas}
    parts = [
        _Part.of(problem, remote[pool.name], pool, requests_per_s)
        for pool in work.pools
        if pool.name in remote and pool.link is not None
    ]
    pauses_s, weights, chances, tokens, needed = (
        np.concatenate([getattr(part, name) for part in parts]) if parts else np.zeros(0)
        for name in ("pauses_s", "weights", "chances", "tokens", "needed_tokens")
    )
    relayed = weights * chances if problem.relay.tokens else np.zeros(len(weights))
    pausing, share = float(weights.sum()), float(relayed.sum())
    return RelayEstimate(
        most_tokens=problem.relay.tokens,
        pausing_fraction=pausing,
        pause_p90_s=_quantile(pauses_s, weights),
        needed_tokens=None if not pausing else math.ceil(_quantile(needed, weights) or 0.0),
        relayed_fraction=share,
        relayed_tokens_mean=min(float((relayed * tokens).sum()) / share, problem.relay.tokens)
        if share
        else 0.0,
        filled_fraction=float(relayed[needed <= problem.relay.tokens].sum()) / share if share else 0.0,
        prefill_loss=max((part.loss for part in parts), default=0.0) if share else 0.0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The requests of one PrfaaS cluster whose KV comes late, an entry per service time."""

    pauses_s: "FloatArray"
    weights: "FloatArray"
    """Their probabilities among all requests."""
    chances: "FloatArray"
    """That prefills leave the instance the time."""
    tokens: "FloatArray"
    """Relayed of an answer."""
    needed_tokens: "FloatArray"
    """That last until the KV is there."""
    loss: float

    @classmethod
    def of(
        cls, problem: PlanProblem, cluster: PrfaasCluster, pool: PrefillPoolLoad, requests_per_s: float
    ) -> "_Part":
        import numpy as np

        assert pool.link is not None
        step_s = max(pd.decode_step_s for pd in problem.pd)
        relay_step_s = cluster.relay_step_s or step_s
        link = pool.link
        pauses_s = link.added_s(pool.seconds, requests_per_s)
        # The rule takes all bytes for bytes that can leave while the prefill runs.
        sent_s = (link.streamed_s + link.late_s - link.before_s) / (1 - requests_per_s * link.busy_s)
        predicted_s = link.round_trip_s + np.maximum(sent_s - pool.seconds, 0.0)
        late = (predicted_s >= WORTH_STEPS * step_s) & (pool.weights > 0)
        pauses_s, weights, seconds = pauses_s[late], pool.weights[late], pool.seconds[late]
        wait = wait_of(pool, requests_per_s)
        chances = 1 - wait.chance * np.exp(-pauses_s / max(wait.mean_s, _LEAST_S))
        needed = pauses_s / relay_step_s
        most = min(problem.relay.tokens, max(problem.workload.output_tokens - 1.0, 0.0))
        tokens = np.minimum(needed, most)
        # Little's law: so many answers are relayed at an instance at a time.
        relays = requests_per_s * float((weights * chances * tokens).sum()) * relay_step_s / pool.instances
        busy = requests_per_s * pool.work_s / pool.instances
        mean_s = float((seconds * weights).sum() / weights.sum()) if len(weights) else math.inf
        chunk_s = mean_s * min(problem.relay.chunk_tokens / _tokens_in(cluster, mean_s, problem), 1.0)
        slower = relay_step_s / chunk_s if chunk_s < math.inf else 0.0
        return cls(pauses_s, weights, chances, tokens, needed, busy * -math.expm1(-relays) * slower)


def _tokens_in(cluster: PrfaasCluster, seconds: float, problem: PlanProblem) -> float:
    """The uncached length of which a prefill takes so long, as near as the workload's lengths have one."""
    import numpy as np

    lengths = problem.workload.lengths
    share = 1 - problem.hit_ratio(cluster)
    known = np.geomspace(lengths.low * share, lengths.high * share, 256)
    return float(np.interp(seconds, cluster.prefill_s(known), known))


def _quantile(values: "FloatArray", weights: "FloatArray") -> float | None:
    """Where nine tenths of the weight lie below; None without any."""
    import numpy as np

    if not len(values) or not weights.sum() > 0:
        return None
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(cumulative, _MOST)), len(values) - 1)])
