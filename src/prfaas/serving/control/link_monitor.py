"""What the engines' senders report of their links, ten times a second, summed per link into the `View`.

`LinkBreaker` closes a link whose transfers fail, whatever its connections report.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.core.deployment import CONTROL, Deployment, Instance
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.engine_monitor import period_s
from prfaas.serving.control.link_meter import LinkMeter, SenderSample
from prfaas.serving.control.pulse import KvPort
from prfaas.serving.transport import Observer, TlsIdentity

_FAILURES_TO_CLOSE = 3
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 80.0


class LinkBreaker:
    """Three failed transfers in a row close a link for 10 s. Then it is tried again.

    One more failure closes it for twice as long, up to 80 s. One success clears all earlier failures.
    """

    __slots__ = ("_closed_until_s", "_failures", "_pause_s")

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = float("-inf")

    def failed(self, now_s: float) -> None:
        """A transfer failed. While the link is closed that is not counted: those transfers began before."""
        if not self.is_up(now_s):
            return
        self._failures += 1
        if self._failures >= _FAILURES_TO_CLOSE:
            self._closed_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """A transfer came through."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = float("-inf")

    def is_up(self, now_s: float) -> bool:
        return now_s >= self._closed_until_s


logger = logging.getLogger(__name__)

WANTED_S = 0.1
MOST_ASKED_PER_S = 250.0
_ANSWER_S = 1.0
# A rank that doesn't answer is asked more rarely; its last report is believed for so long.
_RETRY_S = 2.0
_FORGOTTEN_S = 3.0
# Smaller changes of a capacity are no reason to search the threshold at once.
_MUCH_CHANGED = 0.2


@dataclass(slots=True)
class _Rank:
    instance: Instance
    number: int
    observer: KvPort
    ask_again_s: float = 0.0
    asking: bool = False


class LinkMonitor:
    """Asks every tensor-parallel rank of every instance that may send, and keeps the links of the state right."""

    def __init__(
        self,
        deployment: Deployment,
        observer_of: Callable[[Instance, int], KvPort],
        cluster_state: ClusterState,
        *,
        clock: Clock,
        on_change: Callable[[str], None],
        on_answer: Callable[[str, int], None] = lambda _name, _rank: None,
    ) -> None:
        """`on_change` is called with the link's name when it goes down or comes back, or its capacity changes much.

        `on_answer(instance, rank)`: it has answered.
        """
        self._cluster_state = cluster_state
        self._clock = clock
        self._on_change = on_change
        self._on_answer = on_answer
        now_s = clock()
        self.meters = {
            (link.source, link.target): LinkMeter(link.bandwidth_bits_per_s, now_s)
            for link in deployment.links
        }
        self.breakers = {pair: LinkBreaker() for pair in self.meters}
        self._pairs = {f"{source}->{target}": (source, target) for source, target in self.meters}
        self._announced_bits_per_s = {pair: meter.capacity_bits_per_s for pair, meter in self.meters.items()}
        sources = {source for source, _ in self.meters}
        self._ranks = {
            f"{instance.name}/{rank}": _Rank(instance, rank, observer_of(instance, rank))
            for instance in deployment.instances
            if instance.cluster in sources
            for rank in range(instance.tensor_parallel)
        }
        self._samples: dict[tuple[str, str], dict[str, SenderSample]] = {pair: {} for pair in self.meters}
        self._asked: set[asyncio.Task[None]] = set()
        self.period_s = period_s(WANTED_S, len(self._ranks), MOST_ASKED_PER_S)
        self.failures = 0

    async def run(self) -> None:
        """Until cancelled; at once over where there is no link."""
        while self.meters:
            self.ask()
            # Answers take a fraction of the period; a slower one counts in the next round.
            await asyncio.sleep(self.period_s / 2)
            self.conclude()
            await asyncio.sleep(self.period_s / 2)

    def ask(self) -> None:
        """Ask every rank whose last question is answered, without waiting for the answers."""
        now_s = self._clock()
        for name, rank in self._ranks.items():
            if not rank.asking and now_s >= rank.ask_again_s:
                rank.asking = True
                task = asyncio.get_running_loop().create_task(self._ask(name, rank))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)

    def conclude(self) -> None:
        """Update the links with the answers so far."""
        now_s = self._clock()
        for pair, meter in self.meters.items():
            samples = self._samples[pair]
            for name in [name for name, sample in samples.items() if sample.at_s < now_s - _FORGOTTEN_S]:
                del samples[name]
            acked_bytes = meter.observe(samples, now_s)
            self._update_link(pair, meter, acked_bytes, now_s)

    def samples(self, pair: tuple[str, str]) -> Mapping[str, SenderSample]:
        """The newest word of each sender of a link, by "instance/rank"."""
        return self._samples[pair]

    def failed(self, pair: tuple[str, str]) -> None:
        """A transfer over a link failed, and neither end is known to be dead."""
        if pair in self.breakers:
            self.breakers[pair].failed(self._clock())

    def succeeded(self, pair: tuple[str, str]) -> None:
        """A transfer over a link was completed."""
        if pair in self.breakers:
            self.breakers[pair].succeeded()

    async def close(self) -> None:
        for task in list(self._asked):
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await asyncio.gather(
            *(rank.observer.close() for rank in self._ranks.values()), return_exceptions=True
        )

    async def _ask(self, name: str, rank: _Rank) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await rank.observer.stats()
            self._on_answer(rank.instance.name, rank.number)
            at_s = self._clock()
            for link, report in _reports(answer).items():
                pair = self._pairs.get(link)
                if pair is not None:
                    self._samples[pair][name] = SenderSample.of_report(report, at_s)
        except (OSError, TimeoutError, KeyError, TypeError, ValueError) as error:
            self.failures += 1
            rank.ask_again_s = self._clock() + _RETRY_S
            logger.debug("no link telemetry from %s: %s", name, error)
        finally:
            rank.asking = False

    def _update_link(self, pair: tuple[str, str], meter: LinkMeter, acked_bytes: int, now_s: float) -> None:
        link = self._cluster_state.view.links[pair]
        capacity = meter.capacity_bits_per_s
        self._cluster_state.set_link(
            pair,
            delivered_bytes=acked_bytes,
            measured_bytes=meter.open_bytes,
            capacity_bits_per_s=capacity,
        )
        link.egress_bits_per_s = meter.egress_bits_per_s(now_s)
        link.rtt_s = meter.rtt_s
        link.retransmit_ratio = meter.retransmit_ratio
        link.seen_s = meter.seen_s
        up = meter.is_connected(now_s) and self.breakers[pair].is_up(now_s)
        changed = (
            abs(capacity - self._announced_bits_per_s[pair])
            > _MUCH_CHANGED * self._announced_bits_per_s[pair]
        )
        if up != link.up:
            link.up = up
            logger.warning("link %s->%s is %s", *pair, "up again" if up else "down: not used")
            changed = True
        if changed:
            self._announced_bits_per_s[pair] = capacity
            self._on_change(f"{pair[0]}->{pair[1]}")


def observer_of(key: bytes, tls: TlsIdentity | None = None) -> Callable[[Instance, int], KvPort]:
    """Makes the observers of a deployment with this key. `tls`: for instances that the gateway speaks TLS with."""

    def make(instance: Instance, rank: int) -> KvPort:
        port = instance.kv_ports[rank]
        encrypted_by = tls if instance.tls else None
        return Observer(CONTROL, key, instance.host, port, f"{instance.name}/{rank}", encrypted_by)

    return make


def _reports(answer: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    links = answer["sender"]["links"]
    if not isinstance(links, Mapping):
        raise TypeError("links are no mapping")
    return links
