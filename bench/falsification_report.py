"""What `falsification.py` concludes: every phase live beside its prediction, and the plots."""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from falsification_phases import STATIC, bytes_between, capacity_per_s, mean_bits_per_s, phase_of
from fidelity_recorded import errors_of
from prfaas.core.planner import PlanProblem
from prfaas.lab.simulator.result import is_stable

# The plots of the project's studies.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from studies._figures import Panel, PlotCurve, lines

FloatArray = NDArray[np.float64]

GOAL = 0.15
"""How far a phase's mean TTFT may be from its prediction."""
_MEGA = 1e6


def compared(document: Mapping[str, Any], problem: PlanProblem) -> list[dict[str, Any]]:
    """One entry per policy and phase; JSON-ready. Requests belong to the phase in which they came."""
    return [
        _phase(document, problem, policy, drive, number)
        for policy, drive in document["drives"].items()
        for number in range(len(document["phases"]))
    ]


def _phase(
    document: Mapping[str, Any], problem: PlanProblem, policy: str, drive: Mapping[str, Any], number: int
) -> dict[str, Any]:
    phase_s, phases = document["phase_s"], document["phases"]
    start_s, end_s = number * phase_s, (number + 1) * phase_s
    rows = drive["requests"]
    arrival_s = np.array([row[0] for row in rows])
    first_s, last_s = (_seconds(rows, place) for place in (3, 4))
    whole = np.array([row[6] is None for row in rows])
    here = phase_of(arrival_s, len(phases), phase_s) == number
    predicted = drive["simulated"]
    predicted_ttft_s = np.array(predicted["ttft_s"])
    # Whoever was refused on one side has nothing to be compared with.
    counted = here & whole & np.isfinite(predicted_ttft_s)
    pieces = [(at_s, bits) for at_s, bits in document["pieces"]]
    bits_per_s = mean_bits_per_s(pieces, start_s, end_s)
    static = document["threshold_tokens"] if policy == STATIC else None
    capacity = capacity_per_s(problem, bits_per_s, static)
    rate = int(here.sum()) / phase_s
    left_s = np.where(whole, last_s, np.nan)
    entry: dict[str, Any] = {
        "policy": policy,
        "phase": phases[number]["name"],
        "bandwidth_bits_per_s": bits_per_s,
        "of_need": bits_per_s / document["needed_bits_per_s"],
        "requests": int(here.sum()),
        "lost": int((here & ~whole).sum()),
        "lost_predicted": int((here & np.isnan(predicted_ttft_s)).sum()),
        "rate_per_s": rate,
        "planned_capacity_per_s": capacity,
        "stable_by_plan": rate < capacity,
        "stable_live": is_stable(arrival_s, left_s, start_s, end_s),
        "stable_predicted": is_stable(arrival_s, arrival_s + np.array(predicted["e2e_s"]), start_s, end_s),
        "offloaded": _share(np.array([row[5] == "offload" for row in rows]), here),
        "offloaded_predicted": _share(np.array(predicted["offloaded"]), here),
        "same_route": _share(
            np.array([row[5] == "offload" for row in rows]) == np.array(predicted["offloaded"]), here
        ),
        "line_bytes": bytes_between(drive["carried"], start_s, end_s),
        "kv_bytes_predicted": float(np.array(predicted["link_bytes"])[here].sum()),
        "threshold": _at(drive["readings"], end_s),
        "threshold_predicted": _at(predicted["series"], end_s),
        "load_average": drive["load_average"],
        "strangers": _strangers(document, drive),
    }
    entry["ttft"] = errors_of(predicted_ttft_s[counted], (first_s - arrival_s)[counted])
    entry["is_met"] = abs(entry["ttft"]["mean"]["error"]) <= GOAL
    return entry


def _seconds(rows: Sequence[Sequence[Any]], place: int) -> FloatArray:
    return np.array([np.nan if row[place] is None else row[place] for row in rows], dtype=np.float64)


def _share(values: NDArray[np.bool_], here: NDArray[np.bool_]) -> float:
    return float(values[here].mean()) if here.any() else 0.0


def _at(series: Sequence[Sequence[float | None]], at_s: float) -> float | None:
    """The last value that was read before; None where nothing is offloaded, or nothing was read."""
    known = [row[1] for row in series if row[0] is not None and row[0] <= at_s]
    return known[-1] if known else None


def _strangers(document: Mapping[str, Any], drive: Mapping[str, Any]) -> float:
    """What others took of this machine's cores."""
    share: float = drive["strangers_cpu_s"] / drive["lasted_s"] / document["machine"]["cores"]
    return share


