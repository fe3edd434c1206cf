"""How a line is shared: round trips beside paced transfers, and two senders that have different amounts to send.

    python -m wan.sharing [--json FILE] [--seconds N]      (from bench/, as root)

Senders and receivers of `serving.transport` in a laboratory: 200 Mbit/s, 30 ms. The control plane's link monitor and
link budget run at the consumers' site, as in a gateway. Printed:

- paced: least and mean round trip of the sockets in a steady transfer, at the goodput and at the rate of the line.
- shared: two producers, one makes 20 Mbit/s, one has more than enough. What both carry together, of the goodput: with
  an equal share for each, and with the budget.
"""

import argparse
import asyncio
import json
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from prfaas.core.deployment import CONTROL, Deployment, load_deployment
from prfaas.core.deployment.peers import peers_of
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.link_monitor import LinkMonitor
from prfaas.serving.control.planning_inputs import prefill_curves, view_of
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest
from wan.laboratory import Laboratory, LineSettings, ending_on_sigterm

KEY = bytes(range(32))
FINGERPRINT = {"model": "none"}
RATE_BITS_PER_S, RTT_S = 200e6, 0.030
SLOW_BITS_PER_S = 20e6
CONNECTIONS = 4
KV_PORT = 9000
_STAGING_BYTES = 1 << 30
_PUT_S = 0.05
_WARM_S = 3.0
_ANSWER_S = 30.0
# One transfer for as long as a measurement takes.
_TRANSFER_BYTES = 400 << 20

FILE = """
name: sharing
model: {{served_name: m, tiny: qwen3-next, max_model_len: 32768}}
clusters:
  - name: far
    kind: prfaas
    hardware: synthetic
    profile: internal-1t-h200
    instances:
      - {{name: far-0, roles: [prefill], host: {far0}, http_port: 8000, kv_port: {port}}}
      - {{name: far-1, roles: [prefill], host: {far1}, http_port: 8000, kv_port: {port}}}
  - name: home
    kind: pd
    hardware: synthetic
    profile: internal-1t-h20
    instances:
      - {{name: home-0, roles: [prefill, decode], host: {home}, http_port: 8000, kv_port: {port}}}
links:
  - {{source: far, target: home, bandwidth: {bandwidth:.0f} bit/s, connections: {connections}, encryption: false}}
routing: {{policy: paper, threshold_tokens: 4000}}
slo: {{tokens_per_s: 40}}
security: {{engine_tls: never}}
"""


class _OneRegion:
    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        return [num_tokens - skip_tokens]


@dataclass(frozen=True, slots=True)
class Paced:
    """Round trips of the sockets of one steady transfer."""

    bandwidth_bits_per_s: float
    carried_bits_per_s: float
    least_rtt_s: float
    mean_rtt_s: float
    longest_rtt_s: float

    @property
    def inflation(self) -> float:
        """Mean over least."""
        return self.mean_rtt_s / self.least_rtt_s


@dataclass(frozen=True, slots=True)
class Shared:
    """What two senders carry, in bits per second."""

    slow_bits_per_s: float
    full_bits_per_s: float
    of_goodput: float
    """Both together."""


class Site:
    """The producers, the consumer, and a deployment that names them; all in the laboratory's namespaces."""

    def __init__(self, laboratory: Laboratory, bandwidth_bits_per_s: float, folder: Path) -> None:
        path = folder / "sharing.yaml"
        path.write_text(
            FILE.format(
                far0=laboratory.address("far-0"),
                far1=laboratory.address("far-1"),
                home=laboratory.address("home-0"),
                port=KV_PORT,
                bandwidth=bandwidth_bits_per_s,
                connections=CONNECTIONS,
            )
        )
        self.deployment = load_deployment(path, state_dir=folder / "state")
        self._laboratory = laboratory
        self._ends = ExitStack()
        self.senders: dict[str, Sender] = {}

    def __enter__(self) -> "Site":
        self._listen("home-0", None)
        for name in ("far-0", "far-1"):
            self.senders[name] = self._sender(name)
            self._listen(name, self.senders[name])
        deadline_s = time.monotonic() + _ANSWER_S
        while not all(
            sender.stats()["peers"]["home-0/0"]["connections"] == CONNECTIONS
            for sender in self.senders.values()
        ):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the senders find no receiver")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def open(self, name: str) -> SentTransfer:
        """A transfer of 400 MiB from one of the producers."""
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer=name,
            consumer="home-0",
            num_tokens=_TRANSFER_BYTES,
            skip_tokens=0,
            prompt_digest=prompt_digest([1]),
            expires_at_s=time.time() + 600.0,
        )
        return self.senders[name].open(ticket, ticket.seal(KEY), [_TRANSFER_BYTES])

    @contextmanager
    def budgeted(self) -> Iterator[None]:
        """While the control plane runs at the consumer's site."""
        ended = threading.Event()

        def run() -> None:
            with self._laboratory.inside("home-0"):
                asyncio.run(_control(self.deployment, ended))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _sender(self, name: str) -> Sender:
        instance = self.deployment.instance(name)
        peers = {
            f"{peer.member.name}/0": Peer(
                f"{peer.member.name}/0",
                peer.member.host,
                peer.member.kv_port,
                peer.path.link,
                peer.path.connections,
                peer.path.bandwidth_bits_per_s,
                share_bits_per_s=peer.path.share_bits_per_s,
            )
            for peer in peers_of(self.deployment, instance)
        }
        sender = Sender(
            name=f"{name}/0", key=KEY, peers=peers, fingerprint=FINGERPRINT, options=SenderOptions()
        )
        with self._laboratory.inside(name):
            sender.start()
        self._ends.callback(sender.close)
        return sender

    def _listen(self, name: str, sender: Sender | None) -> None:
        receiver = Receiver(
            name=f"{name}/0",
            key=KEY,
            host=self._laboratory.address(name),
            port=KV_PORT,
            arena=StagingArena(_STAGING_BYTES if sender is None else 1 << 20),
            layout=_OneRegion(),
            fingerprint=FINGERPRINT,
            sender=sender,
        )
        with self._laboratory.inside(name):
            receiver.start()
        self._ends.callback(receiver.close)


