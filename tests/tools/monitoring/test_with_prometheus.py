"""A Prometheus scrapes a gateway and answers what the dashboards ask: what it makes of our labels is not ours."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests.ports import free_ports
from tests.serving.gateway.world import World, running_world

from prfaas.tools.monitoring import dashboards
from prfaas.tools.monitoring.alerts import rules_yaml

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not there: Debian's package prometheus has it"
)

SHORT = list(range(60, 90))
# What a gateway of three engines and a few requests has at once.
SHOWN = {
    "prfaas-overview": {
        *(
            "Gateways",
            "Instances in routing",
            "Requests",
            "TTFT, 95 %",
            "Requests by outcome",
            "TTFT by route",
        ),
        *("Wait of a new request", "Decisions by reason", "Lag of the event loop", "Memory"),
        *("Processor", "File descriptors in use", "Open requests"),
    },
    "prfaas-links": {
        *("Egress and capacity", "Utilisation", "Capacity against the deployment file", "In use"),
        "Time until it is empty",
    },
    "prfaas-engines": {
        *("In routing", "Draining", "Role prefill", "Role decode", "Open prefills", "Open requests"),
        *("Slots in use", "Prefills without an instance"),
    },
    "prfaas-caches": {"Indexed blocks", "Blocks in the index"},
    "prfaas-series": {"prfaas_build_info", "prfaas_control_instance_info", "process_open_fds"},
}


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[aiohttp.ClientSession]:
    """One that scrapes `target` twice a second, with our rules, as a session with its address."""
    (folder / "prfaas.rules.yaml").write_text(rules_yaml())
    job = {
        "job_name": "prfaas-gateway",
        "static_configs": [{"targets": [target], "labels": {"deployment": "d"}}],
    }
    timing = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
    config = {"global": timing, "rule_files": ["prfaas.rules.yaml"], "scrape_configs": [job]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *("prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"),
        f"--web.listen-address=127.0.0.1:{port}",
        cwd=folder,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            await ready(session)
            yield session
    finally:
        process.kill()
        await process.wait()


async def ready(session: aiohttp.ClientSession) -> None:
    """Wait until a Prometheus answers questions."""
    while True:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get("/-/ready") as response:
                if response.ok:
                    return
        await asyncio.sleep(0.1)


async def asked(session: aiohttp.ClientSession, expression: str) -> list[dict[str, Any]]:
    """The samples that an expression gives now. An error of Prometheus is one of the test."""
    async with session.post("/api/v1/query", data={"query": expression}) as response:
        answer = await response.json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


async def until(session: aiohttp.ClientSession, expression: str) -> None:
    """Wait until an expression gives something."""
    while not await asked(session, expression):
        await asyncio.sleep(0.2)


async def shown(session: aiohttp.ClientSession, uid: str) -> set[str]:
    """Titles of a dashboard's charts that have something to draw for every one of their names."""
    found = set()
    (board,) = (json.loads(path.read_text()) for path in dashboards() if path.stem == uid)
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression = re.sub(r'"\$\w+"', '".*"', target["expr"])
            samples = await asked(session, re.sub(r"\$__(rate_interval|range)", "1m", expression))
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            if samples and all(labels <= sample["metric"].keys() for sample in samples):
                found.add(panel["title"])
    return found


@pytest.mark.slow("starts Prometheus, and waits until it has asked")
def test_dashboards_have_something_to_draw(tmp_path: Path) -> None:
    missing: set[tuple[str, str]] = set()

    async def use(world: World, session: aiohttp.ClientSession) -> None:
        await until(session, "prfaas_build_info")
        # A counter that appears with a number has not grown, as far as Prometheus knows.
        while not await asked(session, "sum(rate(prfaas_gateway_requests_total[1m])) > 0"):
            await world.complete(SHORT)
            await asyncio.sleep(0.2)
        await until(session, 'prfaas_control_instance_healthy{exported_instance="decode"} == 1')
        for uid, titles in SHOWN.items():
            missing.update((uid, title) for title in titles)
            # All of a gateway's series are away after a scrape that took too long.
            while uid in dict(missing):
                missing.difference_update((uid, title) for title in await shown(session, uid))
                await asyncio.sleep(0.5)
        async with session.get("/api/v1/rules") as response:
            (group,) = (await response.json())["data"]["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}

    async def main() -> None:
        async with asyncio.timeout(120), running_world(tmp_path / "world", live=True) as world:
            async with world.admin.get("/metrics") as response:
                target = str(response.url.authority)
            async with prometheus(tmp_path, target) as session:
                await use(world, session)

    (tmp_path / "world").mkdir()
    try:
        asyncio.run(main())
    except TimeoutError:
        pytest.fail(f"nothing was told or drawn in time of {missing or 'the gateway'}")
