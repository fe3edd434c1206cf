"""Record what both ends of a link tell of it, in the laboratory, while the link or one of its ends misbehaves.

    python bench/link_telemetry.py [--only CASE,...] [--paced] [--out FOLDER] [--json FILE]

A producer and a consumer, each a process of its own, at two sites that are 30 ms apart at 200 Mbit/s. Beside the
consumer runs the control plane's own monitor; with --paced its budget too, which paces the producer by what the meter
says. Each case writes FOLDER/CASE.jsonl.gz: one line per look of the meter, with the time, what the link truly carries
(bits per second of goodput), and the samples that the meter got. The table says what the live meter made of it.
tests/core/link/test_recorded.py replays files that were made without --paced. Needs root.
"""

import argparse
import asyncio
import gzip
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prfaas.core.deployment import load_deployment
from prfaas.core.link.meter import LinkMeter
from prfaas.core.link.samples import ArrivalSample, SenderSample
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.link_monitor import LinkMonitor
from prfaas.serving.control.planning_inputs import prefill_curves, view_of
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest
from wan.laboratory import Laboratory, LineSettings, ending_on_sigterm

KEY = bytes(range(32))
PORT = 5200
LINE_BITS_PER_S, RTT_S = 200e6, 0.030
BANDWIDTH_BITS_PER_S = 186e6
PAIR = ("far", "home")
TRANSFER_BYTES = 1 << 20

DEPLOYMENT = """
name: laboratory
model: {{served_name: m, tiny: qwen3-next, max_model_len: 32768}}
clusters:
  - name: far
    kind: prfaas
    hardware: synthetic
    profile: internal-1t-h200
    instances: [{{name: p, roles: [prefill], host: {far}, http_port: 5100, kv_port: {port}}}]
  - name: home
    kind: pd
    hardware: synthetic
    profile: internal-1t-h20
    instances:
      - {{name: c, roles: [prefill], host: {home}, http_port: 5100, kv_port: {port}}}
      - {{name: d, roles: [decode], host: {home}, http_port: 5101, kv_port: 5201}}
links: [{{source: far, target: home, bandwidth: {bandwidth} bit/s, encryption: false}}]
routing: {{policy: paper, threshold_tokens: 4000}}
"""


@dataclass(frozen=True)
class Case:
    """What happens: (second, what to do). `load` is what the producer has: "keep MB" or "make BITS_PER_S"."""

    load: str
    seconds: float
    script: Sequence[tuple[float, str]]


DROP = ((6.0, "rate 0.1"), (18.0, "rate 1"))
CASES = {
    "drop-2mb": Case("keep 2", 28, DROP),
    "drop-10mb": Case("keep 10", 28, DROP),
    "drop-40mb": Case("keep 40", 28, DROP),
    "drop-made": Case("make 100e6", 28, DROP),
    "drop-then-idle": Case("keep 10", 32, ((6.0, "rate 0.1"), (12.0, "quiet"), (18.0, "rate 1"))),
    "freeze-5s": Case("keep 10", 22, ((6.0, "dark 1"), (11.0, "dark 0"))),
    "freeze-20s": Case("keep 10", 36, ((6.0, "dark 1"), (26.0, "dark 0"))),
    "stall": Case("keep 10", 20, ((6.0, "stop"), (11.0, "go"))),
    "loss": Case("keep 10", 26, ((6.0, "loss 0.001"), (12.0, "loss 0.03"), (18.0, "loss 0"))),
    "slow-sender": Case("keep 10", 22, ((6.0, "hog"), (14.0, "rest"))),
}


class EqualRegions:
    """One region of as many bytes as the ticket has tokens."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        return [num_tokens - skip_tokens]


def receiver_of(name: str, host: str, sender: Sender | None = None) -> Receiver:
    return Receiver(
        name=f"{name}/0",
        key=KEY,
        host=host,
        port=PORT,
        arena=StagingArena(256 << 20),
        layout=EqualRegions(),
        fingerprint={},
        sender=sender,
    )


def consume(host: str) -> None:
    """The consumer's process: takes what is complete, until it is ended."""
    receiver = receiver_of("c", host)
    receiver.start()
    while True:
        for transfer_id, transfer in list(receiver.transfers.table._transfers.items()):
            if transfer.phase == "complete":
                staged = receiver.transfers.take(transfer_id)
                if staged is not None:
                    staged.free()
        time.sleep(0.02)


