"""Throughput and processor time of the transport, beside plain C, Mooncake, NIXL and iperf3 doing the same job.

    python bench/transport.py [--rounds 4] [--peers-python PATH] [--parts loopback] [--json FILE]

Every contender is a pair of processes with memory of their own, in namespaces of their own (root, /dev/net/tun and a C
compiler are needed: bench/wan/laboratory.py). In each round each one sends the same number of bytes from memory to
memory, one after the other; ratios are of one round, so that a busy machine is busy for all. Figures are medians.

Mooncake and NIXL are found by `--peers-python`, an interpreter that can import them (`pip install
mooncake-transfer-engine-non-cuda nixl`), iperf3 on the PATH. Who is not there is left out. Settings of the peers are
tried first, and the best of each takes part.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from wan.laboratory import Laboratory, LaboratoryError, LineSettings

HERE = Path(__file__).parent
# The tests' authority signs here too.
sys.path.append(str(HERE.parent))
from tests.serving.transport.authority import Authority  # noqa: E402

MIB = 1 << 20
FAR, HOME = "far-0", "home-0"
PACED_BITS_PER_S = (50e6, 200e6, 1e9)
MOONCAKE_LANES, MOONCAKE_BLOCKS = (1, 4, 16), (32, 128)
NIXL_LANES, NIXL_BLOCKS = (1, 2, 4), (1, 32)
SWEEP_SENDS = 3
PARTS = ("loopback", "paced", "wan")
WAN_LINES = (
    ("200 Mbit/s, 30 ms", LineSettings.of_round_trip(200e6, 0.030), 96 * MIB),
    ("1 Gbit/s, 30 ms", LineSettings.of_round_trip(1e9, 0.030), 384 * MIB),
    ("4 Gbit/s, 10 ms", LineSettings.of_round_trip(4e9, 0.010), 1024 * MIB),
)
LOSSY_LINE = ("1 Gbit/s, 30 ms, 0.1 % loss", LineSettings.of_round_trip(1e9, 0.030, loss=0.001), 128 * MIB)


@dataclass(frozen=True)
class Sent:
    """One measurement of one pair."""

    gbit_per_s: float
    send_cpu_s_per_gb: float
    receive_cpu_s_per_gb: float

    @property
    def cpu_s_per_gb(self) -> float:
        return self.send_cpu_s_per_gb + self.receive_cpu_s_per_gb


class Pair:
    """Two processes that talk in lines: `receive` in one namespace, `send` in another."""

    def __init__(self, place: "Place", nbytes: int) -> None:
        self.nbytes = nbytes
        self.facts: dict[str, Any] = {}
        self._place = place
        self._processes: list[subprocess.Popen[str]] = []

    def begin(self, host: str, argv: Sequence[str], **env: str) -> dict[str, Any]:
        """Start an end; returns what it says first."""
        process = self._place.popen(host, argv, env)
        self._processes.append(process)
        return self._read(process)

    def send(self, times: int = 1) -> Sent:
        """Send everything so many times, one after the other."""
        receiver, sender = self._processes
        elapsed_s = 0.0
        cpu_s = [0.0, 0.0]
        for _ in range(times):
            before_s = [cpu_of(process.pid) for process in self._processes]
            said = self._ask(sender, "send")
            for index, process in enumerate(self._processes):
                cpu_s[index] += cpu_of(process.pid) - before_s[index]
            elapsed_s += said["elapsed_s"]
            if said.get("id"):
                self._ask(receiver, said["id"])
        sent_bytes = times * self.nbytes
        return Sent(sent_bytes * 8e-9 / elapsed_s, cpu_s[1] * 1e9 / sent_bytes, cpu_s[0] * 1e9 / sent_bytes)

    def close(self) -> None:
        for process in reversed(self._processes):
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ask(self, process: "subprocess.Popen[str]", line: str) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return self._read(process)

    @staticmethod
    def _read(process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                said: dict[str, Any] = json.loads(line[1:])
                return said
        raise RuntimeError(f"{process.args!r} ended")


def cpu_of(pid: int) -> float:
    """Processor time of a process with all its threads, in seconds: CPUCLOCK_SCHED of <linux/posix-timers.h>."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass
class Place:
    """Where pairs run: in a laboratory's namespaces, or on this machine as it is."""

    laboratory: Laboratory | None
    sender: str = FAR
    receiver: str = HOME
    log: Path = field(default=Path(os.devnull))

    @property
    def address(self) -> str:
        """Of the receiver."""
        if self.laboratory is None or self.sender == self.receiver:
            return "127.0.0.1"
        return self.laboratory.address(self.receiver)

    def popen(self, host: str, argv: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[str]":
        def start() -> "subprocess.Popen[str]":
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **env},
            )

        with self.log.open("a") as log:
            if self.laboratory is None:
                return start()
            with self.laboratory.inside(host):
                return start()


