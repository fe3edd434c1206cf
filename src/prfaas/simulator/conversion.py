"""An instance changes its role: it drains, then does the other thing."""

from collections.abc import Callable
from typing import Any

from prfaas.deployment import Role
from prfaas.simulator.engine import Engine
from prfaas.simulator.world import World

# Both as in `control.roles`.
_TICK_S = 0.25
_DRAIN_LIMIT_S = 60.0


class Conversions:
    """At most one at a time; work that is still there after 60 s goes on beside the new."""

    def __init__(self, world: World, *, on_end: Callable[[], None]) -> None:
        self._world = world
        self._on_end = on_end
        self.is_busy = False
        self.history: list[dict[str, Any]] = []

    def begin(self, instance: str, to_role: Role, reason: str) -> None:
        """Start to convert an instance."""
        engine = self._world.engines[instance]
        engine.view.draining = True
        self.is_busy = True
        now_s = self._world.events.now_s
        self.history.append({"at_s": now_s, "instance": instance, "to_role": to_role, "reason": reason})
        self._world.set_free(engine)
        self._world.events.at(now_s + _TICK_S, self._tick, (engine, to_role, now_s))

    def _tick(self, change: tuple[Engine, Role, float]) -> None:
        engine, to_role, since_s = change
        view, now_s = engine.view, self._world.events.now_s
        if view.healthy and view.in_flight > 0 and now_s - since_s < _DRAIN_LIMIT_S:
            self._world.events.at(now_s + _TICK_S, self._tick, change)
            return
        view.draining = False
        self.is_busy = False
        self.history[-1]["drained_s"] = now_s - since_s
        if view.healthy:
            view.prefills, view.decodes = to_role == "prefill", to_role == "decode"
            if view.prefills:
                self._world.start_next(engine)
        self._on_end()
