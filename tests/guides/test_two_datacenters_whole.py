"""The guide of two datacenters from its first command to its last, as a newcomer types them, while requests go on.

Each machine of the guide is a set of namespaces with a supervisor of its own. What differs from the guide: engines are
synthetic, a stand-in of systemd runs all as root, and there is no GPU to install vLLM for.
"""

import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.guides.load import LONG_EVERY
from tests.guides.machines import Country, Machine, missing
from tests.guides.page import ROOT, Guide

PAGE = Guide.read("two-datacenters")
PROBLEM = missing() or (
    None if shutil.which("etcd") else "there is no etcd; install the Debian package etcd-server"
)
LIMIT_S = 600.0
RATE_PER_S = 3.0
GATEWAYS = {"gateway-a": "198.51.100.20", "gateway-b": "198.51.100.21"}
ENGINES = {
    "east-0": "192.0.2.10",
    "east-1": "192.0.2.11",
    "home-0": "198.51.100.10",
    "home-1": "198.51.100.11",
    "home-2": "198.51.100.12",
}
CLIENTS = "203.0.113.10"
# The page says so: section 2.
WITHOUT_GPUS = {"/models/qwen3-next": "tiny:qwen3-next", "h200x8": "synthetic", "h20x8": "synthetic"}

pytestmark = [
    pytest.mark.docs,
    pytest.mark.newcomer,
    pytest.mark.slow("builds two datacenters of namespaces, as the guide says"),
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]


class Newcomer:
    """Who follows the guide, with a folder of their own and machines at two sites."""

    def __init__(self, country: Country, folder: Path) -> None:
        self._country = country
        self._folder = folder
        self.office = country.machine("home", "office", "198.51.100.2")
        self.engines: dict[str, Machine] = {}
        self.gateways: dict[str, Machine] = {}
        self._shown = time.monotonic()

    def step(self, what: str) -> None:
        now_s = time.monotonic()
        print(f"{now_s - self._shown:6.1f} s  then: {what}")
        self._shown = now_s

    def write_the_file(self) -> None:
        (init,) = PAGE.blocks("2. Write the file")
        for name, without in WITHOUT_GPUS.items():
            init = init.replace(name, without)
        self._at_the_office(init)
        with (self.office.folder / "llm.yaml").open("a") as file:
            file.write("\n" + PAGE.blocks("Two gateways", "yaml")[0])
        (emit,) = PAGE.blocks("3. Emit")
        self._at_the_office(emit)

    def engine(self, name: str) -> None:
        site = name.partition("-")[0]
        machine = self._country.machine(site, name, ENGINES[name])
        self.engines[name] = machine
        self._prepare(machine, f"{site}/{machine.address}", "of an engine or a pool", name)
        self._start(machine)

    def gateway(self, name: str) -> Machine:
        machine = self._country.machine("home", name, GATEWAYS[name])
        self.gateways[name] = machine
        return machine

    def start_gateway(self, machine: Machine) -> None:
        self._prepare(machine, "home/gateway", "of a gateway", "gateway")
        self._start(machine)

    def on_a_gateway(self, shell: str) -> str:
        """What is typed on a gateway's machine, where section 7 has set a variable."""
        first = PAGE.commands("7. Check, and send")[0]
        machine = self.gateways["gateway-a"]
        return machine.typed(f"{first}\n{shell}")

    def checked(self) -> None:
        """`prfaas doctor` finds no problem any more."""
        doctor = PAGE.commands("7. Check, and send")[1]
        assert doctor.startswith("prfaas doctor")
        until_s = time.monotonic() + LIMIT_S
        while True:
            try:
                said = self.on_a_gateway(doctor)
            except AssertionError:
                # Engines need some time to start.
                if time.monotonic() > until_s:
                    raise
                time.sleep(3.0)
            else:
                assert re.search(r"disaggregation: .*east", said), said
                return

    def add_home_2(self) -> None:
        path = self.office.folder / "llm.yaml"
        (line,) = PAGE.blocks("9. Add a machine", "yaml")
        before, after = re.split(r"(?m)(?<=^      - \{name: home-1)(?=,)", path.read_text())
        rest, below = after.split("\n", 1)
        indented = f"      {line.strip()}\n"
        path.write_text(f"{before}{rest}\n{indented}{below}")
        at_the_office, reload = PAGE.blocks("9. Add a machine")[:2]
        self._at_the_office(at_the_office)
        self.engine("home-2")
        emitted = self.office.folder / "machines/home/gateway/prfaas/deployment.yaml"
        for machine in self.gateways.values():
            machine.typed(f"cp {emitted} /etc/prfaas/")
        said = self.on_a_gateway(reload)
        assert said.count("instance home-2 joins home") == 2, said
        assert said.endswith("applied\n"), said

    def state(self, name: str) -> dict[str, Any]:
        """What the gateway tells operators."""
        token = '-H "authorization: Bearer $(cat /var/lib/prfaas-gateway/llm/admin-token)"'
        told: dict[str, Any] = json.loads(
            self.gateways[name].typed(f"curl -s {token} http://127.0.0.1:8001/prfaas/state")
        )
        return told

    def until(self, what: str, name: str, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until_s = time.monotonic() + LIMIT_S
        while True:
            state = self.state(name)
            if happened(state):
                return state
            assert time.monotonic() < until_s, (what, state["fleet"], self.gateways[name].told())
            time.sleep(0.5)

    def _at_the_office(self, shell: str) -> None:
        self.office.typed(shell, home=self.office.folder)

    def _prepare(self, machine: Machine, emitted: str, row: str, name: str) -> None:
        """What section 4 says."""
        shutil.copytree(self.office.folder / "machines" / emitted, machine.folder / "machine")
        table = dict(re.findall(r"(?m)^\| (all|of [\w ]+) \| (.*) \|$", PAGE.section("4. Prepare")))
        for file in re.findall(r"`([^`]+)`", f"{table['all']} {table[row]}"):
            secret = Path(file.replace("NAME", name))
            target = machine.folder / "secrets" / secret
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.office.folder / ".cache/prfaas/llm" / secret, target)
        machine.typed(PAGE.blocks("4. Prepare")[0])

    def _start(self, machine: Machine) -> None:
        _, start = PAGE.blocks("6. Start")
        machine.typed(start)


