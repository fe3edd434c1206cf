"""What offloading was worth, from the rows of ledgers (`core/ledger.py`)."""

import math
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec import convert

from prfaas.core.experiment import Effect, SliceMean, effect
from prfaas.core.units import format_bytes, format_s
from prfaas.serving.ledger_file import open_ledger

By = Literal["hour", "hour-of-day", "cluster", "link", "length", "tenant", "all"]
"""What requests are put together by."""

_KEYS: dict[str, str] = {
    "all": "'all'",
    "hour": "strftime('%Y-%m-%d %H:00', at_s, 'unixepoch')",
    "hour-of-day": "strftime('%H:00', at_s, 'unixepoch')",
    "cluster": "decode_cluster",
    "link": "CASE route WHEN 'offload' THEN prefill_cluster || '->' || decode_cluster ELSE 'stays' END",
    "length": """CASE WHEN prompt_tokens < 1000 THEN '   0 to 1K' WHEN prompt_tokens < 4000 THEN '  1K to 4K'
        WHEN prompt_tokens < 16000 THEN ' 4K to 16K' WHEN prompt_tokens < 64000 THEN '16K to 64K'
        ELSE '64K and more' END""",
    "tenant": "tenant",
}
_TIMED = "outcome = 'ok' AND first_token_s IS NOT NULL"
_MOVED = f"route = 'offload' AND other_s IS NOT NULL AND {_TIMED}"
# A way that failed is no error of a prediction.
_FORESEEN = f"{_TIMED} AND attempts = 1"
_STAYED = f"held_out AND {_TIMED}"
_PAID = "route = 'offload' AND other_gpu_cost IS NOT NULL"


def _sum(what: str, where: str) -> str:
    return f"coalesce(sum({what}) FILTER (WHERE {where}), 0.0)"


_COLUMNS = {
    "requests": "count(*)",
    "offloaded": "count(*) FILTER (WHERE route = 'offload')",
    "timed": f"count(*) FILTER (WHERE {_MOVED})",
    "without_s": _sum("other_s", _MOVED),
    "with_s": _sum("first_token_s", _MOVED),
    "with_squares": _sum("first_token_s * first_token_s", _MOVED),
    "held_out": f"count(*) FILTER (WHERE {_STAYED})",
    "held_out_s": _sum("first_token_s", _STAYED),
    "held_out_squares": _sum("first_token_s * first_token_s", _STAYED),
    "stayed_predicted_s": _sum("predicted_s", f"{_FORESEEN} AND route = 'local'"),
    "stayed_s": _sum("first_token_s", f"{_FORESEEN} AND route = 'local'"),
    "left_predicted_s": _sum("predicted_s", f"{_FORESEEN} AND route = 'offload'"),
    "left_s": _sum("first_token_s", f"{_FORESEEN} AND route = 'offload'"),
    "gpu_s_moved": _sum("other_gpu_s", _PAID),
    "gpu_s_spent": _sum("gpu_s", _PAID),
    "gpu_cost_spared": _sum("other_gpu_cost - gpu_cost", _PAID),
    "egress_bytes": "coalesce(sum(egress_bytes), 0)",
    "egress_cost": "coalesce(sum(egress_cost), 0.0)",
}
"""What each number of `Worth` is in SQL."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Requests that have something in common. Seconds are until the first token, from the decision on."""

    key: str
    requests: int
    offloaded: int
    timed: int
    """Offloaded ones that had their first token."""
    without_s: float
    """What these would have taken in their PD clusters, as predicted when they were decided; a sum."""
    with_s: float
    """What they took; a sum."""
    with_squares: float
    held_out: int
    """Those that stayed although they would have been offloaded, and had their first token."""
    held_out_s: float
    held_out_squares: float
    stayed_predicted_s: float
    """Of all that stayed and went their way at once: predicted, and what came."""
    stayed_s: float
    left_predicted_s: float
    """The same of all that were offloaded."""
    left_s: float
    gpu_s_moved: float
    """GPU-seconds of prefill that PD clusters were spared."""
    gpu_s_spent: float
    """GPU-seconds that these took where they went."""
    gpu_cost_spared: float
    """Price of the former less that of the latter."""
    egress_bytes: int
    egress_cost: float

    @property
    def saved_share(self) -> float | None:
        """By how much sooner the first tokens of offloaded requests came; None: there were none."""
        return 1.0 - self.with_s / self.without_s if self.without_s else None

    @property
    def net(self) -> float:
        """Money that offloading spared, in the currency of the file's prices."""
        return self.gpu_cost_spared - self.egress_cost

    @property
    def bias(self) -> tuple[float | None, float | None]:
        """(What stayed, what was offloaded): by which share it took longer than predicted."""
        pairs = ((self.stayed_s, self.stayed_predicted_s), (self.left_s, self.left_predicted_s))
        stayed, left = (came / predicted - 1.0 if predicted else None for came, predicted in pairs)
        return stayed, left

    def marginal_s(self) -> tuple[float, float] | None:
        """How much sooner one more offloaded request has its first token, and half the 95 % interval.

        Those held out stand beside the others, whose queues they share: it is not what offloading as a whole is worth.
        None with fewer than ten on either side.
        """
        if min(self.held_out, self.timed) < _LEAST:
            return None
        stayed_s, stayed = _mean_and_error(self.held_out, self.held_out_s, self.held_out_squares)
        left_s, left = _mean_and_error(self.timed, self.with_s, self.with_squares)
        return stayed_s - left_s, _NORMAL_95 * math.hypot(stayed, left)


_LEAST = 10
_NORMAL_95 = 1.96


