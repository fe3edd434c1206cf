"""Peer lists of the engines: each rank is sent the list of whom it may exchange KV with, by the running deployment."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from prfaas.core.deployment import AppliedDeployment
from prfaas.serving.control.part import Json, Part
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import BackgroundTasks
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.peer_list import PeerList, peer_list_of
from prfaas.serving.transport.protocol.sentences import legible
from prfaas.serving.transport.protocol.wire import read_body

logger = logging.getLogger(__name__)

_TELL_S = 2.0

Rank = tuple[str, int]
"""An instance's name and the number of its rank."""


class _State(msgspec.Struct):
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    told: bool
    trouble: str


class _Stats(msgspec.Struct):
    """The part of a STATS answer that says which peer list a rank has."""

    roster: _State


class PeerListUpdates(Part):
    """Hears from every rank which peer list it has, and sends it the wanted one where that is another.

    An engine that has started has the peer list of its command line, and is sent one at once. One that another control
    plane has told otherwise is left alone: of two gateways with different files the one that was reloaded last decides.
    """

    def __init__(
        self,
        running: RunningDeployment,
        kv_ports: Mapping[str, Sequence[Observer]],
    ) -> None:
        """
        Args:
            running: its peer lists are wanted.
            kv_ports: instance name → the KV ports of its ranks; whoever made them keeps them up to date.
        """
        self._running = running
        self._kv_ports = kv_ports
        # With its digest, which takes some work.
        self._wanted: dict[Rank, tuple[PeerList, str]] = {}
        # Which wanted peer list a rank has had, or was sent.
        self._settled: dict[Rank, str] = {}
        self._has: dict[Rank, str] = {}
        self._telling = BackgroundTasks()
        self._want()

    def follow(self, _before: AppliedDeployment, _now: AppliedDeployment) -> None:
        """Want other peer lists, and send them to all at once."""
        self._want()
        self.announce()

    def announce(self) -> None:
        """Send all now, in the background: twice, since who is new is let in only by those that were told before."""

        async def announce() -> None:
            for _ in range(2):
                await asyncio.gather(*(self._tell(rank) for rank in tuple(self._wanted)))

        self._telling.start(announce())

    async def close(self) -> None:
        """Send no more."""
        await self._telling.cancel()

    def state(self, _now_s: float) -> Json:
        """Ranks that are behind."""
        return {"applied": {"rosters_behind": self.behind}}

    @property
    def behind(self) -> list[str]:
        """Ranks that have answered and do not have what is wanted, as "instance/rank"."""
        return [
            f"{name}/{number}"
            for (name, number), has in self._has.items()
            if has != self._wanted[name, number][1]
        ]

    def _want(self) -> None:
        """Each takes some work: not made anew at every look."""
        deployment = self._running.current
        self._wanted = {
            (instance.name, rank): (peer_list, peer_list.digest)
            for instance in deployment.instances
            for rank in range(instance.kv_ranks)
            for peer_list in (peer_list_of(deployment, instance, rank),)
        }
        self._has = {rank: digest for rank, digest in self._has.items() if rank in self._wanted}

    def hear(self, name: str, number: int, stats: Mapping[str, Any]) -> None:
        """Take what a rank has answered: which list it has. Send it the wanted one where that is another."""
        rank = (name, number)
        if rank not in self._wanted:
            return
        try:
            reported = read_body(_Stats, stats).roster
        except ValueError as error:
            # An engine of a version that knows only its command line.
            logger.debug("%s/%d does not report which peer list it has: %s", name, number, error)
            return
        wanted = self._wanted[rank][1]
        has = reported.digest
        if self._has.get(rank) != has and has != wanted and reported.trouble:
            logger.warning(
                "%s/%d keeps the peer list that it has: %s", name, number, legible(reported.trouble)
            )
        self._has[rank] = has
        if has == wanted:
            self._settled[rank] = wanted
        elif not reported.told or self._settled.get(rank) != wanted:
            self._telling.start(self._tell(rank))

    async def _tell(self, rank: Rank) -> None:
        name, number = rank
        if rank not in self._wanted or name not in self._kv_ports:
            return
        peer_list, digest = self._wanted[rank]
        try:
            async with asyncio.timeout(_TELL_S):
                await self._kv_ports[name][number].order(peer_list)
        except (OSError, TimeoutError) as error:
            logger.debug("%s/%d can't be sent its peer list: %s", name, number, error)
            return
        self._settled[rank] = digest
