"""What an operator should look at, by one sample."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.serving.console.samples import instances_in

Severity = Literal["critical", "warning"]

WELL = ("clear", "busy")
"""Conditions of a link that nobody needs to look at."""

_CONDITIONS = {
    "congested": "is congested: its queues build up, or it loses packets",
    "slow": "carries less than the deployment file says",
    "slow-sender": "waits for its senders",
    "slow-receiver": "waits for its receivers",
    "unheard": "is not heard of",
    "down": "has no connections",
}
_SILENT_S = 5.0
_FULL_KV = 0.95
_LONG_DRAIN_S = 5.0
# Of the requests of a minute that were refused, or failed.
_MANY = 0.05
_UNSERVED = {
    "refused": "were refused, for want of room or of an engine",
    "failed": "failed in an engine or in the gateway",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that is wrong. Two alarms with the same `kind` and `about` are the same alarm."""

    severity: Severity
    kind: str
    about: str
    """The instance, link or pool; the whole deployment where it is empty."""
    what: str
    """A sentence."""


def alarms_of(sample: Mapping[str, Any]) -> list[Alarm]:
    """All alarms of a sample, the critical ones first."""
    found = [*_service(sample), *_instances(sample), *_links(sample), *_pools(sample), *_pairs(sample)]
    return sorted(found, key=lambda alarm: alarm.severity != "critical")


def _service(sample: Mapping[str, Any]) -> Iterator[Alarm]:
    taking = [
        instance["role"]
        for cluster in sample["clusters"].values()
        if cluster.get("kind") != "prfaas"
        for instance in cluster["instances"].values()
        if instance["healthy"] and instance["drain"] is None
    ]
    if not taking:
        yield Alarm("critical", "no-decode", "", "No instance can decode: requests are refused.")
    elif not any("decode" in role for role in taking):
        yield Alarm("critical", "no-decode", "", "No decode instance takes part: prefill instances decode.")
    served = sample.get("served", {}).get("now", {})
    for kind, what in _UNSERVED.items():
        if count := served.get(kind, 0):
            severity: Severity = "critical" if count > _MANY * served["ended"] else "warning"
            text = f"Of {served['ended']} requests of the last minute {count} {what}."
            yield Alarm(severity, kind, "", text)


def _instances(sample: Mapping[str, Any]) -> Iterator[Alarm]:
    for name, instance in instances_in(sample).items():
        if not instance["healthy"]:
            why = instance.get("suspicion")
            yield Alarm("critical", "down", name, f"{name} is out of routing{f': {why}' if why else ''}.")
        elif instance.get("age_s", 0.0) > _SILENT_S:
            yield Alarm("warning", "silent", name, f"{name} was last heard of {instance['age_s']:.0f} s ago.")
        if instance.get("kv_usage", 0.0) > _FULL_KV:
            yield Alarm(
                "warning", "kv-full", name, f"The KVCache of {name} is {instance['kv_usage']:.0%} full."
            )


def _links(sample: Mapping[str, Any]) -> Iterator[Alarm]:
    for name, link in sample["links"].items():
        if not link["up"]:
            yield Alarm("critical", "link-down", name, f"The link {name} is not used.")
            continue
        if link["condition"] not in WELL:
            yield Alarm(
                "warning", "link-condition", name, f"The link {name} {_CONDITIONS[link['condition']]}."
            )
        if link["drain_s"] > _LONG_DRAIN_S:
            text = f"The bytes accepted for the link {name} need {link['drain_s']:.0f} s more."
            yield Alarm("warning", "link-queue", name, text)


def _pools(sample: Mapping[str, Any]) -> Iterator[Alarm]:
    for name, pool in sample["pools"].items():
        if not pool["up"]:
            yield Alarm("warning", "pool-down", name, f"The pool {name} does not answer.")
        if pool.get("wrong_pages", 0):
            text = f"{pool['wrong_pages']} pages of the pool {name} had wrong bytes. They were not used."
            yield Alarm("warning", "wrong-pages", name, text)


def _pairs(sample: Mapping[str, Any]) -> Iterator[Alarm]:
    for pair in sample["incompatible"]:
        names = f"{pair['producer']} and {pair['consumer']}"
        yield Alarm("warning", "incompatible", names, f"{names} exchange no KVCache: {pair['reason']}.")
