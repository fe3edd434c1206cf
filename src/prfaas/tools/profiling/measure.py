"""Measures a live endpoint: prefill seconds over lengths, decode step seconds over batches."""

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.core.latency.profile import Curve, DecodeCurve, Evidence, LatencyProfile
from prfaas.tools.profiling.endpoint import MeasureError, ProfiledEndpoint, TokenTimes

# Steps that all requests of a batch must do together for a step time to be taken.
_MIN_STEPS = 16
_FIRST_TOKENS = 64
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """The lengths and batches to measure, and how often."""

    lengths: tuple[int, ...]
    """Tokens of prompts, ascending."""
    batches: tuple[int, ...]
    """Requests that decode together, ascending."""
    repeats: int = 3
    """Measurements of every length and batch."""
    warmups: int = 1
    """Measurements before them that don't count."""
    context_tokens: int = 512
    """Tokens of each prompt before decode is measured."""

    @property
    def runs(self) -> int:
        """Measurements in all, warm-ups included."""
        return (len(self.lengths) + len(self.batches)) * (self.warmups + self.repeats)


@dataclass(frozen=True, slots=True)
class Sample:
    """All measurements of one length or batch."""

    at: int
    """Tokens of the prompt, or requests of the batch."""
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median, which goes into the profile."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured times of one endpoint."""

    url: str
    model: str
    plan: MeasurePlan
    prefill: tuple[Sample, ...]
    decode: tuple[Sample, ...]
    notes: tuple[str, ...]
    """What could not be measured, and why."""

    def profile(self, *, name: str, hardware: str, gpus_per_instance: int, source: str) -> LatencyProfile:
        """The medians as a profile: no curve turns between two points, and nothing is said beyond the ends."""
        evidence = Evidence("measured")
        return LatencyProfile(
            name=name,
            hardware=hardware,
            model=self.model,
            gpus_per_instance=gpus_per_instance,
            prefill=Curve.through_points(_points(self.prefill), "monotone"),
            decode=DecodeCurve.through_points(_points(self.decode), self.plan.context_tokens, evidence),
            source=source,
            evidence=evidence,
        )


Progress = Callable[[str], None]
"""Called before every measurement with what is measured."""


async def measure(endpoint: ProfiledEndpoint, plan: MeasurePlan, progress: Progress) -> Measurement:
    """Measure what `plan` says, one after the other, on an endpoint with no other work.

    A batch that the endpoint doesn't run at once ends the decode part, with a note.

    Raises:
        MeasureError: the plan doesn't fit the endpoint, or an answer isn't what was asked for.
    """
    _check(endpoint, plan)
    prefill = [await _prefill(endpoint, length, plan, progress) for length in plan.lengths]
    decode: list[Sample] = []
    notes: list[str] = []
    for batch in plan.batches:
        sample = await _decode(endpoint, batch, plan, progress)
        if sample is None:
            notes.append(
                f"{batch} requests were never decoded together, so decode times end before; the server takes "
                "fewer at once (vLLM: --max-num-seqs) or has no memory for so many"
            )
            break
        decode.append(sample)
    return Measurement(endpoint.url, endpoint.model, plan, tuple(prefill), tuple(decode), notes=tuple(notes))


def _check(endpoint: ProfiledEndpoint, plan: MeasurePlan) -> None:
    if len(plan.lengths) < 2:
        raise MeasureError("prefill needs at least two lengths to measure")
    longest = endpoint.max_model_len
    if longest is None:
        return
    if plan.lengths[-1] + 1 > longest:
        raise MeasureError(
            f"a prompt of {plan.lengths[-1]} tokens and its answer don't fit the endpoint's max_model_len of "
            f"{longest}; the longest that can be measured is {longest - 1}"
        )
    if plan.batches and plan.context_tokens + _FIRST_TOKENS > longest:
        raise MeasureError(
            f"a context of {plan.context_tokens} tokens leaves no room to decode in the endpoint's max_model_len of "
            f"{longest}; give at most {longest - _FIRST_TOKENS}"
        )


async def _prefill(endpoint: ProfiledEndpoint, length: int, plan: MeasurePlan, progress: Progress) -> Sample:
    seconds = []
    for run in range(plan.warmups + plan.repeats):
        progress(f"prefill of {length} tokens" + (", warm-up" if run < plan.warmups else ""))
        taken = await endpoint.prefill_s(length)
        if run >= plan.warmups:
            seconds.append(taken)
    return Sample(length, tuple(seconds))


async def _decode(
    endpoint: ProfiledEndpoint, batch: int, plan: MeasurePlan, progress: Progress
) -> Sample | None:
    seconds = []
    tokens = _FIRST_TOKENS
    for run in range(plan.warmups + plan.repeats):
        progress(f"decode of {batch} at once" + (", warm-up" if run < plan.warmups else ""))
        for _ in range(_ATTEMPTS):
            answers = await _together(endpoint, batch, plan.context_tokens, tokens)
            step = step_s(answers)
            if step is not None:
                break
            tokens = _more_tokens(endpoint, plan.context_tokens, answers)
        else:
            return None
        if run >= plan.warmups:
            seconds.append(step)
    return Sample(batch, tuple(seconds))


async def _together(endpoint: ProfiledEndpoint, batch: int, context: int, tokens: int) -> list[TokenTimes]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(endpoint.decode(context, tokens)) for _ in range(batch)]
    except BaseExceptionGroup as group_error:
        # One reason is enough to say, and the first is the cause of the others.
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]


def step_s(answers: Sequence[TokenTimes]) -> float | None:
    """Seconds per decode step while all `answers` were being decoded; None if that was for too few steps."""
    start_s = max(answer.first_s for answer in answers)
    end_s = min(answer.last_s for answer in answers)
    elapsed_s, steps = 0.0, 0
    for answer in answers:
        inside = [(at, count) for at, count in answer.arrivals if start_s <= at <= end_s]
        # Tokens of the first arrival were made before the time starts to run.
        made = sum(count for _, count in inside[1:])
        if made < _MIN_STEPS:
            return None
        elapsed_s += inside[-1][0] - inside[0][0]
        steps += made
    return elapsed_s / steps


def _more_tokens(endpoint: ProfiledEndpoint, context: int, answers: Sequence[TokenTimes]) -> int:
    """As many tokens as let the last prompt begin before the first answer ends, if prompts only came one by one."""
    first = min(answers, key=lambda answer: answer.first_s)
    behind_s = max(answer.first_s for answer in answers) - first.first_s
    each_s = (first.last_s - first.first_s) / max(1, first.tokens - 1)
    needed = first.tokens if each_s <= 0 else math.ceil(behind_s / each_s)
    longest = endpoint.max_model_len
    # Tokens that came all at once make a step look like nothing, and `needed` like everything.
    tokens = min(max(2 * first.tokens, needed + 4 * _MIN_STEPS), 4 * first.tokens)
    return tokens if longest is None else max(1, min(tokens, longest - context))


def _points(samples: Sequence[Sample]) -> tuple[tuple[float, float], ...]:
    # Six digits are more than a clock over HTTP can tell, and keep the file readable.
    return tuple((float(sample.at), float(f"{sample.median_s:.6g}")) for sample in samples)
