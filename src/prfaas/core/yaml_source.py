"""YAML files that people write: plain values with the line of every field, and one sentence of what is wrong."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml._yaml import CParser
from yaml.composer import Composer, ComposerError
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

# No word of a file's own needs to be shown whole that is longer.
_LONG_WORD = re.compile(r"""[^\s"']{300,}""")
_SHOWN_CHARACTERS = 60


class FileError(ValueError):
    """A file that a person wrote can't be used. The text is `file:line: field: what is wrong; what would be right`.

    It is one line, whatever the file has: very long words of it are cut, and unprintable characters are escaped.
    """

    def __init__(self, path: Path, line: int | None, field: str, problem: str) -> None:
        field, problem = one_line(field), one_line(problem)
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self.path = path
        self.line = line
        self.field = field
        self.problem = problem


def one_line(text: str) -> str:
    """What may be shown of a file's words: on one line, without long ones and without what no terminal should get."""
    short = _LONG_WORD.sub(lambda word: f"{word[0][:_SHOWN_CHARACTERS]}…", text)
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in short
    )


Location = tuple[str | int, ...]

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
    error_type: type[FileError] = FileError
    """Of what is raised about it."""

    def line(self, location: Sequence[str | int]) -> int | None:
        """The line of a field, or of the nearest enclosing field that is there."""
        for length in range(len(location), -1, -1):
            line = self.lines.get(tuple(location[:length]))
            if line is not None:
                return line
        return None

    def gives(self, location: Location) -> bool:
        """Whether the file has a field, whatever its value."""
        return location in self.lines

    def error(self, location: Sequence[str | int], problem: str) -> FileError:
        """The error to raise about a field."""
        return self.error_type(self.path, self.line(location), dotted(location), problem)


def yaml_source(path: Path, text: str, error_type: type[FileError] = FileError) -> YamlSource:
    """What the text of a YAML file says.

    Raises:
        FileError: it is no YAML, or names a field twice.
    """
    try:
        loader = YamlLoader(text)
        node = loader.get_single_node()
        reader = _Reader(path, loader, error_type)
        values = reader.value(node, ()) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark is not None else None
        raise error_type(path, line, "", f"is no valid YAML ({problem})") from error
    except RecursionError:
        raise error_type(path, None, "", _TOO_DEEP) from None
    return YamlSource(path, values, reader.lines, error_type)


class YamlLoader(Composer, CParser, SafeConstructor, Resolver):
    """As `yaml.SafeLoader`, with libyaml as its parser: six times as fast.

    `yaml.CSafeLoader` is faster still. But it composes nodes in C too, and a file of brackets that nest deeply ends the
    process; here such a file is a RecursionError.
    """

    def __init__(self, text: str) -> None:
        """Of a document's text."""
        CParser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise ComposerError(problem=f"it has more than {_MAX_NODES} values")
        return super().compose_node(parent, index)


class _Reader:
    def __init__(self, path: Path, loader: YamlLoader, error_type: type[FileError]) -> None:
        self.lines: dict[Location, int] = {}
        self._path = path
        self._error_type = error_type
        self._loader = loader
        self._nodes = 0

    def value(self, node: yaml.Node, location: Location) -> Any:
        self.lines.setdefault(location, node.start_mark.line + 1)
        self._nodes += 1
        if self._nodes > _MAX_NODES or len(location) > 50:
            raise self._error(node, location, _TOO_DEEP)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*location, index)) for index, item in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except (ValueError, TypeError, AttributeError, LookupError):
            # YAML takes it for a date, or for a number with thousands of digits; or a tag says that it is one.
            problem = "looks like a date or a number, and is none; put it into quotes if it is a text"
            raise self._error(node, location, problem) from None

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise self._error(key_node, location, "a field's name must be plain text")
            here = (*location, key)
            if key in values:
                raise self._error(key_node, here, f"is already given in line {self.lines[here]}")
            # The key's line, not the value's: a block value starts one line further down.
            self.lines[here] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, here)
        return values

    def _error(self, node: yaml.Node, location: Location, problem: str) -> FileError:
        return self._error_type(self._path, node.start_mark.line + 1, dotted(location), problem)
