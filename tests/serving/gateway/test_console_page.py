"""The console in a real browser, before a stand-in deployment under load."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import axe_core_python
import pytest
from tests.browser import CHROMIUM, MISSING, Page, chromium_page

from prfaas.core.deployment import AdminConfig, GatewayConfig, LedgerConfig, Routing

from .world import World, running_world

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

TOKEN = "a-token-of-operators"
ROWS = "document.querySelectorAll('tr[data-request]').length"
NO_SIDEWAYS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@asynccontextmanager
async def seen(home: Path, *, token: bool, ledger: bool = False) -> AsyncIterator[tuple[World, Page, str]]:
    """A world that answers requests all the time, and a browser beside it."""
    file = home / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    admin = AdminConfig("127.0.0.1", 0, file if token else None)
    config = GatewayConfig("127.0.0.1", 0, admin, route_header="full")
    if ledger:
        config = replace(config, ledger=LedgerConfig(home / "ledger.sqlite"))
    async with (
        asyncio.timeout(240),
        running_world(home, live=True, spare=True, gateway_config=config) as world,
    ):
        assert world.live is not None
        # The world's own policy reads no threshold that could be set.
        object.__setattr__(world.live.members.running.current, "routing", Routing("paper", 100))
        ending = asyncio.Event()
        # Before the browser, which may take long to start: a link that carries nothing at first is taken for down.
        load = asyncio.create_task(_load(world, ending))
        try:
            async with chromium_page(home / "profile") as page:
                yield world, page, str(world.admin._base_url).rstrip("/") + "/console"
        finally:
            ending.set()
            await load
            world.admin.headers["Authorization"] = f"Bearer {TOKEN}"
        await world.settled()


async def _load(world: World, ending: asyncio.Event) -> None:
    number = 0
    while not ending.is_set():
        number += 1
        prompt = [number % 200] * (30 if number % 3 else 300)
        await world.post("/v1/completions", {"model": "stand-in", "prompt": prompt, "max_tokens": 3})
        await asyncio.sleep(0.05)


@pytest.mark.slow("a browser shows the page")
def test_the_page_shows_live_numbers_and_goes_back_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with seen(tmp_path, token=False) as (world, page, url):
            await page.open(url)
            await page.until(f"{ROWS} > 5")
            before = int((await page.text("#routed")).replace(",", ""))
            await page.until(
                f"Number(document.querySelector('#routed').innerText.replace(',', '')) > {before + 5}"
            )
            # The stand-ins know no way back.
            await page.until("document.querySelector('#alarms .critical') !== null")
            text = await page.text()
            for words in (
                "far->pd",
                "remote",
                "decode",
                "spare",
                "The link pd->far is not used",
                "can only look",
            ):
                assert words in text, words
            assert await page.run("document.querySelectorAll('#map .link').length") == 2
            await page.until("document.querySelectorAll('#decisions rect[class^=series]').length > 0")
            assert await page.run("[...document.querySelectorAll('[data-drain]')].every((b) => b.disabled)")

            # Pause: the numbers stay. Live again: they go on.
            await page.click("#pause")
            paused = await page.text("#routed")
            assert await page.run("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
            routed = (await _state(world))["requests"]["routed"]
            while (await _state(world))["requests"]["routed"] < routed + 10:
                await asyncio.sleep(0.05)
            assert await page.text("#routed") == paused

            # Pin the moment, go back by key to the oldest, and return to the pinned one.
            await page.click("#pin")
            await page.run("document.querySelector('#scrub').focus()")
            await page.press("Home")
            await page.until(f"document.querySelector('#routed').innerText !== '{paused}'")
            assert "ago" in await page.run("document.querySelector('#scrub').getAttribute('aria-valuetext')")
            await page.click(".pinned button")
            await page.until(f"document.querySelector('#routed').innerText === '{paused}'")
            await page.click("#pause")
            await page.until(f"document.querySelector('#routed').innerText !== '{paused}'")

            # Every request went to the page's own gateway, and nothing was wrong.
            assert all(address.startswith(url.removesuffix("/console")) for address in page.addresses)
            assert page.errors == []

    asyncio.run(main())


@pytest.mark.slow("a browser shows the page")
def test_a_request_is_explained_and_pinned(tmp_path: Path) -> None:
    async def main() -> None:
        async with seen(tmp_path, token=False) as (_, page, url):
            await page.open(url)
            await page.until(f"{ROWS} > 3")
            request_id = await page.run("document.querySelector('tr[data-request]').dataset.request")
            row = f"tr[data-request='{request_id}']"
            assert await page.run(f'document.querySelectorAll("{row} .waterfall rect").length') >= 3
            await page.click(f"{row} button[aria-pressed]")
            # It stays on top while others come.
            await page.until(f'document.querySelector("{row} button[aria-pressed=true]") !== null')
            newest = "document.querySelectorAll('tr[data-request]')[1].dataset.request"
            second = await page.run(newest)
            await page.until(f"{newest} !== '{second}'")
            assert await page.run("document.querySelector('tr[data-request]').dataset.request") == request_id
            await page.run(f'document.querySelector("{row} button.link-like").focus()')
            await page.press("Enter")
            await page.until("document.querySelector('.explained')?.innerText.startsWith('Request')")
            text = await page.text(".explained")
            assert request_id in text and "threshold" in text and "It took:" in text

            # Simulate from here: a command, and a trace to save.
            await page.click("#simulate-ask")
            command = await page.until("document.querySelector('#simulate pre')?.innerText")
            assert command.startswith("prfaas simulate test.yaml --trace scenario.jsonl")
            await page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
            await page.click("#simulate-save")
            for _ in range(200):
                if (tmp_path / "scenario.jsonl").exists():
                    break
                await asyncio.sleep(0.05)
            assert (tmp_path / "scenario.jsonl").read_text().startswith('{"arrival_s":0.0')
            assert page.errors == []

    asyncio.run(main())


@pytest.mark.slow("a browser shows the page")
def test_the_token_opens_the_page_and_lets_it_change_things(tmp_path: Path) -> None:
    async def main() -> None:
        async with seen(tmp_path, token=True) as (world, page, url):
            assert world.live is not None
            await page.open(url)
            await page.until("document.querySelector('#token') !== null")
            assert "asks for a token" in await page.text()
            await page.write("#token", "not-the-token-at-all")
            await page.press("Enter")
            await page.until("document.body.innerText.includes('not the token')")
            await page.run("document.querySelector('#token').value = ''")
            await page.write("#token", TOKEN)
            await page.press("Enter")
            await page.until(f"{ROWS} > 0")
            assert TOKEN not in await page.run(
                "location.href + document.cookie + JSON.stringify(localStorage)"
            )
            assert not any(TOKEN in address for address in page.addresses)

            # Drain, and take it back.
            button = "[data-drain=spare]"
            await page.click(button)
            await page.until(f"document.querySelector('{button}').innerText.startsWith('Undrain')")
            assert world.live.cluster_state.instance("spare").closed
            await page.until("document.querySelector('#changes').innerText.includes('spare is drain')")
            await page.click(button)
            await page.until(f"document.querySelector('{button}').innerText.startsWith('Drain')")
            assert not world.live.cluster_state.instance("spare").closed

            # Hold a threshold, and let it be searched again.
            await page.write("#threshold-pd", "77")
            await page.press("Enter")
            await page.until("document.querySelector('.said').innerText.includes('held at 77 tokens')")
            assert world.live.cluster_state.view.threshold_tokens["pd"] == 77.0
            await page.until("document.querySelector('#decisions').innerText.includes('(held)')")
            await page.click(".threshold-form button[type=button]")
            await page.until("document.querySelector('.said').innerText.includes('searched again')")
            assert not world.live.thresholds.held
            # A refused token is the only error that a browser notes.
            assert all("401" in error for error in page.errors), page.errors

    asyncio.run(main())


@pytest.mark.slow("a browser shows the page")
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_core_finds_nothing(tmp_path: Path, width: int) -> None:
    """The page that asks for a token, and the console with a request and a simulation opened, light and dark."""

    async def main() -> None:
        async with seen(tmp_path, token=True, ledger=True) as (_, page, url):
            for dark in (False, True):
                await page.open(url, width=width, height=844, dark=dark)
                await page.until("document.querySelector('#token') !== null")
                assert await page.run(AXE) == []
                await page.write("#token", TOKEN)
                await page.press("Enter")
                await page.until(f"{ROWS} > 3")
                await page.click("tr[data-request] button.link-like")
                await page.until("document.querySelector('.explained')?.innerText.startsWith('Request')")
                await page.click("#simulate-ask")
                await page.until("document.querySelector('#simulate pre') !== null")
                await page.until("document.querySelector('#worth td') !== null")
                assert await page.run(AXE) == []
                # The token is forgotten, so that the next one is asked for it too.
                await page.run("sessionStorage.clear()")

    asyncio.run(main())


@pytest.mark.slow("a browser shows the page")
def test_the_first_screen_says_whether_it_is_well(tmp_path: Path) -> None:
    async def main() -> None:
        async with seen(tmp_path, token=False) as (world, page, url):
            await page.open(url, width=390, height=844)
            await page.until("document.querySelector('#now-pays b')?.innerText === 'Not known'")
            assert "gateway.ledger" in await page.text("#now-pays")
            assert "No ledger is kept" in await page.text("#worth")
            assert "in the last minute." in await page.text("#now-bottleneck")
            shown = "document.querySelector('#now').getBoundingClientRect().bottom <= window.innerHeight"
            assert await page.run(shown)
            # With a ledger each offloaded request says what it would have taken at home.
            lately = {"ended": 9, "offloaded": 4, "compared": 2, "first_token_s": 1.0, "at_home_s": 4.0}
            for sums, told in (
                (lately | {"egress_cost": 0.25}, ("good", "75 % sooner", "3.00 an hour")),
                (lately | {"first_token_s": 6.0, "egress_cost": 0}, ("warn", "50 % later", "3.00 s")),
                (lately | {"offloaded": 0, "egress_cost": 0}, ("none", "Not used", "None of 9")),
            ):
                asked = f"import('/console/now.js').then(({{pays}}) => pays({json.dumps(sums)}).join(' '))"
                said = await page.run(asked)
                assert all(part in said for part in told), said
            # While requests are refused, the page says so, whatever else is wrong.
            assert world.live is not None
            for name in ("local", "decode", "spare"):
                world.live.drains.drain(name, wanted=True)
            await page.until(
                "document.querySelector('#alarms').innerText.includes('were refused, for want of')"
            )
            assert await page.text("#now-well b") == "No"
            assert "No alarms" not in await page.text()

    asyncio.run(main())


@pytest.mark.slow("a browser shows the page")
def test_what_offloading_was_worth_is_told(tmp_path: Path) -> None:
    def chosen(what: str, value: str) -> str:
        place = f"document.querySelector('#worth-{what}')"
        return f"{place}.value = '{value}'; {place}.dispatchEvent(new Event('change', {{bubbles: true}}))"

    async def main() -> None:
        async with seen(tmp_path, token=False, ledger=True) as (_, page, url):
            await page.open(url)
            await page.until(f"{ROWS} > 3")
            # The ledger is written once a second, and asked for where something else is chosen.
            for hours in ("1", "168") * 50:
                await page.run(chosen("hours", hours))
                await asyncio.sleep(0.2)
                if await page.run("document.querySelector('[data-worth=\"0 to 1K\"]') !== null"):
                    break
            await page.run(chosen("by", "link"))
            await page.until(
                'document.querySelector(\'[data-worth="remote->pd"], [data-worth$="->pd"]\') !== null'
            )
            text = await page.text("#worth")
            assert "were offloaded." in text and "stays" in text and "GPU-s moved" in text
            assert page.errors == []

    asyncio.run(main())


@pytest.mark.slow("a browser shows the page")
def test_it_is_readable_small_and_dark(tmp_path: Path) -> None:
    async def main() -> None:
        async with seen(tmp_path, token=False, ledger=True) as (_, page, url):
            await page.open(url, width=390, height=844)
            await page.until(f"{ROWS} > 3")
            await page.click("tr[data-request] button.link-like")
            await page.until("document.querySelector('.explained')?.innerText.startsWith('Request')")
            assert await page.run(NO_SIDEWAYS)
            assert await page.run(CUT) == []
            light = await page.run("getComputedStyle(document.body).backgroundColor")
            await page.scheme(dark=True)
            assert await page.run("getComputedStyle(document.body).backgroundColor") != light
            assert await page.run(CONTRAST) == []
            await page.resize(1280)
            assert await page.run(NO_SIDEWAYS)
            await page.scheme(dark=False)
            assert await page.run(CONTRAST) == []

            # By keyboard alone: every button and field is reached, has a name and shows the focus.
            assert await page.run(NAMELESS) == []
            await page.run("document.activeElement.blur()")
            await page.press("Tab")
            assert await page.run("document.activeElement.className") == "skip"
            await page.press("Tab")
            assert await page.run("document.activeElement.id") == "pause"
            assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            assert await page.run("document.querySelectorAll('h1').length") == 1
            assert page.errors == []

    asyncio.run(main())


# axe-core's findings that matter. SVG has backgrounds that it can't know: the test below looks at colours by itself.
AXE_CORE = Path(axe_core_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
AXE = f"""{AXE_CORE};
axe.run(document, {{resultTypes: ['violations']}}).then((found) => found.violations
  .map((each) => `${{each.impact}} ${{each.id}}: ${{each.nodes.map((node) => node.html.slice(0, 120)).join(' ')}}`))"""

# What can be seen only by moving something sideways, or not at all.
CUT = """[...document.querySelectorAll('main *, header *')].filter((element) =>
  element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).overflowX !== 'visible'
  && !element.closest('.hidden, thead, svg')
).map((element) => element.outerHTML.slice(0, 120))"""

# Elements that can be used and have no name for a screen reader.
NAMELESS = """[...document.querySelectorAll('button, input, select, meter, [role=img], [role=region]')]
.filter((element) =>
  !(element.innerText || '').trim() && !element.getAttribute('aria-label') && !element.labels?.length
).map((element) => element.outerHTML.slice(0, 120))"""

# Text with a contrast below 4.5 : 1 against the first background below it (WCAG AA), SVG aside.
CONTRAST = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest('svg, script, :disabled, .hidden, .skip')) continue;
    const [a, b] = [light(parts(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) bad.push(`${element.className} ${element.innerText.slice(0, 30)} ${contrast.toFixed(2)}`);
  }
  return [...new Set(bad)];
})()"""


async def _state(world: World) -> dict[str, dict[str, int]]:
    async with world.admin.get("/prfaas/state") as answer:
        state: dict[str, dict[str, int]] = await answer.json()
        return state
