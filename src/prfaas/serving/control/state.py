"""The deployment as it is now, ready for JSON: what `GET /prfaas/state` answers and `prfaas status` shows."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prfaas.core.deployment import AppliedDeployment, Instance, Link, PoolNode
from prfaas.core.scheduling import InstanceView, Route
from prfaas.core.scheduling.decoders import slot_free_s
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.compatibility import Compatibility
from prfaas.serving.control.engine_monitor import EngineMeter, EngineMonitor
from prfaas.serving.control.health import HealthWatch
from prfaas.serving.control.hot_prefixes import HotPrefixes
from prfaas.serving.control.kv_events import EventFeed
from prfaas.serving.control.link_monitor import LinkMonitor
from prfaas.serving.control.pool_monitor import SILENCE_S, TIERS, PoolMonitor
from prfaas.serving.control.prefill_admission import PrefillAdmission
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge
from prfaas.serving.control.role_allocation import RoleAllocation, RoleChanges
from prfaas.serving.control.rosters import Rosters
from prfaas.serving.control.thresholds import Thresholds, json_tokens

Json = dict[str, Any]


@dataclass(slots=True)
class Routed:
    """Decisions so far, by route and reason."""

    total: int = 0
    reasons: dict[Route, Counter[str]] = field(default_factory=lambda: {route: Counter() for route in Route})


@dataclass(slots=True)
class Overview:
    """Everything that there is to be seen of a plane."""

    applied: AppliedDeployment
    """What was taken on last."""
    started_s: float
    cluster_state: ClusterState
    prefix_knowledge: PrefixKnowledge
    event_feed: EventFeed
    links: LinkMonitor
    compatibility: Compatibility
    engines: EngineMonitor
    pools: PoolMonitor
    health: HealthWatch
    window: LengthWindow
    thresholds: Thresholds
    role_changes: RoleChanges
    prefill_admission: PrefillAdmission
    role_allocation: RoleAllocation
    hot_prefixes: HotPrefixes
    routed: Routed
    rosters: Rosters


def state_of(plane: Overview, now_s: float) -> Json:
    """Ages and waits in seconds, sizes in bytes, lengths in tokens; None for what is not known yet.

    No prompts, no keys, no addresses.
    """
    cluster_state, deployment = plane.cluster_state, plane.applied.running
    event_feed = plane.event_feed.state()
    return {
        "deployment": deployment.name,
        "model": deployment.model.served_name,
        "policy": deployment.routing.policy,
        "applied": {
            "digest": plane.applied.digest,
            "leaving": [instance.name for instance in plane.applied.leaving],
            "rosters_behind": plane.rosters.behind,
        },
        "up_s": round(now_s - plane.started_s, 3),
        "clusters": {
            cluster.name: {
                "kind": cluster.kind,
                "hardware": cluster.hardware,
                "threshold_tokens": _threshold(cluster_state, cluster.name),
                "threshold_held": cluster.name in plane.thresholds.held,
                "slot_s": _slot_s(cluster_state, cluster.name),
                "waiting_prefills": plane.prefill_admission.waiting(cluster.name),
                "instances": {
                    instance.name: _instance(plane, instance, event_feed, now_s)
                    for instance in cluster.instances
                },
            }
            for cluster in deployment.clusters
        },
        "pools": {node.name: _pool(plane, node, event_feed, now_s) for node in plane.pools.nodes},
        "links": {link.name: _link(plane, link, now_s) for link in deployment.links},
        "incompatible": plane.compatibility.state(),
        "thresholds": {"history": plane.thresholds.state(now_s), "last_search": plane.thresholds.last},
        "roles": {
            "conversions": plane.role_changes.state(now_s),
            "last_evaluation": plane.role_allocation.last,
        },
        "requests": {
            "routed": plane.routed.total,
            "in_window": plane.window.count(now_s),
            "per_s": round(plane.window.rate_per_s(now_s), 4),
            "uncached_lengths": plane.window.histogram(now_s),
        },
        "routes": {str(route): dict(reasons) for route, reasons in plane.routed.reasons.items()},
        "index": asdict(plane.prefix_knowledge.index.stats())
        | {
            "pending_batches": plane.event_feed.waiting_batches,
            "refused_batches": plane.event_feed.refused_batches,
            "feed_errors": plane.event_feed.thread_errors,
            "expected_blocks": plane.prefix_knowledge.pending_blocks,
        },
        "rebalancing": plane.hot_prefixes.state(now_s),
        "fleet": None,
    }


def _threshold(cluster_state: ClusterState, cluster: str) -> float | None:
    tokens = cluster_state.view.threshold_tokens.get(cluster)
    return None if tokens is None else json_tokens(tokens)


def _slot_s(cluster_state: ClusterState, cluster: str) -> float | None:
    view = cluster_state.view.clusters[cluster]
    return round(view.slot_s, 4) if view.kind == "pd" else None


def _instance(plane: Overview, instance: Instance, event_feed: Mapping[str, Json], now_s: float) -> Json:
    cluster_state = plane.cluster_state
    view = cluster_state.instance(instance.name)
    cluster = cluster_state.view.clusters[view.cluster]
    meter = plane.engines.meters[instance.name]
    return {
        "role": role_of(view),
        "draining": view.draining,
        "healthy": view.healthy,
        "drain": drain_state(view, meter),
        "leaves_in_s": _leaves_in_s(cluster_state, instance.name, now_s),
        "suspicion": plane.health.reason(instance.name),
        "in_flight": view.in_flight,
        "queue": cluster_state.open_prefills(instance.name),
        "busy_s": round(max(view.busy_until_s - now_s, 0.0), 4),
        "decoding": view.decoding,
        "decode_slots": view.decode_slots if cluster.kind == "pd" else 0,
        "decode_wait_s": round(slot_free_s(view, cluster.slot_s), 4) if cluster.kind == "pd" else 0.0,
        "blocks": plane.prefix_knowledge.blocks(instance.name),
        "age_s": round(max(now_s - view.seen_s, 0.0), 3),
        "engine": _engine(meter),
        "events": event_feed.get(instance.name),
    }


def _leaves_in_s(cluster_state: ClusterState, name: str, now_s: float) -> float | None:
    """Seconds of its notice that are left; None where it has none."""
    leaves_s = cluster_state.view.leaves_s.get(name)
    return None if leaves_s is None else round(max(leaves_s - now_s, 0.0), 3)


def drain_state(view: InstanceView, meter: EngineMeter) -> Literal["draining", "drained"] | None:
    """How far an operator's drain is: drained once nothing is open there, not even another gateway's work."""
    if not view.closed:
        return None
    newest = meter.newest
    is_idle = view.in_flight == 0 and (newest is None or newest.running + newest.waiting == 0)
    return "drained" if is_idle else "draining"


def _engine(meter: EngineMeter) -> Json | None:
    newest = meter.newest
    if newest is None:
        return None
    return {
        "running": newest.running,
        "waiting": newest.waiting,
        "kv_usage": round(newest.kv_usage, 4),
        "hit_rate": _rounded(meter.hit_rate),
        "pool_hit_tokens": {"memory": round(newest.pool_memory_tokens), "ssd": round(newest.pool_ssd_tokens)},
        "token_gap_s": _rounded(meter.token_gap_s),
        "output_tokens": _rounded(meter.output_tokens),
    }


def _pool(plane: Overview, node: PoolNode, event_feed: Mapping[str, Json], now_s: float) -> Json:
    """Totals are since the daemon's start."""
    newest, knowledge = plane.pools.newest(node.name), plane.prefix_knowledge
    engines = [plane.engines.meters[name].newest for name in node.instances]
    found: Json = {
        "cluster": node.cluster,
        "instances": list(node.instances),
        "up": newest is not None and now_s - newest.at_s < SILENCE_S,
        "age_s": None if newest is None else round(now_s - newest.at_s, 3),
        "blocks": knowledge.blocks(node.name),
        "memory_blocks": knowledge.memory_blocks(node.name),
        "memory_bits_per_s": round(plane.cluster_state.view.pools[node.name].memory_bits_per_s),
        "hit_tokens": {
            "memory": round(sum(each.pool_memory_tokens for each in engines if each is not None)),
            "ssd": round(sum(each.pool_ssd_tokens for each in engines if each is not None)),
        },
        "events": event_feed.get(node.name),
    }
    if newest is None:
        return found | {"daemon": None}

    def number(part: str, name: str) -> int:
        return round(newest.number(part, name))

    return found | {
        "daemon": {
            "epoch": number("store", "epoch"),
            "sessions": number("store", "engine_sessions"),
            "bytes": {"memory": number("store", "used_bytes"), "ssd": number("store", "ssd_bytes")},
            "capacity_bytes": {"memory": number("store", "memory_bytes"), "ssd": node.ssd_bytes},
            "pages": {tier: newest.pages(tier) for tier in TIERS},
            "pinned_pages": number("store", "pinned_pages"),
            "writing_pages": number("store", "writing_pages"),
            "stored_bytes": number("store", "stored_bytes"),
            "refused_pages": number("store", "refused_pages"),
            "evicted_pages": number("store", "evicted_pages"),
            "evicted_bytes": number("store", "evicted_bytes"),
            "promoted_bytes": number("store", "promoted_bytes"),
            "wrong_pages": number("store", "wrong_pages"),
            "ssd_state": str(newest.parts.get("store", {}).get("ssd_state", "")),
            "ssd_queued_bytes": number("store", "ssd_queued_bytes"),
            "ssd_written_bytes": number("store", "ssd_written_bytes"),
            "ssd_read_bytes": number("store", "ssd_read_bytes"),
            "copied_bytes": number("copies", "copied_bytes"),
            "lent_bytes": number("copies", "lent_bytes"),
            "failed_copies": number("copies", "failed_copies"),
        }
    }


