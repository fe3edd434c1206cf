"""What one deployment file says other than another, field by field, and which of it a running deployment can take on.

What a change of a field needs stands at the field. A test changes each of them, so that none is forgotten.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from prfaas.core.deployment.section import (
    ANOTHER_NAME,
    CERTIFICATES,
    ENGINES_AGAIN,
    EVERYTHING,
    POOLS_AGAIN,
    FieldFacts,
    Section,
    fields_of,
)
from prfaas.core.deployment.types import Cluster, Deployment, Instance, Link
from prfaas.core.units import format_bits_per_s, format_bytes

# What says where an element of a list is, is its name.
_NAMES = frozenset({"name", "cluster", "source", "target"})
_ABSENT = object()

_Named = TypeVar("_Named", Cluster, Link, Instance)


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
    def refused(self) -> tuple[FieldChange, ...]:
        """What it can't."""
        return tuple(change for change in self.changes if change.needs is not None)

    def __bool__(self) -> bool:
        return bool(self.changes)


def difference(before: Deployment, after: Deployment) -> DeploymentDifference:
    """What `after` says other than `before`. Empty exactly when both say the same."""
    changes = (
        *_whole(before, after),
        *_within(before, after, ""),
        *_orders(before, after),
        *_ranks(before, after),
        *_machines(before, after),
    )
    added = _only_in(after.instances, before.instances)
    return DeploymentDifference(changes, added, _only_in(before.instances, after.instances))


def _within(
    before: Section, after: Section, place: str, skipped: frozenset[str] = frozenset()
) -> Iterator[FieldChange]:
    """What two sections say otherwise, field by field. `place`: of both, as in the file, up to a field's name."""
    kind: type = type(before)
    for field in fields_of(kind).values():
        old, new = getattr(before, field.name), getattr(after, field.name)
        assert field.on_change is not None, f"{place}{field.name} says nothing of its changes"
        if old == new or field.name in skipped or not field.on_change.is_compared:
            continue
        where = place + (field.on_change.shown or field.name_in_file)
        if field.is_list_of_sections:
            # What comes or goes as a whole has a sentence of its own.
            earlier = {each.name: each for each in old}
            for each in new:
                if each.name in earlier:
                    yield from _within(earlier[each.name], each, f"{where}[{each.name}].", _NAMES)
        elif isinstance(old, Mapping):
            for name in {**old, **new}:
                one, other = old.get(name, _ABSENT), new.get(name, _ABSENT)
                if one != other:
                    yield _change(field, f"{where}[{name}]", one, other)
        # A section that may be left out is compared as a whole.
        elif isinstance(old, Section) and not field.is_optional:
            yield from _within(old, new, f"{where}.")
        else:
            yield _change(field, where, old, new)


def _change(field: FieldFacts, where: str, old: Any, new: Any) -> FieldChange:
    assert field.on_change is not None
    needs = field.on_change.needs
    if is_dataclass(old) or is_dataclass(new):
        # Too much to be shown in a sentence.
        return FieldChange(where, f"{where} is another one", needs)
    if old is _ABSENT:
        return FieldChange(where, f"{where} is now {_shown(field, new)}", needs)
    if new is _ABSENT:
        return FieldChange(where, f"{where} is left out; it was {_shown(field, old)}", needs)
    return FieldChange(where, f"{where} is now {_shown(field, new)}; it was {_shown(field, old)}", needs)


def _shown(field: FieldFacts, value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    if field.name.endswith("_bits_per_s"):
        return format_bits_per_s(value)
    if field.name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int | Path) else f'"{value}"'


def _only_in(these: Sequence[_Named], others: Sequence[_Named]) -> tuple[_Named, ...]:
    names = {each.name for each in others}
    return tuple(each for each in these if each.name not in names)


def _whole(before: Deployment, after: Deployment) -> Iterator[FieldChange]:
    """Clusters, links and instances that come, go or move."""
    for cluster in _only_in(after.clusters, before.clusters):
        who = ", ".join(instance.name for instance in cluster.instances)
        # Pools learn of each other from the file that they were started with, engines whether they convert.
        needs = None if cluster.pool is None else POOLS_AGAIN.needs
        if after.converts_kv and not before.converts_kv:
            needs = EVERYTHING.needs
        yield FieldChange(f"clusters[{cluster.name}]", f"cluster {cluster.name} is added, with {who}", needs)
    for link in _only_in(after.links, before.links):
        sentence = f"link {link.name} is added, {format_bits_per_s(link.bandwidth_bits_per_s)}"
        yield FieldChange(f"links[{link.name}]", sentence, _needs_of_new(link, before))
    for gone in _only_in(before.clusters, after.clusters):
        yield FieldChange(f"clusters[{gone.name}]", f"cluster {gone.name} is removed", EVERYTHING.needs)
    for link in _only_in(before.links, after.links):
        yield FieldChange(f"links[{link.name}]", f"link {link.name} is removed", ENGINES_AGAIN.needs)
    was = {instance.name: instance.cluster for instance in before.instances}
    for each in after.instances:
        cluster_before = was.get(each.name)
        if cluster_before is None and any(cluster.name == each.cluster for cluster in before.clusters):
            roles = ", ".join(each.roles)
            sentence = f"instance {each.name} joins {each.cluster} ({roles}, {each.host}:{each.http_port})"
            yield FieldChange(_place(each), sentence, None)
        elif cluster_before not in (None, each.cluster):
            sentence = f"instance {each.name} is in {each.cluster} now; it was in {cluster_before}"
            yield FieldChange(_place(each), sentence, ANOTHER_NAME.needs)
    for each in _only_in(before.instances, after.instances):
        if any(cluster.name == each.cluster for cluster in after.clusters):
            sentence = f"instance {each.name} leaves {each.cluster} when its work has ended"
            yield FieldChange(_place(each), sentence, None)


