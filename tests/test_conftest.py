"""Marks that keep a test out of a run say why."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import (
    NOT_BEGUN,
    REASONED,
    UNTIL,
    TimeByPart,
    is_of_test_all,
    pytest_runtest_setup,
    stack_of,
    take_other_examples,
)

ROOT = Path(__file__).parents[1]
MAKEFILE = ROOT / "Makefile"


@dataclass
class Item:
    """As much of a test as is looked at."""

    nodeid: str
    marks: tuple[Any, ...]

    def iter_markers(self, name: str) -> Iterator[Any]:
        return iter([each for each in self.marks if each.name == name])

    def get_closest_marker(self, name: str) -> Any:
        return next(self.iter_markers(name), None)


@pytest.mark.parametrize("name", REASONED)
def test_a_mark_without_a_reason_is_refused(name: str) -> None:
    mark = getattr(pytest.mark, name)
    pytest_runtest_setup(Item("good", (mark("it waits").mark,)))  # type: ignore[arg-type]
    pytest_runtest_setup(Item("plain", ()))  # type: ignore[arg-type]
    for bad in (mark, mark(""), mark(" "), mark(reason="it waits"), mark(5)):
        with pytest.raises(pytest.fail.Exception, match=f"here: its mark must say why: {name}"):
            pytest_runtest_setup(Item("here", (bad.mark,)))  # type: ignore[arg-type]


def test_what_only_test_all_has_is_not_begun_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    extended = Item("extended", (pytest.mark.extended("more of the same").mark,))
    for profile, names, is_over in (
        ("prfaas", ("hypothesis",), True),
        ("few", ("hypothesis",), False),
        ("prfaas", ("hypothesis", "engine"), False),
    ):
        marks = tuple(getattr(pytest.mark, name).mark for name in names)
        told = SimpleNamespace(get_current_profile_name=lambda name=profile: name)
        monkeypatch.setattr("tests.conftest.settings", told)
        assert is_of_test_all(Item("drawn", marks)) == is_over  # type: ignore[arg-type]
    for until_s, is_over in ((0.0, True), (1e12, False)):
        monkeypatch.setenv(UNTIL, str(until_s))
        pytest_runtest_setup(Item("plain", ()))  # type: ignore[arg-type]
        try:
            pytest_runtest_setup(extended)  # type: ignore[arg-type]
            skipped = ""
        except pytest.skip.Exception as skip:
            skipped = str(skip)
        assert skipped == (NOT_BEGUN if is_over else "")


@dataclass
class Found:
    """As much of a collected property test as is looked at."""

    obj: Any
    cls: Any = None


@pytest.mark.parametrize(("factor", "few", "one"), [(10, 250, 10), (0.2, 5, 1)])
def test_property_tests_take_as_many_examples_as_the_profile_says(factor: float, few: int, one: int) -> None:
    @settings(max_examples=25)
    @given(st.integers())
    def numbered(_: int) -> None: ...

    @settings(max_examples=1)
    @given(st.integers())
    def single(_: int) -> None: ...

    @given(st.integers())
    def plain(_: int) -> None: ...

    class Machine:
        settings: Any

    Machine.settings = settings(max_examples=25)

    def examples(test: Any) -> int:
        return int(test._hypothesis_internal_use_settings.max_examples)

    # Cases of one parametrized test share its function.
    items = [Found(each) for each in (numbered, numbered, single, plain, len)] + [Found(None, Machine)]
    take_other_examples(items, factor)  # type: ignore[arg-type]
    assert (examples(numbered), examples(single), Machine.settings.max_examples) == (few, one, few)
    assert examples(plain) == settings().max_examples


def test_the_time_of_a_run_is_told_by_folder() -> None:
    told: list[str] = []

    class Terminal:
        write_line = staticmethod(told.append)

        def section(self, title: str) -> None:
            told.append(title)

    @dataclass
    class Report:
        nodeid: str
        duration: float
        keywords: dict[str, int]
        skipped: bool = False
        longrepr: str = ""

    plugin = TimeByPart()
    for nodeid, seconds, keywords in (
        ("tests/core/test_a.py::test_one", 1.0, {}),
        ("tests/core/test_a.py::test_one", 5.5, {}),
        ("tests/core/test_b.py::test_two", 0.5, {}),
        ("tests/lab/test_c.py::test_three", 9.0, {"slow": 1}),
    ):
        plugin.pytest_runtest_logreport(Report(nodeid, seconds, keywords))  # type: ignore[arg-type]
    skipped = Report(
        "tests/core/test_b.py::test_four", 0.0, {}, skipped=True, longrepr=f"Skipped: {NOT_BEGUN}"
    )
    plugin.pytest_runtest_logreport(skipped)  # type: ignore[arg-type]
    plugin.pytest_terminal_summary(Terminal())  # type: ignore[arg-type]
    assert told == [
        f"1 tests not begun: {UNTIL} is over",
        "time by part",
        "    9.0 s      1 tests  tests/lab",
        "    7.0 s      3 tests  tests/core",
        "over 5 s without a reason: make them cheaper, or mark them slow(...)",
        "    6.5 s  tests/core/test_a.py::test_one",
    ]


def test_files_that_share_engines_go_to_one_worker() -> None:
    for nodeid, stack in {
        "tests/integration/one_stack/test_chain.py::test_a[1::2/3]": "tests/integration/one_stack",
        "tests/integration/test_tls.py::test_a": "tests/integration/test_tls.py",
        "tests/core/kv/test_allocation.py::test_a": "tests/core/kv/test_allocation.py",
    }.items():
        assert stack_of(nodeid) == stack
    shared = {path.parent for path in (ROOT / "tests" / "integration").rglob("conftest.py")}
    assert {
        stack_of(f"{path.relative_to(ROOT)}/test_x.py") for path in shared if path.name != "integration"
    } == {str(path.relative_to(ROOT)) for path in shared if path.name != "integration"}


def test_tests_with_engines_are_where_make_looks_for_them() -> None:
    """Elsewhere they would be in no run."""
    (looked,) = re.findall(
        r"^ENGINES := .*\$\(if \$\(TEST_ARGS\),,([^)]*)\)", MAKEFILE.read_text(), re.MULTILINE
    )
    places = [ROOT / place for place in looked.split()]
    marked = re.compile(r"\bmark\.engi" r"ne\b")
    found = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if marked.search(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 10
    # Where all have engines, and the other run does not look.
    whole = ROOT / "tests" / "integration"
    assert f"--ignore {whole.relative_to(ROOT)}" in MAKEFILE.read_text()
    assert set(whole.rglob("test_*.py")) <= set(found)
    strays = [path for path in found if not any(path.is_relative_to(place) for place in places)]
    assert strays == []
