"""What a simulation gives: a row per request, how things were over time, and the numbers people ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas.deployment import Slo
from prfaas.simulator.stability import is_stable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """All arrays but those of `series` have one entry per request, in the order of arrival.

    `ttft_s`: until all KV was at the decode instance and a slot free there (the paper's TTFT), `e2e_s`: until the
    last token; both from the arrival, NaN if that did not happen before the end. `tpot_s`: seconds per token after the
    first. `uncached_tokens`: what the threshold was compared with; `hit_tokens`: what was not computed, thanks to a
    cache. `link_bytes`: KV that crossed links between clusters. `counted`: after the warm-up. `end_s`: the last
    arrival; what came after is only the emptying of the queues, so rates are taken before it.
    """

    arrival_s: FloatArray
    ttft_s: FloatArray
    e2e_s: FloatArray
    tpot_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    uncached_tokens: IntArray
    hit_tokens: IntArray
    offloaded: BoolArray
    reason: IntArray
    reasons: tuple[str, ...]
    retries: IntArray
    link_bytes: FloatArray
    counted: BoolArray
    start_s: float
    end_s: float
    events: int
    slo: Slo
    series: Mapping[str, FloatArray]
    changes: Mapping[str, Any]

    def summary(self) -> dict[str, Any]:
        """The counted requests in numbers, ready for JSON; NaN becomes None."""
        counted = self.counted
        span_s = max(self.end_s - self.start_s, 1e-9)
        done_s = self.arrival_s + self.e2e_s
        in_time = (done_s >= self.start_s) & (done_s <= self.end_s)
        good = np.ones(len(counted), dtype=bool)
        if self.slo.ttft_s is not None:
            good &= self.ttft_s <= self.slo.ttft_s
        if self.slo.tpot_s is not None:
            # What is exactly at the limit keeps it, whatever rounding made of it.
            good &= self.tpot_s <= self.slo.tpot_s * (1 + 1e-6)
        good &= ~np.isnan(self.ttft_s)
        inputs = float(self.input_tokens[counted].sum())
        bits = {name: values for name, values in self.series.items() if name.startswith("egress_bits_per_s_")}
        during = self.series["time_s"] > self.start_s
        egress = {
            name.removeprefix("egress_bits_per_s_"): _mean(values[during]) for name, values in bits.items()
        }
        document: dict[str, Any] = {
            "requests": int(counted.sum()),
            "simulated_s": self.end_s,
            "arrival_rps": float(counted.sum()) / span_s,
            **_percentiles("ttft", self.ttft_s[counted]),
            **_percentiles("tpot", self.tpot_s[counted]),
            **_percentiles("e2e", self.e2e_s[counted]),
            "throughput_rps": float(in_time.sum()) / span_s,
            "goodput_rps": float((in_time & good).sum()) / span_s,
            "egress_bits_per_s": sum(value or 0.0 for value in egress.values()),
            "offloaded_fraction": _mean(self.offloaded[counted].astype(float)),
            "hit_ratio": float(self.hit_tokens[counted].sum()) / inputs if inputs else 0.0,
            "retries": int(self.retries.sum()),
            "lost": int(np.isnan(self.e2e_s).sum()),
            "stable": is_stable(self.arrival_s, done_s, self.start_s, self.end_s),
            "decisions": {
                reason: int(np.count_nonzero(self.reason[counted] == code))
                for code, reason in enumerate(self.reasons)
            },
            "links": egress,
            "utilisation": {
                name: _mean(values[during]) for name, values in self.series.items() if "_utilisation_" in name
            },
        }
        return document | dict(self.changes)


def _percentiles(name: str, values: FloatArray) -> dict[str, float | None]:
    known = values[~np.isnan(values)]
    quantiles = np.quantile(known, [0.5, 0.9, 0.99]) if len(known) else [None] * 3
    return {f"{name}_mean_s": _mean(known)} | {
        f"{name}_{label}_s": None if value is None else float(value)
        for label, value in zip(("p50", "p90", "p99"), quantiles, strict=True)
    }


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if len(values) else None
