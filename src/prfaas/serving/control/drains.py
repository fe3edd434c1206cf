"""Instances that are taken out of a running deployment: by an operator, or by their owner at short notice."""

import asyncio
import logging
from collections.abc import Callable

from prfaas.serving.control.cluster_state import Clock, ClusterState

logger = logging.getLogger(__name__)


class InstanceDrains:
    """Closes instances and lets them in again. It belongs to the event loop.

    One that was given notice still gets prefills that end in time (`core.scheduling.preemption`). It is closed when the
    time is over, and takes part again as soon as another process answers in its place.
    """

    def __init__(
        self, cluster_state: ClusterState, *, clock: Clock, on_change: Callable[[str], None]
    ) -> None:
        """`on_change(instance)` is called when an instance may be given other work than before."""
        self._cluster_state = cluster_state
        self._clock = clock
        self._on_change = on_change
        # When those that were given notice are gone, or were.
        self._noticed: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def drain(self, name: str, *, wanted: bool) -> None:
        """Let nothing new go to an instance from now on, or let it take part again, whatever notice it had."""
        instance = self._cluster_state.instance(name)
        had_notice = not wanted and self.forget(name)
        if instance.closed != wanted or had_notice:
            instance.closed = wanted
            self._on_change(name)

    def give_notice(self, name: str, notice_s: float) -> None:
        """The instance is gone in so many seconds; a second notice replaces the first."""
        self.forget(name)
        leaves_s = self._clock() + notice_s
        self._noticed[name] = self._cluster_state.view.leaves_s[name] = leaves_s
        self._timers[name] = asyncio.get_running_loop().call_later(notice_s, self._gone, name)
        logger.warning("%s is taken away in %g s", name, notice_s)
        self._on_change(name)

    def has_left(self, name: str) -> bool:
        """Whether its notice is over: another process in its place is a new instance."""
        return name in self._noticed and self._clock() >= self._noticed[name]

    def forget(self, name: str) -> bool:
        """Its notice counts no more. Returns whether it had one."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        self._cluster_state.view.leaves_s.pop(name, None)
        return self._noticed.pop(name, None) is not None

    def _gone(self, name: str) -> None:
        del self._timers[name]
        self._cluster_state.view.leaves_s.pop(name, None)
        self._cluster_state.instance(name).closed = True
        self._on_change(name)
