"""What one deployment file says other than another, field by field, and which of it a running deployment can take on.

Every field has a rule in `RULES`. A test holds them against the fields of `Deployment`, so that none is forgotten.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from prfaas.core.deployment.types import Deployment, Instance, Link
from prfaas.core.units import format_bits_per_s, format_bytes

FieldPath = tuple[str, ...]

_EVERYTHING = "start the gateway and all engines again"
_GATEWAY = "start the gateway again"
_ENGINES = "start the engines again, then the gateway"
_ANOTHER_NAME = "remove the instance, and add it under another name"
_CERTIFICATES = "make certificates for both ends, start the engines again, then the gateway"
_POOLS = "start the pools and the engines again, then the gateway"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What a change of a field needs."""

    shown: str
    """The field as the file has it, behind the name of its cluster, instance or link."""
    needs: str | None = None
    """What must be done in place of a reload; None: nothing, it is taken on while everything runs."""


# By the field's place in `Deployment`; `*` stands for a name.
RULES: Mapping[FieldPath, FieldRule] = {
    ("name",): FieldRule("name", _EVERYTHING),
    ("path",): FieldRule("the file's place", _GATEWAY),
    ("state_dir",): FieldRule("the state directory", _EVERYTHING),
    ("model", "served_name"): FieldRule("model.served_name", _EVERYTHING),
    ("model", "max_model_len"): FieldRule("model.max_model_len", _EVERYTHING),
    ("model", "path"): FieldRule("model.path", _EVERYTHING),
    ("model", "source"): FieldRule("model", _EVERYTHING),
    ("model", "kv_cache_dtype"): FieldRule("model.kv_cache_dtype", _EVERYTHING),
    ("model", "dtype"): FieldRule("model.dtype", _EVERYTHING),
    ("model", "adapters", "*"): FieldRule("model.adapters", _EVERYTHING),
    ("clusters", "*", "kind"): FieldRule("kind", _EVERYTHING),
    ("clusters", "*", "hardware"): FieldRule("hardware", _EVERYTHING),
    ("clusters", "*", "profile"): FieldRule("profile", _GATEWAY),
    ("clusters", "*", "speedup"): FieldRule("speedup", _EVERYTHING),
    ("clusters", "*", "pool"): FieldRule("pool", _POOLS),
    ("clusters", "*", "instance_price_per_hour"): FieldRule("price of an instance-hour"),
    ("clusters", "*", "preemptible"): FieldRule("preemptible"),
    ("clusters", "*", "kills_per_hour"): FieldRule("kills_per_hour"),
    ("clusters", "*", "extra_args"): FieldRule("extra_args", _ENGINES),
    ("clusters", "*", "kv_cache_dtype"): FieldRule("kv_cache_dtype", _EVERYTHING),
    ("clusters", "*", "instances", "*", "roles"): FieldRule("roles"),
    ("clusters", "*", "instances", "*", "host"): FieldRule("host", _ANOTHER_NAME),
    ("clusters", "*", "instances", "*", "http_port"): FieldRule("http_port", _ANOTHER_NAME),
    ("clusters", "*", "instances", "*", "kv_port"): FieldRule("kv_port", _ANOTHER_NAME),
    ("clusters", "*", "instances", "*", "tensor_parallel"): FieldRule("tensor_parallel", _ANOTHER_NAME),
    ("clusters", "*", "instances", "*", "events_port"): FieldRule("events_port", _ANOTHER_NAME),
    ("clusters", "*", "instances", "*", "nixl_port"): FieldRule("nixl_port", _ANOTHER_NAME),
    ("clusters", "*", "instances", "*", "is_stand_in"): FieldRule("hardware", _EVERYTHING),
    ("clusters", "*", "instances", "*", "tls"): FieldRule("TLS, by security.engine_tls", _EVERYTHING),
    ("links", "*", "bandwidth_bits_per_s"): FieldRule("bandwidth"),
    ("links", "*", "connections"): FieldRule("connections", _ENGINES),
    ("links", "*", "rtt_s"): FieldRule("rtt_s"),
    ("links", "*", "connection_bits_per_s"): FieldRule("connection_bandwidth"),
    ("links", "*", "encryption"): FieldRule("encryption", _ENGINES),
    ("links", "*", "compression"): FieldRule("compression", _ENGINES),
    ("links", "*", "egress_per_gb"): FieldRule("egress_per_gb"),
    ("links", "*", "mapping_bits_per_s"): FieldRule("mapping_bandwidth"),
    ("routing", "policy"): FieldRule("routing.policy"),
    ("routing", "threshold_tokens"): FieldRule("routing.threshold_tokens"),
    ("routing", "params", "*"): FieldRule("routing.params"),
    ("slo", "ttft_s"): FieldRule("slo.ttft_s", _GATEWAY),
    ("slo", "tpot_s"): FieldRule("slo.tpot_s", _GATEWAY),
    ("slo", "ttft_statistic"): FieldRule("slo.ttft_statistic", _GATEWAY),
    ("gateway", "host"): FieldRule("gateway.host", _GATEWAY),
    ("gateway", "port"): FieldRule("gateway.port", _GATEWAY),
    ("gateway", "admin", "host"): FieldRule("gateway.admin.host", _GATEWAY),
    ("gateway", "admin", "port"): FieldRule("gateway.admin.port", _GATEWAY),
    ("gateway", "admin", "token_file"): FieldRule("gateway.admin.token_file", _GATEWAY),
    ("gateway", "hosts"): FieldRule("gateway.hosts"),
    ("gateway", "route_header"): FieldRule("gateway.route_header"),
    ("gateway", "shadow"): FieldRule("gateway.shadow"),
    ("gateway", "first_token"): FieldRule("gateway.first_token"),
    ("gateway", "first_byte_s"): FieldRule("gateway.first_byte_s"),
    ("gateway", "idle_s"): FieldRule("gateway.idle_s"),
    ("gateway", "limits", "requests"): FieldRule("gateway.limits.requests"),
    ("gateway", "limits", "queue_s"): FieldRule("gateway.limits.queue_s"),
    ("gateway", "limits", "bodies_bytes"): FieldRule("gateway.limits.bodies"),
    ("gateway", "limits", "body_values"): FieldRule("gateway.limits.body_values"),
    ("gateway", "tracing"): FieldRule("gateway.tracing", _EVERYTHING),
    ("gateway", "cluster"): FieldRule("gateway.cluster", _GATEWAY),
    ("fleet",): FieldRule("fleet", _GATEWAY),
    ("security", "key_file"): FieldRule("security.key_file", _EVERYTHING),
    ("security", "tenant_header"): FieldRule("security.tenant_header"),
    ("security", "tenant_weights", "*"): FieldRule("security.tenant_weights"),
    ("security", "certificates"): FieldRule("security.certificates", _EVERYTHING),
    ("security", "encrypt_inside"): FieldRule("security.encrypt_inside", _ENGINES),
    ("engine", "max_num_batched_tokens"): FieldRule("engine.max_num_batched_tokens", _ENGINES),
    ("engine", "max_num_seqs"): FieldRule("engine.max_num_seqs", _ENGINES),
    ("engine", "kv_cache_gib"): FieldRule("engine.kv_cache_gib", _ENGINES),
    ("engine", "staging_bytes"): FieldRule("engine.staging", _ENGINES),
    ("engine", "transfer_block_bytes"): FieldRule("engine.transfer_block", _ENGINES),
    ("engine", "prefix_cache_retention_tokens"): FieldRule("engine.prefix_cache_retention_tokens", _ENGINES),
    ("engine", "extra_args"): FieldRule("engine.extra_args", _ENGINES),
    ("engine", "env", "*"): FieldRule("engine.env", _ENGINES),
    ("engine", "log_bytes"): FieldRule("engine.log_size", _ENGINES),
    ("engine", "log_files"): FieldRule("engine.log_files", _ENGINES),
    ("engine", "local_transfer"): FieldRule("engine.local_transfer", _ENGINES),
    ("transfer", "lease_s"): FieldRule("transfer.lease_s", _ENGINES),
    ("transfer", "load_wait_s"): FieldRule("transfer.load_wait_s", _ENGINES),
    ("transfer", "staging_wait_s"): FieldRule("transfer.staging_wait_s", _ENGINES),
    ("transfer", "staging_ttl_s"): FieldRule("transfer.staging_ttl_s", _ENGINES),
    ("transfer", "progress_deadline_s"): FieldRule("transfer.progress_deadline_s", _ENGINES),
    ("transfer", "page_digests"): FieldRule("transfer.page_digests", _ENGINES),
    ("transfer", "checksums"): FieldRule("transfer.checksums", _ENGINES),
    ("transfer", "user_timeout_s"): FieldRule("transfer.user_timeout_s", _ENGINES),
    ("transfer", "keepalive_s"): FieldRule("transfer.keepalive_s", _ENGINES),
    ("transfer", "silence_s"): FieldRule("transfer.silence_s", _ENGINES),
    ("transfer", "resume_s"): FieldRule("transfer.resume_s", _ENGINES),
    ("transfer", "decode_lead_s"): FieldRule("transfer.decode_lead_s"),
    ("control", "threshold_period_s"): FieldRule("control.threshold_period_s"),
    ("control", "allocation_period_s"): FieldRule("control.allocation_period_s"),
    # What was learnt of the traffic is kept by this length.
    ("control", "window_s"): FieldRule("control.window_s", _GATEWAY),
    ("control", "stale_after_s"): FieldRule("control.stale_after_s"),
    ("control", "silence_s"): FieldRule("control.silence_s"),
    ("control", "stall_s"): FieldRule("control.stall_s"),
    ("control", "allocation"): FieldRule("control.allocation"),
    ("control", "forecast_period_s"): FieldRule("control.forecast_period_s", _GATEWAY),
    ("pool", "checkpoint_tokens"): FieldRule("pool.checkpoint_tokens", _POOLS),
    ("pool", "tenant_share"): FieldRule("pool.tenant_share", _POOLS),
    ("pool", "eviction"): FieldRule("pool.eviction", _POOLS),
    ("pool", "staging_bytes"): FieldRule("pool.staging", _POOLS),
    ("pool", "timeout_s"): FieldRule("pool.timeout_s", _POOLS),
}

