"""Commands that pages name exist as they are written, and the reference has every option of every command."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from prfaas.cli.main import app
from prfaas.cli.study_folder import study_names
from test_docs import PAGES, ROOT

REFERENCE = "docs/reference/cli.md"
ROOT_COMMAND: Any = typer.main.get_command(app)
# Ours begins a line or a piece of code; then come words, until the shell or the text goes on.
_INLINE = re.compile(r"(?<!`)`(prfaas [^`]+)`(?!`)")
_FENCED = re.compile(r"^\s*(?:\$ )?(?:until )?(prfaas (?:.*\\\n)*.*)$", re.MULTILINE)
_SHELL = frozenset(("|", ">", ">>", "<", "&", "&&", "2>", ";"))
# Of the shell's completion, and typer's own.
_EVERYWHERE = {"--help", "-h", "--version", "--install-completion", "--show-completion"}


def commands_in(text: str) -> Iterator[list[str]]:
    """The words behind `prfaas` of every command on a page."""
    fenced = re.findall(r"^\s*```(\w*)[^\n]*\n(.*?)^\s*```\s*$", text, re.MULTILINE | re.DOTALL)
    fences = "\n".join(inner for language, inner in fenced if language in ("sh", "console"))
    for line in (*_FENCED.findall(fences), *_INLINE.findall(text)):
        words = []
        for word in shlex.split(line.replace("\\\n", " ").replace("\n", " "), comments=True)[1:]:
            if word in _SHELL or "…" in word:
                break
            words.append(word.rstrip(";"))
            if word.endswith(";"):
                break
        yield words


def command_of(words: list[str]) -> tuple[str, Any, list[str]]:
    """The command that words begin with, its full name, and the words after it."""
    command, name, left = ROOT_COMMAND, "prfaas", list(words)
    while hasattr(command, "commands") and left and left[0] in command.commands:
        name, command = f"{name} {left[0]}", command.commands[left.pop(0)]
    return name, command, left


def options_of(command: Any) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name[0] == "-"}


def problem(words: list[str]) -> str | None:
    """Why a command can't be typed like that."""
    name, command, left = command_of(words)
    if hasattr(command, "commands") and left and left[0].isupper():
        return None
    if name == "prfaas":
        # Only options of the program itself.
        known = all(word in _EVERYWHERE for word in left)
        return None if known else f"there is no command {left[0]}"
    if "--" in left:
        left = left[: left.index("--")]
    known_options = options_of(command) | _EVERYWHERE
    for word in left:
        option = word.partition("=")[0]
        if word.startswith("-") and option not in known_options:
            return f"{name} has no option {option}"
    return None


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_as_they_are_written(page: str) -> None:
    found = [(words, problem(words)) for words in commands_in((ROOT / page).read_text(encoding="utf-8"))]
    assert [f"prfaas {shlex.join(words)}: {why}" for words, why in found if why is not None] == []


TARGETS = frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
_MAKE = re.compile(r"(?:^|[;&`] *)make ([a-z][\w-]*)", re.MULTILINE)
_PROGRAM = re.compile(r"python3? ((?:bench|studies|tests|requirements|docs)/[\w/.]+\.py)([^\n|;&>`]*)")
_OPTION = re.compile(r"(?<![\w-])--[\w-]+")


def unknown_of(text: str) -> Iterator[str]:
    """Targets of make and programs of the repository that a page names and that aren't there, and their options."""
    text = text.replace("\\\n", " ")
    yield from (f"make {target}" for target in _MAKE.findall(text) if target not in TARGETS)
    for program, rest in _PROGRAM.findall(text):
        if not (ROOT / program).is_file():
            yield program
            continue
        source = (ROOT / program).read_text(encoding="utf-8")
        yield from (f"{program} {option}" for option in _OPTION.findall(rest) if f'"{option}"' not in source)


@pytest.mark.parametrize("page", PAGES)
def test_targets_and_programs_exist_as_they_are_written(page: str) -> None:
    assert list(unknown_of((ROOT / page).read_text(encoding="utf-8"))) == []


def leaves(command: Any = ROOT_COMMAND, name: str = "prfaas") -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for each, inner in command.commands.items():
        yield from leaves(inner, f"{name} {each}")


def section_of(name: str) -> str:
    """What the reference says of a command: under its own heading, or its group's."""
    text = (ROOT / REFERENCE).read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]}
    words = name.split()[1:]
    if " ".join(words) in sections:
        return sections[" ".join(words)]
    for title, section in sections.items():
        if words[0] in re.split(r"[ ,]+|and", title) or " ".join(words) == title:
            return section
    raise AssertionError(f"{REFERENCE} has no section on {name}")


@pytest.mark.parametrize(
    ("name", "command"), leaves(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_the_reference_has_every_option(name: str, command: Any) -> None:
    section = section_of(name)
    # One name of each is enough.
    missing = [
        each.opts[0]
        for each in command.params
        if each.opts[0][0] == "-"
        and not _EVERYWHERE & set(each.opts)
        and not any(_has_option(section, option) for option in (*each.opts, *each.secondary_opts))
    ]
    assert missing == []


def _has_option(text: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){option}(?![\w-])", text) is not None


def test_the_reference_has_every_study() -> None:
    section = section_of("prfaas study")
    assert [study for study in study_names() if f"`{study}`" not in section] == []


def test_the_checks_catch_what_they_should() -> None:
    typed = "```sh\nmake tea\nmake docs\n```\n`python bench/gateway.py --teapot 3`, `python bench/tea.py`"
    assert list(unknown_of(typed)) == ["make tea", "bench/gateway.py --teapot", "bench/tea.py"]
    shell = "prfaas up x.yaml --sight east\nprfaas fly\nprfaas plan \\\n  a.yaml --sweeps 3 | cat\n"
    page = f"```sh\n{shell}```\n`prfaas up x`"
    found = [problem(words) for words in commands_in(page)]
    assert found == [
        "prfaas up has no option --sight",
        "there is no command fly",
        "prfaas plan has no option --sweeps",
        None,
    ]
    assert Path(ROOT, REFERENCE).is_file()
