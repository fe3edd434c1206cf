"""Pages for people: short sentences and paragraphs, small cells, lines that a diff can show, links that lead somewhere.

`python tests/test_docs.py` prints the figures of every page, and what breaks a rule.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MEAN_SENTENCE_WORDS = 20
MAX_SENTENCE_WORDS = 40
MAX_PARAGRAPH_WORDS = 120
MAX_CELL_WORDS = 12
MAX_LINE_CHARACTERS = 120

# Written by `prfaas reproduce` and `prfaas study`: only their links are checked here.
GENERATED = {"docs/explanation/reproduction.md", "docs/explanation/studies.md"}

FRONT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = [name for name in FRONT if (ROOT / name).exists()]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_FENCE = re.compile(r"^\s*(```|~~~)")
_ITEM = re.compile(r"^\s*([-*+]|\d+[.)])\s+")
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`]*[A-Z0-9`ρΣβΛ])|[.!?][\"')*_]+\s+(?=[A-Z`])")
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|Eq|Eqs|Fig|cf|approx|etc|No)\.(?=\s)")
_DIRECTIVE = re.compile(r"^\s*(:::|\?\?\?|!!!|===|\{%|<)")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a list item, a heading or one cell of a table, without markup; `line` counts from 1."""

    kind: str
    line: int
    text: str


def blocks(text: str) -> Iterator[Block]:
    """The prose of a Markdown page: code fences, indented code, directives and HTML are left out."""
    fence = ""
    kind, start, words = "", 0, list[str]()
    after_blank = True
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = _FENCE.match(line)
        if found is not None and not (fence and found[1] != fence):
            fence = "" if fence else found[1]
            line = ""
        elif fence:
            continue
        stripped = line.strip()
        is_table = stripped.startswith("|")
        is_heading = stripped.startswith("#")
        is_item = _ITEM.match(line) is not None
        is_code = line.startswith("    ") and after_blank and not words and kind != "item" and not is_item
        starts_anew = not stripped or is_table or is_heading or is_item or is_code or _DIRECTIVE.match(line)
        if starts_anew and words:
            yield Block(kind, start, " ".join(words))
            words = []
        if not stripped:
            after_blank = True
            continue
        if is_table:
            if not re.fullmatch(r"[|\s:-]+", stripped):
                for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                    yield Block("cell", number, _plain(cell.strip()))
            kind = ""
        elif is_heading:
            yield Block("heading", number, _plain(stripped.lstrip("#").strip()))
            kind = ""
        elif is_code or _DIRECTIVE.match(line):
            pass
        else:
            if not words:
                is_more = kind == "item" and line.startswith(" ")
                start, kind = number, "item" if is_item or is_more else "text"
            words.append(_plain(_ITEM.sub("", line).strip()))
        after_blank = False


def _plain(text: str) -> str:
    """Link targets go, code becomes one word, so that a command line isn't a sentence of its own."""
    text = _LINK.sub(r"\1", text)
    text = re.sub(r"`+[^`]+`+", "`code`", text)
    return re.sub(r"https?://\S+", "link", text)


def sentences(block: Block) -> list[str]:
    text = _ABBREVIATIONS.sub(r"\1", block.text)
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]


def words_in(text: str) -> int:
    """Words as a reader counts them: something with a letter or a digit in it."""
    return sum(any(each.isalnum() for each in word) for word in text.split())


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub both make them."""
    names = set()
    for line in re.sub(r"(?ms)^\s*(```|~~~).*?^\s*\1", "", text).splitlines():
        if line.startswith("#"):
            title = re.sub(r"[`*]", "", _LINK.sub(r"\1", line.lstrip("#").strip()))
            names.add(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-"))
    return names


def prose(name: str) -> tuple[list[int], list[str]]:
    """Sentence lengths of a page, and everything that breaks a rule."""
    text = (ROOT / name).read_text(encoding="utf-8")
    lengths: list[int] = []
    wrong: list[str] = []
    for block in blocks(text):
        if block.kind == "cell":
            if (count := words_in(block.text)) > MAX_CELL_WORDS:
                wrong.append(f"{name}:{block.line}: a cell of {count} words: {block.text[:60]}")
            continue
        if block.kind == "heading":
            continue
        if (count := words_in(block.text)) > MAX_PARAGRAPH_WORDS:
            wrong.append(f"{name}:{block.line}: a paragraph of {count} words: {block.text[:60]}")
        for sentence in sentences(block):
            count = words_in(sentence)
            lengths += [count] if count else []
            if count > MAX_SENTENCE_WORDS:
                wrong.append(f"{name}:{block.line}: a sentence of {count} words: {sentence[:60]}")
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_CHARACTERS and "](http" not in line and not line.lstrip().startswith("|"):
            wrong.append(f"{name}:{number}: a line of {len(line)} characters")
    return lengths, wrong


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
    named = set(re.findall(r"`((?:src|tests|bench|examples|requirements|docs)/[\w./-]+)`", text))
    if name == "docs/reference/invariants.md":
        # Its table names tests without the folder's name.
        named |= {f"tests/{path}" for path in re.findall(r"`([a-z_/]+/test_\w+\.py)`", text)}
    return [f"{name}: `{path}` isn't there" for path in sorted(named) if not (ROOT / path).exists()]


def figures(lengths: list[int]) -> str:
    return f"{len(lengths)} sentences, mean {sum(lengths) / len(lengths):.1f}, longest {max(lengths)}"


@pytest.mark.parametrize("name", [name for name in PAGES if name not in GENERATED])
def test_prose(name: str) -> None:
    lengths, wrong = prose(name)
    assert not wrong, "\n".join(wrong)
    assert not lengths or sum(lengths) / len(lengths) <= MEAN_SENTENCE_WORDS, (
        f"{name}: {sum(lengths) / len(lengths):.1f} words a sentence on average"
    )


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


def test_the_rules_catch_what_they_should() -> None:
    long = " ".join(["word"] * 41) + "."
    _, only = blocks(f"# Title\n\n{long}\n\n```\n{long}\n```\n\n    {long}\n")
    assert [words_in(each) for each in sentences(only)] == [41]
    two = Block("text", 1, "One thing. Another (see Eq. 5) of it.")
    assert [words_in(each) for each in sentences(two)] == [2, 6]
    cells = [block.text for block in blocks("| a | `b c` |\n|---|---|\n| d \\| e | f |\n")]
    assert cells == ["a", "`code`", "d \\| e", "f"]
    assert anchors("# The `x` of [y](z.md): q\n") == {"the-x-of-y-q"}


if __name__ == "__main__":
    everything: list[int] = []
    failures: list[str] = []
    for page in PAGES:
        if page in GENERATED:
            continue
        counts, found = prose(page)
        everything += counts
        failures += found + broken_links(page)
        if counts:
            print(f"{page}: {figures(counts)}")
    print(f"all: {figures(everything)}")
    print(*failures, sep="\n", file=sys.stderr)
    sys.exit(bool(failures))
