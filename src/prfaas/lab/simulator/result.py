"""Results of a simulation: a row per request, series over time, and a summary."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prfaas.core.arrays import FloatArray, IntArray
from prfaas.core.deployment import Slo
from prfaas.core.extras import how_to_install

if TYPE_CHECKING:
    from pandas import DataFrame

# A backlog that grows by less than this share of the arrivals may be chance.
_GROWTH = 0.01
# Nor one within so many standard deviations of a queue that is exactly full, whose backlog is a random walk.
_WALK_SDS = 2.0
# Its steps are as uneven as arrivals are in this many parts of the run.
_PARTS = 50
# Each fifth of a run that says anything is an answer's time or longer, or it would show how the deployment fills.
_LEAST_ANSWERS = 5
# Of the standard deviation of that walk: what moves less is no queue that is full.
_STILL = 1 / 3
# Of so many parts of the run means are taken for how far the backlog goes up and down.
_LOOKS = 40


def backlog_growth(
    arrived_s: FloatArray, left_s: FloatArray, start_s: float, end_s: float
) -> tuple[float, int]:
    """How much the backlog grew over a run.

    Returns:
        By how many requests the mean backlog grew from the second to the last fifth of [start, end], and how many
        arrivals lie between the middles of the two.
    """
    edges = np.linspace(start_s, end_s, 6)
    early = _mean_open(arrived_s, left_s, edges[1], edges[2])
    late = _mean_open(arrived_s, left_s, edges[4], edges[5])
    middles = (edges[1] + edges[2]) / 2, (edges[4] + edges[5]) / 2
    between = int(np.count_nonzero((arrived_s >= middles[0]) & (arrived_s < middles[1])))
    return late - early, between


def is_stable(arrived_s: FloatArray, left_s: FloatArray, start_s: float, end_s: float) -> bool:
    """True if a run could have gone on without end: unless its backlog grows with time.

    `left_s`: when each request was done, NaN if never. The mean number of open requests in the last fifth of
    [`start_s`, `end_s`] may exceed that in the second fifth by 1 % of the arrivals between them, or by two standard
    deviations of a random walk of so many steps, whichever is more. So an overload of less than 1 % passes, and with
    few requests more than that: n Poisson arrivals tell an overload of about 2.6 / √n. Where arrivals come in bursts
    the walk's variance is as many times larger as that of their number in fiftieths of the run is than Poisson's.
    """
    growth, between = backlog_growth(arrived_s, left_s, start_s, end_s)
    walk = math.sqrt(between * dispersion(arrived_s, start_s, end_s))
    return growth <= max(_GROWTH * between, _WALK_SDS * walk, 1.0)


def stability(
    arrived_s: FloatArray, left_s: FloatArray, start_s: float, end_s: float, answer_s: float
) -> bool | None:
    """`is_stable`, or None where the run is too short to say.

    It is too short with fewer than five times `answer_s`, what one answer takes. To be called stable, the backlog must
    keep clearly stiller than that of a queue which is exactly full: its growth and two standard deviations of its means
    over fortieths, from the second fifth on, are less than a third of one standard deviation of that queue's walk. So
    the verdict comes early at low loads and late near the limit: at 0.9 some 4,000 Poisson arrivals tell it in 19 of 20
    runs. Of runs with 1.8 % more than can be done one in 20 or less is called stable, with any number of requests.
    """
    if end_s - start_s < _LEAST_ANSWERS * answer_s:
        return None
    if not is_stable(arrived_s, left_s, start_s, end_s):
        return False
    growth, between = backlog_growth(arrived_s, left_s, start_s, end_s)
    edges = np.linspace(start_s + (end_s - start_s) / 5, end_s, _LOOKS + 1)
    backlog = [_mean_open(arrived_s, left_s, *ends) for ends in pairwise(edges.tolist())]
    walk = math.sqrt(between * dispersion(arrived_s, start_s, end_s))
    return True if max(growth, 0.0) + 2 * float(np.std(backlog)) <= _STILL * walk else None


def dispersion(arrived_s: FloatArray, start_s: float, end_s: float) -> float:
    """Variance over mean of the number of arrivals in fiftieths of [start, end]; at least 1, Poisson's."""
    counts, _ = np.histogram(arrived_s, bins=_PARTS, range=(start_s, max(end_s, start_s + 1e-9)))
    mean = float(counts.mean())
    return max(float(counts.var()) / mean, 1.0) if mean > 0 else 1.0


