"""Photographs the console of a deployment under load: docs/img/console*.png, which docs/guides/console.md shows.

    .venv/bin/python docs/img/record_console.py

It needs Debian's chromium. It starts a part of examples/synthetic.yaml with a token, and sends it a minute of made-up
traffic.
"""

import argparse
import asyncio
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.lengths import Uniform
from prfaas.core.workload.requests import write_requests
from prfaas.core.workload.traffic import take

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from studies._sessions import SessionTraffic  # noqa: E402
from tests.browser import CHROMIUM, MISSING, Page, chromium_page  # noqa: E402

_START_S = 120
# Not those of the example, which may be running.
_PORT = 8870
_GATEWAY, _CONSOLE = f"http://127.0.0.1:{_PORT}", f"http://127.0.0.1:{_PORT + 1}/console"
_OFFLOADED = """[...document.querySelectorAll('tr[data-request]')].find((row) =>
  row.querySelector('.offload') && row.querySelector('.dot.good'))"""
_ROWS = "document.querySelectorAll('tr[data-request]').length"


def _deployment(token_file: Path, ledger: Path) -> str:
    """The example with so few engines that a laptop keeps up with all of them."""
    told = yaml.safe_load((ROOT / "examples" / "synthetic.yaml").read_text())
    for cluster in told["clusters"]:
        cluster["instances"] = [each for each in cluster["instances"] if each["name"][-1] in "01"]
        for instance in cluster["instances"]:
            instance["http_port"], instance["kv_port"] = (
                instance["http_port"] + 700,
                instance["kv_port"] + 700,
            )
    told["gateway"] |= {"port": _PORT, "admin": {"port": _PORT + 1, "token_file": str(token_file)}}
    # So that the page can say whether offloading pays.
    told["gateway"]["ledger"] = {"file": str(ledger)}
    told["name"] = "two-coasts"
    return yaml.safe_dump(told, sort_keys=False)


async def _photograph(token: str, folder: Path, out: Path, load_s: float) -> None:
    async with chromium_page(folder / "profile") as page:
        await page.open(_CONSOLE)
        await page.until("document.querySelector('#token') !== null")
        await page.write("#token", token)
        await page.press("Enter")
        await page.until(f"{_ROWS} > 5", 60)
        await asyncio.sleep(load_s)
        # One that was offloaded and answered has the most to tell.
        await page.until(f"{_OFFLOADED} !== undefined", 60)
        await page.run(f"{_OFFLOADED}.querySelector('button.link-like').click()")
        await page.until("document.querySelector('.explained')?.innerText.startsWith('Request')")
        await _take(page, out / "console.png", 1280, 1500, dark=False)
        await page.run("document.querySelector('#requests').scrollIntoView()")
        await _take(page, out / "console-dark.png", 1280, 900, dark=True)
        await page.run("scrollTo(0, 0)")
        await _take(page, out / "console-narrow.png", 390, 844, dark=False)


async def _take(page: Page, path: Path, width: int, height: int, *, dark: bool) -> None:
    await page.resize(width, height)
    await page.scheme(dark)
    # The page measures itself and draws anew.
    await asyncio.sleep(2.0)
    await page.screenshot(path)
    # A page has few colours: half the bytes, and nothing to see of it.
    Image.open(path).convert("RGB").quantize(200).save(path, optimize=True)


def main() -> None:
    """Start, load, photograph, stop."""
    parser = argparse.ArgumentParser(description="Photograph the console of a deployment under load.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before the pictures")
    parser.add_argument("--out", type=Path, default=HERE, help="where they go; default: beside this program")
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit(MISSING)
    prfaas = Path(sys.executable).with_name("prfaas")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        token = secrets.token_hex(16)
        token_file = folder / "token"
        token_file.write_text(token)
        token_file.chmod(0o600)
        file = folder / "synthetic.yaml"
        file.write_text(_deployment(token_file, folder / "ledger.sqlite"))
        up = subprocess.Popen(
            [prfaas, "up", file], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        load = None
        try:
            retries = ["--retry", str(_START_S), "--retry-delay", "1", "--retry-all-errors"]
            subprocess.run(["curl", "--silent", "--fail", *retries, f"{_GATEWAY}/ready"], check=True)
            conversations = SessionTraffic(Poisson(0.8), 4, 6, Uniform(200, 16_000), Uniform(40, 200))
            trace = folder / "conversations.jsonl"
            write_requests(trace, take(conversations.chunks(np.random.default_rng(0)), until_s=600))
            load = subprocess.Popen(
                [prfaas, "replay", _GATEWAY, "--trace", trace],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            asyncio.run(_photograph(token, folder, options.out, options.seconds))
        finally:
            for process in (load, up):
                if process is not None:
                    process.terminate()
                    process.wait(60)


if __name__ == "__main__":
    main()
