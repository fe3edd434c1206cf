"""How the deployment was over time, in a bounded number of samples."""

from array import array
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from prfaas.simulator.world import World

MOST_SAMPLES = 512


class Series:
    """Samples everything each `period_s`; when there are too many, every other one goes and the period doubles.

    Rates and utilisations are means since the sample before; queues, thresholds and roles are as they are then.
    """

    def __init__(self, world: "World", period_s: float = 1.0) -> None:
        self._world = world
        self.period_s = period_s
        self._totals: dict[str, array[float]] = {}
        self._levels: dict[str, array[float]] = {}
        self._slots: dict[str, array[float]] = {}
        self.times = array("d")
        self.is_over = False
        self._sample(None)

    def _sample(self, _argument: object) -> None:
        world = self._world
        now_s = world.events.now_s
        world.look()
        self.times.append(now_s)
        totals, levels = self._totals, self._levels
        for cluster in world.scenario.clusters:
            name = cluster.name
            engines = [engine for engine in world.engines.values() if engine.cluster.name == name]
            prefillers = [engine for engine in engines if engine.view.prefills]
            decoders = [engine for engine in engines if engine.view.decodes]
            _add(totals, f"prefill_busy_s_{name}", sum(engine.busy_s(now_s) for engine in engines))
            _add(levels, f"prefill_instances_{name}", len(prefillers))
            waiting = sum(len(engine.queue) for engine in engines) + len(world.pools[name])
            _add(levels, f"queue_{name}", waiting)
            if cluster.kind == "pd":
                clocks = [engine.clock for engine in engines if engine.clock is not None]
                _add(totals, f"decode_busy_s_{name}", sum(clock.busy_slot_s for clock in clocks))
                _add(levels, f"decode_slots_{name}", len(decoders) * cluster.decode_slots)
                _add(levels, f"decode_queue_{name}", sum(clock.waiting for clock in clocks))
                _add(levels, f"threshold_tokens_{name}", world.view.threshold_tokens.get(name, float("inf")))
        for lane in world.lanes.values():
            _add(totals, f"sent_bits_{lane.link.name}", lane.link.sent_bits)
            _add(levels, f"capacity_bits_per_s_{lane.link.name}", lane.link.capacity_bits_per_s)
        if len(self.times) > MOST_SAMPLES:
            self._halve()
        if not self.is_over:
            world.events.at(now_s + self.period_s, self._sample)

    def _halve(self) -> None:
        self.times = self.times[::2]
        for columns in (self._totals, self._levels):
            for name in columns:
                columns[name] = columns[name][::2]
        self.period_s *= 2

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
            if name.startswith("prefill_busy_s_"):
                cluster = name.removeprefix("prefill_busy_s_")
                counts = np.maximum(levels[f"prefill_instances_{cluster}"][1:], 1)
                found[f"prefill_utilisation_{cluster}"] = values / counts
            elif name.startswith("decode_busy_s_"):
                cluster = name.removeprefix("decode_busy_s_")
                found[f"decode_utilisation_{cluster}"] = values / np.maximum(
                    found.pop(f"decode_slots_{cluster}"), 1
                )
            else:
                found[f"egress_bits_per_s_{name.removeprefix('sent_bits_')}"] = values
        return found


def _add(columns: "dict[str, array[float]]", name: str, value: float) -> None:
    if name not in columns:
        columns[name] = array("d")
    columns[name].append(value)
