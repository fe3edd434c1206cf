"""How the deployment was over time, in a bounded number of samples."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prfaas.lab.simulator.instance import Engine
from prfaas.lab.simulator.world import World

MOST_SAMPLES = 512


class TimeSeries:
    """Samples the whole deployment in equal steps of time.

    When there are too many samples, every other one goes and the step doubles. Rates and utilisations are means since
    the sample before; queues, thresholds and roles are as they are at the sample.
    """

    def __init__(self, world: World, period_s: float = 1.0) -> None:
        self._world = world
        self.period_s = period_s
        self.times = array("d")
        self._totals: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self._levels: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self._engines: dict[str, list[Engine]] = defaultdict(list)
        for engine in world.engines.values():
            self._engines[engine.cluster.name].append(engine)
        self._work_s: dict[str, list[float]] = {}
        self.is_over = False
        self._sample(None)

    def _sample(self, _argument: object) -> None:
        world = self._world
        now_s = world.events.now_s
        world.look()
        passed_s = now_s - self.times[-1] if self.times else now_s
        self.times.append(now_s)
        for name, total in self._totals_after(passed_s):
            self._totals[name].append(total)
        for name, level in self._levels_now():
            self._levels[name].append(level)
        if len(self.times) > MOST_SAMPLES:
            # The last sample stays: totals go on from it.
            for values in (self.times, *self._totals.values(), *self._levels.values()):
                del values[1::2]
            self.period_s *= 2
        if not self.is_over:
            world.events.at(now_s + self.period_s, self._sample)

    def _levels_now(self) -> Iterator[tuple[str, float]]:
        world = self._world
        for cluster in world.scenario.clusters:
            name, engines = cluster.name, self._engines[cluster.name]
            yield f"prefill_instances_{name}", sum(engine.view.prefills for engine in engines)
            queued = sum(len(engine.queue) for engine in engines)
            yield f"queue_{name}", queued + len(world.prefill_pools[name])
            if cluster.kind == "pd":
                waiting = [engine.clock.waiting for engine in engines if engine.clock is not None]
                yield f"decode_queue_{name}", sum(waiting)
                yield f"threshold_tokens_{name}", world.view.threshold_tokens.get(name, math.inf)
        for link in world.links.values():
            yield f"capacity_bits_per_s_{link.fluid.name}", link.fluid.capacity_bits_per_s

    def _totals_after(self, passed_s: float) -> Iterator[tuple[str, float]]:
        """So far, a sample and so many seconds after the one before."""
        now_s = self._world.events.now_s
        for cluster in self._world.scenario.clusters:
            name, engines = cluster.name, self._engines[cluster.name]
            prefills = [(engine.busy_s(now_s), engine.view.prefills) for engine in engines]
            yield from self._used("prefill_{}_s_" + name, prefills, passed_s)
            if cluster.kind == "pd":
                decodes = [
                    (engine.clock.busy_slot_s, engine.view.decodes)
                    for engine in engines
                    if engine.clock is not None
                ]
                yield from self._used("decode_{}_s_" + name, decodes, cluster.decode_slots * passed_s)
        for link in self._world.links.values():
            yield f"sent_bits_{link.fluid.name}", link.fluid.sent_bits

    def _used(self, name: str, work: list[tuple[float, bool]], most_s: float) -> Iterator[tuple[str, float]]:
        """Seconds in which instances had a role and worked, and in which they could have.

        Args:
            name: Of both, with {}.
            work: Of each instance, seconds of work so far, and whether it has the role.
            most_s: Seconds that one of them can have worked since the sample before.
        """
        busy, there = name.format("busy"), name.format("there")
        used_s = self._totals[busy][-1] if self._totals[busy] else 0.0
        before_s = self._work_s.get(name, [0.0] * len(work))
        for (total_s, has_role), seen_s in zip(work, before_s, strict=True):
            if has_role:
                used_s += total_s - seen_s
        self._work_s[name] = [total_s for total_s, _ in work]
        yield busy, used_s
        there_s = self._totals[there][-1] if self._totals[there] else 0.0
        yield there, there_s + most_s * sum(has_role for _, has_role in work)

    def arrays(self, end_s: float) -> dict[str, NDArray[np.float64]]:
        """By name, one value per sample after the first, up to `end_s`."""
        times = np.array(self.times)
        kept = np.flatnonzero(times <= end_s)
        times = times[kept]
        steps = np.maximum(np.diff(times), 1e-12)
        levels = {name: np.array(values)[kept] for name, values in self._levels.items()}
        rates = {name: np.diff(np.array(values)[kept]) / steps for name, values in self._totals.items()}
        found = {"time_s": times[1:]} | {name: values[1:] for name, values in levels.items()}
        for name, values in rates.items():
            if "_busy_s_" in name:
                there = rates[name.replace("_busy_s_", "_there_s_")]
                used = np.divide(values, there, out=np.zeros_like(values), where=there > 0)
                found[name.replace("_busy_s_", "_utilisation_")] = used
            elif name.startswith("sent_bits_"):
                found[f"egress_bits_per_s_{name.removeprefix('sent_bits_')}"] = values
        return found