def _place(instance: Instance) -> str:
    return f"clusters[{instance.cluster}].instances[{instance.name}]"


def _needs_of_new(link: Link, before: Deployment) -> str | None:
    """Engines are told of a new link by the gateway. Certificates and pools' peers they have from their start."""
    ends = [cluster for cluster in before.clusters if cluster.name in (link.source, link.target)]
    if any(cluster.pool is not None for cluster in ends):
        return POOLS_AGAIN.needs
    running = (instance.name for cluster in ends for instance in cluster.instances)
    return None if not link.encryption or all(map(before.needs_certificate, running)) else CERTIFICATES.needs


def _orders(before: Deployment, after: Deployment) -> Iterator[FieldChange]:
    """Other orders of what stays: they decide nothing but ties, and pools' names."""
    for what in ("clusters", "links", "instances"):
        old, new = ([each.name for each in getattr(file, what)] for file in (before, after))
        if [name for name in old if name in new] != [name for name in new if name in old]:
            yield FieldChange(what, f"the {what} are in another order", None)


def _ranks(before: Deployment, after: Deployment) -> Iterator[FieldChange]:
    """Data-parallel groups that stay, but not with the same ranks: engines count them when they start."""
    was = {each.data_parallel: before.ranks_with(each) for each in before.instances}
    for group, ranks in {each.data_parallel: after.ranks_with(each) for each in after.instances}.items():
        names = [each.name for each in ranks]
        if group is not None and group in was and names != [each.name for each in was[group]]:
            sentence = f"group {group} has other ranks: {', '.join(names)}"
            yield FieldChange(f"data_parallel[{group}]", sentence, ENGINES_AGAIN.needs)


def _machines(before: Deployment, after: Deployment) -> Iterator[FieldChange]:
    """Pools that come, go or have another name because their clusters' machines have changed."""

    def nodes(deployment: Deployment, cluster: str) -> set[tuple[str, str, bool]]:
        return {(node.name, node.host, node.tls) for node in deployment.pools if node.cluster == cluster}

    spaces = {cluster.name: cluster.pool for cluster in before.clusters}
    for cluster in after.clusters:
        name = cluster.name
        if spaces.get(name) == cluster.pool and nodes(before, name) != nodes(after, name):
            sentence = f"cluster {name} gets other pools, since its machines change"
            yield FieldChange(f"clusters[{name}].pool", sentence, POOLS_AGAIN.needs)


_WAIT = "wait until it has left, and reload again"


@dataclass(frozen=True, slots=True)
class AppliedDeployment:
    """A deployment that was taken on. Several gateways run the same one when their digests are equal."""

    said: Deployment
    """As the file has it."""
    digest: str
    """SHA-256 of the file, in hex."""
    leaving: tuple[Instance, ...] = ()
    """Instances that the file no longer has. They get nothing new, and end what they have."""

    @property
    def running(self) -> Deployment:
        """The deployment with the instances that leave, each behind the others of its cluster."""
        clusters = (
            replace(
                cluster,
                instances=cluster.instances
                + tuple(each for each in self.leaving if each.cluster == cluster.name),
            )
            for cluster in self.said.clusters
        )
        return replace(self.said, clusters=tuple(clusters)) if self.leaving else self.said

    def difference(self, wanted: Deployment) -> DeploymentDifference:
        """What would change with another file.

        An instance that comes back while it leaves must be the same as before.
        """
        found = difference(self.said, wanted)
        leaving = {instance.name: instance for instance in self.leaving}
        other = tuple(
            FieldChange(
                _place(each), f"instance {each.name} still leaves, and comes back as another one", _WAIT
            )
            for each in found.added
            if each.name in leaving and replace(leaving[each.name], roles=each.roles) != each
        )
        return replace(found, changes=(*found.changes, *other))

    def taking_on(self, wanted: Deployment, digest: str) -> "AppliedDeployment":
        """The same after a file was taken on: what it lacks begins to leave, what it has again stays."""
        return AppliedDeployment(wanted, digest, _only_in(self.running.instances, wanted.instances))

    def without(self, name: str) -> "AppliedDeployment":
        """The same after an instance has left."""
        return replace(self, leaving=tuple(each for each in self.leaving if each.name != name))
