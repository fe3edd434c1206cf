"""The slow side of the roles: which PD instance should do what, and the change of one at a time."""

import asyncio
import logging
from dataclasses import asdict
from typing import Any

from prfaas.control.board import Clock
from prfaas.control.facts import LiveFacts
from prfaas.control.roles import RoleChanges
from prfaas.control.usage import Usage
from prfaas.deployment import ControlConfig
from prfaas.planner import PlanError
from prfaas.scheduling.allocation import Allocator
from prfaas.scheduling.length_window import LengthWindow
from prfaas.workload import WorkloadError

logger = logging.getLogger(__name__)

_TICK_S = 0.25
# After a conversion the queues need this many evaluations to show what it did.
_COOL_DOWN_PERIODS = 2


class Allocating:
    """Evaluates the roles every `allocation_period_s` and sees conversions through."""

    def __init__(
        self,
        config: ControlConfig,
        facts: LiveFacts,
        usage: Usage,
        window: LengthWindow,
        changes: RoleChanges,
        *,
        clock: Clock,
    ) -> None:
        self._config = config
        self._facts = facts
        self._usage = usage
        self._window = window
        self._changes = changes
        self._clock = clock
        self._allocator = Allocator(cool_down_s=_COOL_DOWN_PERIODS * config.allocation_period_s)
        self.last: dict[str, Any] = {}

    async def run(self) -> None:
        """Until cancelled."""
        next_s = self._clock() + self._config.allocation_period_s
        while True:
            await asyncio.sleep(_TICK_S)
            self._changes.tick()
            if self._clock() >= next_s:
                next_s = self._clock() + self._config.allocation_period_s
                if self._config.allocation:
                    await self.evaluate()

    async def evaluate(self) -> None:
        """One evaluation; the planner works in a thread. At most one conversion is begun."""
        now_s = self._clock()
        loads = self._usage.loads()
        self.last = {
            "loads": {
                load.cluster: {"prefill": asdict(load.prefill), "decode": asdict(load.decode)}
                for load in loads
            }
        }
        lengths = self._window.lengths(now_s)
        if lengths is None or self._changes.is_busy:
            self.last["result"] = "converting" if self._changes.is_busy else "too few requests"
            return
        try:
            problem = self._facts.problem(lengths)
            conversion = await asyncio.to_thread(self._allocator.decide, loads, problem, now_s)
        except (PlanError, WorkloadError) as error:
            self.last["result"] = str(error)
            return
        self.last["result"] = "kept" if conversion is None else "conversion"
        if conversion is not None:
            self.last |= {
                "rate_before": conversion.rate_before,
                "rate_after": conversion.rate_after,
                "rate_best": conversion.rate_best,
            }
            self._changes.begin(conversion.instance, conversion.to_role, conversion.reason)