def table_of(found: Sequence[Mapping[str, Any]]) -> Table:
    """For people."""
    table = Table(title="TTFT in seconds; error: predicted minus live, of live")
    for column in (
        "policy", "phase", "Mbit/s", "of need", "requests", "live mean", "P90", "predicted", "P90", "error", "P90",
        "stable: plan", "live", "offloaded", "predicted", "MB", "predicted", "threshold", "predicted",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("policy", "phase") else "right")
    for each in found:
        ttft = each["ttft"]
        table.add_row(
            each["policy"],
            each["phase"],
            f"{each['bandwidth_bits_per_s'] / _MEGA:.1f}",
            f"{each['of_need']:.2f}",
            f"{each['requests']}" + (f", {each['lost']} lost" if each["lost"] else ""),
            *(f"{ttft[key]['real_s']:.2f}" for key in ("mean", "p90")),
            *(f"{ttft[key]['simulated_s']:.2f}" for key in ("mean", "p90")),
            *(f"{ttft[key]['error']:+.0%}" for key in ("mean", "p90")),
            "yes" if each["stable_by_plan"] else "no",
            "yes" if each["stable_live"] else "no",
            f"{each['offloaded']:.0%}",
            f"{each['offloaded_predicted']:.0%}",
            f"{each['line_bytes'] / _MEGA:.1f}",
            f"{each['kv_bytes_predicted'] / _MEGA:.1f}",
            _tokens(each["threshold"]),
            _tokens(each["threshold_predicted"]),
        )
    return table


def _tokens(threshold: float | None) -> str:
    return "-" if threshold is None else f"{threshold:.0f}"


def verdict_of(found: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> list[str]:
    """Sentences under the table: what is met, what is missed, and how loaded the machine was."""
    missed = [each for each in found if not each["is_met"]]
    grown = [each for each in found if each["stable_by_plan"] and not each["stable_live"]]
    said = [
        f"capacity {document['capacity_per_s']:.3f} requests/s, sent {document['per_s']:.3f}; the plan needs "
        f"{document['needed_bits_per_s'] / _MEGA:.1f} Mbit/s; its threshold {document['threshold_tokens']:.0f} tokens",
        f"mean TTFT within {GOAL:.0%} of its prediction in {len(found) - len(missed)} of {len(found)} phases",
    ]
    said += [
        f"  missed: {each['policy']}, {each['phase']}: {each['ttft']['mean']['error']:+.0%}"
        for each in missed
    ]
    said.append(
        f"stable live in {sum(e['stable_by_plan'] for e in found) - len(grown)} of the "
        f"{sum(e['stable_by_plan'] for e in found)} phases that the planner calls stable"
    )
    said += [f"  grew: {each['policy']}, {each['phase']}" for each in grown]
    return said + [
        f"{policy}: load average {drive['load_average']:.1f}, others took {_strangers(document, drive):.0%} of the "
        f"cores; machine {drive['pace'] - 1:+.1%}; the client was up to {drive['behind_s']:.2f} s late"
        for policy, drive in document["drives"].items()
    ]


def plots_of(found: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> dict[str, str]:
    """SVG by name: TTFT of each phase, live and predicted, and threshold and line over time."""
    policies = list(document["drives"])
    return {
        "falsification-ttft": _ttft(policies, document),
        "falsification-threshold": _threshold(policies, document),
        "falsification-phases": _phases(policies, found, document),
    }


def _ttft(policies: Sequence[str], document: Mapping[str, Any]) -> str:
    panels = []
    for policy in policies:
        rows = document["drives"][policy]["requests"]
        arrival_s = [row[0] for row in rows]
        live = [None if row[3] is None else row[3] - row[0] for row in rows]
        predicted = document["drives"][policy]["simulated"]["ttft_s"]
        panels.append(
            Panel(
                f"{policy}: TTFT (s)",
                [
                    PlotCurve("live", arrival_s, live, colour=1),
                    PlotCurve("predicted", arrival_s, predicted, colour=0, is_dashed=True),
                ],
            )
        )
    return lines("falsification-ttft", "", "arrival (s)", panels).svg


def _threshold(policies: Sequence[str], document: Mapping[str, Any]) -> str:
    panels = []
    for policy in policies:
        drive = document["drives"][policy]
        curves = [
            PlotCurve(label, [row[0] for row in series], [row[1] for row in series], colour, is_dashed=colour == 0)
            for label, series, colour in (
                ("live", drive["readings"], 1),
                ("predicted", drive["simulated"]["series"], 0),
            )
        ]  # fmt: skip
        panels.append(Panel(f"{policy}: threshold (tokens)", curves, is_stepped=True))
    end_s = len(document["phases"]) * document["phase_s"]
    corners = [(at_s, bits) for at_s, bits in document["pieces"] if at_s < end_s]
    x = [at_s for pair in pairwise(corners) for at_s in (pair[0][0], pair[1][0])]
    y = [bits / _MEGA for (_, bits), _ in pairwise(corners) for _ in range(2)]
    panels.append(Panel("line's payload (Mbit/s)", [PlotCurve("", x, list(y), colour=2)]))
    return lines("falsification-threshold", "", "time (s)", panels).svg


def _phases(policies: Sequence[str], found: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> str:
    panels = []
    for policy in policies:
        own = [each for each in found if each["policy"] == policy]
        places = list(range(1, len(own) + 1))
        panels.append(
            Panel(
                f"{policy}: mean TTFT (s)",
                [
                    PlotCurve("live", places, [each["ttft"]["mean"]["real_s"] for each in own], colour=1),
                    PlotCurve(
                        "predicted",
                        places,
                        [each["ttft"]["mean"]["simulated_s"] for each in own],
                        colour=0,
                        is_dashed=True,
                    ),
                ],
            )
        )
    names = ", ".join(f"{number} {each['name']}" for number, each in enumerate(document["phases"], 1))
    return lines("falsification-phases", "", f"phase ({names})", panels).svg
