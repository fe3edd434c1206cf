"""Once a second: every engine's own counters, from its /metrics.

How often everybody is asked: as often as wanted, less often when there are many.
"""

import asyncio
from collections.abc import Callable

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.engine_metrics import EngineAccess, EngineMeter, EngineReading, read_exposition


def period_s(wanted_s: float, members: int, most_per_s: float) -> float:
    """Seconds between two rounds over `members`, so that never more than `most_per_s` are asked in a second."""
    return max(wanted_s, members / most_per_s)


WANTED_S = 1.0
# Writing its exposition costs an engine some milliseconds, and reading it costs us one.
MOST_ASKED_PER_S = 24.0
_ANSWER_S = 2.0
_WINDOW_S = 60.0


class EngineMonitor:
    """One meter per instance, the counts of foreign requests on the board, and who was restarted."""

    def __init__(
        self,
        deployment: Deployment,
        http: EngineAccess,
        board: ClusterState,
        *,
        clock: Clock,
        on_restart: Callable[[str], None],
        on_reading: Callable[[Instance, EngineReading], None],
    ) -> None:
        """`on_restart(instance name)`: the process is another one than at the last look."""
        self._instances = deployment.instances
        self._http = http
        self._board = board
        self._clock = clock
        self._on_restart = on_restart
        self._on_reading = on_reading
        self.meters = {instance.name: EngineMeter(_WINDOW_S) for instance in self._instances}
        self.period_s = period_s(WANTED_S, len(self._instances), MOST_ASKED_PER_S)
        self.failures = 0

    async def run(self) -> None:
        """Until cancelled. Instances are asked one after the other, evenly over the period."""
        asked: set[asyncio.Task[None]] = set()
        try:
            while True:
                for instance in self._instances:
                    task = asyncio.get_running_loop().create_task(self.ask(instance))
                    asked.add(task)
                    task.add_done_callback(asked.discard)
                    await asyncio.sleep(self.period_s / len(self._instances))
        finally:
            for task in list(asked):
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def ask(self, instance: Instance) -> None:
        """One look at one engine; no answer is no news."""
        text = await self._http.metrics(instance, _ANSWER_S)
        if text is None:
            self.failures += 1
            return
        reading = read_exposition(text)
        now_s = self._clock()
        if self.meters[instance.name].add(reading, now_s):
            self._on_restart(instance.name)
        self._board.instance(instance.name).seen_s = now_s
        self._board.set_engine_load(instance.name, reading.running + reading.waiting)
        self._on_reading(instance, reading)
