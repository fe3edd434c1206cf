"""One moment of the deployment as the console draws it: what `state_of` tells, less what no picture needs.

A part that the state lacks is missing in the sample too, so that a control plane that tells less can be drawn as well.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

Json = dict[str, Any]

_INSTANCE = (
    "role",
    "draining",
    "healthy",
    "drain",
    "suspicion",
    "in_flight",
    "queue",
    "busy_s",
    "decoding",
    "decode_slots",
    "blocks",
    "age_s",
)
_ENGINE = ("running", "waiting", "kv_usage", "hit_rate")
_CLUSTER = ("kind", "hardware", "threshold_tokens", "threshold_held", "waiting_prefills")
_LINK = (
    "source",
    "target",
    "up",
    "configured_bits_per_s",
    "capacity_bits_per_s",
    "egress_bits_per_s",
    "utilisation",
    "queued_bytes",
    "drain_s",
    "transfers",
    "rtt_s",
    "retransmit_ratio",
    "condition",
    "age_s",
)
_POOL = ("cluster", "up", "age_s", "hit_tokens")
_DAEMON = ("bytes", "capacity_bytes", "wrong_pages", "failed_copies")


def sample_of(state: Mapping[str, Any], at_s: float) -> Json:
    """The sample of one state; `at_s`: its Unix time."""
    leaving = state.get("applied", {}).get("leaving", ())
    return {
        "at_s": round(at_s, 3),
        "requests": state.get("requests", {}),
        "routes": state.get("routes", {}),
        "served": state.get("served", {}),
        "clusters": {name: _cluster(cluster, leaving) for name, cluster in state["clusters"].items()},
        "links": {name: _picked(link, _LINK) for name, link in state.get("links", {}).items()},
        "pools": {name: _pool(pool) for name, pool in state.get("pools", {}).items()},
        "incompatible": state.get("incompatible", []),
    }


def instances_in(sample: Mapping[str, Any]) -> dict[str, Json]:
    """Every instance of a sample, by name."""
    return {
        name: instance
        for cluster in sample["clusters"].values()
        for name, instance in cluster["instances"].items()
    }


def _cluster(cluster: Mapping[str, Any], leaving: Collection[str]) -> Json:
    instances = {
        name: _instance(instance) | ({"leaving": True} if name in leaving else {})
        for name, instance in cluster["instances"].items()
    }
    return _picked(cluster, _CLUSTER) | {"instances": instances}


def _instance(instance: Mapping[str, Any]) -> Json:
    return _picked(instance, _INSTANCE) | _picked(instance.get("engine") or {}, _ENGINE)


def _pool(pool: Mapping[str, Any]) -> Json:
    return _picked(pool, _POOL) | _picked(pool.get("daemon") or {}, _DAEMON)


def _picked(whole: Mapping[str, Any], names: Iterable[str]) -> Json:
    return {name: whole[name] for name in names if name in whole}