def plain_c(place: Place, program: Path, connections: int, nbytes: int) -> Pair:
    pair = Pair(place, nbytes)
    common = [place.address, str(connections), str(nbytes)]
    port = pair.begin(place.receiver, [str(program), "receive", *common])["port"]
    pair.begin(place.sender, [str(program), "send", *common, str(port)])
    return pair


def ours(place: Place, connections: int, nbytes: int, **job: Any) -> Pair:
    pair = Pair(place, nbytes)
    job = {"host": place.address, "nbytes": nbytes, "connections": connections, **job}
    program = [sys.executable, str(HERE / "transport_ends.py")]
    job |= pair.begin(place.receiver, [*program, "receive", json.dumps(job)])
    pair.facts = pair.begin(place.sender, [*program, "send", json.dumps(job)])
    return pair


def peer(place: Place, python: str, kind: str, blocks: int, nbytes: int, env: Mapping[str, str]) -> Pair:
    pair = Pair(place, nbytes)
    job: dict[str, Any] = {"host": place.address, "nbytes": nbytes, "blocks": blocks}
    program = [python, str(HERE / "transport_peers.py")]
    job |= pair.begin(place.receiver, [*program, "receive", kind, json.dumps(job)], **env)
    pair.begin(place.sender, [*program, "send", kind, json.dumps(job)], **env)
    return pair


def settings_of(kind: str) -> list[tuple[str, int, dict[str, str]]]:
    """(name, blocks, environment) of every setting of a peer that is tried."""
    if kind == "mooncake":
        return [
            (f"mooncake, {lanes} lanes, {blocks} blocks", blocks, {"MC_TCP_LANES_PER_PEER": str(lanes)})
            for lanes in MOONCAKE_LANES
            for blocks in MOONCAKE_BLOCKS
        ]
    tcp = {"UCX_TLS": "tcp,self"}
    return [
        (f"nixl, {lanes} lanes, {blocks} blocks", blocks, tcp | {"UCX_MAX_RNDV_LANES": str(lanes)})
        for lanes in NIXL_LANES
        for blocks in NIXL_BLOCKS
    ]


def best_of(place: Place, python: str, kind: str, nbytes: int) -> tuple[str, Callable[[], Pair]] | None:
    """The setting of a peer that is fastest here; None: the peer is not there."""
    found: list[tuple[float, str, Callable[[], Pair]]] = []
    for name, blocks, env in settings_of(kind):
        start = partial(peer, place, python, kind, blocks, nbytes, env)
        try:
            pair = start()
        except (RuntimeError, OSError):
            say(f"{kind} is not there or does not start: it is left out")
            return None
        try:
            pair.send()
            rate = statistics.median(pair.send().gbit_per_s for _ in range(SWEEP_SENDS))
        except (RuntimeError, OSError):
            rate = 0.0
        finally:
            pair.close()
        say(f"{name}: {rate:.1f} Gbit/s")
        found.append((rate, name, start))
    _, fastest, start_fastest = max(found, key=lambda each: each[0])
    return fastest, start_fastest


def compare(starts: Mapping[str, Callable[[], Pair]], rounds: int, sends: int) -> dict[str, list[Sent]]:
    """All contenders in turn, in every round; the first round warms them up."""
    pairs: dict[str, Pair] = {}
    results: dict[str, list[Sent]] = {name: [] for name in starts}
    try:
        for name, start in starts.items():
            pairs[name] = start()
        for index in range(rounds + 1):
            for name, pair in pairs.items():
                sent = pair.send(sends)
                if index:
                    results[name].append(sent)
            say(f"round {index} of {rounds}")
    finally:
        for pair in pairs.values():
            pair.close()
    return results


def row_of(name: str, results: Mapping[str, Sequence[Sent]], base: str) -> dict[str, Any]:
    mine, others = results[name], results[base]
    ratios = [one.gbit_per_s / other.gbit_per_s for one, other in zip(mine, others, strict=True)]
    cpu = [one.cpu_s_per_gb / other.cpu_s_per_gb for one, other in zip(mine, others, strict=True)]
    return {
        "name": name,
        "gbit_per_s": statistics.median(one.gbit_per_s for one in mine),
        "send_cpu_s_per_gb": statistics.median(one.send_cpu_s_per_gb for one in mine),
        "receive_cpu_s_per_gb": statistics.median(one.receive_cpu_s_per_gb for one in mine),
        f"rate_to_{base}": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        f"cpu_to_{base}": {"median": statistics.median(cpu), "min": min(cpu), "max": max(cpu)},
    }