_LISTS = ("clusters", "instances", "links")
_NAMED = frozenset(path[:-1] for path in RULES if path[-1] == "*")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One thing that the new file says otherwise."""

    field: str
    """As in the file, with names in place of list indexes."""
    sentence: str
    """What changes."""
    needs: str | None
    """What must be done in place of a reload; None: nothing."""


@dataclass(frozen=True, slots=True)
class DeploymentDifference:
    """All that changes from one deployment to another."""

    changes: tuple[FieldChange, ...]
    added: tuple[Instance, ...]
    removed: tuple[Instance, ...]

    @property
    def live(self) -> tuple[FieldChange, ...]:
        """What a running deployment can take on."""
        return tuple(change for change in self.changes if change.needs is None)

    @property
    def refused(self) -> tuple[FieldChange, ...]:
        """What it can't."""
        return tuple(change for change in self.changes if change.needs is not None)

    def __bool__(self) -> bool:
        return bool(self.changes)


def difference(before: Deployment, after: Deployment) -> DeploymentDifference:
    """What `after` says other than `before`. Empty exactly when both say the same."""
    old, new = dict(_leaves(before, ())), dict(_leaves(after, ()))
    was = {instance.name: instance for instance in before.instances}
    becomes = {instance.name: instance for instance in after.instances}
    changes = [
        *_whole(before, after),
        *(
            _change(path, old.get(path, _ABSENT), new.get(path, _ABSENT))
            for path in {**old, **new}
            if _is_in_both(path, before, after) and old.get(path, _ABSENT) != new.get(path, _ABSENT)
        ),
        *_orders(before, after),
        *_machines(before, after),
    ]
    return DeploymentDifference(
        tuple(changes),
        tuple(each for name, each in becomes.items() if name not in was),
        tuple(each for name, each in was.items() if name not in becomes),
    )


