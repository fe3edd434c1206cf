"""A simulated deployment on machines that are faster at one time than at another."""

from prfaas.lab.simulator.instance import Engine, Job
from prfaas.lab.simulator.mixed_world import MixedWorld


class SlowedWorld(MixedWorld):
    """A `MixedWorld` whose prefills take as much longer as the scenario says; policies expect what profiles say."""

    def _start(self, engine: Engine, job: Job) -> None:
        slowdown = self.scenario.slowdown
        if slowdown is not None:
            job.service_s = slowdown.stretched_s(self.events.now_s, job.service_s)
        super()._start(engine, job)
