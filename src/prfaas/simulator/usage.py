"""How busy the instances were between two evaluations of the roles."""

from prfaas.scheduling import InstanceView
from prfaas.scheduling.allocation import PdInstance, PdLoad, StageLoad
from prfaas.simulator.engine import Engine
from prfaas.simulator.world import World


class Usage:
    """Loads since the last call of `loads`: what `control.usage` measures."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s = world.events.now_s
        self._busy_s = dict.fromkeys(world.engines, 0.0)
        self._decoding_s = dict.fromkeys(world.engines, 0.0)
        self._share = dict.fromkeys(world.engines, 0.0)
        self._batch = dict.fromkeys(world.engines, 0.0)

    def loads(self) -> list[PdLoad]:
        """Every PD cluster with a healthy instance."""
        self._advance()
        view = self._world.view
        loads = []
        for cluster in view.clusters.values():
            if cluster.kind != "pd" or not any(instance.healthy for instance in cluster.instances):
                continue
            remote = [
                instance
                for (source, target), link in view.links.items()
                if target == cluster.name and link.up and view.clusters[source].kind == "prfaas"
                for instance in view.clusters[source].instances
                if instance.healthy and instance.prefills
            ]
            loads.append(
                PdLoad(
                    cluster.name,
                    tuple(self._instance(instance) for instance in cluster.instances),
                    self._prefill([i for i in cluster.instances if i.healthy and i.prefills]),
                    self._decode([i for i in cluster.instances if i.healthy and i.decodes]),
                    self._prefill(remote) if remote else None,
                    len(remote),
                )
            )
        return loads

    def _advance(self) -> None:
        now_s = self._world.events.now_s
        elapsed_s = max(now_s - self._since_s, 1e-9)
        self._since_s = now_s
        for name, engine in self._world.engines.items():
            busy_s = engine.busy_s(now_s)
            decoding_s = engine.clock.busy_slot_s if engine.clock is not None else 0.0
            self._share[name] = (busy_s - self._busy_s[name]) / elapsed_s
            self._batch[name] = (decoding_s - self._decoding_s[name]) / elapsed_s
            self._busy_s[name], self._decoding_s[name] = busy_s, decoding_s

    def _prefill(self, instances: list[InstanceView]) -> StageLoad:
        engines = [self._world.engines[instance.name] for instance in instances]
        share = sum(self._share[instance.name] for instance in instances) / max(len(instances), 1)
        pooled = {engine.cluster.name: len(engine.pool) for engine in engines}
        return StageLoad(share, sum(len(engine.queue) for engine in engines) + sum(pooled.values()))

    def _decode(self, instances: list[InstanceView]) -> StageLoad:
        slots = sum(instance.decode_slots for instance in instances)
        batch = sum(self._batch[instance.name] for instance in instances)
        clocks = [self._world.engines[instance.name].clock for instance in instances]
        return StageLoad(batch / max(slots, 1), sum(clock.waiting for clock in clocks if clock is not None))

    def _instance(self, view: InstanceView) -> PdInstance:
        engine = self._world.engines[view.name]
        busy = float(_prefills_open(engine) if view.prefills else view.decoding)
        return PdInstance(view.name, view.prefills, view.decodes, view.healthy, view.draining, busy)


def _prefills_open(engine: Engine) -> int:
    return len(engine.queue) + engine.at_work