def _leaves(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, Any]]:
    """Every field of a deployment with its value, by its place."""
    if path and path[-1] in _LISTS:
        for each in value:
            for field in fields(each):
                if field.name not in ("name", "cluster", "source", "target"):
                    yield from _leaves(getattr(each, field.name), (*path, each.name, field.name))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield (*path, str(name)), each
    elif is_dataclass(value) and _pattern(path) not in RULES:
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), (*path, field.name))
    else:
        yield path, value


def _pattern(path: FieldPath) -> FieldPath:
    """The place with `*` for names."""
    if path[:1] == ("clusters",):
        path = (*path[:1], "*", *path[2:])
        if path[2:3] == ("instances",):
            path = (*path[:3], "*", *path[4:])
        return path
    if path[:1] == ("links",):
        return (*path[:1], "*", *path[2:])
    return (*path[:-1], "*") if path[:-1] in _NAMED else path


def _where(path: FieldPath) -> str:
    """A field as in the file: "links[east->home].bandwidth"."""
    shown = RULES[_pattern(path)].shown
    if path[0] == "links":
        return f"links[{path[1]}].{shown}"
    if path[0] == "clusters":
        inside = f".instances[{path[3]}]" if path[2] == "instances" else ""
        return f"clusters[{path[1]}]{inside}.{shown}"
    return f"{shown}[{path[-1]}]" if path[:-1] in _NAMED else shown


