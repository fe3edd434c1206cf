"""Pages that messages name are there: for who has a checkout, who has a package, and who reads a site."""

from pathlib import Path

import pytest

from prfaas.core import shipped
from prfaas.core.shipped import page


def test_in_a_checkout_it_is_the_file() -> None:
    assert page("guides/alerts") == str(Path(__file__).parents[2] / "docs/guides/alerts.md")


def test_in_a_package_it_is_the_file_that_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prfaas/docs").mkdir(parents=True)
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "prfaas")
    assert page("guides/alerts") == str(tmp_path / "prfaas/docs/guides/alerts.md")


def test_a_site_goes_before_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_DOCS", "https://docs.example.org/prfaas/")
    assert page("guides/alerts") == "https://docs.example.org/prfaas/guides/alerts.html"
