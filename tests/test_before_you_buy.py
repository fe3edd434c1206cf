"""docs/guides/before-you-buy.md as written: from a config.json and the names of two GPUs to a verdict and its plots."""

from pathlib import Path

import pytest
from tests.test_own_policy_page import ROOT, Page, fences

PAGE = ROOT / "docs" / "guides" / "before-you-buy.md"

pytestmark = pytest.mark.docs


@pytest.fixture
def page(tmp_path: Path) -> Page:
    found = Page(tmp_path, fences(PAGE.read_text()))
    for each in found.blocks:
        if each.file:
            (tmp_path / each.file).write_text(each.text)
    return found


@pytest.mark.extended("does all that the page says; each of its commands has tests of its own")
def test_from_a_config_and_two_gpus_to_a_verdict(page: Page) -> None:
    sized, estimated, planned, swept, simulated = page.shell
    assert "12 full + 36 GDN" in page.run(sized)
    page.run(estimated)
    for gpu in ("h100", "b200"):
        assert "origin: estimated" in (page.folder / f"{gpu}.yaml").read_text()

    printed = page.run(planned)
    for row in (
        "fleet you have",
        "at equal cost",
        "req/s, P90 in 600 ms",
        "egress break-even per GB",
        "offer->mine",
    ):
        assert row in printed

    printed = page.run(swept)
    assert printed.count("No break-even from ") == 2
    assert len(list((page.folder / "plots").glob("*.svg"))) == 4
    assert "TTFT" in page.run(simulated)
