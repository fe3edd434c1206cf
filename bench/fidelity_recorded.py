"""Recorded runs of single vLLM engines beside what `fidelity_aggregated.py` makes of the same requests.

The cost of a step is fitted to the times of one half of the requests; what is reported for the other half is a
prediction from arrivals and lengths alone. All requests come within half a minute, so the first half meets a light
load that grows, and the second half waits in a long queue.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy.optimize import minimize

from fidelity_aggregated import AggregatedEngine, Served, StepCost, serve

FloatArray = NDArray[np.float64]

_FIRST_GUESS = StepCost(fixed_s=0.015, token_s=4e-5, request_s=5e-5, context_token_s=5e-8)
_STARTS = 6


@dataclass(frozen=True)
class Limits:
    """What the recorded engine was started with. `fits_memory`: its KVCache was too small for `max_running`
    requests, and its size is fitted, too."""

    max_running: int = 128
    step_tokens: int = 2048
    fits_memory: bool = False


@dataclass(frozen=True, eq=False)
class Recorded:
    """Times in seconds from the first arrival, one entry per request."""

    name: str
    arrival_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    input_tokens: list[int]
    output_tokens: list[int]

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """A file of requests as LLMServingSim's bench writes it, also compressed.

        Arrivals are in Unix time and the engine's times on a clock of their own: the smallest difference between the
        two, that of a request that was taken up at once, is where both meet.
        """
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        between_s = min(row["queued_ts"] - row["arrival_time"] for row in rows)
        start_s = rows[0]["arrival_time"]
        return cls(
            path.name.partition(".jsonl")[0].removeprefix("vllm_real_timings_"),
            np.array([row["arrival_time"] - start_s for row in rows]),
            np.array([row["first_token_ts"] - between_s - start_s for row in rows]),
            np.array([row["last_token_ts"] - between_s - start_s for row in rows]),
            [row["input_toks"] for row in rows],
            [row["output_toks"] for row in rows],
        )

    @property
    def further_tokens(self) -> FloatArray:
        """Tokens of each answer after the first, at least 1."""
        return np.maximum(np.array(self.output_tokens, dtype=np.float64) - 1, 1)


def fitted(recorded: Recorded, limits: Limits, known: slice) -> AggregatedEngine:
    """The engine whose TTFT and TPOT of the `known` requests come closest (mean absolute log ratio)."""
    ttft_s = recorded.first_token_s - recorded.arrival_s
    tpot_s = (recorded.last_token_s - recorded.first_token_s) / recorded.further_tokens

    def off_by(logs: FloatArray) -> float:
        try:
            served = _serve(_engine(logs, limits), recorded)
        except ValueError:
            return 1e3  # the memory is too small for the longest request
        ttft = (served.first_token_s - recorded.arrival_s)[known] / ttft_s[known]
        tpot = (served.last_token_s - served.first_token_s) / recorded.further_tokens / tpot_s
        return float(np.abs(np.log(ttft)).mean() + np.abs(np.log(tpot[known])).mean())

    cost = _FIRST_GUESS
    guess = [cost.fixed_s, cost.token_s, cost.request_s, cost.context_token_s]
    if limits.fits_memory:
        guess.append(
            2 * max(p + a for p, a in zip(recorded.input_tokens, recorded.output_tokens, strict=True))
        )
    rng = np.random.default_rng(1)
    best, closest = np.log(guess), float("inf")
    for start in range(_STARTS):
        found = minimize(
            off_by,
            np.log(guess) + (rng.normal(0, 0.5, len(guess)) if start else 0),
            method="Nelder-Mead",
            options={"maxfev": 600, "xatol": 1e-3, "fatol": 1e-4},
        )
        if found.fun < closest:
            best, closest = found.x, found.fun
    return _engine(best, limits)


def compared(path: Path, limits: Limits) -> list[dict[str, Any]]:
    """How far each half's prediction is off, as fractions of what was recorded; JSON-ready."""
    recorded = Recorded.read(path)
    middle = len(recorded.arrival_s) // 2
    first, second = slice(0, middle), slice(middle, None)
    return [
        _predicted(recorded, limits, first, second, "second"),
        _predicted(recorded, limits, second, first, "first"),
    ]


