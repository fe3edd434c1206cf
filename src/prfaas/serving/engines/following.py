"""The engine processes of one machine follow the deployment file while the deployment runs."""

import asyncio
from collections import deque
from collections.abc import Callable

from prfaas.core.deployment import AppliedDeployment, Deployment, DeploymentDifference, Instance
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.child_processes import STOP_TIMEOUT_S
from prfaas.serving.engines.engine_units import unit_name, units_of
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.supervisor import LOOK_EVERY_S, Supervisor
from prfaas.serving.reloading import ReloadRefusedError
from prfaas.serving.secret_files import KeyFileError, TlsFileError


class FollowingEngines:
    """Has the engines that a file adds started, and ends those that have left. It belongs to one event loop."""

    def __init__(
        self,
        engines: RunningEngines,
        supervisor: Supervisor,
        tell: Callable[[str], None],
        runs_here: Callable[[Instance], bool] = lambda _: True,
    ) -> None:
        """
        Args:
            engines: of this machine.
            supervisor: starts them; nobody else runs it.
            tell: called with every sentence that an operator should read.
            runs_here: whether an instance is one to start and end here.
        """
        self._engines = engines
        self._supervisor = supervisor
        self._tell = tell
        self.runs_here = runs_here
        self._left: deque[Instance] = deque()
        self._again: deque[str] = deque()

    def check(self, said: Deployment, difference: DeploymentDifference) -> None:
        """Check that the engines that a file adds can be started on this machine.

        Raises:
            ReloadRefusedError: a port is taken, or a certificate can't be used.
        """
        added = filter(self.runs_here, difference.added)
        new = [each for each in added if not self._engines.is_running(each.name)]
        try:
            self._engines.check(said, new)
        except (EngineError, KeyFileError, TlsFileError) as error:
            raise ReloadRefusedError(f"nothing was changed: {error}") from None

    def follow(self, _before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Have what is new started, soon."""
        self._engines.deployment = now.running
        for unit in units_of(filter(self.runs_here, now.said.instances)):
            self._supervisor.watch(unit)

    def left(self, instance: Instance) -> None:
        """Have the engine of an instance that has left ended, soon."""
        if self.runs_here(instance):
            self._supervisor.leave(unit_name(instance))
            self._left.append(instance)

    def restart(self, name: str) -> bool:
        """Have an engine ended and started again, soon, and its group with it; False: it is none to start here."""
        instances = self._engines.deployment.instances
        unit = next(
            (unit_name(each) for each in instances if each.name == name and self.runs_here(each)), None
        )
        if unit is not None and unit not in self._again:
            self._again.append(unit)
        return unit is not None

    async def _start_again(self, unit: str) -> None:
        """What it has open may go on for its time; then the supervisor starts it."""
        deployment = self._engines.deployment
        timeout_s = deployment.engine.shutdown_timeout_s + STOP_TIMEOUT_S
        of_unit = [each for each in deployment.instances if unit_name(each) == unit and self.runs_here(each)]
        await asyncio.gather(*(asyncio.to_thread(self._engines.end, each, timeout_s) for each in of_unit))
        self._supervisor.start_again(unit)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # One after the other: engines are started and ended by one thread at a time.
            while self._left:
                instance = self._left.popleft()
                try:
                    await asyncio.to_thread(self._engines.end, instance)
                except (EngineError, OSError) as error:
                    self._tell(
                        f"engine {instance.name} has left the deployment file and was not ended: {error}"
                    )
                else:
                    self._tell(f"engine {instance.name} has left the deployment file and was ended")
            while self._again:
                unit = self._again.popleft()
                try:
                    await self._start_again(unit)
                except (EngineError, OSError) as error:
                    self._tell(f"engine {unit} was not started again: {error}")
            await self._supervisor.look()
