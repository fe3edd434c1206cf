"""One thing that `prfaas doctor` looked at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is what was looked at, `text` what was found, `mend` what to do about it (only for problems)."""

    subject: str
    level: Literal["ok", "problem"]
    text: str
    mend: str | None = None


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(subject, "ok", text)


def problem(subject: str, text: str, mend: str) -> Finding:
    """Something needs mending."""
    return Finding(subject, "problem", text, mend)


def any_problem(findings: Sequence[Finding]) -> bool:
    """True if something needs mending."""
    return any(finding.level == "problem" for finding in findings)
