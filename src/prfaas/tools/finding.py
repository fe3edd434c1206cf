"""Findings of the checks of a deployment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    level: Literal["ok", "problem"]
    text: str
    """What was found."""
    mend: str | None = None
    """What to do about it; only for problems."""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(subject, "ok", text)


def problem(subject: str, text: str, mend: str) -> Finding:
    """Something needs mending."""
    return Finding(subject, "problem", text, mend)


def any_problem(findings: Sequence[Finding]) -> bool:
    """True if something needs mending."""
    return any(finding.level == "problem" for finding in findings)
