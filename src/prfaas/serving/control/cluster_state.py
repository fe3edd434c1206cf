"""The board that policies read: one `View`, kept right by everything that happens in the gateway's process."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from prfaas.core.deployment import Deployment, Role
from prfaas.core.scheduling import ClusterView, Decision, InstanceView, KvFacts, LinkView, View
from prfaas.serving.control.backlog import LinkLoad, PrefillQueue

Clock = Callable[[], float]
OnService = Callable[[str, int, float], None]

# A measured service time is one of the prefill only if the link was done well before.
_LINK_SHARE = 0.8
_TYPICAL_WEIGHT = 0.05


@dataclass(slots=True)
class _Load:
    """What the board knows of one instance besides its view. `foreign`: requests of somebody else, by the newest
    two looks at the engine."""

    view: InstanceView
    cluster: ClusterView
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    own_decoding: int = 0
    on_the_way: int = 0
    decoding_s: float = 0.0
    counted_s: float = 0.0
    foreign: int = 0
    foreign_before: int = 0
    typical_s: float = 0.0


class OpenPrefill:
    """A prefill elsewhere that is under way."""

    __slots__ = ("is_measured",)

    def __init__(self) -> None:
        self.is_measured = False

    def measured(self) -> None:
        """The prefill and its transfer went well: the time until its end is a measurement of service."""
        self.is_measured = True


class ClusterState:
    """Owns the `View`. Everything is accounted for by what is open here: with nothing open, every count is zero.

    Waits: `busy_until_s` = now + what the open prefills there have left by prediction (`prefill_queue.py`);
    `drained_s` = now + the bytes that are still to leave over the capacity (`link_load.py`). Both are corrected
    when the work ends. Requests that an engine reports beyond those open here (another gateway's) count as well,
    each for as long as a typical prefill of that cluster.
    """

    def __init__(
        self,
        deployment: Deployment,
        kv: KvFacts,
        prefill_s: Mapping[str, Callable[[float], float]],
        decode_slots: Mapping[str, int],
        *,
        clock: Clock,
        on_service: OnService,
    ) -> None:
        """`prefill_s` by cluster, `decode_slots` by cluster. `on_service(cluster, uncached tokens, seconds)` is
        told of every measured prefill."""
        self._clock = clock
        self._on_service = on_service
        now_s = clock()
        self.view = View(
            clusters={
                cluster.name: ClusterView(
                    cluster.name,
                    cluster.kind,
                    [
                        InstanceView(
                            instance.name,
                            cluster.name,
                            prefills=instance.has_role("prefill"),
                            decodes=instance.has_role("decode"),
                            decode_slots=decode_slots.get(cluster.name, 1),
                            busy_until_s=now_s,
                            seen_s=now_s,
                        )
                        for instance in cluster.instances
                    ],
                    prefill_s[cluster.name],
                )
                for cluster in deployment.clusters
            },
            links={
                (link.source, link.target): LinkView(
                    link.source, link.target, link.bandwidth_bits_per_s, drained_s=now_s, seen_s=now_s
                )
                for link in deployment.links
            },
            kv=kv,
            now_s=now_s,
            stale_after_s=deployment.control.stale_after_s,
        )
        self._loads = {
            instance.name: _Load(instance, cluster, counted_s=now_s)
            for cluster in self.view.clusters.values()
            for instance in cluster.instances
        }
        self._links = {pair: LinkLoad() for pair in self.view.links}

    def at(self, now_s: float) -> View:
        """The view with its clock at `now_s`; work that overruns its prediction ends now in it."""
        self.view.now_s = now_s
        for load in self._loads.values():
            if load.view.busy_until_s < now_s and (len(load.queue) or load.foreign):
                self._predict(load, now_s)
        return self.view

    @property
    def names(self) -> Iterable[str]:
        """All instances, in the order of the file."""
        return self._loads

    def instance(self, name: str) -> InstanceView:
        """What policies see of one instance."""
        return self._loads[name].view

    def own_in_flight(self, name: str) -> int:
        """Requests open at an instance through this gateway."""
        return self._loads[name].view.in_flight

    def prefill_waiting(self, name: str) -> int:
        """Prefills accepted there, the one at work included."""
        return len(self._loads[name].queue)

    def prefill_busy_s(self, name: str) -> float:
        """Seconds in which a prefill was open there, since the start."""
        return self._loads[name].queue.busy_s(self._clock())

    def decoding_s(self, name: str) -> float:
        """Request-seconds of decode there, since the start: it grows by the batch, second by second."""
        load = self._loads[name]
        self._count(load, self._clock())
        return load.decoding_s

    def transfers_open(self, pair: tuple[str, str]) -> int:
        return len(self._links[pair])

    def residual_bytes(self, pair: tuple[str, str]) -> int:
        return self._links[pair].residual_bytes

    def set_role(self, name: str, role: Role) -> None:
        """The instance has this one role from now on."""
        load = self._loads[name]
        self._count(load, self._clock())
        load.view.prefills, load.view.decodes = role == "prefill", role == "decode"
        self._show_decoding(load)

    def set_link(
        self, pair: tuple[str, str], *, delivered_bytes: int, measured_bytes: int, capacity_bits_per_s: float
    ) -> None:
        """What telemetry says of a link: bytes delivered since the last word, bytes still to leave, capacity."""
        link = self.view.links[pair]
        link.capacity_bits_per_s = capacity_bits_per_s
        self._links[pair].delivered(delivered_bytes, measured_bytes)
        link.drained_s = self._drained_s(pair, self._clock())

    def set_engine_load(self, name: str, requests: int) -> None:
        """What an engine says is open there. More than is open here, twice in a row, is somebody else's."""
        load, now_s = self._loads[name], self._clock()
        beyond = max(requests - load.view.in_flight, 0)
        foreign, load.foreign_before = min(beyond, load.foreign_before), beyond
        self._count(load, now_s)
        load.foreign = foreign
        self._show_decoding(load)
        self._predict(load, now_s)

    @contextmanager
    def prefilling(self, decision: Decision) -> Iterator[OpenPrefill]:
        """A prefill at `decision.prefill` and its transfers are under way.

        Only an end after a call of `OpenPrefill.measured` counts as a measurement of service time.
        """
        now_s = self._clock()
        load = self._loads[decision.prefill]
        transfer = decision.cache_transfer
        with ExitStack() as open_here:
            if transfer is not None:
                source = self._loads[transfer.source]
                open_here.enter_context(self._in_flight(source))
                open_here.enter_context(self._on_link(source, load, transfer.kv_bytes))
            open_here.enter_context(self._in_flight(load))
            target = self._loads[decision.decode]
            open_here.enter_context(self._on_its_way(target))
            link_done_s = open_here.enter_context(self._on_link(load, target, decision.kv_bytes))
            predicted_s = load.cluster.prefill_s(decision.prefill_tokens)
            load.typical_s += (
                _TYPICAL_WEIGHT * (predicted_s - load.typical_s) if load.typical_s else predicted_s
            )
            work = load.queue.add(now_s, predicted_s)
            self._predict(load, now_s)
            prefill = OpenPrefill()
            try:
                yield prefill
            except BaseException:
                prefill.is_measured = False
                raise
            finally:
                end_s = self._clock()
                service_s = load.queue.remove(end_s, work)
                self._predict(load, end_s)
                if prefill.is_measured and service_s and link_done_s <= end_s - (1 - _LINK_SHARE) * service_s:
                    self._on_service(load.cluster.name, decision.prefill_tokens, service_s)

    @contextmanager
    def awaiting_prefill(self, decision: Decision) -> Iterator[None]:
        """A request waits for an instance of the cluster of `decision.prefill`."""
        load, target = self._loads[decision.prefill], self._loads[decision.decode]
        with self._on_its_way(target), self._on_link(load, target, decision.kv_bytes):
            yield

    @contextmanager
    def decoding(self, name: str, prefill_tokens: int) -> Iterator[None]:
        """A request is open at its decode instance, which prefills `prefill_tokens` >= 0 of it; see
        `gateway.plane`."""
        load = self._loads[name]
        work = None
        if prefill_tokens > 0:
            now_s = self._clock()
            work = load.queue.add(now_s, load.cluster.prefill_s(prefill_tokens), timed=True)
            self._predict(load, now_s)
        with self._in_flight(load):
            self._decode(load, 1)
            try:
                yield
            finally:
                self._decode(load, -1)
                if work is not None:
                    now_s = self._clock()
                    load.queue.remove(now_s, work)
                    self._predict(load, now_s)

    @contextmanager
    def _in_flight(self, load: _Load) -> Iterator[None]:
        load.view.in_flight += 1
        try:
            yield
        finally:
            load.view.in_flight -= 1

    @contextmanager
    def _on_link(self, source: _Load, target: _Load, nbytes: int) -> Iterator[float]:
        """`nbytes` are promised to the link between two instances' clusters, if it takes one. Yields when they
        will have left."""
        pair = (source.cluster.name, target.cluster.name)
        load = self._links.get(pair)
        if load is None:
            yield self._clock()
            return
        link = self.view.links[pair]
        transfer = load.accept(nbytes)
        link.drained_s = max(link.drained_s, self._clock()) + 8 * nbytes / link.capacity_bits_per_s
        try:
            yield link.drained_s
        finally:
            load.finish(transfer)
            link.drained_s = min(link.drained_s, self._drained_s(pair, self._clock()))

    @contextmanager
    def _on_its_way(self, load: _Load) -> Iterator[None]:
        """A request will decode there once its KV has come."""
        with self._in_flight(load):
            load.on_the_way += 1
            self._show_decoding(load)
            try:
                yield
            finally:
                load.on_the_way -= 1
                self._show_decoding(load)

    def _decode(self, load: _Load, change: int) -> None:
        self._count(load, self._clock())
        load.own_decoding += change
        self._show_decoding(load)

    def _show_decoding(self, load: _Load) -> None:
        foreign = load.foreign if load.view.decodes else 0
        load.view.decoding = load.own_decoding + load.on_the_way + foreign

    def _count(self, load: _Load, now_s: float) -> None:
        batch = load.view.decoding - load.on_the_way
        load.decoding_s += batch * (now_s - load.counted_s)
        load.counted_s = now_s

    def _predict(self, load: _Load, now_s: float) -> None:
        until_s = load.queue.busy_until_s(now_s)
        if load.foreign and not load.view.decodes:
            until_s = max(until_s, now_s) + load.foreign * load.typical_s
        load.view.busy_until_s = until_s

    def _drained_s(self, pair: tuple[str, str], now_s: float) -> float:
        capacity = self.view.links[pair].capacity_bits_per_s
        return now_s + 8 * self._links[pair].residual_bytes / capacity
