"""Sections of the deployment file: the frozen objects that the code uses.

At a field stand its default, its bounds (`field_types.py`), a line that says what it is, and what a change of it needs.
Reading a file, the difference of two, the JSON Schema and the reference page all come from there.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class OnChange:
    """What a running deployment needs when a field has another value."""

    needs: str | None
    """What must be done in place of a reload; None: nothing, it is taken on while everything runs."""
    shown: str | None = None
    """The field for people, where the file does not call it so."""
    is_compared: bool = True
    """False: what comes of it is a field of its own, which is compared."""


LIVE = OnChange(None)
EVERYTHING = OnChange("start the gateway and all engines again")
GATEWAY_AGAIN = OnChange("start the gateway again")
ENGINES_AGAIN = OnChange("start the engines again, then the gateway")
POOLS_AGAIN = OnChange("start the pools and the engines again, then the gateway")
ANOTHER_NAME = OnChange("remove the instance, and add it under another name")
CERTIFICATES = OnChange("make certificates for both ends, start the engines again, then the gateway")
TOLD_ELSEWHERE = OnChange(None, is_compared=False)


class Section:
    """Base of the frozen dataclasses that are sections of the file, or hold what comes of one."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    on_change: ClassVar[OnChange]
    """Of every field that does not say it itself."""

    def __init_subclass__(cls, on_change: OnChange | None = None) -> None:
        # `dataclass` makes a class with slots anew, from what the first one has.
        if on_change is not None:
            cls.on_change = on_change


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """What is known of one field of a section."""

    name: str
    """In the code."""
    name_in_file: str
    kind: Any
    """Its type, without what is annotated."""
    on_change: OnChange | None
    """None: of a section that is only read."""
    default: Any
    """`MISSING` where the file must have it."""

    @property
    def is_optional(self) -> bool:
        """Whether it can be None."""
        return get_origin(self.kind) in (Union, UnionType) and type(None) in get_args(self.kind)

    @property
    def is_list_of_sections(self) -> bool:
        """Whether it holds sections that are told apart by their names."""
        return get_origin(self.kind) in (list, tuple) and self.section is not None

    @property
    def sections(self) -> tuple[type, ...]:
        """The sections that it can hold, alone, optional or in a list: several where one field says which it is."""
        return tuple(each for each in _types_in(self.kind) if is_section(each))

    @property
    def forms(self) -> dict[str, type]:
        """The sections by the word that says which of several it is; empty where it can be one only."""
        if len(self.sections) < 2:
            return {}
        return {
            field.default: each
            for each in self.sections
            for field in fields_of(each).values()
            if get_origin(field.kind) is Literal and get_args(field.kind) == (field.default,)
        }

    @property
    def section(self) -> type | None:
        """The section that it holds; None: a plain value, or one of several."""
        return self.sections[0] if len(self.sections) == 1 else None


def is_section(kind: Any) -> bool:
    """Whether a type is a section of the file."""
    return isinstance(kind, type) and issubclass(kind, BaseModel | Section)


def _types_in(kind: Any) -> Iterator[Any]:
    yield kind
    for each in get_args(kind):
        yield from _types_in(each)


@cache
def fields_of(section: type) -> Mapping[str, FieldFacts]:
    """The fields of a section by their names in the file, in their order."""
    if issubclass(section, BaseModel):
        given: Mapping[str, FieldInfo] = section.model_fields
    else:
        assert is_dataclass(section)
        hints = get_type_hints(section, include_extras=True)
        given = {
            each.name: FieldInfo.from_annotated_attribute(hints[each.name], each) for each in fields(section)
        }
    found = {}
    for name, info in given.items():
        alias, default = info.alias or name, info.get_default(call_default_factory=True)
        needs = (each for each in info.metadata if isinstance(each, OnChange))
        on_change = next(needs, getattr(section, "on_change", None))
        found[alias] = FieldFacts(
            name, alias, info.annotation, on_change, MISSING if info.is_required() else default
        )
    return found


@cache
def docs_of(section: type) -> Mapping[str, str]:
    """The lines below fields, which Python itself forgets, by the fields' names in the code; of base classes too."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if base in (object, Section, BaseModel) or not is_section(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found
