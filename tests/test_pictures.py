"""The drawings of the documentation as a browser shows them: no text runs over the edge of a box."""

import asyncio
from pathlib import Path

import pytest
from tests.browser import CHROMIUM, MISSING, chromium_page

ROOT = Path(__file__).parents[1]
# Drawn by hand; the others are plots and recordings.
DRAWN = ("overview", "pool")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
    pytest.mark.slow("a browser starts for each drawing"),
]

_CROSSING = """
(() => {
  const box = (each) => each.getBoundingClientRect();
  const page = box(document.documentElement);
  const inside = (a, b) => a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
  const apart = (a, b) => a.right < b.left || a.left > b.right || a.bottom < b.top || a.top > b.bottom;
  const boxes = [...document.querySelectorAll('rect')].map(box);
  return [...document.querySelectorAll('text')]
    .filter((text) => !inside(box(text), page)
      || boxes.some((each) => !inside(box(text), each) && !apart(box(text), each)))
    .map((text) => text.textContent);
})()
"""


async def crossing(picture: Path, profile: Path) -> list[str]:
    """Texts of a drawing that are partly in a box, or partly off it."""
    async with chromium_page(profile) as page:
        await page.open(picture.as_uri(), width=1100, height=700)
        await page.until("document.querySelectorAll('text').length > 0")
        found: list[str] = await page.run(_CROSSING)
        return found


@pytest.mark.parametrize("name", DRAWN)
def test_no_text_crosses_an_edge(name: str, tmp_path: Path) -> None:
    assert asyncio.run(crossing(ROOT / f"docs/img/{name}.svg", tmp_path)) == []


def test_a_text_that_crosses_an_edge_is_found(tmp_path: Path) -> None:
    picture = tmp_path / "wrong.svg"
    picture.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 100"><rect x="10" y="10" width="90" height="40"/>'
        '<text x="20" y="30">as long as this is</text><text x="20" y="80">below</text></svg>'
    )
    assert asyncio.run(crossing(picture, tmp_path / "profile")) == ["as long as this is"]
