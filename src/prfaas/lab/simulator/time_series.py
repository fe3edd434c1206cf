"""How the deployment was over time, in a bounded number of samples."""

from array import array

import numpy as np
from numpy.typing import NDArray

from prfaas.lab.simulator.instance import Engine
from prfaas.lab.simulator.simulated_cluster import SimulatedCluster
from prfaas.lab.simulator.world import World

MOST_SAMPLES = 512

_Columns = dict[str, "array[float]"]


class TimeSeries:
    """Samples the whole deployment in equal steps of time.

    When there are too many samples, every other one goes and the step doubles. Rates and utilisations are means since
    the sample before; queues, thresholds and roles are as they are at the sample.
    """

    def __init__(self, world: World, period_s: float = 1.0) -> None:
        self._world = world
        self.period_s = period_s
        self._totals: _Columns = {}
        self._levels: _Columns = {}
        self.times = array("d")
        self.is_over = False
        self._clusters = [
            _ClusterCourse(world, cluster, self._totals, self._levels) for cluster in world.scenario.clusters
        ]
        self._links = [link.fluid for link in world.links.values()]
        for link in self._links:
            self._totals[f"sent_bits_{link.name}"] = array("d")
            self._levels[f"capacity_bits_per_s_{link.name}"] = array("d")
        self._sample(None)

    def _sample(self, _argument: object) -> None:
        world = self._world
        now_s = world.events.now_s
        world.look()
        self.times.append(now_s)
        for cluster in self._clusters:
            cluster.sample(now_s)
        for link in self._links:
            self._totals[f"sent_bits_{link.name}"].append(link.sent_bits)
            self._levels[f"capacity_bits_per_s_{link.name}"].append(link.capacity_bits_per_s)
        if len(self.times) > MOST_SAMPLES:
            # In place: each column is known where it is filled.
            for values in (self.times, *self._totals.values(), *self._levels.values()):
                del values[1::2]
            self.period_s *= 2
        if not self.is_over:
            world.events.at(now_s + self.period_s, self._sample)

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


class _Side:
    """Prefill or decode in one cluster: what its instances did so far while they had this role."""

    def __init__(self, name: str, instances: int, totals: _Columns) -> None:
        """`name`: of side and cluster, "prefill" and "home" in prefill_busy_s_home."""
        side, _, cluster = name.partition(" ")
        self._busy_s = totals[f"{side}_busy_s_{cluster}"] = array("d")
        self._there_s = totals[f"{side}_there_s_{cluster}"] = array("d")
        self._seen_s = [0.0] * instances
        self._used_s = self._was_there_s = self._before_s = 0.0

    def sample(self, work_s: list[float], has_role: list[bool], places: int, now_s: float) -> None:
        """Seconds of work of each instance so far, which of them have the role, and their instances or slots."""
        used_s, seen_s = self._used_s, self._seen_s
        for number, total_s in enumerate(work_s):
            if has_role[number]:
                used_s += total_s - seen_s[number]
        self._seen_s = work_s
        self._used_s = used_s
        self._busy_s.append(used_s)
        self._was_there_s += places * (now_s - self._before_s)
        self._before_s = now_s
        self._there_s.append(self._was_there_s)


class _ClusterCourse:
    """The columns of one cluster."""

    def __init__(self, world: World, cluster: SimulatedCluster, totals: _Columns, levels: _Columns) -> None:
        name = cluster.name
        self._name = name
        self._engines: list[Engine] = [
            engine for engine in world.engines.values() if engine.cluster.name == name
        ]
        self._pool = world.prefill_pools[name]
        self._prefill = _Side(f"prefill {name}", len(self._engines), totals)
        self._prefill_instances = levels[f"prefill_instances_{name}"] = array("d")
        self._queue = levels[f"queue_{name}"] = array("d")
        self._decode: _Side | None = None
        if cluster.kind == "pd":
            self._clocks = [engine.clock for engine in self._engines if engine.clock is not None]
            self._slots = cluster.decode_slots
            self._thresholds = world.view.threshold_tokens
            self._decode = _Side(f"decode {name}", len(self._engines), totals)
            self._decode_queue = levels[f"decode_queue_{name}"] = array("d")
            self._threshold = levels[f"threshold_tokens_{name}"] = array("d")

    def sample(self, now_s: float) -> None:
        engines = self._engines
        prefills = [engine.view.prefills for engine in engines]
        count = sum(prefills)
        self._prefill.sample([engine.busy_s(now_s) for engine in engines], prefills, count, now_s)
        self._prefill_instances.append(count)
        self._queue.append(sum([len(engine.queue) for engine in engines]) + len(self._pool))
        if self._decode is None:
            return
        decodes = [engine.view.decodes for engine in engines]
        clocks = self._clocks
        self._decode.sample(
            [clock.busy_slot_s for clock in clocks], decodes, sum(decodes) * self._slots, now_s
        )
        self._decode_queue.append(sum([clock.waiting for clock in clocks]))
        self._threshold.append(self._thresholds.get(self._name, float("inf")))