def _link(plane: Overview, link: Link, now_s: float) -> Json:
    pair = (link.source, link.target)
    view = plane.cluster_state.view.links[pair]
    meter = plane.links.meters[pair]
    return {
        "source": link.source,
        "target": link.target,
        "up": view.up,
        "configured_bits_per_s": link.bandwidth_bits_per_s,
        "capacity_bits_per_s": round(view.capacity_bits_per_s),
        "egress_bits_per_s": round(view.egress_bits_per_s),
        "delivery_bits_per_s": round(meter.delivery_bits_per_s),
        "utilisation": round(view.utilisation, 4),
        "queued_bytes": meter.queued_bytes,
        "residual_bytes": plane.cluster_state.residual_bytes(pair),
        "drain_s": round(max(view.drained_s - now_s, 0.0), 4),
        "transfers": plane.cluster_state.transfers_open(pair),
        "rtt_s": round(view.rtt_s, 6),
        "retransmit_ratio": round(view.retransmit_ratio, 6),
        "connections_up": meter.connections_up,
        "carried_bytes": meter.carried_bytes,
        "egress_per_gb": link.egress_per_gb,
        "egress_cost": round(plane.links.costs[pair].total(meter.carried_bytes), 6),
        "congestion": round(view.congestion, 4),
        "condition": view.condition,
        "queue_rtt_s": round(meter.network.rtt_s, 6),
        "age_s": round(max(now_s - view.seen_s, 0.0), 3),
    }


def role_of(view: InstanceView) -> str:
    """ "prefill", "decode" or "prefill+decode"."""
    return "+".join(name for name, has in (("prefill", view.prefills), ("decode", view.decodes)) if has)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
