"""Instances that are taken out of a running deployment: by an operator, by their owner at short notice, by the file, by
themselves."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from prfaas.core.deployment import AppliedDeployment
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.part import Part
from prfaas.serving.control.prefill_admission import PrefillAdmission

logger = logging.getLogger(__name__)


# Why an instance is closed. It takes part again when no reason is left.
_OPERATOR, _NOTICE, _FILE, _ENDING = "operator", "notice", "file", "ending"


class InstanceDrains(Part):
    """Closes instances and lets them in again. It belongs to the event loop.

    An engine that is to end says so at its KV port, or by refusing new requests while it lets the old ones end. It is
    closed until its end.

    One that was given notice still gets prefills that end in time (`core.scheduling.preemption`). It is closed when the
    time is over, and takes part again as soon as another process answers in its place. One that the file has no more
    gets nothing new; it is forgotten by a deployment without it, which must wait until `is_idle`.
    """

    def __init__(
        self,
        cluster_state: ClusterState,
        admission: PrefillAdmission,
        meters: Mapping[str, EngineMeter],
        listeners: Listeners,
    ) -> None:
        """
        Args:
            cluster_state: whose instances are closed.
            admission: knows who has been given a prefill.
            meters: what engines say of their work, by instance.
            listeners: are told of notices, of operators' drains, and of everybody who may be given other work.
        """
        self.cluster_state = cluster_state
        self._admission = admission
        self._meters = meters
        self._listeners = listeners
        # When those that were given notice are gone, or were.
        self._noticed: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._leaving_since_s: dict[str, float] = {}
        self._reasons: dict[str, set[str]] = {}

    def drain(self, name: str, *, wanted: bool) -> None:
        """Let nothing new go to an instance from now on, or let it take part again, whatever notice it had.

        All ranks of a data-parallel group go with it, here and in the other methods.
        """
        for each in self.cluster_state.together(name):
            self.carry_out(each, wanted=wanted)
            self._listeners.drained.tell(each, wanted)

    def carry_out(self, name: str, *, wanted: bool) -> None:
        """Drain one instance, or end that; only `drain` tells the fleet."""
        had_notice = not wanted and self._forget(name)
        if not wanted:
            self._set(name, _NOTICE, False)
        if not self._set(name, _OPERATOR, wanted) and had_notice:
            self._listeners.changed.tell(name)

    def hear(self, name: str, rank: int, stats: Mapping[str, Any]) -> None:
        """What a rank has just said at its KV port: whether its engine is to end."""
        is_leaving = stats.get("leaving") is True
        self._set_together(name, f"{name}/{rank} leaves", is_leaving)

    def is_ending(self, name: str) -> None:
        """An engine takes no new requests any more, and lets old ones end: its process has been told to."""
        self._set_together(name, _ENDING, True)

    def ended(self, name: str) -> None:
        """Its process is gone: what that has said of its end is over."""
        for each in self.cluster_state.together(name) if name in self.cluster_state.names else ():
            for reason in tuple(self._reasons.get(each, ())):
                if reason == _ENDING or reason.startswith(f"{name}/"):
                    self._set(each, reason, False)

    def _set_together(self, name: str, reason: str, is_there: bool) -> None:
        """Have a reason at all ranks of a group, or not any more; nothing happens where it has left."""
        for each in self.cluster_state.together(name) if name in self.cluster_state.names else ():
            self._set(each, reason, is_there)

    def _set(self, name: str, reason: str, is_there: bool) -> bool:
        """Have a reason for closing an instance, or not any more; returns whether that has opened or closed it."""
        reasons = self._reasons.setdefault(name, set())
        if is_there:
            reasons.add(reason)
        else:
            reasons.discard(reason)
        instance = self.cluster_state.instance(name)
        if instance.closed == bool(reasons):
            return False
        instance.closed = bool(reasons)
        self._listeners.changed.tell(name)
        return True

    def give_notice(self, name: str, notice_s: float) -> None:
        """The instance is taken away in so many seconds; a second notice replaces the first.

        It begins only what it ends until then, and gets nothing more from then on. It takes part again when another
        process answers in its place, or with `drain(name, wanted=False)`.
        """
        for each in self.cluster_state.together(name):
            self._notice(each, notice_s)

    def _notice(self, name: str, notice_s: float) -> None:
        self._forget(name)
        leaves_s = self.cluster_state.clock() + notice_s
        self._noticed[name] = self.cluster_state.view.leaves_s[name] = leaves_s
        self._timers[name] = asyncio.get_running_loop().call_later(notice_s, self._gone, name)
        logger.warning("%s is taken away in %g s", name, notice_s)
        self._listeners.changed.tell(name)
        self._listeners.noticed.tell(name, notice_s)

    def restarted(self, name: str) -> None:
        """Another process is in its place: the old one has ended, and its notice is over where that time has come."""
        self.ended(name)
        if name in self._noticed and self.cluster_state.clock() >= self._noticed[name]:
            self.drain(name, wanted=False)

    def follow(self, _before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Close who begins to leave, and open who is in the file again."""
        leaving = {instance.name for instance in now.leaving}
        for name in leaving - self._leaving_since_s.keys():
            self._leaving_since_s[name] = self.cluster_state.clock()
            self._set(name, _FILE, True)
        for name in self._leaving_since_s.keys() - leaving:
            del self._leaving_since_s[name]
            if any(instance.name == name for instance in now.said.instances):
                self._set(name, _FILE, False)

    def is_idle(self, name: str) -> bool:
        """True if an instance that leaves has no work left; an engine that does not answer has none."""
        return all(map(self._is_idle, self.cluster_state.together(name)))

    def _is_idle(self, name: str) -> bool:
        view = self.cluster_state.instance(name)
        if view.in_flight or self.cluster_state.is_planned(name) or self._admission.is_working(name):
            return False
        newest = self._meters[name].newest
        if not view.healthy or newest is None:
            return True
        # Another gateway's work counts as well, and what the engine said before may be old.
        is_fresh = view.seen_s > self._leaving_since_s.get(name, 0.0)
        return is_fresh and newest.running + newest.waiting == 0

    def leave(self, name: str) -> None:
        """Nothing that was said of it counts any more."""
        self._forget(name)
        self._reasons.pop(name, None)

    def _forget(self, name: str) -> bool:
        """Its notice counts no more. Returns whether it had one."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        self.cluster_state.view.leaves_s.pop(name, None)
        return self._noticed.pop(name, None) is not None

    def _gone(self, name: str) -> None:
        del self._timers[name]
        self.cluster_state.view.leaves_s.pop(name, None)
        self._set(name, _NOTICE, True)