def _change(path: FieldPath, old: Any, new: Any) -> FieldChange:
    where, rule = _where(path), RULES[_pattern(path)]
    if path[-1] in ("profile", "fleet") or (path[0] == "clusters" and path[-1] == "pool"):
        # Too much to be shown in a sentence.
        return FieldChange(where, f"{where} is another one", rule.needs)
    if old is _ABSENT:
        return FieldChange(where, f"{where} is now {_shown(path, new)}", rule.needs)
    if new is _ABSENT:
        return FieldChange(where, f"{where} is left out; it was {_shown(path, old)}", rule.needs)
    return FieldChange(where, f"{where} is now {_shown(path, new)}; it was {_shown(path, old)}", rule.needs)


def _shown(path: FieldPath, value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    if path[-1].endswith("_bits_per_s"):
        return format_bits_per_s(value)
    if path[-1].endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int | Path) else f'"{value}"'


def _is_in_both(path: FieldPath, before: Deployment, after: Deployment) -> bool:
    """Whether the cluster, instance or link of a field is in both; what comes or goes as a whole has one sentence."""
    if path[0] == "links":
        return _has_link(before, path[1]) and _has_link(after, path[1])
    if path[0] != "clusters":
        return True
    if path[2] != "instances":
        return _has_cluster(before, path[1]) and _has_cluster(after, path[1])
    return all(
        any((instance.cluster, instance.name) == (path[1], path[3]) for instance in each.instances)
        for each in (before, after)
    )


def _has_link(deployment: Deployment, name: str) -> bool:
    return any(link.name == name for link in deployment.links)


def _has_cluster(deployment: Deployment, name: str) -> bool:
    return any(cluster.name == name for cluster in deployment.clusters)