def produce(host: str, consumer: str, load: str) -> None:
    """The producer's process: "keep MB" or "make BITS_PER_S". SIGUSR1 hogs its CPU, SIGUSR2 ends that.

    After SIGHUP nothing more is made.
    """
    peer = Peer("c/0", consumer, PORT, "far->home", 4, BANDWIDTH_BITS_PER_S)
    sender = Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint={})
    sender.start()
    receiver_of("p", host, sender).start()
    is_hogged = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: is_hogged.set())
    signal.signal(signal.SIGUSR2, lambda *_: is_hogged.clear())
    for _ in range(6):
        threading.Thread(target=_hog, args=(is_hogged,), daemon=True).start()
    is_quiet = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: is_quiet.set())
    what, amount = load.split()
    content = os.urandom(TRANSFER_BYTES)
    began_s = time.monotonic()
    made_bytes = 0.0
    while True:
        now_s = time.monotonic() - began_s
        queued = sender.telemetry()["links"]["far->home"]["queued_bytes"]
        is_enough = (
            queued >= float(amount) * 1e6 if what == "keep" else made_bytes >= float(amount) / 8 * now_s
        )
        if is_enough or is_quiet.is_set():
            time.sleep(0.005)
            continue
        made_bytes += TRANSFER_BYTES
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer="p",
            consumer="c",
            num_tokens=TRANSFER_BYTES,
            skip_tokens=0,
            prompt_digest=prompt_digest([]),
            expires_at_s=time.time() + 600,
        )
        transfer = sender.open(ticket, ticket.seal(KEY), [TRANSFER_BYTES])
        transfer.put(0, 0, BytesSource(content))
        transfer.end()


def _hog(is_hogged: threading.Event) -> None:
    while True:
        is_hogged.wait()
        sum(range(20_000))


class RecordedMeter(LinkMeter):
    """Writes down what it gets."""

    def __init__(self, truth: Callable[[], float], began_s: float) -> None:
        super().__init__(BANDWIDTH_BITS_PER_S, began_s, 2.5)
        self.rows: list[dict[str, Any]] = []
        self.is_recording = False
        self._truth = truth
        self._began_s = began_s

    def begin(self, now_s: float) -> None:
        """Write down from now on; times count from here."""
        self._began_s, self.is_recording = now_s, True

    def observe(
        self, senders: Mapping[str, SenderSample], arrivals: Mapping[str, ArrivalSample], now_s: float
    ) -> int:
        carried = super().observe(senders, arrivals, now_s)
        if not self.is_recording:
            return carried
        self.rows.append(
            {
                "now_s": round(now_s - self._began_s, 4),
                "true_bits_per_s": self._truth(),
                "senders": {name: self._relative(sample) for name, sample in senders.items()},
                "arrivals": {name: self._relative(sample) for name, sample in arrivals.items()},
                "capacity_bits_per_s": round(self.capacity_bits_per_s),
                "condition": self.condition(now_s),
                "congestion": round(self.congestion, 3),
            }
        )
        return carried

    def _relative(self, sample: SenderSample | ArrivalSample) -> dict[str, Any]:
        fields = asdict(sample)
        fields["at_s"] = round(sample.at_s - self._began_s, 4)
        return fields


async def watched(
    case: Case, laboratory: Laboratory, ends: dict[str, Any], folder: Path, *, paced: bool
) -> RecordedMeter:
    """The rows of a case."""
    path = folder / "deployment.yaml"
    text = DEPLOYMENT.format(
        far=laboratory.address("far-0"),
        home=laboratory.address("home-0"),
        port=PORT,
        bandwidth=int(BANDWIDTH_BITS_PER_S),
    )
    path.write_text(text)
    deployment = load_deployment(path, state_dir=folder / "state")
    view = view_of(deployment, None, prefill_curves(deployment), time.monotonic())
    state = ClusterState(view, clock=time.monotonic, on_service=lambda *_: None)
    changes: list[tuple[float, float]] = []
    ports = {
        instance.name: (Observer("control", KEY, instance.host, instance.kv_ports[0], f"{instance.name}/0"),)
        for instance in deployment.instances
    }
    running = RunningDeployment(deployment)
    monitor = LinkMonitor(
        running,
        lambda instance, rank: ports[instance.name][rank],
        state,
        on_change=lambda _: changes.append((time.monotonic(), meter.capacity_bits_per_s)),
    )

    def truth() -> float:
        line = laboratory.line("far", "home")
        return 0.0 if line.blackhole else line.goodput_bits_per_s

    meter = monitor.by_pair[PAIR].meter = RecordedMeter(truth, time.monotonic())
    loops = [asyncio.create_task(monitor.run())]
    if paced:
        budget = LinkBudget(running, ports, view.links, monitor.samples, clock=time.monotonic)
        loops.append(asyncio.create_task(budget.run()))
    async with asyncio.timeout(60):
        while meter.egress_bits_per_s(time.monotonic()) < 0.4 * BANDWIDTH_BITS_PER_S:
            await asyncio.sleep(0.1)
    await asyncio.sleep(3.0)
    began_s = time.monotonic()
    changes.clear()
    meter.begin(began_s)
    for at_s, what in case.script:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        verb, _, value = what.partition(" ")
        if verb == "rate":
            laboratory.change(source="far", rate_bits_per_s=float(value) * LINE_BITS_PER_S)
        elif verb == "dark":
            laboratory.change(blackhole=value == "1")
        elif verb == "loss":
            laboratory.change(loss=float(value))
        else:
            end, number = {
                "stop": ("consumer", signal.SIGSTOP),
                "go": ("consumer", signal.SIGCONT),
                "hog": ("producer", signal.SIGUSR1),
                "rest": ("producer", signal.SIGUSR2),
                "quiet": ("producer", signal.SIGHUP),
            }[verb]
            os.kill(ends[end].pid, number)
    await asyncio.sleep(began_s + case.seconds - time.monotonic())
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await monitor.close()
    await asyncio.gather(*(port.close() for (port,) in ports.values()))
    meter.changes = [(at_s - began_s, bits) for at_s, bits in changes]  # type: ignore[attr-defined]
    return meter