def _mean_and_error(count: int, total: float, squares: float) -> tuple[float, float]:
    mean = total / count
    return mean, math.sqrt(max(squares / count - mean * mean, 0.0) / (count - 1))


def worth(ledgers: Iterable[sqlite3.Connection], by: By = "all", since_s: float = 0.0) -> list[Worth]:
    """What the requests since then (Unix time) were worth, of all ledgers together, in the order of their keys."""
    query = f"SELECT {_KEYS[by]} AS key, {', '.join(_COLUMNS.values())} FROM requests WHERE at_s >= ? GROUP BY key"
    found: dict[str, dict[str, float]] = {}
    for ledger in ledgers:
        for key, *numbers in ledger.execute(query, (since_s,)):
            before = found.setdefault(key, {})
            for name, number in zip(_COLUMNS, numbers, strict=True):
                before[name] = before.get(name, 0) + number
    return [convert({"key": key, **numbers}, Worth) for key, numbers in sorted(found.items())]


_SLICES = f"""SELECT slice, arm, count(*), sum(ttft_s) FROM requests
    WHERE at_s >= ? AND arm != '' AND NOT washout AND {_TIMED} GROUP BY slice, arm"""


def effects(ledgers: Iterable[sqlite3.Connection], since_s: float = 0.0) -> dict[str, Effect]:
    """What the scheduler was worth as a whole, by what it was compared with; from experiments with enough slices."""
    slices: dict[tuple[int, str], tuple[int, float]] = {}
    for ledger in ledgers:
        for number, arm, count, total_s in ledger.execute(_SLICES, (since_s,)):
            before, before_s = slices.get((number, arm), (0, 0.0))
            slices[number, arm] = before + count, before_s + total_s
    compared: dict[str, set[int]] = {}
    for number, arm in slices:
        if arm != "as-is":
            compared.setdefault(arm, set()).add(number // 2)
    found = {
        against: effect(
            SliceMean(number, "other" if arm == against else "as-is", count, total_s / count)
            for (number, arm), (count, total_s) in slices.items()
            if number // 2 in pairs and arm in ("as-is", against)
        )
        for against, pairs in sorted(compared.items())
    }
    return {against: each for against, each in found.items() if each is not None}


def told(files: Sequence[Path], by: By = "length", hours: float = 0.0) -> dict[str, Any]:
    """Sentences and rows about the requests of the last hours (0: of all) in these files, ready for JSON.

    `all` has one row, or none where no request was routed in that time.

    Raises:
        LedgerFileError: one is no ledger, or not there.
    """
    since_s = time.time() - 3600 * hours if hours else 0.0
    with ExitStack() as stack:
        ledgers = [open_ledger(path, read_only=True) for path in files]
        for ledger in ledgers:
            stack.callback(ledger.close)
        total, rows = worth(ledgers, since_s=since_s), worth(ledgers, by, since_s)
        compared = effects(ledgers, since_s)
    return {
        "by": by,
        "sentences": [sentence for each in total for sentence in _sentences(each)]
        + [_of_experiment(against, each) for against, each in compared.items()],
        "all": [_document(each) for each in total],
        "rows": [_document(each) for each in rows],
        "experiments": {
            against: asdict(each) | {"saved_s": each.saved_s} for against, each in compared.items()
        },
    }


def _document(row: Worth) -> dict[str, Any]:
    stayed, left = row.bias
    marginal = row.marginal_s()
    return asdict(row) | {
        "mean_with_s": row.with_s / row.timed if row.timed else None,
        "mean_without_s": row.without_s / row.timed if row.timed else None,
        "saved_share": row.saved_share,
        "net": row.net,
        "bias_of_those_that_stayed": stayed,
        "bias_of_offloaded": left,
        "marginal_s": None if marginal is None else marginal[0],
        "marginal_interval_s": None if marginal is None else marginal[1],
    }


def _sentences(total: Worth) -> list[str]:
    said = [f"{total.offloaded:,} of {total.requests:,} requests were offloaded."]
    if total.saved_share is not None:
        sooner = "sooner" if total.saved_share >= 0 else "later"
        said.append(
            f"Their first tokens came {abs(total.saved_share):.0%} {sooner} than in their own clusters: "
            f"{format_s(total.with_s / total.timed)} on average, predicted {format_s(total.without_s / total.timed)}."
        )
    if total.offloaded:
        said.append(
            f"{total.gpu_s_moved:,.0f} GPU-seconds of prefill were moved, for {total.gpu_s_spent:,.0f} elsewhere and "
            f"{format_bytes(total.egress_bytes)} over links."
        )
        if total.gpu_cost_spared or total.egress_cost:
            gpus, egress = f"{total.gpu_cost_spared:+.2f}", f"{-total.egress_cost:+.2f}"
            said.append(f"In money: {gpus} of GPUs, {egress} of egress, net {total.net:+.2f}.")
    for bias, who in zip(total.bias, ("stayed", "were offloaded"), strict=True):
        if bias is not None:
            said.append(
                f"Requests that {who} took {abs(bias):.0%} {'longer' if bias >= 0 else 'less'} than predicted."
            )
    marginal = total.marginal_s()
    if marginal is not None:
        said.append(
            f"Holdout: one more offloaded request has its first token {marginal[0]:.3g} ± {marginal[1]:.2g} s sooner "
            f"({total.held_out:,} were held out)."
        )
    return said


def _of_experiment(against: str, found: Effect) -> str:
    return (
        f"Experiment against {against}: first tokens come {found.saved_s:.3g} ± {found.half_s:.2g} s sooner as it is "
        f"({found.as_is_s:.3g} against {found.other_s:.3g} s, {found.pairs} pairs of slices)."
    )
