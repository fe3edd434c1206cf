"""Pages for people: lines that a diff can show, links and names of files that lead somewhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from prfaas import __version__

ROOT = Path(__file__).parents[1]

MAX_LINE_CHARACTERS = 120

# Written by `prfaas reproduce` and `prfaas study`: only their links are checked here.
GENERATED = {"docs/explanation/reproduction.md", "docs/explanation/studies.md"}

FRONT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [name for name in FRONT if (ROOT / name).exists()]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub both make them."""
    names = set()
    for line in re.sub(r"(?ms)^\s*(```|~~~).*?^\s*\1", "", text).splitlines():
        if line.startswith("#"):
            title = re.sub(r"[`*]", "", _LINK.sub(r"\1", line.lstrip("#").strip()))
            names.add(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-"))
    return names


def long_lines(name: str) -> list[str]:
    """Lines of a page that no diff shows whole; addresses and tables can't be broken."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [
        f"{name}:{number}: a line of {len(line)} characters"
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_LINE_CHARACTERS and "](http" not in line and not line.lstrip().startswith("|")
    ]


def broken_links(name: str) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    path = ROOT / name
    text = re.sub(r"(?ms)^\s*(```|~~~).*?^\s*\1", "", path.read_text(encoding="utf-8"))
    wrong = []
    for _, target in _LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            wrong.append(f"{name}: {target}: no such file")
        elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
            wrong.append(f"{name}: {target}: no such heading")
    return wrong


def missing_files(name: str) -> list[str]:
    """Files of this repository that a page names in backticks and that aren't there."""
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:src|tests|bench|studies|examples|requirements|docs)/[\w./-]+)`", text))
    if name == "docs/reference/invariants.md":
        # Its table names tests without the folder's name.
        named |= {f"tests/{path}" for path in re.findall(r"`([a-z_/]+/test_\w+\.py)`", text)}
    return [f"{name}: `{path}` isn't there" for path in sorted(named) if not (ROOT / path).exists()]


_ROOM = r"(?:guides|reference|explanation|tutorial)"
_NAMED = re.compile(
    # A file of the folder, or a page of the site: `docs/guides/plan.md`, `page("guides/plan")`, "the page guides/plan".
    rf"(?<![\w/.-])(?:docs/((?:{_ROOM}/)?[\w/-]+\.md)(#[\w-]+)?|({_ROOM}/[\w-]+(?:/[\w-]+)?)(?![\w./-]))"
)
# In quotations from elsewhere.
_NOT_OURS = {"docs/tutorials/working-with-profile-exports.md"}


def named_pages(text: str) -> Iterator[tuple[str, str]]:
    """Pages that a file other than a page names: from the root of `docs`, and the heading."""
    for whole in _NAMED.finditer(text):
        if whole[0] not in _NOT_OURS:
            yield whole[1] or f"{whole[3]}.md", (whole[2] or "").removeprefix("#")


def dead_names(path: Path) -> list[str]:
    wrong = []
    for page, anchor in named_pages(path.read_text(encoding="utf-8")):
        there = ROOT / "docs" / page
        if not there.is_file():
            wrong.append(f"{path.relative_to(ROOT)}: {page}: no such page")
        elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
            wrong.append(f"{path.relative_to(ROOT)}: {page}#{anchor}: no such heading")
    return wrong


@pytest.mark.parametrize("name", [name for name in PAGES if name not in GENERATED])
def test_lines(name: str) -> None:
    wrong = long_lines(name)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    wrong = broken_links(name)
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(
    not (ROOT / "src/prfaas/core").exists(), reason="the pages describe the tree in five wings"
)
@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name: str) -> None:
    wrong = missing_files(name)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["src", "examples", "bench", "studies", "containers", "tests"])
def test_pages_that_messages_name_exist(folder: str) -> None:
    """In messages, helps, templates, examples and comments, with their headings."""
    kinds = (".py", ".yaml", ".jinja", ".json", ".sh", ".Containerfile", ".js", ".html", ".ipynb")
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in kinds and path.is_file()]
    assert files
    wrong = [each for path in files if path != Path(__file__) for each in dead_names(path)]
    assert not wrong, "\n".join(wrong)


def test_dead_pages_are_found() -> None:
    text = 'see docs/guides/plan.md#nowhere, page("guides/none"); x/docs/guides/no.md is another\'s'
    assert list(named_pages(text)) == [("guides/plan.md", "nowhere"), ("guides/none.md", "")]


_PATH = re.compile(r"(?<!/)\bdocs/[\w/-]+\.md")


def test_messages_name_pages_that_a_package_has_too() -> None:
    """A path from the repository's root leads nowhere for who has a wheel: `page` gives one that does."""
    told = []
    for path in (ROOT / "src/prfaas").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if _PATH.search(text) is None:
            continue
        tree = ast.parse(text)
        # A docstring is for readers of the source, but that of a command, which is its help.
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        told += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if node not in texts or "cli" in path.parts
            if _PATH.search(node.value)
        ]
    assert told == []


def test_every_page_is_in_the_sites_menu() -> None:
    menu = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    there = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    assert menu == there


def test_the_map_names_what_there_is() -> None:
    """Every `Class.method` in ARCHITECTURE.md stands in the source."""
    named = set(
        re.findall(r"`([A-Z]\w+\.[a-z_]\w*)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    )
    # To parse the whole house takes seconds.
    wanted = re.compile(rf"^class ({'|'.join({name.partition('.')[0] for name in named})})\b", re.MULTILINE)
    there = set()
    for text in (path.read_text(encoding="utf-8") for path in (ROOT / "src/prfaas").rglob("*.py")):
        for node in ast.parse(text).body if wanted.search(text) else ():
            if isinstance(node, ast.ClassDef):
                there |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, _FUNCTION)}
    assert len(named) > 30
    assert named - there == set()


def test_generated_pages_exist() -> None:
    assert set(PAGES) >= GENERATED


def test_anchors_are_those_that_readers_get() -> None:
    assert anchors("# The `x` of [y](z.md): q\n") == {"the-x-of-y-q"}


def test_what_to_cite_is_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["version"] == __version__