def _whole(before: Deployment, after: Deployment) -> Iterator[FieldChange]:
    """Clusters, links and instances that come, go or move."""
    for cluster in after.clusters:
        if not _has_cluster(before, cluster.name):
            who = ", ".join(instance.name for instance in cluster.instances)
            # Pools learn of each other from the file that they were started with, engines whether they convert.
            needs = None if cluster.pool is None else _POOLS
            if after.converts_kv and not before.converts_kv:
                needs = _EVERYTHING
            yield FieldChange(
                f"clusters[{cluster.name}]", f"cluster {cluster.name} is added, with {who}", needs
            )
    for link in after.links:
        if not _has_link(before, link.name):
            bandwidth = format_bits_per_s(link.bandwidth_bits_per_s)
            needs = _needs_of_new(link, before)
            yield FieldChange(f"links[{link.name}]", f"link {link.name} is added, {bandwidth}", needs)
    for cluster in before.clusters:
        if not _has_cluster(after, cluster.name):
            yield FieldChange(f"clusters[{cluster.name}]", f"cluster {cluster.name} is removed", _EVERYTHING)
    for link in before.links:
        if not _has_link(after, link.name):
            yield FieldChange(f"links[{link.name}]", f"link {link.name} is removed", _ENGINES)
    was = {instance.name: instance for instance in before.instances}
    becomes = {instance.name: instance for instance in after.instances}
    for name, instance in becomes.items():
        where = f"clusters[{instance.cluster}].instances[{name}]"
        if name not in was and _has_cluster(before, instance.cluster):
            at = f"{instance.host}:{instance.http_port}"
            yield FieldChange(
                where, f"instance {name} joins {instance.cluster} ({', '.join(instance.roles)}, {at})", None
            )
        elif name in was and was[name].cluster != instance.cluster:
            moved = f"instance {name} is in {instance.cluster} now; it was in {was[name].cluster}"
            yield FieldChange(where, moved, _ANOTHER_NAME)
    for name, instance in was.items():
        if name not in becomes and _has_cluster(after, instance.cluster):
            where = f"clusters[{instance.cluster}].instances[{name}]"
            yield FieldChange(
                where, f"instance {name} leaves {instance.cluster} when its work has ended", None
            )


def _needs_of_new(link: Link, before: Deployment) -> str | None:
    """Engines are told of a new link by the gateway. Certificates and pools' peers they have from their start."""
    ends = [cluster for cluster in before.clusters if cluster.name in (link.source, link.target)]
    if any(cluster.pool is not None for cluster in ends):
        return _POOLS
    running = (instance.name for cluster in ends for instance in cluster.instances)
    return None if not link.encryption or all(map(before.needs_certificate, running)) else _CERTIFICATES


def _orders(before: Deployment, after: Deployment) -> Iterator[FieldChange]:
    """Other orders of what stays: they decide nothing but ties, and pools' names."""
    for what, old, new in (
        ("clusters", [each.name for each in before.clusters], [each.name for each in after.clusters]),
        ("links", [each.name for each in before.links], [each.name for each in after.links]),
        ("instances", [each.name for each in before.instances], [each.name for each in after.instances]),
    ):
        if [name for name in old if name in new] != [name for name in new if name in old]:
            yield FieldChange(what, f"the {what} are in another order", None)


def _machines(before: Deployment, after: Deployment) -> Iterator[FieldChange]:
    """Pools that come, go or have another name because their clusters' machines have changed."""
    old = {(pool.name, pool.host, pool.tls) for pool in before.pools}
    new = {(pool.name, pool.host, pool.tls) for pool in after.pools}
    same = {
        cluster.name
        for cluster in after.clusters
        if any(each.name == cluster.name and each.pool == cluster.pool for each in before.clusters)
    }
    machines = {pool.cluster for pool in (*before.pools, *after.pools) if pool.cluster in same}
    for name in sorted(machines):
        here = {
            (pool.name, pool.host, pool.tls) for pool in (*before.pools, *after.pools) if pool.cluster == name
        }
        if here & old != here & new:
            yield FieldChange(
                f"clusters[{name}].pool",
                f"cluster {name} gets other pools, since its machines change",
                _POOLS,
            )