def _mean_open(arrived_s: FloatArray, left_s: FloatArray, start_s: float, end_s: float) -> float:
    """Open requests on average over [start, end]."""
    if end_s <= start_s:
        return 0.0
    left = np.where(np.isnan(left_s), np.inf, left_s)
    overlap = np.minimum(left, end_s) - np.maximum(arrived_s, start_s)
    return float(np.clip(overlap, 0.0, None).sum() / (end_s - start_s))


BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Result:
    """The result of a simulation. Arrays have one entry per request, in the order of arrival."""

    arrival_s: FloatArray
    ttft_s: FloatArray
    """From the arrival until all KV was at the decode instance and a slot free there (the paper's TTFT), or until the
    prefill's own first token was with the client; NaN if that never happened."""
    e2e_s: FloatArray
    """From the arrival until the last token; NaN if that never came."""
    tpot_s: FloatArray
    """Seconds per token after the first."""
    input_tokens: IntArray
    output_tokens: IntArray
    uncached_tokens: IntArray
    """What the threshold was compared with."""
    hit_tokens: IntArray
    """What was not computed, thanks to a cache."""
    tier_tokens: Mapping[str, IntArray]
    """Of those, what was loaded from pools, by tier (`pools.TIERS`); empty without pools."""
    offloaded: BoolArray
    reason: IntArray
    """Of the decision, as an index into `reasons`."""
    reasons: tuple[str, ...]
    retries: IntArray
    """How often it was prefilled again."""
    link_bytes: FloatArray
    """KV that crossed links between clusters."""
    counted: BoolArray
    """Whether it came after the warm-up."""
    start_s: float
    """The end of the warm-up."""
    end_s: float
    """The last arrival. Rates are taken before it: after it the queues only empty."""
    events: int
    """Of the simulation in all."""
    slo: Slo
    series: Mapping[str, FloatArray]
    """By name, values at the equally spaced times `time_s`: `queue_<cluster>`, `prefill_utilisation_<cluster>`,
    `egress_bits_per_s_<link>` and so on."""
    changes: Mapping[str, Any]
    """What the slow loops changed: `threshold_changes`, `conversions`, and with pools `prefix_copies`."""
    answer_s: float = 0.0
    """What a request of mean lengths takes in a full batch, without waiting; 0: not known."""
    second_token_s: FloatArray | None = None
    """From the arrival until the second token, NaN where there is none; None where first tokens come from decode
    instances, a step before it."""
    longest_gap_s: FloatArray | None = None
    """The longest time between two tokens up to the first one of the decode instance, whose others come a step apart;
    NaN where there is none; None as `second_token_s`."""
    more: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further columns of the `table`, by name."""

    def __repr__(self) -> str:
        return f"Result({len(self.arrival_s):,} requests in {self.end_s:,.0f} s; summary() and table() have the rest)"

    def mean_of(self, series: str) -> float | None:
        """The mean of a series after the warm-up; None where there is none, or nothing finite in it."""
        values = self.series.get(series)
        if values is None:
            return None
        kept = values[self.series["time_s"] > self.start_s]
        return _mean(kept[np.isfinite(kept)])

    def table(self) -> dict[str, NDArray[Any]]:
        """A column per fact, in seconds, tokens and bytes, with an entry per request in the order of arrival.

        Columns are named as the fields are. Two differ: `request` is the number of the request from 0 on, the same
        for every policy under the same requests, and `reason` is a word. With pools, `hit_tokens_memory`, `_ssd`,
        `_machine` and `_cluster` say what of `hit_tokens` came from which tier. Where first tokens come from prefills
        there are `second_token_s` and `longest_gap_s`.

        `prefill_instance` and `decode_instance` are names. What TTFT is made of, in seconds from the arrival: its
        prefill went from `prefill_from_s` to `prefill_to_s`, and all KV was at the decode instance at `kv_there_s`; of
        the last attempt, where there were several. A trace's other columns are words, named `trace_` and as there.
        """
        reasons = np.array(self.reasons, dtype=object)
        after_first = {
            name: values
            for name, values in (
                ("second_token_s", self.second_token_s),
                ("longest_gap_s", self.longest_gap_s),
            )
            if values is not None
        }
        return {
            "request": np.arange(len(self.arrival_s)),
            "counted": self.counted,
            "arrival_s": self.arrival_s,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "uncached_tokens": self.uncached_tokens,
            "hit_tokens": self.hit_tokens,
            **{f"hit_tokens_{tier}": tokens for tier, tokens in self.tier_tokens.items()},
            "offloaded": self.offloaded,
            "reason": reasons[self.reason],
            "retries": self.retries,
            "link_bytes": self.link_bytes,
            "ttft_s": self.ttft_s,
            **after_first,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            **self.more,
        }

    def to_dataframe(self) -> "DataFrame":
        """The `table` for pandas: a row per request, `reason` as a category.

        Raises:
            ModuleNotFoundError: pandas is not installed; it is in the extra `records`.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"a data frame needs pandas: {how_to_install('records')}", name=error.name
            ) from error
        columns = self.table()
        reason = pandas.Categorical.from_codes(self.reason, categories=list(self.reasons))
        return pandas.DataFrame(columns | {"reason": reason})

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
            **self._after_first(),
            **_percentiles("tpot", self.tpot_s[counted]),
            **_percentiles("e2e", self.e2e_s[counted]),
            "throughput_rps": float(in_time.sum()) / span_s,
            "goodput_rps": float((in_time & good).sum()) / span_s,
            "egress_bits_per_s": sum(value or 0.0 for value in egress.values()),
            "offloaded_fraction": _mean(self.offloaded[counted].astype(float)),
            "hit_ratio": float(self.hit_tokens[counted].sum()) / inputs if inputs else 0.0,
            **self._by_tier(inputs),
            "retries": int(self.retries.sum()),
            "lost": int(np.isnan(self.e2e_s).sum()),
            "stable": stability(self.arrival_s, done_s, self.start_s, self.end_s, self.answer_s),
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

    def _after_first(self) -> dict[str, float | None]:
        """Of the tokens behind the first ones, where those come from prefills."""
        if self.second_token_s is None or self.longest_gap_s is None:
            return {}
        counted = self.counted
        return _percentiles("second_token", self.second_token_s[counted]) | _percentiles(
            "longest_gap", self.longest_gap_s[counted]
        )

    def _by_tier(self, inputs: float) -> dict[str, float]:
        """Of the hit ratio what came from pools; the rest is engines' own."""
        return {
            f"hit_ratio_{tier}": float(tokens[self.counted].sum()) / inputs if inputs else 0.0
            for tier, tokens in self.tier_tokens.items()
        }


def _percentiles(name: str, values: FloatArray) -> dict[str, float | None]:
    known = values[~np.isnan(values)]
    quantiles = np.quantile(known, [0.5, 0.9, 0.99]) if len(known) else [None] * 3
    return {f"{name}_mean_s": _mean(known)} | {
        f"{name}_{label}_s": None if value is None else float(value)
        for label, value in zip(("p50", "p90", "p99"), quantiles, strict=True)
    }


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if len(values) else None
