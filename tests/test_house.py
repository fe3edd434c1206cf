"""The measures of the house: no circle of files, functions of a screen, one meaning for every class name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
MOST_FILE_LINES = 700
MOST_FUNCTION_LINES = 70
MOST_COLLABORATORS = 6
MOST_POSITIONAL = 5
LEAST_LINES_OF_ONE_USER = 100

# What is over a limit still. The lists are exact: what has come under it leaves its list.
LONG_FUNCTIONS: set[str] = set()
MANY_COLLABORATORS = {
    "lab.simulator.link:FluidLink.__init__",
    "serving.transport.io.observer:Observer.__init__",
    "serving.transport.io.receiver:Receiver.__init__",
    "serving.transport.io.sender:Sender.__init__",
}
# Calls by module and class: with more values by position, where one in a wrong place is a silent bug.
MANY_POSITIONAL: set[str] = set()

# Under a hundred lines, and used by one other file of its room alone.
OF_ONE_USER = {
    # Compiled apart for long simulations; its user has numpy in it.
    "core.latency.curve_reader",
    # It asks its own process.
    "cli.site_share",
    # Imports what estimates; its user is imported for every command's help.
    "cli.profile_estimate",
    # Two of what a fleet does, each with other parts of a plane; with both, its control would be as long as a file may.
    *("serving.fleet.decisions", "serving.fleet.shares"),
    # Imports torch and what makes a checkpoint: only where one is made.
    "serving.engines.trained",
    # Sums of pages as they lie, and the state's half of a layout: each as long as a page of the file that has it.
    *("serving.engines.vllm.dense_sums", "serving.engines.vllm.state_layout"),
    # Two services that are none of the deployment's, beside what Compose starts.
    "tools.emit.monitoring",
    # Asks ranks for what several parts of the plane hear; it is none of them.
    "serving.control.rank_stats",
    # The whole way of a request, and nothing else: who reads the gateway begins there.
    "serving.gateway.generation",
    # Needs OpenTelemetry alone; its user needs the gateway's packages too.
    "serving.tracing.queue",
    # Rooms that are still to be taken apart: tools, lab.
    "tools.emit.containers",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((SOURCE / "prfaas").rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """Not before a test asks: every worker collects this file, and to parse the house takes seconds."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All within a node. Most of a tree are expressions, in which there are none."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def imported(tree: ast.Module) -> set[str]:
    """The modules of the house that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            for alias in node.names:
                submodule = f"{module}.{alias.name}"
                found.add(submodule if submodule in FILES else module)
    return found & FILES.keys()


def test_no_circle_of_files() -> None:
    graph = {name: imported(tree) - {name} for name, tree in trees().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"files import each other in a circle: {' <- '.join(error.args[1])}") from None


def test_no_file_is_long() -> None:
    """A file is one noun, and as long as the noun."""
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: count for name, count in lines.items() if count > MOST_FILE_LINES} == {}


def test_what_one_file_uses_stands_in_it() -> None:
    """Unless it is long, or listed with a reason. Commands are found by their names; packages show what they have."""
    users: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees().items():
        for other in imported(tree) - {name}:
            users[other].add(name)
    alone = set()
    for name, path in FILES.items():
        room = name.rpartition(".")[0]
        user = next(iter(users[name])) if len(users[name]) == 1 else name
        is_of_room = user != name and user.rpartition(".")[0] == room and FILES[user].name != "__init__.py"
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if is_of_room and user != "prfaas.cli.main" and lines < LEAST_LINES_OF_ONE_USER:
            alone.add(name.removeprefix("prfaas."))
    assert alone == OF_ONE_USER


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All of the house by module and name, with the classes that they are in; not those inside functions."""
    for module, tree in trees().items():
        found: list[tuple[str, ast.AST]] = [("", tree)]
        while found:
            inside, node = found.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef):
                    found.append((f"{inside}{child.name}.", child))
                elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{module.removeprefix('prfaas.')}:{inside}{child.name}", child


def test_a_function_fits_a_screen() -> None:
    long = set()
    for name, function in functions():
        # A command's options and help are a table, which is read as one; so are arguments of the library's functions.
        is_table = name.startswith(("cli.", "api:")) and function.body[1:]
        first = function.body[1].lineno if is_table else function.lineno
        if (function.end_lineno or 0) - first + 1 > MOST_FUNCTION_LINES:
            long.add(name)
    assert long == LONG_FUNCTIONS


def test_a_constructor_takes_few_collaborators() -> None:
    many = set()
    for name, function in functions():
        given = function.args
        if name.endswith(".__init__"):
            count = len(given.posonlyargs + given.args + given.kwonlyargs) - 1
            if count > MOST_COLLABORATORS:
                many.add(name)
    assert many == MANY_COLLABORATORS


def records() -> dict[str, set[str]]:
    """Data classes, structs and named tuples: where each name stands."""
    bases: dict[tuple[str, str], set[str]] = {}
    for module, tree in trees().items():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                marks = {ast.unparse(each).partition("(")[0] for each in (*node.decorator_list, *node.bases)}
                bases[node.name, module] = {mark.rpartition(".")[2] for mark in marks}
    kinds = {"dataclass", "Struct", "NamedTuple"}
    while more := {name for (name, _), marks in bases.items() if marks & kinds} - kinds:
        kinds |= more
    found: dict[str, set[str]] = defaultdict(set)
    for (name, module), marks in bases.items():
        if marks & kinds:
            found[name].add(module)
    return found


def test_data_is_built_by_name() -> None:
    """Of more than five values all others have their names; none are unpacked from a tuple."""
    known, many = records(), set()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            places = known.get(name, set())
            is_unpacked = any(isinstance(each, ast.Starred) for each in node.args)
            # A private one is of its file alone.
            if (module in places if name.startswith("_") else places) and (
                is_unpacked or len(node.args) > MOST_POSITIONAL
            ):
                many.add(f"{module.removeprefix('prfaas.')}:{name}")
    assert many == MANY_POSITIONAL


def test_every_class_name_means_one_thing() -> None:
    """Private ones are of their file alone, and so may stand in several."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees().items():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
