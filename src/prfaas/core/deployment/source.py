"""A deployment file as it was written. A sweep puts other numbers in place of some of its: `changed`."""

import copy
import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.core.bounded_file import WRITTEN_BYTES, file_text
from prfaas.core.yaml_source import FileError, Location, YamlSource, dotted, yaml_source


class DeploymentError(FileError):
    """A deployment file can't be used."""


def read_source(path: Path) -> YamlSource:
    """Read a deployment file.

    Raises:
        DeploymentError: the file can't be read, is no YAML, or names a field twice.
    """
    try:
        return yaml_source(path, file_text(path, WRITTEN_BYTES), DeploymentError)
    except FileNotFoundError:
        raise DeploymentError(path, None, "", "there is no such file; name a deployment file") from None
    except OSError as error:
        raise DeploymentError(path, None, "", f"can't be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise DeploymentError(path, None, "", "is no text in UTF-8; name a deployment file") from None


_ENTRY = r"\[([^\[\]]+)\]"
_FIELD = re.compile(rf"\w+(\.\w+|{_ENTRY})*", re.ASCII)
_STEP = re.compile(rf"(\w+)|{_ENTRY}", re.ASCII)


def changed(source: YamlSource, changes: Mapping[str, float]) -> YamlSource:
    """The file with other numbers in it. A field is written as in errors, `links[0].bandwidth`, or with the
    cluster's or link's name in place of the index: `links[east->home].bandwidth`.

    Raises:
        DeploymentError: no such list entry or section, or no number may stand there.
    """
    values, lines = copy.deepcopy(source.values), dict(source.lines)
    for field, number in changes.items():
        try:
            section, location = _place(values, field)
        except LookupError as error:
            raise DeploymentError(source.path, None, field, f"can't be changed: {error.args[0]}") from None
        key = location[-1]
        before = section.get(key) if isinstance(section, dict) else section[key]
        # Counts must stay whole numbers, and a sweep's steps are seldom whole. What is left out may be a count.
        may_be_count = before is None or (isinstance(before, int) and not isinstance(before, bool))
        section[key] = int(number) if may_be_count and float(number).is_integer() else number
        lines.setdefault(location, source.line(location) or 1)
    return replace(source, values=values, lines=lines)


def _place(values: Any, field: str) -> tuple[Any, Location]:
    """The section or list that a field is in, and where the field is. Raises LookupError, with what is wrong."""
    if not _FIELD.fullmatch(field):
        raise LookupError("it is no field's name")
    location: Location = ()
    section, value = None, values
    for step in _STEP.finditer(field):
        where = dotted(location)
        if step[1] is None:
            key: str | int = _index(section, where, value, step[2])
        elif isinstance(value, dict):
            key = step[1]
        else:
            raise LookupError(
                f"{where} is a list" if isinstance(value, list) else f'the file has no "{where}"'
            )
        section, location = value, (*location, key)
        value = section.get(key) if isinstance(section, dict) else section[key]
    if isinstance(value, dict | list):
        raise LookupError("it is no number but a whole section")
    return section, location


def _index(beside: Any, where: str, entries: Any, entry: str) -> int:
    if not isinstance(entries, list):
        others = beside.items() if isinstance(beside, dict) else ()
        lists = [name for name, each in others if isinstance(each, list)]
        near = difflib.get_close_matches(where.rpartition(".")[2], lists, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise LookupError(f'"{where}" is no list in the file{hint}')
    if entry.isdecimal():
        if int(entry) < len(entries):
            return int(entry)
        count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise LookupError(f"the list has only {count}, counted from 0")
    names = [_name(each) for each in entries]
    if entry not in names:
        raise LookupError(f'nothing there is named "{entry}"; there are {", ".join(names)}')
    return names.index(entry)


def _name(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    return str(entry["name"]) if "name" in entry else f"{entry.get('source')}->{entry.get('target')}"