class Load:
    """Requests of clients to all gateways, until the end."""

    def __init__(self, country: Country, folder: Path) -> None:
        self._machine = country.machine("home", "clients", CLIENTS)
        self._out = folder / "requests.jsonl"
        urls = " ".join(f"http://{address}:8000" for address in GATEWAYS.values())
        self._process = self._machine.begun(
            f"{sys.executable} {ROOT / 'tests/guides/load.py'} {self._out} {RATE_PER_S} {urls}"
        )

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._out.read_text().splitlines()]

    def some_more(self, count: int = 8) -> None:
        """Go on once so many more requests have ended."""
        wanted = count + (len(self.records()) if self._out.exists() else 0)
        until_s = time.monotonic() + LIMIT_S
        while not self._out.exists() or len(self.records()) < wanted:
            assert self._process.poll() is None, self._machine.told()
            assert time.monotonic() < until_s, "requests do not end"
            time.sleep(0.1)

    def ended(self) -> list[dict[str, Any]]:
        self._out.with_suffix(".stop").touch()
        assert self._process.wait(LIMIT_S) == 0, self._machine.told()
        return self.records()


@pytest.fixture
def country(tmp_path: Path) -> Iterator[Country]:
    with Country(tmp_path, ("east", "home")) as country:
        yield country


@pytest.mark.timeout(1800)
def test_the_whole_guide(country: Country, tmp_path: Path) -> None:
    newcomer = Newcomer(country, tmp_path)
    newcomer.step("write the file and emit")
    newcomer.write_the_file()
    newcomer.step("etcd")
    a, b = (newcomer.gateway(name) for name in GATEWAYS)
    etcd = a.begun(PAGE.blocks("6. Start")[0])
    newcomer.step("start all")
    for machine in (a, b):
        newcomer.start_gateway(machine)
    for name in ("east-0", "east-1", "home-0", "home-1"):
        newcomer.engine(name)
    newcomer.step("check")
    newcomer.checked()
    *_, curl = PAGE.blocks("7. Check, and send")[:2]
    assert "x-prfaas-route: " in newcomer.on_a_gateway(curl)
    status = PAGE.blocks("7. Check, and send")[2]
    assert re.search(
        "gateway gateway-a-8000 of gateway-a-8000, gateway-b-8000;", newcomer.on_a_gateway(status)
    )

    newcomer.step("load")
    load = Load(country, tmp_path)
    load.some_more()
    newcomer.step("add a machine")
    newcomer.add_home_2()
    for name in GATEWAYS:
        newcomer.until(
            "home-2 decodes",
            name,
            lambda state: state["clusters"]["home"]["instances"].get("home-2", {}).get("healthy", False),
        )
    load.some_more()
    newcomer.step("take a machine out")
    *_, drain = PAGE.blocks("9. Add a machine")
    assert "east-1 is drained" in newcomer.on_a_gateway(drain)
    newcomer.engines["east-1"].typed("systemctl disable --now prfaas.target")
    load.some_more()

    newcomer.step("upgrade an engine")
    drain, restart, back, kill = PAGE.blocks("10. Upgrade one engine")
    assert "home-1 is drained" in newcomer.on_a_gateway(drain)
    newcomer.engines["home-1"].typed(restart)
    # What was taken out above would be a problem.
    newcomer.engines["east-1"].typed("systemctl enable --now prfaas.target")
    newcomer.on_a_gateway("prfaas undrain east-1 /etc/prfaas/deployment.yaml")
    newcomer.on_a_gateway(back)
    load.some_more()

    newcomer.step("kill the leader")
    leader = newcomer.state("gateway-a")["fleet"]["leader"].removesuffix("-8000")
    (other,) = GATEWAYS.keys() - {leader}
    newcomer.gateways[leader].typed(kill)
    newcomer.until("it leads", other, lambda state: state["fleet"]["leads"] is True)
    newcomer.until("two again", other, lambda state: len(state["fleet"]["members"]) == 2)
    load.some_more(30)

    newcomer.step("end")
    records = load.ended()
    assert etcd.poll() is None
    failed = [each for each in records if "failed" in each]
    print(Counter((each.get("gateway"), each.get("route")) for each in records))
    assert not failed, (failed, [machine.told() for machine in (a, b)])
    # Nobody but the leader that was killed has cut a request.
    assert {url for each in records for url in each["cut_by"]} <= {f"http://{GATEWAYS[leader]}:8000"}
    for address in GATEWAYS.values():
        served = {each["route"] for each in records if each["gateway"] == f"http://{address}:8000"}
        assert {"local", "offload"} <= served
    assert len(records) > 10 * LONG_EVERY
