"""Other numbers in place of some of a deployment file's: what a sweep does to it."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.core.deployment.source import DeploymentError, Location, YamlSource, dotted

_PART = re.compile(r"([A-Za-z0-9_]+)((?:\[[^\[\]]+\])*)")


def changed(source: YamlSource, changes: Mapping[str, float]) -> YamlSource:
    """The file with other numbers in it. A field is written as in errors, `links[0].bandwidth`, or with the
    cluster's or link's name in place of the index: `links[east->home].bandwidth`.

    Raises:
        DeploymentError: no such list entry or section, or no number may stand there.
    """
    values = copy.deepcopy(source.values)
    for field, number in changes.items():
        location = _location(source, values, field)
        parent = _at(values, location[:-1])
        key = location[-1]
        parent[key] = _like(parent.get(key) if isinstance(parent, dict) else parent[int(key)], number)
    return YamlSource(source.path, values, source.lines)


def _like(before: object, number: float) -> float:
    # Counts must stay whole numbers, and a sweep's steps are seldom whole.
    if isinstance(before, int) and not isinstance(before, bool) and float(number).is_integer():
        return int(number)
    return number


def _location(source: YamlSource, values: Any, field: str) -> Location:
    location: list[str | int] = []
    for part in field.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise _unknown(source, field, f'"{part}" is no field\'s name')
        location.append(match[1])
        for entry in re.findall(r"\[([^\[\]]+)\]", match[2]):
            location.append(_index(source, field, _at(values, location), entry))
    parent, key = _at(values, location[:-1]), location[-1]
    if not isinstance(parent, dict if isinstance(key, str) else list):
        section = dotted(location[:-1])
        why = f"{section} is a list" if isinstance(parent, list) else f'the file has no "{section}"'
        raise _unknown(source, field, why)
    present = _at(values, location)
    if isinstance(present, dict | list):
        raise _unknown(source, field, "it is no number but a whole section")
    return tuple(location)


def _index(source: YamlSource, field: str, entries: Any, entry: str) -> int:
    if not isinstance(entries, list):
        raise _unknown(source, field, f'there is no list for "[{entry}]"')
    if entry.isdecimal():
        if int(entry) < len(entries):
            return int(entry)
        raise _unknown(source, field, f"the list has only {len(entries)} entries, counted from 0")
    names = [_name(each) for each in entries]
    if entry not in names:
        raise _unknown(source, field, f'nothing there is named "{entry}"; there are {", ".join(names)}')
    return names.index(entry)


def _name(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    return str(entry["name"]) if "name" in entry else f"{entry.get('source')}->{entry.get('target')}"


def _at(values: Any, location: Sequence[str | int]) -> Any:
    for part in location:
        if isinstance(values, dict) and isinstance(part, str):
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def _unknown(source: YamlSource, field: str, why: str) -> DeploymentError:
    return DeploymentError(source.path, None, field, f"can't be changed: {why}")