async def _control(deployment: Deployment, ended: threading.Event) -> None:
    clock = time.monotonic
    state = ClusterState(
        view_of(deployment, None, prefill_curves(deployment), clock()),
        clock=clock,
        on_service=lambda *_: None,
    )
    ports = {instance.name: KvPorts(CONTROL, KEY).of_ranks(instance) for instance in deployment.instances}
    running = RunningDeployment(deployment)
    monitor = LinkMonitor(
        running,
        lambda instance, rank: ports[instance.name][rank],
        state,
        on_change=lambda _: None,
    )
    budget = LinkBudget(running, ports, state.view.links, monitor.samples, clock=clock)
    loops = [asyncio.create_task(loop.run()) for loop in (monitor, budget)]
    while not ended.is_set():
        await asyncio.sleep(0.05)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await monitor.close()
    await asyncio.gather(*(port.close() for (port,) in ports.values()))


def line() -> LineSettings:
    """200 Mbit/s and 30 ms."""
    return LineSettings.of_round_trip(RATE_BITS_PER_S, RTT_S)


def paced(bandwidth_bits_per_s: float, seconds: float) -> Paced:
    """One sender, told that it may send `bandwidth_bits_per_s` of payload."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Laboratory({"far": 2, "home": 1}, line()) as laboratory,
        Site(laboratory, bandwidth_bits_per_s, Path(folder)) as site,
        site.budgeted(),
    ):
        transfer = site.open("far-0")
        transfer.put(0, 0, BytesSource(bytes(_TRANSFER_BYTES)))
        time.sleep(_WARM_S)
        began_s, began_bytes, rtts = time.monotonic(), transfer.acked_bytes, []
        while (passed_s := time.monotonic() - began_s) < seconds and not transfer.phase.terminal:
            rtts.append(_mean_rtt_s(site.senders["far-0"]))
            time.sleep(0.1)
        carried = 8 * (transfer.acked_bytes - began_bytes) / passed_s
        transfer.abort("measured")
    return Paced(bandwidth_bits_per_s, carried, RTT_S, sum(rtts) / len(rtts), max(rtts))


def _mean_rtt_s(sender: Sender) -> float:
    infos = [
        info
        for connections in sender._connections.values()
        for each in connections
        if (info := each.tcp_info())
    ]
    return sum(info.rtt_s for info in infos) / len(infos)


def shared(seconds: float, *, budget: bool) -> Shared:
    """Two senders: one makes 20 Mbit/s, the other has more than enough to send."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Laboratory({"far": 2, "home": 1}, line()) as laboratory,
        Site(laboratory, line().goodput_bits_per_s, Path(folder)) as site,
        ExitStack() as control,
    ):
        if budget:
            control.enter_context(site.budgeted())
        slow, full = site.open("far-0"), site.open("far-1")
        full.put(0, 0, BytesSource(bytes(_TRANSFER_BYTES)))
        piece = int(SLOW_BITS_PER_S / 8 * _PUT_S)
        began_s = next_s = time.monotonic()
        marks: list[tuple[float, int, int]] = []
        while (now_s := time.monotonic()) < began_s + _WARM_S + seconds:
            slow.put(0, slow.put_bytes, BytesSource(bytes(piece)))
            if now_s > began_s + _WARM_S:
                marks.append((now_s, slow.acked_bytes, full.acked_bytes))
            next_s += _PUT_S
            time.sleep(max(0.0, next_s - time.monotonic()))
        for transfer in (slow, full):
            transfer.abort("measured")
    (first_s, *before), (last_s, *after) = marks[0], marks[-1]
    rates = [8 * (end - start) / (last_s - first_s) for start, end in zip(before, after, strict=True)]
    return Shared(rates[0], rates[1], sum(rates) / line().goodput_bits_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0)
    asked = parser.parse_args()
    with ending_on_sigterm():
        goodput = line().goodput_bits_per_s
        found = {
            "paced at goodput": paced(goodput, asked.seconds),
            "paced at the line's rate": paced(RATE_BITS_PER_S, asked.seconds),
        }
        sharing = {
            "equal shares": shared(asked.seconds, budget=False),
            "budget": shared(asked.seconds, budget=True),
        }
    for name, result in found.items():
        print(
            f"{name}: {result.carried_bits_per_s / 1e6:.1f} Mbit/s, round trip {1e3 * result.mean_rtt_s:.1f} ms "
            f"in the mean, {1e3 * result.longest_rtt_s:.1f} at most, {result.inflation:.2f} of the least"
        )
    for name, each in sharing.items():
        print(
            f"{name}: {each.slow_bits_per_s / 1e6:.1f} + {each.full_bits_per_s / 1e6:.1f} Mbit/s, "
            f"{each.of_goodput:.3f} of the goodput"
        )
    if asked.json is not None:
        results = {name: asdict(each) for name, each in (found | sharing).items()}
        asked.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
