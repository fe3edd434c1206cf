"""How busy the instances were between two evaluations of the roles."""

from collections.abc import Callable, Iterable, Mapping

from prfaas.control.board import Board, Clock
from prfaas.control.engine_meter import EngineMeter
from prfaas.deployment import Deployment
from prfaas.scheduling import InstanceView
from prfaas.scheduling.allocation import PdInstance, PdLoad, StageLoad


class Usage:
    """Loads since the last call of `loads`. Utilisation is by what is open here, waiting by what engines say."""

    def __init__(
        self,
        deployment: Deployment,
        board: Board,
        engines: Mapping[str, EngineMeter],
        *,
        clock: Clock,
        pooled: Callable[[str], int] = lambda _cluster: 0,
    ) -> None:
        """`pooled(cluster)`: prefills that wait for any instance of a cluster and that no engine knows of yet."""
        self._deployment = deployment
        self._board = board
        self._engines = engines
        self._clock = clock
        self._pooled = pooled
        self._since_s = clock()
        self._busy_s = dict.fromkeys(board.names, 0.0)
        self._decoding_s = dict.fromkeys(board.names, 0.0)
        self._prefill_share = dict.fromkeys(board.names, 0.0)
        self._decoding = dict.fromkeys(board.names, 0.0)

    def loads(self) -> list[PdLoad]:
        """Every PD cluster with a healthy instance, as busy as it was since the last call."""
        self._advance()
        clusters = self._board.view.clusters
        loads = []
        for cluster in self._deployment.pd_clusters:
            instances = clusters[cluster.name].instances
            if not any(instance.healthy for instance in instances):
                continue
            remote = [
                instance
                for (source, target), link in self._board.view.links.items()
                if target == cluster.name and link.up and clusters[source].kind == "prfaas"
                for instance in clusters[source].instances
                if instance.healthy and instance.prefills
            ]
            loads.append(
                PdLoad(
                    cluster.name,
                    tuple(self._instance(instance) for instance in instances),
                    self._prefill(i for i in instances if i.healthy and i.prefills),
                    self._decode(i for i in instances if i.healthy and i.decodes),
                    self._prefill(remote) if remote else None,
                    len(remote),
                )
            )
        return loads

    def _advance(self) -> None:
        now_s = self._clock()
        elapsed_s = max(now_s - self._since_s, 1e-9)
        self._since_s = now_s
        for name in self._board.names:
            busy_s, decoding_s = self._board.prefill_busy_s(name), self._board.decoding_s(name)
            self._prefill_share[name] = (busy_s - self._busy_s[name]) / elapsed_s
            self._decoding[name] = (decoding_s - self._decoding_s[name]) / elapsed_s
            self._busy_s[name], self._decoding_s[name] = busy_s, decoding_s

    def _prefill(self, instances: Iterable[InstanceView]) -> StageLoad:
        some = list(instances)
        names = [instance.name for instance in some]
        pooled = sum(self._pooled(cluster) for cluster in {instance.cluster for instance in some})
        share = sum(self._prefill_share[name] for name in names) / max(len(names), 1)
        return StageLoad(share, self._waiting(names) + pooled)

    def _decode(self, instances: Iterable[InstanceView]) -> StageLoad:
        some = list(instances)
        slots = sum(instance.decode_slots for instance in some)
        batch = sum(self._decoding[instance.name] for instance in some)
        return StageLoad(batch / max(slots, 1), self._waiting([instance.name for instance in some]))

    def _waiting(self, names: Iterable[str]) -> float:
        return sum(self._engines[name].waiting for name in names)

    def _instance(self, view: InstanceView) -> PdInstance:
        busy = float(self._board.prefill_waiting(view.name) if view.prefills else view.decoding)
        return PdInstance(view.name, view.prefills, view.decodes, view.healthy, view.draining, busy)
