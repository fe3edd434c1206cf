"""How busy the prefill and decode instances of the PD clusters were between two evaluations of the roles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.core.scheduling.allocation import PdInstance, PdLoad, StageLoad
from prfaas.core.scheduling.view import InstanceView, View

_LEAST_ELAPSED_S = 1e-9


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """The work of one instance: totals since the start, and what is there now."""

    busy_s: float
    """Seconds in which a prefill was open there, since the start."""
    decoding_s: float
    """Request-seconds of decode there, since the start."""
    open_prefills: int
    """Prefills accepted there, those at work included."""
    waiting_prefills: float
    """Prefills that wait there, on average."""
    waiting_decodes: float
    """Requests that wait there for a decode slot, on average."""


_NO_WORK = InstanceWork(0.0, 0.0, 0, 0.0, 0.0)


class StageUtilisation:
    """Loads since the last call of `loads`."""

    def __init__(
        self,
        view: View,
        work_of: Callable[[str], InstanceWork],
        pooled: Callable[[str], int],
        now_s: float,
    ) -> None:
        """Begin to measure at `now_s`.

        Args:
            view: roles and health, kept up to date by its owner.
            work_of: the work of the instance with this name.
            pooled: prefills of the cluster with this name that wait for any of its instances.
            now_s: seconds of the clock of `loads`.
        """
        self._view = view
        self._work_of = work_of
        self._pooled = pooled
        self._since_s = now_s
        self._work: dict[str, InstanceWork] = {}
        self._prefill_share: dict[str, float] = {}
        self._decode_batch: dict[str, float] = {}

    def loads(self, now_s: float) -> list[PdLoad]:
        """Every PD cluster with a healthy instance, as busy as it was since the last call."""
        self._advance(now_s)
        clusters, loads = self._view.clusters, []
        for cluster in clusters.values():
            healthy = [each for each in cluster.instances if each.available]
            if cluster.kind != "pd" or not healthy:
                continue
            remote = [
                each
                for (source, target), link in self._view.links.items()
                if target == cluster.name and link.up and clusters[source].kind == "prfaas"
                for each in clusters[source].instances
                if each.available and each.prefills
            ]
            loads.append(
                PdLoad(
                    cluster.name,
                    tuple(self._instance(each) for each in cluster.instances),
                    self._prefill_load([each for each in healthy if each.prefills]),
                    self._decode_load([each for each in healthy if each.decodes]),
                    self._prefill_load(remote) if remote else None,
                    remote_instances=len(remote),
                )
            )
        return loads

    def _advance(self, now_s: float) -> None:
        elapsed_s = max(now_s - self._since_s, _LEAST_ELAPSED_S)
        self._since_s = now_s
        names = [each.name for cluster in self._view.clusters.values() for each in cluster.instances]
        earlier, self._work = self._work, {name: self._work_of(name) for name in names}
        for name, work in self._work.items():
            before = earlier.get(name, _NO_WORK)
            self._prefill_share[name] = (work.busy_s - before.busy_s) / elapsed_s
            self._decode_batch[name] = (work.decoding_s - before.decoding_s) / elapsed_s

    def _prefill_load(self, instances: Sequence[InstanceView]) -> StageLoad:
        share = sum(self._prefill_share[each.name] for each in instances) / max(len(instances), 1)
        waiting = sum(self._work[each.name].waiting_prefills for each in instances)
        return StageLoad(share, waiting + sum(map(self._pooled, {each.cluster for each in instances})))

    def _decode_load(self, instances: Sequence[InstanceView]) -> StageLoad:
        slots = sum(each.decode_slots for each in instances)
        batch = sum(self._decode_batch[each.name] for each in instances)
        waiting = sum(self._work[each.name].waiting_decodes for each in instances)
        return StageLoad(batch / max(slots, 1), waiting)

    def _instance(self, view: InstanceView) -> PdInstance:
        busy = float(self._work[view.name].open_prefills if view.prefills else view.decoding)
        return PdInstance(
            view.name,
            view.prefills,
            view.decodes,
            view.available,
            view.draining,
            busy=busy,
            group=view.group,
        )
