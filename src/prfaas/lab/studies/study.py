"""What a study is: simulations to run, and what to make of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prfaas.lab.studies.runs import Key, Outcome, Run
from prfaas.lab.studies.setup import Setting

Outcomes = Mapping[Key, Outcome]


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` and `rows` of text; the first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """`svg`: a whole file, `name` its name without the ending, `caption`: what it shows, in words."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Section:
    """A study's part of the page: what was asked and simulated, what came out, the numbers and drawings.

    `findings` are one paragraph. Tables stand in the order of `tables`, each under its title.
    """

    question: str
    setup: str
    findings: Sequence[str]
    tables: Mapping[str, Table]
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """`runs` says what to simulate for a setting, `tell` what it means, from the outcomes by key alone."""

    name: str
    title: str
    runs: Callable[[Setting], Sequence[Run]]
    tell: Callable[[Setting, Outcomes], Section]
