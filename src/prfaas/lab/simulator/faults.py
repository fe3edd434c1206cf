"""Instances and links that fail, and come back."""

from prfaas.lab.simulator.instance import Engine, JobStage
from prfaas.lab.simulator.scenario import Failure
from prfaas.lab.simulator.world import World


class Faults:
    """Puts the failures of a scenario into its world."""

    def __init__(self, world: World) -> None:
        self._world = world
        # How many failures of an instance are going on: it is back when all of them are over.
        self._down = dict.fromkeys(world.engines, 0)
        self._warned = dict.fromkeys(world.engines, 0)
        self._links = {link.fluid.name: link for link in world.links.values()}
        for failure in world.scenario.failures:
            if failure.notice_s and failure.what not in self._links:
                world.events.at(failure.at_s - failure.notice_s, self._warn, failure)
            world.events.at(failure.at_s, self._begin, failure)
            world.events.at(failure.at_s + failure.lasts_s, self._end, failure)

    def _warn(self, failure: Failure) -> None:
        """An operator drains what will be gone: nothing new comes, what is there may still end."""
        engine = self._world.engines[failure.what]
        self._warned[failure.what] += 1
        engine.view.draining = True
        self._world.set_free(engine)

    def _begin(self, failure: Failure) -> None:
        if failure.what in self._links:
            # The link itself knows its outages; policies see them at once, since transfers fail.
            self._links[failure.what].look(failure.at_s)
            return
        if failure.notice_s:
            self._warned[failure.what] -= 1
            self._world.engines[failure.what].view.draining = self._warned[failure.what] > 0
        self._down[failure.what] += 1
        if self._down[failure.what] == 1:
            self._die(self._world.engines[failure.what])

    def _end(self, failure: Failure) -> None:
        now_s = self._world.events.now_s
        if failure.what in self._links:
            self._links[failure.what].look(now_s)
            return
        self._down[failure.what] -= 1
        if self._down[failure.what] == 0:
            engine = self._world.engines[failure.what]
            engine.view.healthy = True
            engine.view.busy_until_s = now_s
            self._world.start_next(engine)

    def _die(self, engine: Engine) -> None:
        """Everything there is lost: prefills start again in their PD cluster, answers go on from what is written."""
        world = self._world
        engine.view.healthy = False
        if world.caches is not None:
            world.caches.clear(engine.name)
        world.set_free(engine)
        if engine.clock is not None:
            for job, left_tokens in engine.clock.drop_all():
                written = job.left_tokens - round(left_tokens)
                if written:
                    world.answers.break_off(job)
                job.left_tokens -= written
                job.tokens += written
                world.restart(job)
        for job in [job for job in world.open.values() if job.engine is engine and job.is_at_prefill]:
            job.is_lost = job.stage is JobStage.PREFILLING
            world.restart(job)
        if engine.sharing is not None:
            engine.sharing.drop_all()
        engine.at_work = 0
        engine.waiting = 0
        engine.waiting_s = 0.0
