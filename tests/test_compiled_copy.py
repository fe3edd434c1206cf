"""The rewritten source that `make fast` compiles: it is the same program, in a form that mypyc makes fast."""

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest

REQUIREMENTS = Path(__file__).parents[1] / "requirements"

SOURCE = '''"""A module."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Struct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Row = NDArray[float]

LIMIT = 3.0
_FAR: float = math.inf
_ONE, _TWO = 1, 2
Alias = tuple[int, int]


@dataclass(slots=True)
class Part:
    """A part."""

    size: int
    names: dict[str, int] = field(default_factory=dict)
    far_s: float = math.inf
    urgency: float | None = field(default=None, kw_only=True)

    @property
    def doubled(self) -> int:
        return 2 * self.size


@dataclass(slots=True)
class Whole(Part):
    left: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    name: ClassVar[str] = "rule"
    mark: Annotated[float, "bounds"] = 0.5


class Way(Struct, kw_only=True, frozen=True):
    start_s: float
    names: dict[str, int] = {}


class Best(Way, kw_only=True, frozen=True):
    wait_s: float = 0.0
    place: int


@dataclass(frozen=True, slots=True)
class Sum:
    parts: tuple[int, ...]
    total: int = field(init=False)
    row: "Row" = field(init=False, default=(), compare=False)
    flags: "NDArray[bool]" = field(init=False, default=(), compare=False)
    seen: list[int] = field(init=False, default_factory=list, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts))
'''


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(REQUIREMENTS))
    yield importlib.import_module("native_source")
    sys.modules.pop("native_source", None)


def executed(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def rewritten(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    return executed(tool.native_source(SOURCE), "rewritten_module", monkeypatch)


def test_objects_are_made_as_before(rewritten: Any) -> None:
    part = rewritten.Part(4, urgency=2.0)
    assert (part.size, part.names, part.far_s, part.urgency, part.doubled) == (4, {}, float("inf"), 2.0, 8)
    assert part.names is not rewritten.Part(4).names
    assert part == rewritten.Part(4, urgency=2.0) != rewritten.Part(5, urgency=2.0)
    assert repr(part) == "Part(size=4, names={}, far_s=inf, urgency=2.0)"
    assert replace(part, size=1).size == 1


def test_fields_of_the_base_come_first(rewritten: Any) -> None:
    assert [each.name for each in fields(rewritten.Whole)] == ["size", "names", "far_s", "urgency", "left"]
    assert rewritten.Whole(4, {}, 1.0, 9).left == 9


def test_structs_are_data_classes(rewritten: Any) -> None:
    best = rewritten.Best(start_s=1.0, place=2)
    assert [each.name for each in fields(best)] == ["start_s", "names", "wait_s", "place"]
    assert best == rewritten.Best(start_s=1.0, names={}, place=2)
    assert best.names is not rewritten.Best(start_s=1.0, place=2).names


def test_what_has_a_default_comes_last(tool: ModuleType) -> None:
    """mypyc can't compile another order: it makes all positional where a float has a default."""
    text = tool.native_source(SOURCE)
    assert '(self, *, start_s: "float", place: "int", names: "dict[str, int] | None" = None, wait_s' in text


def test_parameters_keep_their_bounds_and_class_variables_are_none(rewritten: Any) -> None:
    assert rewritten.Rule.name == "rule"
    assert [each.name for each in fields(rewritten.Rule)] == ["mark"]
    assert get_type_hints(rewritten.Rule, include_extras=True)["mark"].__metadata__ == ("bounds",)


def test_frozen_objects_are_pickled_as_what_makes_them_anew(rewritten: Any) -> None:
    assert rewritten.Rule(0.7).__reduce__() == (rewritten.Rule, (0.7,))
    assert pickle.loads(pickle.dumps(rewritten.Rule(0.7))) == rewritten.Rule(0.7)


def test_fields_that_are_not_given_are_worked_out(rewritten: Any) -> None:
    found = rewritten.Sum((1, 2))
    assert (found.total, found.seen) == (3, [])
    assert found.seen is not rewritten.Sum((1, 2)).seen
    # No type that is there in a checker alone is looked up.
    hints = get_type_hints(rewritten.Sum)
    assert hints["row"] is hints["flags"] is Any
    assert pickle.loads(pickle.dumps(found)).total == 3


def test_frozen_objects_keep_their_hash(rewritten: Any) -> None:
    assert {rewritten.Sum((1, 2)), rewritten.Sum((1, 2))} == {rewritten.Sum((1, 2))}
    assert len({rewritten.Rule(0.1), rewritten.Rule(0.2)}) == 2


def test_constants_are_final_and_aliases_are_not(tool: ModuleType, rewritten: Any) -> None:
    assert (3.0, float("inf"), 1, 2) == (rewritten.LIMIT, rewritten._FAR, rewritten._ONE, rewritten._TWO)
    text = tool.native_source(SOURCE)
    assert "LIMIT: Final = 3.0" in text
    assert "_FAR: Final[float] = _INFINITE" in text
    assert "Alias = tuple[int, int]" in text
    assert "math.inf" not in text


@pytest.fixture
def compiled(tool: ModuleType) -> Iterator[ModuleType]:
    yield importlib.import_module("compiled")
    sys.modules.pop("compiled")


def test_every_file_that_is_compiled_can_be_rewritten(tool: ModuleType, compiled: ModuleType) -> None:
    for name in compiled.COMPILED:
        text = (compiled.SOURCE / name).read_text(encoding="utf-8")
        rewritten = tool.native_source(text)
        compile(rewritten, name, "exec")
        assert "slots=True" not in rewritten
        # Structs are none in the copy, and msgspec's functions for them fail.
        assert "from msgspec" not in rewritten


def test_no_data_class_that_is_compiled_has_fields_from_another_file(compiled: ModuleType) -> None:
    """Rewriting sees one file: the constructor that it writes out would lack them."""
    names = [f"prfaas.{name.removesuffix('.py').replace('/', '.')}" for name in compiled.COMPILED]
    for module in [importlib.import_module(name) for name in names]:
        for kind in vars(module).values():
            if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__:
                foreign = [base for base in kind.__mro__[1:] if base.__module__ != kind.__module__]
                assert not any(is_dataclass(base) and fields(base) for base in foreign), kind
