"""The text that `trained: words` learns from: Python's own documentation, as plain prose of 70 columns.

Three sources, all under the PSF licence: what `help()` knows (`pydoc_data.topics`), the HTML documentation (Debian's
package python3.11-doc, unpacked with `dpkg -x` or installed), and the docstrings of the standard library.

    python bench/words/corpus.py /usr/share/doc/python3.11/html /tmp/words     # writes train.txt and others

The HTML becomes text in the manner of the topics: code between quotation marks, headings underlined, lists indented.
Tables and long code go. A paragraph that an earlier document has goes too. A document is a topic, a page, or a
module's docstrings; one in a hundred, chosen by its name, is held out as a whole.
"""

import argparse
import ast
import hashlib
import itertools
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

END_OF_DOCUMENT = "</s>"
COLUMNS = 70

# Every hundredth document is held out, by a hash of its name, so that more text moves no document to the other side.
HELD_OUT_EVERY = 100

_LONGEST_CODE_LINES = 14
_PARAGRAPH_WORTH_COMPARING = 60
_SHORTEST_DOCUMENT = 200
_TYPOGRAPHIC = str.maketrans(
    {"’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "–": "-", "—": "--", "→": "->", "•": "*", "×": "x"}
)
_NO_PROSE = {"genindex", "search", "py-modindex", "contents", "changelog", "index", "glossary-all"}
_NO_LIBRARY = {"test", "tests", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "_vendor"}
_HEADINGS = {"h1": "*", "h2": "=", "h3": "-", "h4": "~", "h5": '"', "h6": "'"}
_SKIPPED_TAGS = {"script", "style", "table", "nav", "svg", "form", "head"}
_VOID_TAGS = {"br", "hr", "img", "input", "link", "meta", "col", "wbr"}
_SKIPPED_CLASSES = {"headerlink", "toctree-wrapper", "related", "sphinxsidebar", "contents", "viewcode-link"}


def ascii_text(text: str) -> str:
    """`text` with typographic characters written in ASCII and without those that have no such form."""
    return text.translate(_TYPOGRAPHIC).encode("ascii", "ignore").decode("ascii")


class PlainText(HTMLParser):
    """One page of Sphinx's HTML as text. Feed it a page, then read `text`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._blocks: list[str] = []
        self._words: list[str] = []
        self._open: list[tuple[str, bool]] = []  # each open tag, and whether its text is skipped
        self._indents: list[str] = []
        self._bullet = ""
        self._counters: list[int] = []
        self._in_body = False
        self._in_code = False
        self._in_signature = False

    @property
    def text(self) -> str:
        """What the page says, a blank line between paragraphs."""
        self._end_block()
        return "\n\n".join(self._blocks)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = set((dict(attrs).get("class") or "").split())
        if tag in _VOID_TAGS:
            return
        if tag == "div" and "body" in classes:
            self._in_body = True
        skipped = self._skipping or tag in _SKIPPED_TAGS or bool(classes & _SKIPPED_CLASSES)
        self._open.append((tag, skipped))
        if skipped or not self._in_body:
            return
        if tag in ("p", "li", "dt", "dd", "pre", "ul", "ol", "dl", "div", "blockquote", *_HEADINGS):
            self._end_block()
        if tag in ("ul", "ol"):
            self._counters.append(0 if tag == "ol" else -1)
        elif tag == "li":
            if self._counters and self._counters[-1] >= 0:
                self._counters[-1] += 1
                self._bullet = f"{self._counters[-1]}. "
            else:
                self._bullet = "* "
            self._indents.append(" " * len(self._bullet))
        elif tag in ("dd", "blockquote"):
            self._indents.append("   ")
        elif tag == "pre":
            self._in_code = True
        elif tag == "dt" and "sig" in classes:
            self._in_signature = True
        else:
            self._mark(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            name, skipped = self._open.pop()
            if not skipped and self._in_body:
                self._close(name)
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        if self._in_body and not self._skipping:
            self._words.append(data)

    @property
    def _skipping(self) -> bool:
        return bool(self._open) and self._open[-1][1]

    def _mark(self, tag: str) -> None:
        marks = {"code": '"', "em": "*", "strong": "**"}
        if tag in marks and not self._in_code and not self._in_signature:
            self._words.append(marks[tag])

    def _close(self, tag: str) -> None:
        if tag in _HEADINGS:
            self._end_block(underline=_HEADINGS[tag])
        elif tag == "pre":
            self._end_code()
        elif tag in ("p", "li", "dt", "dd", "div", "blockquote", "section"):
            self._end_block()
        if tag in ("li", "dd", "blockquote") and self._indents:
            self._indents.pop()
            self._bullet = ""
        elif tag in ("ul", "ol") and self._counters:
            self._counters.pop()
        elif tag == "dt":
            self._in_signature = False
        else:
            self._mark(tag)

    def _end_block(self, underline: str = "") -> None:
        words = " ".join("".join(self._words).split())
        self._words.clear()
        if not words:
            return
        indent = "".join(self._indents)
        if underline:
            self._blocks.append(f"\n{words}\n{underline * len(words)}")
            return
        first = indent[: len(indent) - len(self._bullet)] + self._bullet
        self._bullet = ""
        self._blocks.append(
            textwrap.fill(
                words,
                width=COLUMNS,
                initial_indent=first,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )

    def _end_code(self) -> None:
        code = "".join(self._words).strip("\n")
        self._words.clear()
        self._in_code = False
        if code and code.count("\n") < _LONGEST_CODE_LINES:
            self._blocks.append(textwrap.indent(code, "".join(self._indents) + "   "))


def topics() -> Iterator[tuple[str, str]]:
    """The name and text of every topic that `help()` knows."""
    from pydoc_data.topics import topics as texts

    for name in sorted(texts):
        yield f"topic {name}", texts[name]


def pages(html: Path) -> Iterator[tuple[str, str]]:
    """The name and text of every page of the HTML documentation that is prose."""
    for file in sorted(html.rglob("*.html")):
        if file.stem in _NO_PROSE or file.parent.name.startswith("_"):
            continue
        parser = PlainText()
        parser.feed(file.read_text("utf-8"))
        yield f"page {file.relative_to(html)}", parser.text


def docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """The name and docstrings of every module of the standard library."""
    for file in sorted(library.rglob("*.py")):
        relative = file.relative_to(library)
        if _NO_LIBRARY & set(relative.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, owners)]
        yield (
            f"module {relative}",
            "\n\n".join(text for text in texts if len(text) > _PARAGRAPH_WORTH_COMPARING),
        )


def is_held_out(name: str) -> bool:
    """Whether the document of this name is for judging only."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) % HELD_OUT_EVERY == 0


def without_repeats(text: str, seen: set[bytes]) -> str:
    """`text` without the longer paragraphs that `seen` has; adds its own to it."""
    kept = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        key = " ".join(re.sub(r"[\"'*`]", "", paragraph).split())
        if len(key) >= _PARAGRAPH_WORTH_COMPARING:
            digest = hashlib.blake2b(key.encode(), digest_size=12).digest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(paragraph.rstrip())
    return "\n\n".join(kept)


def documents(html: Path, library: Path) -> dict[str, list[str]]:
    """All documents in ASCII without repeated paragraphs, by the file that they go into.

    `topics` are those of the demo's prompts, `train` all to learn from with them, `held-out` the others.
    """
    seen: set[bytes] = set()
    files: dict[str, list[str]] = {"topics": [], "train": [], "held-out": []}
    for name, raw in itertools.chain(topics(), pages(html), docstrings(library)):
        text = without_repeats(ascii_text(raw), seen).strip()
        if len(text) < _SHORTEST_DOCUMENT:
            continue
        if is_held_out(name):
            files["held-out"].append(text)
            continue
        files["train"].append(text)
        if name.startswith("topic "):
            files["topics"].append(text)
    return files


def main() -> None:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "html", type=Path, help="folder of Python's HTML documentation (it has library/, reference/, …)"
    )
    parser.add_argument("out", type=Path, help="folder for the texts")
    arguments = parser.parse_args()
    if not (arguments.html / "reference").is_dir():
        parser.error(f"{arguments.html} has no folder reference/; it should be Python's HTML documentation")
    files = documents(arguments.html, Path(sysconfig.get_paths()["stdlib"]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, texts in files.items():
        joined = "".join(text + "\n" + END_OF_DOCUMENT for text in texts)
        (arguments.out / f"{name}.txt").write_text(joined)
        print(f"{name}.txt: {len(texts)} documents, {len(joined):,} characters")


if __name__ == "__main__":
    main()
