"""What encryption costs a transfer on a loopback, beside plain transfers and plain C in the same rounds.

    python bench/encryption.py [--mib 256] [--rounds 5] [--connections 2] [--gbit-per-s 0 1 4] [--json]

Each round sends the same bytes with plain C (`transport_c.c`), then with this project's transport without checksums,
with them, and encrypted; ratios are medians over rounds of paired times. At a rate above 0 the transport is paced, and
plain C is left out. Processor time is in seconds per gigabyte of each end; it depends least on what else the machine
does.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prfaas.core.deployment import load_deployment
from prfaas.serving.certificates import CertificateFolder
from transport_ends import Job

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "local.yaml"
PRODUCER, CONSUMER = "east-prefill-0", "home-decode-0"
ENDS = (sys.executable, str(HERE / "transport_ends.py"))
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class End:
    """One process at an end of the transfers, asked line by line."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self.line()

    def line(self) -> str:
        """The next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} has ended")
        return line

    def ask(self, line: str) -> str:
        """Its answer to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.line()

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Way:
    """One way of moving the bytes, with what it took in each round."""

    sender: End
    receiver: End
    is_ours: bool
    times_s: list[float]

    def once(self) -> float:
        """Seconds of one transfer."""
        if not self.is_ours:
            return float(self.sender.ask("go"))
        answer = json.loads(self.sender.ask("go"))
        self.receiver.ask(answer["id"])
        return float(answer["elapsed_s"])


def measure(ways: dict[str, Way], nbytes: int, rounds: int) -> dict[str, Any]:
    for way in ways.values():
        way.once()
    before_s = {name: (way.sender.cpu_s(), way.receiver.cpu_s()) for name, way in ways.items()}
    for _ in range(rounds):
        for way in ways.values():
            way.times_s.append(way.once())
    moved_gb = rounds * nbytes / 1e9
    encrypted = ways["encrypted"].times_s
    return {
        name: {
            "gbit_per_s": statistics.median(nbytes * 8 / 1e9 / each for each in way.times_s),
            "encrypted_to_it": statistics.median(
                it / ours for it, ours in zip(way.times_s, encrypted, strict=True)
            ),
            "sender_cpu_s_per_gb": (way.sender.cpu_s() - before_s[name][0]) / moved_gb,
            "receiver_cpu_s_per_gb": (way.receiver.cpu_s() - before_s[name][1]) / moved_gb,
        }
        for name, way in ways.items()
    }


@contextlib.contextmanager
def all_ways(
    folder: Path, certificates: Path, nbytes: int, connections: int, bits_per_s: float | None
) -> Iterator[dict[str, Way]]:
    with contextlib.ExitStack() as stack:

        def end(*command: str) -> End:
            made = End(command)
            stack.callback(made.close)
            return made

        ways = {}
        if bits_per_s is None:
            program, host = str(folder / "transport_c"), ("127.0.0.1", str(connections), str(nbytes))
            receiver = end(program, "receive", *host)
            ways["plain C"] = Way(end(program, "send", *host, receiver.first.strip()), receiver, False, [])
        for name, checksums, folder_of in (
            ("no checksum", False, ""),
            ("checksum", True, ""),
            ("encrypted", True, str(certificates)),
        ):
            job = Job(
                host="127.0.0.1",
                nbytes=nbytes,
                connections=connections,
                checksums=checksums,
                bits_per_s=bits_per_s,
                producer=PRODUCER,
                consumer=CONSUMER,
                certificates=folder_of,
            )
            receiver = end(*ENDS, "receive", json.dumps(asdict(job)))
            told = asdict(job) | {"port": json.loads(receiver.first)["port"]}
            ways[name] = Way(end(*ENDS, "send", json.dumps(told)), receiver, True, [])
        yield ways


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="of one transfer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--gbit-per-s", type=float, nargs="+", default=[0, 1, 4], help="0: unpaced")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    nbytes = options.mib << 20
    result: dict[str, Any] = {"load": os.getloadavg()}
    with tempfile.TemporaryDirectory() as home:
        deployment = load_deployment(EXAMPLE, state_dir=Path(home))
        CertificateFolder(deployment).make()
        program = ["cc", "-O2", "-pthread", "-o", f"{home}/transport_c", str(HERE / "transport_c.c")]
        subprocess.run(program, check=True)
        for gbit_per_s in options.gbit_per_s:
            pace = gbit_per_s * 1e9 or None
            folder = deployment.security.ca_file.parent
            with all_ways(Path(home), folder, nbytes, options.connections, pace) as ways:
                name = f"{gbit_per_s:g} Gbit/s" if pace else "unpaced"
                result[name] = measure(ways, nbytes, options.rounds)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, rows in result.items():
        print(f"{name}: {rows}" if name == "load" else name)
        for way, figures in () if name == "load" else rows.items():
            print(f"  {way:12}", "  ".join(f"{what} {value:.3f}" for what, value in figures.items()))


if __name__ == "__main__":
    main()
