"""Changing an instance's role without losing or slowing a request: drain, then relabel."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.control.board import Board, Clock
from prfaas.deployment import Role

logger = logging.getLogger(__name__)

DRAIN_LIMIT_S = 60.0
_HISTORY = 20


@dataclass(slots=True)
class RoleChange:
    """One conversion. `outcome`: draining, done, done-with-old-work (the drain took too long; both kinds of work
    are there for a while) or abandoned (the instance failed meanwhile)."""

    instance: str
    cluster: str
    from_role: Role
    to_role: Role
    reason: str
    at_s: float
    outcome: str = "draining"
    drained_s: float | None = None


class RoleChanges:
    """At most one conversion at a time.

    A converting instance gets nothing new. When its old work is done, or after 60 s, it has its new role; work that
    is still there then goes on to its end beside the new. An instance that fails while it drains keeps its role.
    """

    def __init__(
        self,
        board: Board,
        *,
        clock: Clock,
        on_end: Callable[[RoleChange], None],
        on_begin: Callable[[str], None] = lambda _instance: None,
    ) -> None:
        """`on_begin` is told of every instance that gets nothing new any more, `on_end` of every conversion that
        ends, however."""
        self._board = board
        self._clock = clock
        self._on_begin = on_begin
        self._on_end = on_end
        self._current: RoleChange | None = None
        self.history: deque[RoleChange] = deque(maxlen=_HISTORY)

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    def begin(self, instance: str, to_role: Role, reason: str) -> bool:
        """Start to convert; False if another conversion is under way or the instance has that role already."""
        view = self._board.instance(instance)
        has_role = (view.prefills, view.decodes) == (to_role == "prefill", to_role == "decode")
        if self._current is not None or has_role:
            return False
        view.draining = True
        from_role: Role = "decode" if to_role == "prefill" else "prefill"
        self._current = RoleChange(instance, view.cluster, from_role, to_role, reason, self._clock())
        self.history.append(self._current)
        logger.info("%s is to %s instead of %s: %s", instance, to_role, from_role, reason)
        self._on_begin(instance)
        return True

    def tick(self) -> None:
        """Look whether the conversion under way can be concluded."""
        change = self._current
        if change is None:
            return
        view = self._board.instance(change.instance)
        waited_s = self._clock() - change.at_s
        if not view.healthy:
            self._conclude(change, "abandoned", waited_s)
        elif view.in_flight == 0:
            self._conclude(change, "done", waited_s)
        elif waited_s >= DRAIN_LIMIT_S:
            self._conclude(change, "done-with-old-work", waited_s)

    def state(self, now_s: float) -> list[dict[str, Any]]:
        """The last conversions, newest last, `age_s` instead of times."""
        return [
            {key: value for key, value in asdict(change).items() if key != "at_s"}
            | {"age_s": round(now_s - change.at_s, 3)}
            for change in self.history
        ]

    def _conclude(self, change: RoleChange, outcome: str, waited_s: float) -> None:
        change.outcome, change.drained_s = outcome, waited_s
        self._current = None
        self._board.instance(change.instance).draining = False
        logger.info(
            "conversion of %s to %s: %s after %.1f s", change.instance, change.to_role, outcome, waited_s
        )
        if outcome != "abandoned":
            self._board.set_role(change.instance, change.to_role)
        self._on_end(change)