def recorded(name: str, case: Case, out: Path | None, *, paced: bool) -> dict[str, Any]:
    """Run a case, write it down, and say what the meter made of it."""
    line = LineSettings.of_round_trip(LINE_BITS_PER_S, RTT_S)
    with tempfile.TemporaryDirectory() as folder, Laboratory({"far": 1, "home": 1}, line) as laboratory:
        home, far = laboratory.address("home-0"), laboratory.address("far-0")
        program = [sys.executable, __file__]
        ends = {
            "consumer": laboratory.start(
                "home-0", [*program, "--consume", home], log=Path(folder) / "consumer.log"
            ),
            "producer": laboratory.start(
                "far-0", [*program, "--produce", far, home, case.load], log=Path(folder) / "producer.log"
            ),
        }
        with laboratory.inside("home-0"):
            meter = asyncio.run(watched(case, laboratory, ends, Path(folder), paced=paced))
        for end in ("consumer", "producer"):
            text = (Path(folder) / f"{end}.log").read_text(errors="replace")
            if "Traceback" in text:
                print(text[-2000:], file=sys.stderr)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with gzip.GzipFile(out / f"{name}.jsonl.gz", "wb", mtime=0) as file:
            for row in meter.rows:
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return {"case": name, "changes": meter.changes, "rows": meter.rows}  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--paced", action="store_true", help="pace the producer as the control plane does")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--consume", nargs=1, help=argparse.SUPPRESS)
    parser.add_argument("--produce", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.consume:
        consume(*asked.consume)
    if asked.produce:
        produce(*asked.produce)
    results = []
    with ending_on_sigterm():
        for name in asked.only.split(","):
            result = recorded(name, CASES[name], asked.out, paced=asked.paced)
            results.append(result)
            print(f"{name}: load {os.getloadavg()[0]:.1f}")
            for at_s, bits in result["changes"]:
                print(f"  told at {at_s:.1f} s: {bits / 1e6:.1f} Mbit/s")
            for row in result["rows"][:: max(len(result["rows"]) // 28, 1)]:
                words = " ".join(f"{key}={value}" for key, value in _short(row).items())
                print(f"  {row['now_s']:5.1f} s true {row['true_bits_per_s'] / 1e6:5.1f} {words}")
    if asked.json:
        asked.json.write_text(json.dumps(results))


def _short(row: dict[str, Any]) -> dict[str, Any]:
    (word,) = list(row["senders"].values()) or [None]
    shown: dict[str, Any] = {
        "capacity": f"{row['capacity_bits_per_s'] / 1e6:.1f}",
        "condition": row["condition"],
        "congestion": row["congestion"],
    }
    if word is not None:
        shown |= {
            "age": f"{row['now_s'] - word['at_s']:.2f}",
            "queued": f"{word['queued_bytes'] / 1e6:.1f}",
            "filled": word["filled_connections"],
            "pace": f"{word['pace_bits_per_s'] / 1e6:.1f}",
            "rtt_ms": f"{1000 * word['rtt_s']:.0f}/{1000 * word['least_rtt_s']:.0f}",
            "rwnd": f"{word['receiver_limited_s_total']:.1f}",
        }
    for arrival in row["arrivals"].values():
        if arrival["connections"]:
            shown["rcv_rtt_ms"] = f"{1000 * arrival['rtt_s']:.0f}"
            shown["unread_kb"] = arrival["unread_bytes"] >> 10
    return shown


if __name__ == "__main__":
    main()