def goal(what: str, value: float, *, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    met = (least is None or value >= least) and (most is None or value <= most)
    return {"what": what, "value": value, "least": least, "most": most, "met": met}


def loopback(options: argparse.Namespace, place: Place, folder: Path) -> dict[str, Any]:
    """Everything beside plain C over the loopback of one namespace."""
    nbytes, connections = options.mib * MIB, options.connections
    program, certificates = compiled(folder), folder / "certificates"
    authority = Authority(certificates)
    for name in ("p", "c"):
        authority.write(name)
    starts: dict[str, Callable[[], Pair]] = {
        "c": lambda: plain_c(place, program, connections, nbytes),
        "plain": lambda: ours(place, connections, nbytes, checksums=False),
        "checksum": lambda: ours(place, connections, nbytes),
        "encrypted": lambda: ours(place, connections, nbytes, certificates=str(certificates)),
    }
    for source in options.sources:
        starts[source] = partial(ours, place, connections, nbytes, source=source)
    peers: dict[str, str] = {}
    for kind in ("mooncake", "nixl") if options.peers_python else ():
        best = best_of(place, options.peers_python, kind, nbytes)
        if best is not None:
            peers[kind], starts[kind] = best
    results = compare(starts, options.rounds, options.sends)
    rows = [row_of(name, results, "c") for name in starts]
    of = {row["name"]: row for row in rows}
    goals = [
        goal(f"{name}: rate to plain C", of[name]["rate_to_c"]["median"], least=least)
        for name, least in (("plain", 0.90), ("checksum", 0.60), ("encrypted", 0.55))
    ]
    goals += [
        goal(f"{name}: processor time to plain C", of[name]["cpu_to_c"]["median"], most=most)
        for name, most in (("plain", 1.15), ("checksum", 1.5))
    ]
    for kind in peers:
        for name, least in (("plain", 2.0), ("checksum", 1.8)):
            ratio = row_of(name, results, kind)[f"rate_to_{kind}"]["median"]
            goals.append(goal(f"{name}: rate to {peers[kind]}", ratio, least=least))
    return {"rows": rows, "peers": peers, "goals": goals}


def iperf3(place: Place, connections: int, congestion: str, nbytes: int) -> Sent:
    """One test of iperf3, with connections of its own."""
    server = place.popen(place.receiver, ["iperf3", "-s", "-1", "-J"], {})
    try:
        time.sleep(0.5)
        bytes_each = nbytes // connections
        client = ["iperf3", "-c", place.address, "-P", str(connections), "-C", congestion, "-J"]
        said, _ = place.popen(place.sender, [*client, "-n", str(bytes_each * connections)], {}).communicate()
        end = json.loads(said)["end"]
    finally:
        server.kill()
        server.wait()
    received, cpu = end["sum_received"], end["cpu_utilization_percent"]
    per_gb = received["seconds"] / 100 / (received["bytes"] / 1e9)
    return Sent(received["bits_per_second"] / 1e9, cpu["host_total"] * per_gb, cpu["remote_total"] * per_gb)


def cold(start: Callable[[], Pair]) -> Sent:
    """The first transfer over new connections."""
    pair = start()
    try:
        return pair.send()
    finally:
        pair.close()


def wide_area(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Cold transfers over emulated lines, beside iperf3 with as many connections and the same congestion control."""
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    connections = options.wan_connections
    for name, line, nbytes in WAN_LINES if shutil.which("iperf3") else ():
        with Laboratory({"far": 1, "home": 1}, line) as laboratory:
            place = Place(laboratory, log=log)
            results: dict[str, list[Sent]] = {"ours": [], "iperf3": []}
            for _ in range(options.rounds):
                results["ours"].append(cold(lambda: ours(place, connections, nbytes)))  # noqa: B023
                results["iperf3"].append(iperf3(place, connections, "bbr", nbytes))
        found = [row_of(each, results, "iperf3") for each in results]
        rows += [{"line": name, **row} for row in found]
        goals.append(goal(f"{name}: rate to iperf3", found[0]["rate_to_iperf3"]["median"], least=0.98))
        if line.rate_bits_per_s == 200e6:
            for side in ("send", "receive"):
                value = found[0][f"{side}_cpu_s_per_gb"]
                goals.append(goal(f"{name}: processor time to {side}, s/GB", value, most=1.0))
        say(name)
    if options.peers_python:
        name, line, nbytes = LOSSY_LINE
        # Mooncake takes the machine's congestion control, which is cubic nearly everywhere.
        with Laboratory({"far": 1, "home": 1}, line, congestion_control="cubic") as laboratory:
            place = Place(laboratory, log=log)
            start = [
                lambda blocks=blocks, env=env: peer(
                    place, options.peers_python, "mooncake", blocks, nbytes, env
                )
                for _, blocks, env in settings_of("mooncake")
            ][-1]
            results = {"ours": [], "mooncake": []}
            for _ in range(options.rounds):
                results["ours"].append(cold(lambda: ours(place, connections, nbytes)))
                results["mooncake"].append(cold(start))
        rows += [{"line": name, **row_of(each, results, "mooncake")} for each in results]
        ratio = row_of("ours", results, "mooncake")["rate_to_mooncake"]["median"]
        goals.append(goal(f"{name}: rate to Mooncake (bbr to cubic)", ratio, least=2.0))
        say(name)
    return {"rows": rows, "goals": goals}


def pacing(place: Place) -> list[dict[str, Any]]:
    """How well a pace holds, with four connections."""
    rows = []
    for asked in PACED_BITS_PER_S:
        nbytes = int(asked / 8 * 2) >> 16 << 16  # about two seconds
        sent = cold(lambda: ours(place, 4, nbytes, bits_per_s=asked))  # noqa: B023
        rows.append({"asked_mbit_per_s": asked / 1e6, "ratio": sent.gbit_per_s * 1e9 / asked})
    return rows


def compiled(folder: Path) -> Path:
    program = folder / "transport_c"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-O2", "-o", program, HERE / "transport_c.c", "-lpthread"], check=True
    )
    return program


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def print_tables(result: Mapping[str, Any]) -> None:
    for part in ("loopback", "wide_area"):
        for row in result.get(part, {}).get("rows", ()):
            ratios = [
                f"{key} {value['median']:.2f} ({value['min']:.2f}–{value['max']:.2f})"
                for key, value in row.items()
                if isinstance(value, dict)
            ]
            cpu = f"{row['send_cpu_s_per_gb']:.3f}/{row['receive_cpu_s_per_gb']:.3f} s/GB"
            where = row.get("line", part)
            print(f"{where:28} {row['name']:16} {row['gbit_per_s']:7.3f} Gbit/s  {cpu}  {'  '.join(ratios)}")
    for row in result.get("paced", ()):
        print(f"paced {row['asked_mbit_per_s']:.0f} Mbit/s: {row['ratio']:.3f} of it")
    for part in ("loopback", "wide_area"):
        for each in result.get(part, {}).get("goals", ()):
            bound = f"≥ {each['least']}" if each["least"] is not None else f"≤ {each['most']}"
            print(f"{'met   ' if each['met'] else 'MISSED'} {each['what']}: {each['value']:.2f} ({bound})")


def main() -> None:
    parser = argparse.ArgumentParser(description="The transport beside plain C and its peers.")
    parser.add_argument("--mib", type=int, default=512, help="size of one transfer over the loopback")
    parser.add_argument("--sends", type=int, default=4, help="transfers of each contender in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--connections", type=int, default=2, help="over the loopback")
    parser.add_argument("--wan-connections", type=int, default=4)
    parser.add_argument("--congestion", default="cubic", help="congestion control over the loopback, of all")
    parser.add_argument(
        "--sources",
        nargs="*",
        default=["pages:8192", "scattered:8192", "scattered:262144"],
        help="engine pages to send from as well, with checksums (needs torch)",
    )
    parser.add_argument("--peers-python", help="an interpreter that can import mooncake and nixl")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cores": os.cpu_count(),
        },
        "transfer_bytes": options.mib * MIB,
        "rounds": options.rounds,
        "load": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        # The line is not used: both ends are in one namespace.
        sites, line = {"far": 1, "home": 1}, WAN_LINES[0][1]
        try:
            with Laboratory(sites, line, congestion_control=options.congestion) as laboratory:
                place = Place(laboratory, FAR, FAR, log)
                result["congestion"] = options.congestion
                if "loopback" in options.parts:
                    result["loopback"] = loopback(options, place, Path(folder))
                if "paced" in options.parts:
                    result["paced"] = pacing(place)
            if "wan" in options.parts:
                result["wide_area"] = wide_area(options, log)
        except LaboratoryError as error:
            say(f"{error}; only the loopback of this machine is measured, with its own congestion control")
            place = Place(None, log=log)
            result["loopback"] = loopback(options, place, Path(folder))
        except RuntimeError as error:
            raise SystemExit(f"{error}\n{log.read_text()[-4000:]}") from None
    print_tables(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
