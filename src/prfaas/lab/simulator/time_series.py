"""How the deployment was over time, in a bounded number of samples."""

from array import array

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
        self._totals: dict[str, array[float]] = {}
        self._levels: dict[str, array[float]] = {}
        self._used_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._there_s: dict[str, tuple[float, float]] = {}
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
            _add(totals, f"prefill_busy_s_{name}", self._used(f"p{name}", engines, now_s, of_prefill=True))
            _add(totals, f"prefill_there_s_{name}", self._there(f"p{name}", len(prefillers), now_s))
            _add(levels, f"prefill_instances_{name}", len(prefillers))
            waiting = sum(len(engine.queue) for engine in engines) + len(world.prefill_pools[name])
            _add(levels, f"queue_{name}", waiting)
            if cluster.kind == "pd":
                clocks = [engine.clock for engine in engines if engine.clock is not None]
                slots = sum(engine.view.decodes for engine in engines) * cluster.decode_slots
                _add(
                    totals, f"decode_busy_s_{name}", self._used(f"d{name}", engines, now_s, of_prefill=False)
                )
                _add(totals, f"decode_there_s_{name}", self._there(f"d{name}", slots, now_s))
                _add(levels, f"decode_queue_{name}", sum(clock.waiting for clock in clocks))
                _add(levels, f"threshold_tokens_{name}", world.view.threshold_tokens.get(name, float("inf")))
        for link in world.links.values():
            _add(totals, f"sent_bits_{link.fluid.name}", link.fluid.sent_bits)
            _add(levels, f"capacity_bits_per_s_{link.fluid.name}", link.fluid.capacity_bits_per_s)
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
            if "_busy_s_" in name:
                there = rates[name.replace("_busy_s_", "_there_s_")]
                used = np.divide(values, there, out=np.zeros_like(values), where=there > 0)
                found[name.replace("_busy_s_", "_utilisation_")] = used
            elif name.startswith("sent_bits_"):
                found[f"egress_bits_per_s_{name.removeprefix('sent_bits_')}"] = values
        return found

    def _used(self, key: str, engines: list[Engine], now_s: float, *, of_prefill: bool) -> float:
        """Seconds of work so far that instances did while they had this role."""
        used_s = self._used_s.get(key, 0.0)
        for engine in engines:
            if of_prefill:
                total_s = engine.busy_s(now_s)
            else:
                total_s = engine.clock.busy_slot_s if engine.clock is not None else 0.0
            has_role = engine.view.prefills if of_prefill else engine.view.decodes
            if has_role:
                used_s += total_s - self._seen_s.get(key + engine.name, 0.0)
            self._seen_s[key + engine.name] = total_s
        self._used_s[key] = used_s
        return used_s

    def _there(self, key: str, count: int, now_s: float) -> float:
        """Seconds of instances, or of slots, in a role so far."""
        before_s, there_s = self._there_s.get(key, (0.0, 0.0))
        there_s += count * (now_s - before_s)
        self._there_s[key] = (now_s, there_s)
        return there_s


def _add(columns: "dict[str, array[float]]", name: str, value: float) -> None:
    if name not in columns:
        columns[name] = array("d")
    columns[name].append(value)
