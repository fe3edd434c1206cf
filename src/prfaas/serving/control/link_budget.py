"""The budget of every link, divided live among the senders that have something to send."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prfaas.core.link.budget import Claim, paces
from prfaas.core.link.samples import SenderSample
from prfaas.core.scheduling.view import LinkView
from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.control.cluster_state import Clock
from prfaas.serving.control.part import Part
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.pacing import PaceOrder

logger = logging.getLogger(__name__)

HOLD_S = 3.0
"""A sender that hears nothing for so long returns to its standing share."""
PERIOD_S = 0.1
_ANSWER_S = 1.0
# An order is repeated well before it ends; in between, smaller changes are not worth a frame.
_REPEAT_S = 1.0
_CHANGE = 0.05
# What a sender has produced lately it may produce again; what waits should leave soon.
_PRODUCTION_S = 0.5
_BACKLOG_S = 0.2


@dataclass(slots=True)
class _Production:
    """How fast one sender's transfers on one link come out of their prefills."""

    at_s: float
    produced_bytes: int
    bits_per_s: float = 0.0

    def look(self, sample: SenderSample) -> None:
        produced = sample.acked_bytes_total + sample.queued_bytes
        passed_s = sample.at_s - self.at_s
        if passed_s <= 0:
            return
        # Less than before: transfers failed, or it is a new process.
        grown = BITS_PER_BYTE * max(produced - self.produced_bytes, 0) / passed_s
        self.bits_per_s += (grown - self.bits_per_s) * -math.expm1(-passed_s / _PRODUCTION_S)
        self.at_s, self.produced_bytes = sample.at_s, produced


@dataclass(slots=True)
class _Told:
    """What one sender was told last."""

    at_s: float = -math.inf
    paces: dict[str, float] = field(default_factory=dict)
    """By the link's name."""


class LinkBudget(Part):
    """Ten times a second divides each link's bandwidth by `core.link.budget.paces`, and tells the senders.

    The bandwidth is what the deployment file says. On a link that is believed slow it is what its meter allows: a
    little more than it is believed to carry, so no queue builds up there, and twice as much while that comes through.
    A sender claims what it has produced lately (mean over about 0.5 s), and what waits there within 0.2 s.
    """

    def __init__(
        self,
        running: RunningDeployment,
        kv_ports: Mapping[str, Sequence[Observer]],
        links: Mapping[tuple[str, str], LinkView],
        samples: Callable[[tuple[str, str]], Mapping[str, SenderSample]],
        *,
        clock: Clock,
    ) -> None:
        """
        Args:
            running: the links.
            kv_ports: those of each instance's ranks, by its name; whoever made them keeps them up to date.
            links: the view's, by (source, target).
            samples: of a link, the newest word of each sender by "instance/rank".
            clock: seconds.
        """
        self._running = running
        self._ports = kv_ports
        self._links = links
        self._samples = samples
        self._clock = clock
        self.paused = False
        """Whether another gateway tells the senders."""
        self._productions: dict[tuple[tuple[str, str], str], _Production] = {}
        self._paces: dict[str, dict[str, float]] = {}
        self._told: dict[str, _Told] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                if not self.paused:
                    self.divide()
                    for sender, order in self.orders():
                        self._tell(sender, order)
                await asyncio.sleep(PERIOD_S)
        finally:
            for task in self._telling.values():
                task.cancel()
            await asyncio.gather(*self._telling.values(), return_exceptions=True)

    def divide(self) -> None:
        """Work out what every sender that is heard may send on each link."""
        self._paces = {}
        heard: set[tuple[tuple[str, str], str]] = set()
        since_s = self._clock() - HOLD_S
        for link in self._running.current.links:
            pair = (link.source, link.target)
            # Who is not heard for so long is not told either, and has returned to its standing share.
            samples = {
                name: each
                for name, each in self._samples(pair).items()
                if each.at_s > since_s and self._port(name) is not None
            }
            heard.update((pair, sender) for sender in samples)
            usable = min(link.bandwidth_bits_per_s, self._links[pair].pace_bits_per_s)
            claims = [self._claim(pair, sender, sample) for sender, sample in samples.items()]
            for sender, pace in zip(samples, paces(usable, claims), strict=True):
                self._paces.setdefault(sender, {})[link.name] = pace
        for gone in self._productions.keys() - heard:
            del self._productions[gone]
        self._told = {sender: told for sender, told in self._told.items() if sender in self._paces}

    def orders(self) -> Iterator[tuple[str, PaceOrder]]:
        """Paces to send now, by "instance/rank": those that have changed, and those sent long ago."""
        now_s = self._clock()
        for sender, now in self._paces.items():
            told = self._told.setdefault(sender, _Told())
            if now_s - told.at_s < _REPEAT_S and not _differs(told.paces, now):
                continue
            told.at_s, told.paces = now_s, now
            yield (
                sender,
                PaceOrder({link: max(round(pace), 1) for link, pace in now.items()}, round(1000 * HOLD_S)),
            )

    def _port(self, sender: str) -> Observer | None:
        """The KV port of an "instance/rank"; None: it has left."""
        name, _, rank = sender.rpartition("/")
        ports = self._ports.get(name, ())
        return ports[int(rank)] if int(rank) < len(ports) else None

    def _claim(self, pair: tuple[str, str], sender: str, sample: SenderSample) -> Claim:
        produced_bytes = sample.acked_bytes_total + sample.queued_bytes
        production = self._productions.setdefault((pair, sender), _Production(sample.at_s, produced_bytes))
        production.look(sample)
        # What has come in the last moments, and what is in flight, does not wait.
        on_its_way_bits = production.bits_per_s * (sample.rtt_s + PERIOD_S)
        waiting_bits = max(BITS_PER_BYTE * sample.ready_bytes - on_its_way_bits, 0.0)
        is_working = sample.open_bytes > 0
        wanted = production.bits_per_s + waiting_bits / _BACKLOG_S if is_working else 0.0
        behind = min(sample.background_bytes / sample.queued_bytes, 1.0) if sample.queued_bytes else 0.0
        return Claim((1 - behind) * wanted, behind * wanted, is_working)

    def _tell(self, sender: str, order: PaceOrder) -> None:
        before = self._telling.get(sender)
        if before is None or before.done():
            self._telling[sender] = asyncio.create_task(self._send(sender, order))
        else:
            # It is being told still, so what it was to be told now must come again.
            self._told.pop(sender, None)

    async def _send(self, sender: str, order: PaceOrder) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                port = self._port(sender)
                if port is not None:
                    await port.order(order)
        except (OSError, TimeoutError) as error:
            logger.debug("%s can't be told its pace: %s", sender, error)


def _differs(told: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return told.keys() != now.keys() or any(
        abs(pace - told[link]) > _CHANGE * max(pace, told[link]) for link, pace in now.items()
    )
