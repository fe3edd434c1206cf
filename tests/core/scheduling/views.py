"""Boards for routing tests: the paper's case study, small hand-made ones, and random ones."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.latency.files import load_profile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.scheduling.decision import Decision, KvFacts, PoolHit, PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.policy import POLICIES, Policy, policy_named
from prfaas.core.scheduling.tiers import with_pools
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, PoolView, View

NOW_S = 1000.0
H200, H20 = (ServiceCurve.of_profile(load_profile(f"internal-1t-{name}")) for name in ("h200", "h20"))


def linear_s(tokens: float) -> float:
    return 0.1 + 1e-4 * tokens


def kv_bytes(num_tokens: int, skip_tokens: int) -> int:
    return int(173.906 * 2**20) + 17280 * (num_tokens - skip_tokens)


def prefiller(name: str, cluster: str = "pd", **state: object) -> InstanceView:
    return InstanceView(name, cluster, prefills=True, decodes=False, **state)  # type: ignore[arg-type]


def decoder(name: str, cluster: str = "pd", **state: object) -> InstanceView:
    return InstanceView(name, cluster, prefills=False, decodes=True, **{"decode_slots": 16, **state})  # type: ignore[arg-type]


def link(source: str, target: str, bits_per_s: float = 100e9, **state: float) -> LinkView:
    return LinkView(source, target, bits_per_s, **{"seen_s": NOW_S, **state})  # type: ignore[arg-type]


def board(
    *instances: InstanceView,
    links: Sequence[LinkView] | None = None,
    threshold: float = 1000.0,
    hybrid: bool = True,
    can_skip: bool = True,
    prefill_s: Callable[[float], float] = linear_s,
) -> View:
    """Clusters in the order of their instances; those named "far…" are PrfaaS clusters, all with the same times."""
    clusters: dict[str, ClusterView] = {}
    for each in instances:
        kind = "prfaas" if each.cluster.startswith("far") else "pd"
        cluster = clusters.setdefault(each.cluster, ClusterView(each.cluster, kind, [], prefill_s))  # type: ignore[arg-type]
        cluster.instances.append(each)
    if links is None:
        links = [link("far", "pd"), link("pd", "far")]
    thresholds = {name: threshold for name, cluster in clusters.items() if cluster.kind == "pd"}
    facts = KvFacts(hybrid, can_skip, kv_bytes, kv_bytes)
    return View(clusters, {(each.source, each.target): each for each in links}, facts, 5.0, thresholds, NOW_S)


def small(**facts: object) -> View:
    """One instance of each kind."""
    return board(prefiller("remote", "far"), prefiller("prefill"), decoder("decode"), **facts)  # type: ignore[arg-type]


def paper_board(threshold: float, *, bits_per_s: float = 100e9, n_prefill: int = 3) -> View:
    """Section 4: 4 H200 instances, 8 of H20, 100 Gbit/s."""
    east = [prefiller(f"east-{i}", "far") for i in range(4)]
    home = [prefiller(f"home-{i}") for i in range(n_prefill)]
    home += [decoder(f"home-{i}", decode_slots=20) for i in range(n_prefill, 8)]
    view = board(*east, *home, links=[link("far", "pd", bits_per_s)], threshold=threshold)
    view.clusters["far"].prefill_s = H200.seconds
    view.clusters["pd"].prefill_s = H20.seconds
    return view


def every_policy() -> dict[str, Policy]:
    """All policies, with defaults."""
    needed = {"static_threshold": {"threshold_tokens": 1000.0}}
    return {name: policy_named(name, **needed.get(name, {})) for name in POLICIES}


@dataclass
class Outcome:
    """What became of simulated requests. `waits_s` until prefills began, in the order of arrival."""

    offloaded: float
    mean_ttft_s: float
    waits_s: list[float]


def simulate(
    policy: Policy,
    view: View,
    lengths: Sequence[int],
    rate_per_s: float,
    *,
    seed: int,
    link_pair: bool = True,
) -> Outcome:
    """Poisson arrivals through first-come-first-served instances and one link; nothing is cached."""
    draw = random.Random(seed)
    instances = {each.name: each for cluster in view.clusters.values() for each in cluster.instances}
    for each in view.links.values():
        each.seen_s = float("inf")
    waits, total_s, offloaded = [], 0.0, 0
    for ordinal, num_tokens in enumerate(lengths):
        view.now_s += draw.expovariate(rate_per_s)
        decision = policy.decide(RoutingRequest(num_tokens, {}, ordinal), view)
        at = instances[decision.prefill]
        start_s = max(at.busy_until_s, view.now_s)
        at.busy_until_s = start_s + view.clusters[at.cluster].prefill_s(decision.prefill_tokens)
        done_s = at.busy_until_s
        if decision.route is Route.OFFLOAD:
            offloaded += 1
            wire = view.links[at.cluster, "pd"]
            wire_s = kv_bytes(num_tokens, 0) * 8 / wire.capacity_bits_per_s
            wire.drained_s = max(wire.drained_s, view.now_s) + wire_s
            done_s = max(done_s, wire.drained_s)
        waits.append(start_s - view.now_s)
        total_s += done_s - view.now_s
    return Outcome(offloaded / len(lengths), total_s / len(lengths), waits)


def relabelled(view: View, request: RoutingRequest, prefix: str) -> tuple[View, RoutingRequest]:
    """The same with other names for everything."""
    view = copy.deepcopy(view)
    for cluster in view.clusters.values():
        cluster.name = prefix + cluster.name
        for each in cluster.instances:
            each.name, each.cluster = prefix + each.name, prefix + each.cluster
    for each in view.links.values():
        each.source, each.target = prefix + each.source, prefix + each.target
    view = replace(
        view,
        clusters={cluster.name: cluster for cluster in view.clusters.values()},
        links={(each.source, each.target): each for each in view.links.values()},
        threshold_tokens={prefix + name: value for name, value in view.threshold_tokens.items()},
        avoid=frozenset(prefix + name for name in view.avoid),
        blocked=frozenset((prefix + one, prefix + other) for one, other in view.blocked),
    )
    held = {prefix + name: value for name, value in request.held.items()}
    return view, structs.replace(request, held=held)


def renamed(decision: Decision, prefix: str) -> Decision:
    """The decision with the names that `relabelled` gives."""
    moved = decision.cache_transfer
    if moved is not None:
        moved = structs.replace(moved, source=prefix + moved.source)
    return structs.replace(
        decision, prefill=prefix + decision.prefill, decode=prefix + decision.decode, cache_transfer=moved
    )


_offsets = st.one_of(st.just(0.0), st.floats(-5, 40))
_ages = st.sampled_from([0.0, 0.0, 0.0, 4.9, 5.1, 29.0, 31.0])
_tokens = st.integers(0, 160).map(lambda blocks: 256 * blocks)


@dataclass(frozen=True)
class Curve:
    """c0 + c1 x + c2 x² seconds."""

    c0: float
    c1: float
    c2: float

    def __call__(self, tokens: float) -> float:
        return self.c0 + self.c1 * tokens + self.c2 * tokens * tokens


curves = st.builds(Curve, st.floats(0.05, 0.8), st.floats(5e-6, 5e-4), st.floats(0, 1e-9))


@st.composite
def _instances(draw: st.DrawFn, cluster: str, *, pd: bool) -> list[InstanceView]:
    return [
        InstanceView(
            f"{cluster}-{index}",
            cluster,
            prefills=draw(st.booleans()) if pd else True,
            decodes=draw(st.booleans()) if pd else False,
            healthy=draw(st.sampled_from([True, True, True, False])),
            draining=draw(st.sampled_from([False, False, False, True])),
            in_flight=draw(st.integers(0, 3)),
            busy_until_s=NOW_S + draw(_offsets),
            decoding=draw(st.integers(0, 5)),
            decode_slots=draw(st.integers(1, 4)),
        )
        for index in range(draw(st.integers(0 if not pd else 1, 4)))
    ]


@st.composite
def views(draw: st.DrawFn, *, max_pd: int = 2) -> View:
    """Any number of clusters of both kinds, any link matrix, any state."""
    clusters: dict[str, ClusterView] = {}
    for index in range(draw(st.integers(0, 2))):
        name = f"far{index}"
        clusters[name] = ClusterView(name, "prfaas", draw(_instances(name, pd=False)), draw(curves))
    for index in range(draw(st.integers(1, max_pd))):
        name = f"pd{index}"
        clusters[name] = ClusterView(name, "pd", draw(_instances(name, pd=True)), draw(curves))
    links = {}
    for source in clusters:
        for target in clusters:
            if source != target and draw(st.sampled_from([True, True, False])):
                capacity = draw(st.sampled_from([1e8, 1e9, 1e10, 1e11]))
                links[source, target] = LinkView(
                    source,
                    target,
                    capacity,
                    egress_bits_per_s=capacity * draw(st.sampled_from([0.0, 0.3, 0.6, 0.95, 1.2])),
                    drained_s=NOW_S + draw(_offsets),
                    rtt_s=draw(st.sampled_from([0.0, 0.03])),
                    up=draw(st.sampled_from([True, True, True, False])),
                    seen_s=NOW_S - draw(_ages),
                    congestion=draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])),
                )
    thresholds = {
        name: draw(st.sampled_from([0.0, 500.0, 5000.0, 20_000.0, float("inf")]))
        for name in clusters
        if name.startswith("pd") and draw(st.sampled_from([True, True, True, False]))
    }
    names = [each.name for cluster in clusters.values() for each in cluster.instances]
    avoid = frozenset(draw(st.lists(st.sampled_from(names), max_size=2)) if names else [])
    facts = KvFacts(draw(st.booleans()), draw(st.booleans()), kv_bytes, kv_bytes)
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda pair: pair[0] != pair[1])
    blocked = frozenset(draw(st.sets(pairs, max_size=6)) if len(names) > 1 and draw(st.booleans()) else ())
    return View(clusters, links, facts, 5.0, thresholds, NOW_S, avoid=avoid, blocked=blocked)


@st.composite
def requests(draw: st.DrawFn, view: View, *, cached: bool = True) -> RoutingRequest:
    """A prompt of up to 40K tokens, and what the instances hold of it."""
    num_tokens = draw(st.one_of(st.integers(0, 4), st.integers(0, 41_000)))
    held = {}
    if cached and draw(st.booleans()):
        for cluster in view.clusters.values():
            for each in cluster.instances:
                if draw(st.booleans()):
                    attention = min(draw(_tokens), num_tokens)
                    held[each.name] = PrefixHit(min(draw(_tokens), attention), attention)
    return RoutingRequest(num_tokens, held, draw(st.integers(0, 100)))


@st.composite
def cases(draw: st.DrawFn, *, cached: bool = True, max_pd: int = 2) -> tuple[View, RoutingRequest]:
    """A board and a request for it."""
    view = draw(views(max_pd=max_pd))
    return view, draw(requests(view, cached=cached))


def _machines(draw: st.DrawFn, cluster: ClusterView) -> list[tuple[str, ...]]:
    """The instances of a cluster on machines of up to three, some of which have a pool."""
    names, machines = [each.name for each in cluster.instances], []
    while names:
        count = draw(st.integers(1, 3))
        machines.append(tuple(names[:count]))
        names = names[count:]
    return [machine for machine in machines if draw(st.sampled_from([True, True, False]))]


@st.composite
def pooled_cases(draw: st.DrawFn) -> tuple[View, RoutingRequest, RoutingRequest]:
    """A board with pools, a request that knows them, and the same one that does not."""
    view, request = draw(cases())
    speeds = st.sampled_from([1e8, 1e9, 1e10, 64e9])
    pools, hits = {}, {}
    for cluster in view.clusters.values():
        for number, instances in enumerate(_machines(draw, cluster)):
            name = f"{cluster.name}-pool-{number}"
            pools[name] = PoolView(name, cluster.name, instances, draw(speeds), draw(speeds), draw(speeds))
            pools[name].up = draw(st.sampled_from([True, True, True, False]))
            if draw(st.booleans()):
                attention = min(draw(_tokens), request.num_tokens)
                reusable = min(draw(_tokens), attention)
                in_memory = min(draw(_tokens), attention)
                hits[name] = PoolHit(
                    PrefixHit(reusable, attention),
                    PrefixHit(min(draw(_tokens), in_memory, reusable), in_memory),
                )
    view = replace(view, pools=pools)
    return view, with_pools(request.num_tokens, request.held, hits, view, request.ordinal), request
