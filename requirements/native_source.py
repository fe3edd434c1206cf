"""Rewrites a module's source so that what mypyc makes of it is fast: for the copy of `compiled.py` alone.

- mypyc doesn't know `slots=True`, and calls the `__init__` that `dataclass` makes as interpreted code, attribute by
  attribute through descriptors. So each data class gets one that is written out. Frozen ones are not frozen in the
  copy, where nothing checks that, or this `__init__` could not set their fields. They keep their hash.
- What was frozen is pickled as what makes it anew.
- mypyc does not know msgspec's structs either: they become data classes.
- It takes every annotation of a data class for a field's plain type. Class variables go behind the class, and
  `Annotated` is put back there. It also evaluates them: those of names that only type checkers know become `Any`.
- It looks up every name of a module in a dictionary, unless it is `Final`: constants become that.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    annotation: str
    default: str | None
    factory: str | None
    is_keyword: bool
    is_given: bool
    """False: it is no parameter, and `__post_init__` sets it where there is no default."""

    @property
    def parameter(self) -> str:
        if self.factory is not None:
            return f'{self.name}: "{self.annotation} | None" = None'
        default = "" if self.default is None else f" = {self.default}"
        return f'{self.name}: "{self.annotation}"{default}'

    @property
    def assignment(self) -> str:
        if not self.is_given:
            return f"self.{self.name} = {self.default or f'{self.factory}()'}"
        if self.factory is None:
            return f"self.{self.name} = {self.name}"
        return f"self.{self.name} = {self.factory}() if {self.name} is None else {self.name}"


_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
_INFINITE = "_INFINITE"


def native_source(text: str) -> str:
    """The module's text, rewritten."""
    return with_constants(with_native_classes(with_data_classes(text)))


def with_data_classes(text: str) -> str:
    """The module's text, its structs made data classes."""
    lines = text.splitlines()
    structs: set[str] = {"Struct"}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef) or not any(ast.unparse(base) in structs for base in node.bases):
            continue
        structs.add(node.name)
        bases = [base for each in node.bases if (base := ast.unparse(each)) != "Struct"]
        # Not frozen: a data class could not be pickled so, and has no hash that anybody asks for.
        options = [ast.unparse(each) for each in node.keywords if each.arg == "kw_only"]
        head = f"class {node.name}({', '.join(bases)}):" if bases else f"class {node.name}:"
        lines[node.lineno - 1] = f"@dataclass({', '.join(options)})\n{head}"
        for each in node.body:
            if (
                isinstance(each, ast.AnnAssign)
                and each.value is not None
                and ast.unparse(each.value) in ("{}", "[]")
            ):
                kind = "dict" if ast.unparse(each.value) == "{}" else "list"
                line = lines[each.lineno - 1]
                lines[each.lineno - 1] = f"{line[: each.value.col_offset]}field(default_factory={kind})"
    written = "\n".join([*lines, ""])
    return written.replace("from msgspec import Struct", "from dataclasses import dataclass, field")


def with_constants(text: str) -> str:
    """The module's text with its constants marked as such, `math.inf` among them."""
    lines = text.splitlines()
    body = ast.parse(text).body
    for node in body:
        if isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            lines[node.lineno - 1] = _with_final(node, lines[node.lineno - 1])
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    added = ["from typing import Any, Final"]
    if "math.inf" in text:
        lines = [re.sub(r"\bmath\.inf\b", _INFINITE, line) for line in lines]
        added.append(f'{_INFINITE}: Final = float("inf")')
    last = imports[-1].end_lineno if imports else body[0].end_lineno
    assert last is not None
    lines[last:last] = added
    return "\n".join([*lines, ""])


