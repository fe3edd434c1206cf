"""A headless Chromium, driven by its DevTools protocol over aiohttp: no driver, no further package."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
MISSING = "Chromium is not installed (Debian's package chromium, see requirements/debian.txt)"

_START_S = 30.0
_CALL_S = 60.0
_FLAGS = (
    "--headless=new",
    # Tests run as root in containers, where Chromium's own sandbox can't be made. They load only our page.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    # Its handler of crashes would outlive it.
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--no-first-run",
    "--proxy-server=direct://",
    "--remote-debugging-port=0",
)


class Page:
    """One page. `errors`: what it wrote to its console as an error, and what it did not catch."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.addresses: list[str] = []
        """Everything that it asked for."""

    async def listen(self) -> None:
        """Until the socket ends."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._asked.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]["exceptionDetails"])[:500])
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] in (
                "error",
                "warning",
            ):
                self.errors.append(json.dumps(told["params"]["args"])[:500])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(
                    told["params"]["entry"]["text"] + " " + told["params"]["entry"].get("url", "")
                )
            elif told["method"] == "Network.requestWillBeSent":
                self.addresses.append(told["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol. Raises AssertionError with its error."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(_CALL_S):
            told = await answer
        assert "error" not in told, (method, told)
        result: dict[str, Any] = told["result"]
        return result

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, (expression, told["exceptionDetails"])
        return told["result"].get("value")

    async def until(self, expression: str, limit_s: float = 40.0) -> Any:
        """Wait until an expression is true; returns its value."""
        value = None
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not (value := await self.run(expression)):
                    await asyncio.sleep(0.05)
                return value
        shown = await self.run("document.body.innerText.slice(0, 1500)")
        raise AssertionError(
            f"{expression} did not become true; errors {self.errors}; the page shows: {shown}"
        )

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page of the given size."""
        await self.resize(width, height)
        await self.scheme(dark)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def scheme(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def press(self, key: str) -> None:
        """One key, down and up, where the focus is."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "Home": 36}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def write(self, selector: str, text: str) -> None:
        """Write into a field."""
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def text(self, selector: str = "body") -> str:
        text: str = await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return text

    async def screenshot(self, path: Path) -> None:
        """Write what is visible as PNG."""
        told = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def chromium_page(profile: Path) -> AsyncIterator[Page]:
    """A Chromium with one empty page and an empty profile; it is ended and waited for."""
    assert CHROMIUM is not None, MISSING
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(profile, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as listed:
                target = next(page for page in await listed.json() if page["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Runtime", "Log", "Page", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
            await listening
    finally:
        with suppress(ProcessLookupError):
            # Its children are in its group.
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _port(profile: Path, process: asyncio.subprocess.Process) -> int:
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(_START_S):
        while True:
            assert process.returncode is None, f"Chromium ended with {process.returncode}"
            if file.exists() and (lines := file.read_text().splitlines()):
                return int(lines[0])
            await asyncio.sleep(0.05)
