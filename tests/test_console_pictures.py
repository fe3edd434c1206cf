"""docs/img/console*.png are made by a program, of a console under load: here with seconds of it."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tests.browser import CHROMIUM, MISSING
from tests.guides.page import ROOT

pytestmark = [
    pytest.mark.docs,
    pytest.mark.extended("starts a deployment and a browser for pictures alone"),
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
]
SIZES = {"console.png": (1280, 1500), "console-dark.png": (1280, 900), "console-narrow.png": (390, 844)}


def test_the_console_is_photographed(tmp_path: Path) -> None:
    program = ROOT / "docs/img/record_console.py"
    done = subprocess.run(
        [sys.executable, str(program), "--seconds", "3", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, size in SIZES.items():
        with Image.open(tmp_path / name) as picture:
            assert picture.size == size
            # Nothing was drawn where there are two colours.
            assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20
        with Image.open(ROOT / "docs/img" / name) as shown:
            assert shown.size == size