def _predicted(
    recorded: Recorded, limits: Limits, known: slice, unknown: slice, which: str
) -> dict[str, Any]:
    engine = fitted(recorded, limits, known)
    served = _serve(engine, recorded)
    cost = engine.cost
    count = len(served.last_token_s)
    return {
        "run": recorded.name,
        "predicted_half": which,
        "requests": count,
        "step_s": {
            "fixed": cost.fixed_s,
            "token": cost.token_s,
            "request": cost.request_s,
            "context_token": cost.context_token_s,
        },
        "kv_tokens": None if engine.kv_blocks is None else engine.kv_blocks * engine.block_tokens,
        "preemptions": served.preemptions,
        "fitted": _errors(recorded, served, known),
        "predicted": _errors(recorded, served, unknown),
        "throughput": _error(count / served.last_token_s.max(), count / recorded.last_token_s.max()),
    }


def limits_of(path: Path) -> Limits:
    """From the file's name, as far as LLMServingSim's own notes on these runs say: 128 requests and 2048 tokens per
    engine. Qwen3-30B-A3B ran on two engines in lockstep (data parallel, experts shared), which is taken for one of
    twice the size. The 24 GB of an RTX 4090 hold few tokens beside 16 GB of weights."""
    if "30B-A3B" in path.name:
        return Limits(max_running=256, step_tokens=4096)
    return Limits(fits_memory="RTX4090" in path.name)


def table_of(found: list[dict[str, Any]]) -> Table:
    table = Table(title="predicted minus recorded, of recorded, for the half that was not fitted")
    for column in (
        "run",
        "TTFT mean",
        "P50",
        "P90",
        "recorded mean",
        "TPOT mean",
        "P50",
        "P90",
        "throughput",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    for each in found:
        ttft, tpot = each["predicted"]["ttft"], each["predicted"]["tpot"]
        table.add_row(
            each["run"],
            each["predicted_half"],
            *(f"{ttft[key]['error']:+.1%}" for key in ("mean", "p50", "p90")),
            f"{ttft['mean']['real_s']:.3g} s",
            *(f"{tpot[key]['error']:+.1%}" for key in ("mean", "p50", "p90")),
            f"{each['throughput']['error']:+.1%}",
        )
    return table


def _engine(logs: FloatArray, limits: Limits) -> AggregatedEngine:
    values = np.exp(logs).tolist()
    blocks = int(values[4] / 16) if limits.fits_memory else None
    return AggregatedEngine(StepCost(*values[:4]), limits.max_running, limits.step_tokens, blocks)


def _serve(engine: AggregatedEngine, recorded: Recorded) -> Served:
    return serve(engine, recorded.arrival_s.tolist(), recorded.input_tokens, recorded.output_tokens)


def _errors(recorded: Recorded, served: Served, part: slice) -> dict[str, Any]:
    arrival_s, further = recorded.arrival_s, recorded.further_tokens
    return {
        "ttft": errors_of(
            (served.first_token_s - arrival_s)[part], (recorded.first_token_s - arrival_s)[part]
        ),
        "tpot": errors_of(
            ((served.last_token_s - served.first_token_s) / further)[part],
            ((recorded.last_token_s - recorded.first_token_s) / further)[part],
        ),
        "e2e": errors_of((served.last_token_s - arrival_s)[part], (recorded.last_token_s - arrival_s)[part]),
    }


def errors_of(simulated: FloatArray, real: FloatArray) -> dict[str, dict[str, float]]:
    """Mean, P50 and P90 of both in seconds, and how far the first is off."""
    pairs = {"mean": (float(simulated.mean()), float(real.mean()))}
    for percent in (50, 90):
        pairs[f"p{percent}"] = (float(np.percentile(simulated, percent)), float(np.percentile(real, percent)))
    return {
        name: {"simulated_s": ours, "real_s": theirs, "error": ours / theirs - 1}
        for name, (ours, theirs) in pairs.items()
    }


def _error(simulated: float, real: float) -> dict[str, float]:
    return {"simulated": simulated, "real": real, "error": simulated / real - 1}
