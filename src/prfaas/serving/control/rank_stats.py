"""Every rank's own account of itself: its KV port is asked for STATS, and the parts that listen hear the answer."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from prfaas.serving.control.engine_monitor import period_s
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.part import Part
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.io.observer import Observer

logger = logging.getLogger(__name__)

WANTED_S = 0.5
MOST_ASKED_PER_S = 100.0
_ANSWER_S = 1.0


class RankStats(Part):
    """Asks all ranks of all instances, and tells `Listeners.told`. Of one that does not answer nothing is told."""

    def __init__(
        self,
        running: RunningDeployment,
        kv_ports: Mapping[str, Sequence[Observer]],
        listeners: Listeners,
    ) -> None:
        """Nobody is asked before `run` or `ask`.

        Args:
            running: whose instances.
            kv_ports: instance → one observer per rank; whoever made them keeps them up to date.
            listeners: are told of every answer.
        """
        self._running = running
        self._kv_ports = kv_ports
        self._listeners = listeners
        self._asking: dict[str, asyncio.Task[None]] = {}

    def leave(self, name: str) -> None:
        """Its answer is of no use any more."""
        asking = self._asking.pop(name, None)
        if asking is not None:
            asking.cancel()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                instances = self._running.current.instances
                for instance in instances:
                    self._ask_soon(instance.name)
                ranks = sum(instance.kv_ranks for instance in instances)
                await asyncio.sleep(period_s(WANTED_S, ranks, MOST_ASKED_PER_S))
        finally:
            for task in self._asking.values():
                task.cancel()

    async def ask(self, name: str) -> None:
        """Have the word of an instance as of now, unless it does not answer within two seconds."""
        if name not in self._kv_ports:
            return
        before = self._asking.get(name)
        if before is not None:
            # What is being asked already may be answered by what was so before.
            await asyncio.wait((before,))
        await asyncio.wait((self._ask_soon(name),))

    def _ask_soon(self, name: str) -> "asyncio.Task[None]":
        asking = self._asking.get(name)
        if asking is None or asking.done():
            asking = asyncio.get_running_loop().create_task(self._ask(name))
            self._asking[name] = asking
        return asking

    async def _ask(self, name: str) -> None:
        ports = self._kv_ports.get(name, ())
        await asyncio.gather(*(self._ask_rank(name, rank, port) for rank, port in enumerate(ports)))

    async def _ask_rank(self, name: str, rank: int, port: Observer) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await port.stats()
        except (OSError, ValueError) as error:
            logger.debug("%s/%d says nothing of itself: %s", name, rank, error)
            return
        if name in self._kv_ports:
            self._listeners.told.tell(name, rank, answer)
