"""`--sweep FIELD=A:B:N`: one number of a deployment, N values from A to B."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.common import CliError

if TYPE_CHECKING:
    from prfaas.core.planner import Plan

_MOST = 1000


@dataclass(frozen=True, slots=True)
class Sweep:
    """A field of the deployment file and the values to put there.

    `is_rate` says that they are bits per second; `is_geometric` that their ratios are equal, not their differences.
    """

    field: str
    values: tuple[float, ...]
    is_rate: bool
    is_geometric: bool


def parse_sweep(text: str) -> Sweep:
    """From "links[0].bandwidth=1 Gbit/s:1 Tbit/s:50". Ends of bandwidths may have a unit.

    Values are spaced evenly, those of a range over more than a factor 30 by equal ratios. Of instance counts
    every whole number is taken once.

    Raises:
        CliError: the text has another form, or a range makes no sense.
    """
    field, sign, span = text.partition("=")
    parts = span.split(":")
    if not sign or not field or len(parts) != 3:
        raise CliError(
            f'--sweep "{text}": write FIELD=FROM:TO:COUNT, for example "links[0].bandwidth=1 Gbit/s:1 Tbit/s:50"'
        )
    field = field.strip()
    is_rate = field.endswith("bandwidth")
    first, last = (_number(text, part, is_rate) for part in parts[:2])
    count = parts[2].strip()
    if not re.fullmatch(r"[0-9]+", count) or not 2 <= int(count) <= _MOST:
        raise CliError(f'--sweep "{text}": the count must be a whole number from 2 to {_MOST}, not "{count}"')
    if first >= last:
        raise CliError(f'--sweep "{text}": the first value must be below the second')
    is_geometric = first > 0 and last / first > 30
    values = _spaced(first, last, int(count), is_geometric)
    if field.endswith("instance_count"):
        values = tuple(float(value) for value in dict.fromkeys(round(value) for value in values))
    return Sweep(field, values, is_rate, is_geometric)


def swept(path: Path, sweep: Sweep) -> "Iterator[Plan]":
    """The plan of the deployment file at each value.

    Raises:
        DeploymentError: the file is wrong, or a value can't stand in the field.
    """
    from prfaas.core.deployment import load_planned
    from prfaas.core.planner import make_plan, problem_of

    for value in sweep.values:
        yield make_plan(problem_of(load_planned(path, changes={sweep.field: value})))


def _spaced(first: float, last: float, count: int, is_geometric: bool) -> tuple[float, ...]:
    steps = [index / (count - 1) for index in range(count)]
    inner = [first * (last / first) ** x if is_geometric else first + (last - first) * x for x in steps[1:-1]]
    return (first, *inner, last)


def _number(text: str, part: str, is_rate: bool) -> float:
    from prfaas.core.units import parse_bits_per_s

    part = part.strip()
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if is_rate and math.isnan(value):
        try:
            return parse_bits_per_s(part)
        except ValueError as error:
            raise CliError(f'--sweep "{text}": {error}') from None
    if not math.isfinite(value):
        raise CliError(f'--sweep "{text}": "{part}" is no number')
    return value
