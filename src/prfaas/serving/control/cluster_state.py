"""The state of all clusters as this gateway knows it: one `View`, kept right by everything that happens here."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count

from prfaas.core.deployment import Role
from prfaas.core.scheduling.decision import Decision, KvFacts
from prfaas.core.scheduling.gateway_share import NOTHING_AT_INSTANCE, GatewayShare, InstanceShare
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, View

Clock = Callable[[], float]
OnService = Callable[[str, int, int, float], None]

# A measured service time is one of the prefill only if the link was done well before.
_LINK_SHARE = 0.8
_TYPICAL_WEIGHT = 0.05


_ids = count()


class LinkLoad:
    """Bytes of the open transfers of one link, accepted by prediction, sent by measurement.

    Bytes that the link is measured to deliver come off the oldest promises, and a transfer that ends takes its
    own with it. So nothing is left when nothing is open, however wrong the predictions were. Where other gateways use
    the link too, what it delivers comes off the promises of all, in proportion.
    """

    __slots__ = ("_measured_bytes", "_open", "_open_bytes", "others_bytes", "promised_bytes")

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._open_bytes = 0
        self.promised_bytes = 0
        """Bytes of the promised transfers that have not left yet."""
        self._measured_bytes = 0
        self.others_bytes = 0
        """What other gateways have promised to the link and is still to leave."""

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, nbytes: int) -> int:
        """Open a transfer of `nbytes` >= 0. Returns the number that `finish` takes."""
        transfer = next(_ids)
        self._open[transfer] = nbytes
        self._open_bytes += nbytes
        self.promised_bytes += nbytes
        return transfer

    def finish(self, transfer: int) -> None:
        """The transfer is complete, or given up."""
        self._open_bytes -= self._open.pop(transfer)
        self.promised_bytes = min(self.promised_bytes, self._open_bytes)

    def delivered(self, nbytes: int, measured_bytes: int) -> None:
        """Note that the link delivered `nbytes` more, and that by its producers `measured_bytes` are still to leave."""
        if self.promised_bytes:
            own_bytes = nbytes * self.promised_bytes // (self.promised_bytes + self.others_bytes)
            self.promised_bytes = max(self.promised_bytes - own_bytes, 0)
        self._measured_bytes = measured_bytes

    @property
    def residual_bytes(self) -> int:
        """Still to leave: what was promised by all gateways, or what its producers report, if that is more."""
        return max(self.promised_bytes + self.others_bytes, self._measured_bytes)


@dataclass(slots=True)
class _Work:
    predicted_s: float
    timed: bool


class PrefillQueue:
    """First in, first out, one at a time: the paper's model of a prefill instance.

    The work at the head runs since the later of its acceptance and the end of the work before it; the rest waits.
    Work that overruns its prediction counts as done in this moment, so `busy_until_s` is never in the past while
    anything is open. The end of a decode instance's own prefill is not seen: such work is accepted with `timed=True`
    and leaves when its prediction is over. Times are seconds of one clock that does not go back.
    """

    __slots__ = ("_busy_s", "_head_start_s", "_open", "_waiting_s")

    def __init__(self) -> None:
        self._open: dict[int, _Work] = {}
        self._head_start_s = 0.0
        self._waiting_s = 0.0
        self._busy_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, now_s: float, predicted_s: float, *, timed: bool = False) -> int:
        """Accept work of `predicted_s` >= 0 seconds. Returns the number that `remove` takes."""
        self._expire(now_s)
        work = next(_ids)
        if self._open:
            self._waiting_s += predicted_s
        else:
            self._head_start_s = now_s
        self._open[work] = _Work(predicted_s, timed)
        return work

    def remove(self, now_s: float, work: int) -> float | None:
        """End `work`; nothing happens if it has left already.

        Returns:
            Its service time in seconds: end − the later of acceptance and the end of the work before it. None for
            work that ends before earlier work: they shared the instance, so its time is not its own.
        """
        self._expire(now_s)
        if work not in self._open:
            return None
        if work != next(iter(self._open)):
            self._waiting_s -= self._open.pop(work).predicted_s
            self._settle()
            return None
        start_s = self._head_start_s
        self._pop_head(now_s)
        return now_s - start_s

    def busy_until_s(self, now_s: float) -> float:
        """When all open work will be done; never before `now_s` while there is any, else when the last ended."""
        self._expire(now_s)
        if not self._open:
            return self._head_start_s
        head = next(iter(self._open.values()))
        return max(now_s, self._head_start_s + head.predicted_s) + self._waiting_s

    def busy_s(self, now_s: float) -> float:
        """Seconds in which anything was open, since the beginning."""
        self._expire(now_s)
        return self._busy_s + (now_s - self._head_start_s if self._open else 0.0)

    def _expire(self, now_s: float) -> None:
        while self._open:
            head = next(iter(self._open.values()))
            end_s = self._head_start_s + head.predicted_s
            if not head.timed or end_s > now_s:
                return
            self._pop_head(end_s)

    def _pop_head(self, end_s: float) -> None:
        self._open.pop(next(iter(self._open)))
        self._busy_s += end_s - self._head_start_s
        self._head_start_s = end_s
        if self._open:
            self._waiting_s -= next(iter(self._open.values())).predicted_s
        self._settle()

    def _settle(self) -> None:
        # Differences of sums drift: with at most one open, nothing waits for certain.
        self._waiting_s = max(self._waiting_s, 0.0) if len(self._open) > 1 else 0.0


@dataclass(slots=True)
class _Load:
    """The work of one instance, beside its view."""

    view: InstanceView
    cluster: ClusterView
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    own_decoding: int = 0
    on_the_way: int = 0
    """Requests that will decode there once their KV has come."""
    decoding_s: float = 0.0
    """Request-seconds of decode until `counted_s`."""
    counted_s: float = 0.0
    foreign: int = 0
    """Requests that are not this gateway's, in both of the last two looks at the engine."""
    foreign_before: int = 0
    """As many as the newest look saw."""
    typical_s: float = 0.0
    """Mean of the latest predicted prefills."""
    others: InstanceShare = NOTHING_AT_INSTANCE
    """What the other gateways of a fleet have told of it, summed."""
    others_at_s: float = 0.0
    """When they told it."""
    others_busy_s: float = 0.0
    """Seconds in which only they had prefills open there."""


