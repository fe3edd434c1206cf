"""What a trace says about traffic, whatever its format."""

from dataclasses import dataclass

from prfaas.workload.empirical import Empirical
from prfaas.workload.errors import WorkloadError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `cached_tokens` of its prompt are what a cache that forgets nothing would have held by then
    (None: the trace doesn't say).
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths, answers and rate of recorded traffic.

    `lengths` are whole prompts. `uncached` is what is left of them behind an endless prefix cache, None if the
    trace doesn't say. `requests` is empty where the source has only statistics (ServeGen). `skipped` names
    parts of the source that were left out, and why.
    """

    name: str
    lengths: Empirical
    uncached: Empirical | None
    output_tokens: float
    requests_per_s: float
    requests: tuple[TraceRequest, ...] = ()
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, requests: tuple[TraceRequest, ...]) -> "Trace":
        """From single requests, at least one with a prompt; those with an empty prompt don't count as lengths.

        Raises:
            WorkloadError: there are none.
        """
        prompts = [request for request in requests if request.input_tokens > 0]
        if not prompts:
            raise WorkloadError(f"{name}: has no request with a prompt")
        cached = [request.cached_tokens for request in prompts]
        uncached = None
        if all(each is not None for each in cached):
            # The last token is always computed, even of a prompt that is cached as a whole.
            left = [max(r.input_tokens - (r.cached_tokens or 0), 1) for r in prompts]
            uncached = Empirical(left)
        arrivals = [request.arrival_s for request in requests]
        span_s = max(arrivals) - min(arrivals)
        return cls(
            name=name,
            lengths=Empirical([request.input_tokens for request in prompts]),
            uncached=uncached,
            output_tokens=sum(request.output_tokens for request in prompts) / len(prompts),
            requests_per_s=len(requests) / span_s if span_s > 0 else 0.0,
            requests=requests,
        )
