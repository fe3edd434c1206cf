"""A YAML file as plain values, with the line of every field kept, and what is wrong in it in one sentence.

A sweep puts other numbers in place of some of a file's: `changed`.
"""

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas.core.yaml_loader import YamlLoader, fault_in

# No word of a file's own needs to be shown whole that is longer.
_LONG_WORD = re.compile(r"""[^\s"']{300,}""")
_SHOWN_CHARACTERS = 60


class DeploymentError(ValueError):
    """A deployment file can't be used. The text is `file:line: field: what is wrong; what would be right`.

    It is one line, whatever the file has: very long words of it are cut, and unprintable characters are escaped.
    """

    def __init__(self, path: Path, line: int | None, field: str, problem: str) -> None:
        field, problem = _one_line(field), _one_line(problem)
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self.path = path
        self.line = line
        self.field = field
        self.problem = problem


def _one_line(text: str) -> str:
    short = _LONG_WORD.sub(lambda word: f"{word[0][:_SHOWN_CHARACTERS]}…", text)
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in short
    )


Location = tuple[str | int, ...]

Finding = tuple[Location, str]
"""Where something is wrong in a file, and what: `YamlSource.error` makes an error of it."""
Findings = Iterator[Finding]

# Aliases are followed, so a few lines could unfold into millions of nodes; no real file comes near this.
_MAX_NODES = 100_000
_TOO_DEEP = "nests or repeats too much"


def dotted(location: Sequence[str | int]) -> str:
    """`("clusters", 0, "name")` → "clusters[0].name"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class YamlSource:
    """The values of a file and where they stand: `lines` maps a field's location to its line, from 1 on."""

    path: Path
    values: Any
    lines: dict[Location, int]

    def line(self, location: Sequence[str | int]) -> int | None:
        """The line of a field, or of the nearest enclosing field that is there."""
        for length in range(len(location), -1, -1):
            line = self.lines.get(tuple(location[:length]))
            if line is not None:
                return line
        return None

    def gives(self, location: Location) -> bool:
        """Whether the file has a field, whatever its value."""
        parent = _at(self.values, location[:-1])
        return isinstance(parent, dict) and location[-1] in parent

    def error(self, location: Sequence[str | int], problem: str) -> DeploymentError:
        """The error to raise about a field."""
        return DeploymentError(self.path, self.line(location), dotted(location), problem)


def read_source(path: Path) -> YamlSource:
    """Read a YAML file.

    Raises:
        DeploymentError: the file can't be read, is no YAML, or names a field twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DeploymentError(path, None, "", "there is no such file; name a deployment file") from None
    except OSError as error:
        raise DeploymentError(path, None, "", f"can't be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise DeploymentError(path, None, "", "is no text in UTF-8; name a deployment file") from None
    try:
        loader = YamlLoader(text)
        node = loader.get_single_node()
        reader = _Reader(path, loader)
        values = reader.value(node, ()) if node is not None else None
    except yaml.YAMLError as error:
        line, problem = fault_in(error)
        raise DeploymentError(path, line, "", problem) from error
    except RecursionError:
        raise DeploymentError(path, None, "", _TOO_DEEP) from None
    return YamlSource(path, values, reader.lines)


class _Reader:
    def __init__(self, path: Path, loader: YamlLoader) -> None:
        self.lines: dict[Location, int] = {}
        self._path = path
        self._loader = loader
        self._nodes = 0

    def value(self, node: yaml.Node, location: Location) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(location, line)
        self._nodes += 1
        if self._nodes > _MAX_NODES or len(location) > 50:
            raise DeploymentError(self._path, line, dotted(location), _TOO_DEEP)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*location, index)) for index, item in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except (ValueError, TypeError, AttributeError, LookupError):
            # YAML takes it for a date, or for a number with thousands of digits; or a tag says that it is one.
            raise DeploymentError(
                self._path,
                line,
                dotted(location),
                "looks like a date or a number, and is none; put it into quotes if it is a text",
            ) from None

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key, str):
                raise DeploymentError(self._path, line, dotted(location), "a field's name must be plain text")
            here = (*location, key)
            if key in values:
                first = self.lines[here]
                raise DeploymentError(self._path, line, dotted(here), f"is already given in line {first}")
            # The key's line, not the value's: a block value starts one line further down.
            self.lines[here] = line
            values[key] = self.value(value_node, here)
        return values


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
    # Counts must stay whole numbers, and a sweep's steps are seldom whole. A field that is left out may be a count.
    is_count = before is None or (isinstance(before, int) and not isinstance(before, bool))
    if is_count and float(number).is_integer():
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
            location.append(_index(source, field, values, location, entry))
    parent, key = _at(values, location[:-1]), location[-1]
    if not isinstance(parent, dict if isinstance(key, str) else list):
        section = dotted(location[:-1])
        why = f"{section} is a list" if isinstance(parent, list) else f'the file has no "{section}"'
        raise _unknown(source, field, why)
    present = _at(values, location)
    if isinstance(present, dict | list):
        raise _unknown(source, field, "it is no number but a whole section")
    return tuple(location)


def _index(source: YamlSource, field: str, values: Any, location: Sequence[str | int], entry: str) -> int:
    entries = _at(values, location)
    if not isinstance(entries, list):
        beside = _at(values, location[:-1])
        lists = (
            [name for name in beside if isinstance(beside[name], list)] if isinstance(beside, dict) else []
        )
        near = difflib.get_close_matches(str(location[-1]), lists, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise _unknown(source, field, f'"{dotted(location)}" is no list in the file{hint}')
    if entry.isdecimal():
        if int(entry) < len(entries):
            return int(entry)
        count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise _unknown(source, field, f"the list has only {count}, counted from 0")
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
