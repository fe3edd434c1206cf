"""What of the engines on this machine is started, restarted and ended as one.

A unit is an engine, or the ranks of a data-parallel group that run on this machine: none computes without the others.
"""

from collections.abc import Callable, Collection, Iterable

from prfaas.core.deployment import Instance
from prfaas.serving.engines.running import RunningEngines


def unit_name(instance: Instance) -> str:
    """The name of the unit that an engine is in: the engine's, or "group" and the group's."""
    return instance.name if instance.data_parallel is None else f"group {instance.data_parallel}"


def units_of(instances: Iterable[Instance]) -> tuple[str, ...]:
    """The names of the units of these engines, in their order."""
    return tuple(dict.fromkeys(map(unit_name, instances)))


class RunningUnits:
    """The engines of this machine as a supervisor sees them: by the names of their units."""

    def __init__(
        self, engines: RunningEngines, runs_here: Callable[[Instance], bool] = lambda _: True
    ) -> None:
        """`runs_here`: whether an instance is one to start here."""
        self._engines = engines
        self._runs_here = runs_here

    def is_running(self, name: str) -> bool:
        """True if every engine of a unit runs."""
        return not self._ended(name)

    def ended_how(self, name: str) -> str:
        """The way in which those of a unit have ended that do not run, and where to read more."""
        ended = self._ended(name)
        if ended == [name]:
            return self._engines.ended_how(name)
        return "; ".join(f"{each}: {self._engines.ended_how(each)}" for each in ended)

    def restart(self, names: Collection[str]) -> None:
        """Start units again of which an engine has ended: the rest of each is ended first. Returns at once.

        Raises:
            EngineError, KeyFileError, TlsFileError: as `RunningEngines.restart`.
        """
        engines = [engine for name in names for engine in self._of(name)]
        for engine in engines:
            if self._engines.is_running(engine):
                self._engines.kill(engine)
        self._engines.restart(engines)

    def kill(self, name: str) -> None:
        """SIGKILL all engines of a unit. Raises EngineError where ports stay taken."""
        for engine in self._of(name):
            self._engines.kill(engine)

    def answers(self, name: str) -> bool:
        """True if all servers of a unit say that they are healthy."""
        return all(map(self._engines.answers, self._of(name)))

    def _ended(self, name: str) -> list[str]:
        return [engine for engine in self._of(name) if not self._engines.is_running(engine)]

    def _of(self, name: str) -> list[str]:
        instances = self._engines.deployment.instances
        of_unit = [each for each in instances if unit_name(each) == name]
        return [each.name for each in of_unit if each.data_parallel is None or self._runs_here(each)]