def _with_final(node: ast.Assign | ast.AnnAssign, line: str) -> str:
    """The first line of an assignment, or all of one to several names; as it is where it gives no constants."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    if not all(isinstance(name, ast.Name) and _CONSTANT.fullmatch(name.id) for name in names):
        return line
    if isinstance(target, ast.Tuple):
        assert node.value is not None
        values = f"tuple({ast.unparse(node.value)})"
        return "; ".join(f"{ast.unparse(name)}: Final = {values}[{at}]" for at, name in enumerate(names))
    kind = f"Final[{ast.unparse(node.annotation)}]" if isinstance(node, ast.AnnAssign) else "Final"
    return f"{ast.unparse(target)}: {kind} = {line.partition('=')[2].strip()}"


def with_native_classes(text: str) -> str:
    """The module's text with its data classes rewritten."""
    lines = text.splitlines()
    unknown = _names_for_checkers(text)
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    behind: list[str] = []
    # From the last one on, so that the lines of those before stay where they are.
    for node in reversed(classes.values()):
        decorator = _dataclass_of(node)
        if decorator is None:
            continue
        options = {each.arg: ast.unparse(each.value) for each in decorator.keywords}
        options.pop("slots", None)
        is_frozen = options.pop("frozen", None) is not None
        if is_frozen:
            if "eq" not in options:
                options["unsafe_hash"] = "True"
            lines[node.end_lineno : node.end_lineno] = _reduction(node, classes)
        if "init" not in options:
            options["init"] = "False"
            lines[node.end_lineno : node.end_lineno] = _constructor(node, classes)
        for each in reversed(node.body):
            if isinstance(each, ast.AnnAssign) and _head_of(each.annotation) == "ClassVar":
                assert each.value is not None and each.end_lineno is not None
                behind.append(
                    f"setattr({node.name}, {ast.unparse(each.target)!r}, {ast.unparse(each.value)})"
                )
                del lines[each.lineno - 1 : each.end_lineno]
            elif isinstance(each, ast.AnnAssign) and _head_of(each.annotation) == "Annotated":
                place = f"getattr({node.name}, '__annotations__')[{ast.unparse(each.target)!r}]"
                behind.append(f"{place} = {ast.unparse(each.annotation)}")
            elif isinstance(each, ast.AnnAssign) and _is_written(each.annotation, unknown):
                line = lines[each.lineno - 1]
                start, end = each.annotation.col_offset, each.annotation.end_col_offset
                lines[each.lineno - 1] = f"{line[:start]}Any{line[end:]}"
        written = ", ".join(f"{name}={value}" for name, value in options.items())
        lines[decorator.lineno - 1] = f"@dataclass({written})"
    return "\n".join([*lines, *reversed(behind), ""])


def _names_for_checkers(text: str) -> set[str]:
    """What is defined where `TYPE_CHECKING` holds."""
    blocks = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found: set[str] = set()
    for each in [each for block in blocks for each in block.body]:
        if isinstance(each, ast.Assign):
            found |= {ast.unparse(target) for target in each.targets}
        elif isinstance(each, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in each.names}
    return found


def _is_written(annotation: ast.expr, names: set[str]) -> bool:
    """Whether it is a string with one of these names."""
    if not (isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)):
        return False
    return any(
        isinstance(each, ast.Name) and each.id in names for each in ast.walk(ast.parse(annotation.value))
    )


def _dataclass_of(node: ast.ClassDef) -> ast.Call | None:
    """Its decorator, on one line and with arguments; None where it has none."""
    for each in node.decorator_list:
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "dataclass":
            return each
    return None


def _constructor(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    fields = {each.name: each for each in _fields(node, classes)}.values()
    plain = [each.parameter for each in fields if each.is_given and not each.is_keyword]
    named = [each.parameter for each in sorted(fields, key=_is_optional) if each.is_given and each.is_keyword]
    parameters = ["self", *plain, *(["*", *named] if named else [])]
    is_set = [each for each in fields if each.is_given or each.default or each.factory]
    body = [f"        {each.assignment}" for each in is_set]
    if any(isinstance(each, ast.FunctionDef) and each.name == "__post_init__" for each in node.body):
        body.append("        self.__post_init__()")
    body = body or ["        pass"]
    return ["", f"    def __init__({', '.join(parameters)}) -> None:", *body]


def _is_optional(field: _Field) -> bool:
    """What comes behind the others: mypyc takes parameters by name for positional ones where a float has a default."""
    return field.default is not None or field.factory is not None


def _reduction(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    fields = [each for each in {each.name: each for each in _fields(node, classes)}.values() if each.is_given]
    assert not any(each.is_keyword for each in fields), f"{node.name} has a field that is given by name alone"
    values = "".join(f"self.{each.name}, " for each in fields)
    return ["", '    def __reduce__(self) -> "tuple[object, ...]":', f"        return type(self), ({values})"]


def _fields(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[_Field]:
    """Those of classes in the same file that it derives from come first."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields(classes[base.id], classes)
    decorator = _dataclass_of(node)
    all_by_name = decorator is not None and any(each.arg == "kw_only" for each in decorator.keywords)
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or _head_of(each.annotation) == "ClassVar":
            continue
        annotation = each.annotation
        if _head_of(annotation) == "Annotated":
            assert isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)
            annotation = annotation.slice.elts[0]
        kind = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
        default = None if each.value is None else ast.unparse(each.value)
        factory, is_keyword, is_given = None, all_by_name, True
        if isinstance(each.value, ast.Call) and ast.unparse(each.value.func) == "field":
            given = {option.arg: ast.unparse(option.value) for option in each.value.keywords}
            default, factory = given.get("default"), given.get("default_factory")
            is_keyword = all_by_name or given.get("kw_only") == "True"
            is_given = given.get("init") != "False"
        name = ast.unparse(each.target)
        yield _Field(name, str(kind).replace('"', "'"), default, factory, is_keyword, is_given)


def _head_of(annotation: ast.expr) -> str:
    return ast.unparse(annotation.value) if isinstance(annotation, ast.Subscript) else ""
