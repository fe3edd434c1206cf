"""What an operator may set of a policy: names, defaults, units and bounds, declared once at the policy's fields."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

Setting = float | int | bool | str
"""What a deployment file can say of a parameter."""

_KINDS: Mapping[type, str] = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}


class PolicyError(ValueError):
    """A policy that there is not, that can't be loaded, or a parameter that it does not take."""

    def __init__(self, problem: str, parameter: str | None = None) -> None:
        super().__init__(problem)
        self.parameter = parameter
        """Which one is wrong; None: the policy itself."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Beside a field's type, in `Annotated`: what the parameter is, and which values it takes.

    Numbers are finite, unless `allows_infinity`.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Patient:
        ...     wait_s: Annotated[float, Bounds("longest wait", unit="s", least=0)] = 2.0
        >>> next(iter(parameters_of(Patient).values())).described
        'wait_s: a number in s, at least 0 (2)'
    """

    text: str = ""
    """What it means, in one line."""
    unit: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    allows_infinity: bool = False

    @property
    def in_words(self) -> str:
        """What limits a number, empty where nothing does."""
        limits = (
            ("at least", self.least),
            ("above", self.above),
            ("at most", self.most),
            ("below", self.below),
        )
        return " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)

    def hold(self, number: float) -> bool:
        """Whether the parameter may be this number."""
        return (
            (math.isfinite(number) or (self.allows_infinity and number == math.inf))
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number, word or switch that a policy takes."""

    name: str
    kind: type
    bounds: Bounds
    default: Setting | None
    """None: it must be given."""
    words: tuple[str, ...] = ()
    """The only words that it may be; empty: any."""

    @property
    def described(self) -> str:
        """Name, kind, bounds and default."""
        default = "must be given" if self.default is None else shown(self.default)
        return f"{self.name}: {self.expected} ({default})"

    @property
    def expected(self) -> str:
        """What it must be, in words."""
        if self.words:
            return f"one of {', '.join(self.words)}"
        kind = _KINDS[self.kind] + (f" in {self.bounds.unit}" if self.bounds.unit else "")
        return f"{kind}, {self.bounds.in_words}" if self.bounds.in_words else kind

    def parsed(self, text: str) -> Setting:
        """What somebody means who types it; the text itself where it is nothing of the parameter's kind."""
        if self.kind is str:
            return text
        if self.kind is bool:
            return {"true": True, "false": False}.get(text, text)
        try:
            return float(text)
        except ValueError:
            return text

    def value_of(self, given: object) -> Setting | None:
        """The value as the policy takes it; None where it takes no such value."""
        if self.kind in (bool, str):
            return given if isinstance(given, self.kind) and (not self.words or given in self.words) else None
        if isinstance(given, bool) or not isinstance(given, int | float) or not self.bounds.hold(given):
            return None
        if self.kind is int:
            return int(given) if float(given).is_integer() else None
        return float(given)


def shown(value: object) -> str:
    """A parameter's value as a deployment file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.15g}" if isinstance(value, int | float) else str(value)


def parameters_of(policy: type) -> dict[str, Parameter]:
    """The parameters of a policy, in the order of its fields.

    Each field of a dataclass that is a number, a word or a switch is one; without `Bounds` any number is good. The
    fields of a field that is a dataclass itself are parameters too, named after both.
    """
    return dict(_parameters(policy, ""))


def _parameters(policy: type, prefix: str) -> Iterator[tuple[str, Parameter]]:
    for field, hint in _fields(policy):
        name = f"{prefix}{field.name}"
        kind, bounds = hint, Bounds()
        if get_origin(hint) is Annotated:
            kind, *marks = get_args(hint)
            bounds = next((each for each in marks if isinstance(each, Bounds)), bounds)
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _parameters(kind, f"{name}_")
            continue
        words: tuple[str, ...] = ()
        if get_origin(kind) is Literal:
            kind, words = str, get_args(kind)
        if kind in _KINDS:
            yield name, Parameter(name, kind, bounds, _default(field), words)


def _fields(policy: type) -> list[tuple["Field[Any]", Any]]:
    if not is_dataclass(policy):
        return []
    hints = get_type_hints(policy, include_extras=True)
    return [(field, hints[field.name]) for field in fields(policy) if field.init]


def _default(field: "Field[Any]") -> Setting | None:
    if field.default is not MISSING:
        return field.default  # type: ignore[no-any-return]
    return None if field.default_factory is MISSING else field.default_factory()


def checked(name: str, policy: type, given: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of the policy's class for these parameters.

    Raises:
        PolicyError: a parameter that the policy does not have, lacks, or that is out of its bounds.
    """
    known = parameters_of(policy)
    values: dict[str, Setting] = {}
    for key, value in given.items():
        if key not in known:
            raise PolicyError(f'policy {name} has no parameter "{key}"; {_listed(known)}', key)
        taken = known[key].value_of(value)
        if taken is None:
            problem = f"takes for {key} {known[key].expected}, not {shown(value)}"
            raise PolicyError(f"policy {name} {problem}; {_listed(known)}", key)
        values[key] = taken
    for each in known.values():
        if each.default is None and each.name not in values:
            raise PolicyError(f"policy {name} needs the parameter {each.name}; {_listed(known)}", each.name)
    return _arguments(policy, "", values)


def _listed(known: Mapping[str, Parameter]) -> str:
    if not known:
        return "it has none"
    return f"its parameters are {'; '.join(each.described for each in known.values())}"


def _arguments(policy: type, prefix: str, values: Mapping[str, Setting]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, hint in _fields(policy):
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        name = f"{prefix}{field.name}"
        if name in values:
            found[field.name] = values[name]
        elif is_dataclass(kind):
            inner = _arguments(kind, f"{name}_", values)  # type: ignore[arg-type]
            if inner:
                found[field.name] = kind(**inner)  # type: ignore[operator]
    return found
