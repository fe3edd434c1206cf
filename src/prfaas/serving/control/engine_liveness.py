"""Liveness of instances: when each last answered over HTTP, and at the KV port of each rank."""

import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.core.deployment import Instance
from prfaas.serving.control.cluster_state import Clock
from prfaas.serving.control.engine_http import EngineHttp
from prfaas.serving.own_process import lacks_descriptors, on_time_timeout
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.handshake import HandshakeError

_ANSWER_S = 2.0
# By the clock on the wall, however late the loop is.
_LONGEST_ANSWER_S = 60.0
# What is heard without being asked for tells that an engine lives, not that it is well.
_HEALTH_S = 5.0


@dataclass(slots=True)
class _Way:
    label: str
    ask: Callable[[], Awaitable[object]]
    longest_s: float
    """It is asked after so long even if it is heard meanwhile."""
    heard_s: float
    asked_s: float
    asking: bool = False


class EngineLiveness:
    """Asks every way that has not been heard for `ask_s`. What others hear of an instance counts as well.

    Time is that of the gateway's own event loop while it is on time, so a late loop makes nobody silent.
    """

    def __init__(
        self,
        http: EngineHttp,
        *,
        ask_s: Callable[[], float],
        clock: Clock,
        on_health: Callable[[str, bool], None],
    ) -> None:
        """`on_health(instance, good)`: its /health was answered, or its HTTP port refused."""
        self._http = http
        self._ask_s = ask_s
        self._clock = clock
        self._on_health = on_health
        self._ways: dict[str, tuple[_Way, ...]] = {}

    def join(self, instance: Instance, ports: Sequence[Observer]) -> None:
        """Ask an instance and the KV ports of its ranks from now on; it counts as heard now."""
        self._ways[instance.name] = (
            self._way("HTTP server", self._asker(instance), _HEALTH_S),
            *(
                self._way(_port_label(rank, len(ports)), port.stats, math.inf)
                for rank, port in enumerate(ports)
            ),
        )

    def leave(self, name: str) -> None:
        """Ask it no longer."""
        del self._ways[name]

    def heard_http(self, name: str) -> None:
        """The instance has answered over HTTP."""
        if name in self._ways:
            self._ways[name][0].heard_s = self._clock()

    def heard_kv(self, name: str, rank: int) -> None:
        """The KV port of a rank has answered. That of a pool says nothing of an engine."""
        if name in self._ways:
            self._ways[name][1 + rank].heard_s = self._clock()

    def silence(self, name: str, limit_s: float) -> str | None:
        """The name of a way that has not answered for longer than `limit_s`; None: all have."""
        before_s = self._clock() - limit_s
        return next((way.label for way in self._ways[name] if way.heard_s < before_s), None)

    def heard_since(self, name: str, moment_s: float) -> bool:
        """True if every way has answered after a moment of the clock."""
        return all(way.heard_s > moment_s for way in self._ways[name])

    def due(self, names: Iterable[str], urgent: Callable[[str], bool]) -> list[Coroutine[Any, Any, None]]:
        """The questions that are to be asked now.

        `urgent(instance)`: every way is to be asked every `ask_s`, also one that is heard.
        """
        now_s, ask_s = self._clock(), self._ask_s()
        return [
            self._ask(way)
            for name in names
            for way in self._ways[name]
            if not way.asking and now_s >= _next_s(way, ask_s, urgent=urgent(name))
        ]

    def _way(self, label: str, ask: Callable[[], Awaitable[object]], longest_s: float) -> _Way:
        now_s = self._clock()
        return _Way(label, ask, longest_s, now_s, now_s)

    def _asker(self, instance: Instance) -> Callable[[], Awaitable[None]]:
        async def ask() -> None:
            healthy = await self._http.is_healthy(instance, _LONGEST_ANSWER_S)
            if healthy is None:
                raise TimeoutError
            if instance.name in self._ways:
                self._on_health(instance.name, healthy)

        return ask

    def _ask(self, way: _Way) -> Coroutine[Any, Any, None]:
        way.asking, way.asked_s = True, self._clock()
        return self._asked(way)

    async def _asked(self, way: _Way) -> None:
        try:
            async with on_time_timeout(_ANSWER_S, self._clock):
                await way.ask()
            way.heard_s = self._clock()
        except OSError as error:
            # Who refuses is not frozen; and what we can't ask for lack of descriptors can't answer.
            if isinstance(error, ConnectionRefusedError | HandshakeError) or lacks_descriptors(error):
                way.heard_s = self._clock()
        finally:
            way.asking = False


def _port_label(rank: int, ranks: int) -> str:
    return "KV port" if ranks == 1 else f"KV port of rank {rank}"


def _next_s(way: _Way, ask_s: float, *, urgent: bool) -> float:
    next_s = way.asked_s + ask_s
    return next_s if urgent else max(next_s, min(way.heard_s + ask_s, way.asked_s + way.longest_s))
