"""Instances and links that fail, and come back."""

import math

from prfaas.lab.simulator.instance import Engine, Job, JobStage
from prfaas.lab.simulator.scenario import Failure
from prfaas.lab.simulator.world import World


class Faults:
    """Puts the failures of a scenario into its world."""

    def __init__(self, world: World) -> None:
        self._world = world
        # How many failures of an instance are going on: it is back when all of them are over.
        self._down = dict.fromkeys(world.engines, 0)
        self._warned: dict[str, list[float]] = {name: [] for name in world.engines}
        self._links = {link.fluid.name: link for link in world.links.values()}
        for failure in world.scenario.failures:
            if failure.notice_s and failure.what not in self._links:
                world.events.at(failure.at_s - failure.notice_s, self._warn, failure)
            world.events.at(failure.at_s, self._begin, failure)
            world.events.at(failure.at_s + failure.lasts_s, self._end, failure)

    def _warn(self, failure: Failure) -> None:
        """Nothing begins any more that does not end in time; what can't end goes to others now, as it does live."""
        world, engine = self._world, self._world.engines[failure.what]
        self._warned[failure.what].append(failure.at_s)
        self._set_leaving(engine)
        world.set_free(engine)
        for job in self._ending_late(engine):
            if job.stage is JobStage.PREFILLING:
                job.is_lost = True
                engine.stop(world.events.now_s)
            world.restart(job, anywhere=True)
        world.start_next(engine)

    def _set_leaving(self, engine: Engine) -> None:
        engine.leaves_s = min(self._warned[engine.name], default=math.inf)
        self._world.view.leaves_s.pop(engine.name, None)
        if engine.leaves_s < math.inf:
            self._world.view.leaves_s[engine.name] = engine.leaves_s

    def _ending_late(self, engine: Engine) -> list[Job]:
        """The prefills that an instance has been given and won't have computed when it leaves.

        Those that share a step go on until they are lost with it: none of them can be taken out of what all of them
        take.
        """
        now_s = self._world.events.now_s
        is_alone = not engine.chunk_tokens
        free_s = max(engine.free_at_s, now_s) if engine.at_work else now_s
        if is_alone and free_s > engine.leaves_s:
            free_s = now_s
        late = []
        for job in self._world.open.values():
            if job.engine is not engine:
                continue
            if job.stage <= JobStage.QUEUED:
                free_s += job.service_s
                if free_s > engine.leaves_s:
                    late.append(job)
                    free_s -= job.service_s
            elif job.stage is JobStage.PREFILLING and is_alone and engine.free_at_s > engine.leaves_s:
                late.append(job)
        return late

    def _begin(self, failure: Failure) -> None:
        if failure.what in self._links:
            # The link itself knows its outages; policies see them at once, since transfers fail.
            self._links[failure.what].look(failure.at_s)
            return
        if failure.notice_s:
            self._warned[failure.what].remove(failure.at_s)
            self._set_leaving(self._world.engines[failure.what])
        for name in self._together(failure.what):
            self._down[name] += 1
            if self._down[name] == 1:
                self._die(self._world.engines[name])

    def _end(self, failure: Failure) -> None:
        now_s = self._world.events.now_s
        if failure.what in self._links:
            self._links[failure.what].look(now_s)
            return
        for name in self._together(failure.what):
            self._down[name] -= 1
            if self._down[name] == 0:
                engine = self._world.engines[name]
                engine.view.healthy = True
                engine.view.busy_until_s = now_s
                self._world.start_next(engine)

    def _together(self, name: str) -> tuple[str, ...]:
        """The instances that fail with one: all ranks of its group."""
        return self._world.engines[name].view.group or (name,)

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
        engine.at_work = 0
        engine.waiting = 0
        engine.waiting_s = 0.0