class OpenPrefill:
    """A prefill elsewhere that is under way."""

    __slots__ = ("_clock", "_ends_s", "is_measured")

    def __init__(self, ends_s: float, clock: Clock) -> None:
        """`ends_s`: when its last byte will have left, by `clock`."""
        self.is_measured = False
        self._ends_s = ends_s
        self._clock = clock

    @property
    def left_s(self) -> float:
        """Seconds until its last byte has left, as was predicted when it began; below 0: it takes longer."""
        return self._ends_s - self._clock()

    def measured(self) -> None:
        """The prefill and its transfer went well: the time until its end is a measurement of service."""
        self.is_measured = True


class ClusterState:
    """Owns the `View`. All counts are of work that is open here: with nothing open, every count is zero.

    Waits: `busy_until_s` = now + what the open prefills there have left by prediction; `drained_s` = now + the bytes
    that are still to leave over the capacity. Both are corrected when the work ends. What the other gateways of a fleet
    tell (`set_others`) counts as their own does. Requests that an engine reports beyond all these count as well, each
    for as long as a typical prefill of that cluster.
    """

    def __init__(self, view: View, *, clock: Clock, on_service: OnService) -> None:
        """Take over `view`.

        Args:
            view: the deployment at rest, with its clock at now.
            clock: seconds that never go back.
            on_service: called with (cluster, uncached tokens, reused ones, seconds) for every measured prefill.
        """
        self.view = view
        self.clock = clock
        """Seconds that never go back."""
        self._on_service = on_service
        self._loads = {
            instance.name: _Load(instance, cluster, counted_s=view.now_s)
            for cluster in view.clusters.values()
            for instance in cluster.instances
        }
        self._links = {pair: LinkLoad() for pair in view.links}
        self._planned: Counter[str] = Counter()

    def at(self, now_s: float) -> View:
        """The view with its clock at `now_s`; work that overruns its prediction ends now in it."""
        self.view.now_s = now_s
        for load in self._loads.values():
            if load.view.busy_until_s < now_s and (len(load.queue) or load.foreign):
                self._predict(load, now_s)
        return self.view

    @property
    def names(self) -> Iterable[str]:
        """All instances, in the order of the deployment file."""
        return self._loads

    def instance(self, name: str) -> InstanceView:
        """The view of one instance that policies read."""
        return self._loads[name].view

    def together(self, name: str) -> list[str]:
        """All instances that change as one with this one: it, and the other ranks of its data-parallel group."""
        return [each for each in self.instance(name).group if each in self._loads] or [name]

    def kv_between(self, producer: str, consumer: str) -> KvFacts:
        """Sizes of the KVCache that moves from one instance to another, by their names."""
        return self.view.kv_between(self.instance(producer).cluster, self.instance(consumer).cluster)

    def add_cluster(self, cluster: ClusterView) -> None:
        """One more cluster, still without instances."""
        self.view.clusters[cluster.name] = cluster

    def add_link(self, link: LinkView) -> None:
        """One more link, with nothing on it."""
        self.view.links[link.source, link.target] = link
        self._links[link.source, link.target] = LinkLoad()

    def drop_cluster(self, name: str) -> None:
        """Forget a cluster without instances."""
        del self.view.clusters[name]
        self.view.threshold_tokens.pop(name, None)

    def keep_links(self, links: Collection[tuple[str, str]]) -> None:
        """Forget all other links, on which nothing is open."""
        for pair in self.view.links.keys() - set(links):
            del self.view.links[pair], self._links[pair]

    def join(self, instance: InstanceView) -> None:
        """One more instance in its cluster."""
        cluster = self.view.clusters[instance.cluster]
        cluster.instances.append(instance)
        self._loads[instance.name] = _Load(instance, cluster, counted_s=self.clock())

    def leave(self, name: str) -> None:
        """The instance is none any more; nothing is open there."""
        load = self._loads.pop(name)
        load.cluster.instances[:] = [each for each in load.cluster.instances if each is not load.view]

    def is_used(self, name: str) -> bool:
        """True if a request is open at the instance, or on its way there."""
        return self.instance(name).in_flight > 0

    def idle_decode_instance(self) -> str | None:
        """A healthy instance that decodes and has nothing to do; None if there is none."""
        views = (load.view for load in self._loads.values())
        return next((view.name for view in views if view.takes_decodes and not view.in_flight), None)

    def is_planned(self, name: str) -> bool:
        """True if a decision for the instance is about to be carried out."""
        return self._planned[name] > 0

    def open_prefills(self, name: str) -> int:
        """Prefills accepted there by all gateways, the one at work included."""
        load = self._loads[name]
        return len(load.queue) + load.others.prefills

    def prefill_busy_s(self, name: str) -> float:
        """Seconds in which a prefill was open there, since the start."""
        load = self._loads[name]
        return load.queue.busy_s(self.clock()) + load.others_busy_s

    def decoding_s(self, name: str) -> float:
        """Request-seconds of decode there, since the start: it grows by the batch, second by second."""
        load = self._loads[name]
        self._count(load, self.clock())
        return load.decoding_s

    def transfers_open(self, pair: tuple[str, str]) -> int:
        return len(self._links[pair])

    def residual_bytes(self, pair: tuple[str, str]) -> int:
        return self._links[pair].residual_bytes

    def follow_roles(self, name: str, *, prefills: bool, decodes: bool, draining: bool) -> bool:
        """The instance has these roles, as another gateway has decided. Returns whether that is a change."""
        view = self._loads[name].view
        if (view.prefills, view.decodes, view.draining) == (prefills, decodes, draining):
            return False
        has: Mapping[Role, bool] = {"prefill": prefills, "decode": decodes}
        self.set_roles(name, [role for role in has if has[role]])
        view.draining = draining
        return True

    def set_roles(self, name: str, roles: Collection[Role]) -> None:
        """The instance has these roles from now on."""
        load = self._loads[name]
        self._count(load, self.clock())
        load.view.prefills, load.view.decodes = "prefill" in roles, "decode" in roles
        self._update_decoding(load)

    def own_share(self) -> GatewayShare:
        """This gateway's open work, for the other gateways of a fleet."""
        now_s = self.clock()
        instances = {
            name: InstanceShare(
                requests=load.view.in_flight - load.others.requests,
                decoding=load.own_decoding,
                arriving=load.on_the_way,
                prefills=len(load.queue),
                prefill_s=max(load.queue.busy_until_s(now_s) - now_s, 0.0),
            )
            for name, load in self._loads.items()
        }
        return GatewayShare(
            instances={name: share for name, share in instances.items() if share != NOTHING_AT_INSTANCE},
            links={
                "->".join(pair): load.promised_bytes
                for pair, load in self._links.items()
                if load.promised_bytes
            },
        )

    def set_others(self, others: GatewayShare) -> None:
        """Count the open work of the other gateways of a fleet, all together, from now on."""
        now_s = self.clock()
        for name, load in self._loads.items():
            now, before = others.instances.get(name, NOTHING_AT_INSTANCE), load.others
            if before.prefills and not len(load.queue):
                load.others_busy_s += now_s - load.others_at_s
            load.others_at_s = now_s
            if now is before is NOTHING_AT_INSTANCE:
                continue
            self._count(load, now_s)
            load.others = now
            load.view.in_flight += now.requests - before.requests
            # What a gateway tells of itself needs no guess any more.
            load.foreign = max(load.foreign - max(now.requests - before.requests, 0), 0)
            self._update_decoding(load)
            self._predict(load, now_s)
        for pair, link in self._links.items():
            link.others_bytes = others.links.get("->".join(pair), 0)
            self.view.links[pair].drained_s = self._drained_s(pair, now_s)

    def set_blocked(self, pairs: Iterable[tuple[str, str]]) -> None:
        """These pairs (producer, consumer) are incompatible, and no others."""
        self.view.blocked = frozenset(pairs)

    def set_link(
        self, pair: tuple[str, str], *, delivered_bytes: int, measured_bytes: int, capacity_bits_per_s: float
    ) -> None:
        """Correct a link by its telemetry.

        Args:
            pair: (source cluster, target cluster).
            delivered_bytes: what it delivered since the last call.
            measured_bytes: what its producers say is still to leave.
            capacity_bits_per_s: what it can carry now.
        """
        link = self.view.links[pair]
        link.capacity_bits_per_s = capacity_bits_per_s
        self._links[pair].delivered(delivered_bytes, measured_bytes)
        link.drained_s = self._drained_s(pair, self.clock())

    def set_engine_load(self, name: str, requests: int) -> None:
        """Correct an instance by the number of requests that its engine reports as open.

        What two reports in a row have beyond the requests that are open here is another gateway's.
        """
        load, now_s = self._loads[name], self.clock()
        beyond = max(requests - load.view.in_flight, 0)
        foreign, load.foreign_before = min(beyond, load.foreign_before), beyond
        self._count(load, now_s)
        load.foreign = foreign
        self._update_decoding(load)
        self._predict(load, now_s)

    @contextmanager
    def prefilling(self, decision: Decision) -> Iterator[OpenPrefill]:
        """A prefill at `decision.prefill` and its transfers are under way.

        Only an end after a call of `OpenPrefill.measured` counts as a measurement of service time.
        """
        now_s = self.clock()
        load = self._loads[decision.prefill]
        transfer = decision.cache_transfer
        with ExitStack() as open_here:
            if transfer is not None and not transfer.from_pool:
                source = self._loads[transfer.source]
                # Its bytes are no promise to the link: they get what others leave.
                open_here.enter_context(self._in_flight(source))
            open_here.enter_context(self._in_flight(load))
            target = self._loads[decision.decode]
            open_here.enter_context(self._arriving(target))
            link_done_s = open_here.enter_context(self._on_link(load, target, decision.kv_bytes))
            tokens, reused_tokens = decision.prefill_tokens, decision.reused_tokens
            predicted_s = load.cluster.after_prefix_s(tokens, reused_tokens)
            load.typical_s += (
                _TYPICAL_WEIGHT * (predicted_s - load.typical_s) if load.typical_s else predicted_s
            )
            work = load.queue.add(now_s, predicted_s)
            self._predict(load, now_s)
            prefill = OpenPrefill(max(load.view.busy_until_s, link_done_s), self.clock)
            try:
                yield prefill
            except BaseException:
                prefill.is_measured = False
                raise
            finally:
                end_s = self.clock()
                service_s = load.queue.remove(end_s, work)
                self._predict(load, end_s)
                if prefill.is_measured and service_s and link_done_s <= end_s - (1 - _LINK_SHARE) * service_s:
                    self._on_service(load.cluster.name, tokens, reused_tokens, service_s)

    @contextmanager
    def planned(self, decision: Decision) -> Iterator[None]:
        """A decision is about to be carried out. Nothing is counted yet, but who leaves is waited for."""
        names = {decision.prefill, decision.decode}
        self._planned.update(names)
        try:
            yield
        finally:
            self._planned.subtract(names)
            for name in names:
                if not self._planned[name]:
                    del self._planned[name]

    @contextmanager
    def awaiting_prefill(self, decision: Decision) -> Iterator[None]:
        """A request waits for an instance of the cluster of `decision.prefill`."""
        load, target = self._loads[decision.prefill], self._loads[decision.decode]
        with self._arriving(target), self._on_link(load, target, decision.kv_bytes):
            yield

    @contextmanager
    def decoding(self, name: str, tokens: int, reused_tokens: int = 0, *, answers: int = 1) -> Iterator[None]:
        """A request is open at its decode instance, which prefills `tokens` >= 0 of it behind `reused_tokens`.

        `answers`: that it decodes at once, each in a slot of its own.
        """
        load = self._loads[name]
        work = None
        if tokens > 0:
            now_s = self.clock()
            work = load.queue.add(now_s, load.cluster.after_prefix_s(tokens, reused_tokens), timed=True)
            self._predict(load, now_s)
        with self._in_flight(load):
            self._decode(load, answers)
            try:
                yield
            finally:
                self._decode(load, -answers)
                if work is not None:
                    now_s = self.clock()
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
        """Promise `nbytes` to the link between two instances' clusters, if they need one. Yields when they will have
        left, by the clock."""
        pair = (source.cluster.name, target.cluster.name)
        load = self._links.get(pair)
        if load is None:
            yield self.clock()
            return
        link = self.view.links[pair]
        transfer = load.accept(nbytes)
        link.drained_s = max(link.drained_s, self.clock()) + 8 * nbytes / link.capacity_bits_per_s
        try:
            yield link.drained_s
        finally:
            load.finish(transfer)
            link.drained_s = min(link.drained_s, self._drained_s(pair, self.clock()))

    @contextmanager
    def _arriving(self, load: _Load) -> Iterator[None]:
        """A request will decode there once its KV has come."""
        with self._in_flight(load):
            load.on_the_way += 1
            self._update_decoding(load)
            try:
                yield
            finally:
                load.on_the_way -= 1
                self._update_decoding(load)

    def _decode(self, load: _Load, change: int) -> None:
        self._count(load, self.clock())
        load.own_decoding += change
        self._update_decoding(load)

    def _update_decoding(self, load: _Load) -> None:
        foreign = load.foreign if load.view.decodes else 0
        others = load.others.decoding + load.others.arriving
        load.view.decoding = load.own_decoding + load.on_the_way + foreign + others

    def _count(self, load: _Load, now_s: float) -> None:
        batch = load.view.decoding - load.on_the_way - load.others.arriving
        load.decoding_s += batch * (now_s - load.counted_s)
        load.counted_s = now_s

    def _predict(self, load: _Load, now_s: float) -> None:
        until_s = load.queue.busy_until_s(now_s)
        if load.foreign and not load.view.decodes:
            until_s = max(until_s, now_s) + load.foreign * load.typical_s
        others_left_s = load.others_at_s + load.others.prefill_s - now_s
        if load.others.prefill_s and others_left_s > 0:
            until_s = max(until_s, now_s) + others_left_s
        load.view.busy_until_s = until_s

    def _drained_s(self, pair: tuple[str, str], now_s: float) -> float:
        capacity = self.view.links[pair].capacity_bits_per_s
        return now_s + 8 * self._links[pair].residual_bytes / capacity
