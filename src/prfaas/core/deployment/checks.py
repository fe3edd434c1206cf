"""What must fit together between the fields of a deployment file. Each check yields what it finds, first things first.

A file that is to run and one that is to be planned share most checks; each has some of its own.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import chain

from prfaas.core.deployment.addresses import is_loopback, same_host
from prfaas.core.deployment.model import (
    TINY_MODELS,
    TRAINED_MODELS,
    is_hub_name,
    is_revision,
)
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    LengthsSpec,
    LogNormalLengths,
    TraceLengths,
    UniformLengths,
)
from prfaas.core.deployment.planned_model import check_cluster_dtypes
from prfaas.core.deployment.pool import PoolSpace, by_machine, pool_names
from prfaas.core.deployment.schema import ClusterSection, DeploymentFile
from prfaas.core.deployment.security import OBSERVERS
from prfaas.core.deployment.source import Finding, Findings, Location, YamlSource
from prfaas.core.deployment.types import (
    BUILT_IN_POLICIES,
    POLICY_ENTRY_POINTS,
    SYNTHETIC,
    InstanceSection,
)
from prfaas.core.kv import ConfigError

LEAST_WINDOWS = 10
"""A forecast needs a period of at least so many windows: what changes within a window is not seen."""

_MAX_NAME = 63

_MODEL_FIELDS = {
    "path": "a checkpoint directory",
    "trained": "a model with trained weights",
    "hub": "ORG/NAME on the Hugging Face hub",
    "tiny": "a made model's name",
    "published": "a model that `prfaas models` lists",
    "config": "a config.json to plan with",
}


def _check_planning(file: DeploymentFile) -> Findings:
    for c, cluster in enumerate(file.clusters):
        if cluster.profile is None:
            yield (
                ("clusters", c),
                "has no profile, so how fast its instances are is not known; name one that `prfaas profile` "
                "wrote or one that comes with prfaas",
            )
    if file.workload is None:
        yield ("workload",), "is missing; say how long prompts and answers are"
        return
    yield from _check_lengths(file.workload.lengths)
    if file.workload.output_tokens is None and not isinstance(file.workload.lengths, TraceLengths):
        yield ("workload", "output_tokens"), "is missing; give the mean length of answers"
    if file.slo.tpot_s is None and file.slo.tokens_per_s is None:
        yield ("slo",), "needs tokens_per_s (or tpot_s): without it there is no limit to the decode batch"
    yield from _check_prices(file)


def _check_lengths(lengths: LengthsSpec) -> Findings:
    place = ("workload", "lengths")
    match lengths:
        case LogNormalLengths(low=low, high=high) | UniformLengths(low=low, high=high) if low >= high:
            yield (*place, "high"), f"{high:g} must be greater than low ({low:g})"
        case EmpiricalLengths(weights=(_, *_) as weights) if len(weights) != len(lengths.lengths):
            yield (
                (*place, "weights"),
                f"has {len(weights)} entries for {len(lengths.lengths)} lengths; give one for each",
            )
        case EmpiricalLengths(weights=(_, *_) as weights) if not any(weights):
            yield (*place, "weights"), "are all 0; at least one must be above 0"


def _check_prices(file: DeploymentFile) -> Findings:
    """Instances have all prices or none; where egress has one, all, since it is weighed against theirs."""
    used = dict.fromkeys(cluster.hardware for cluster in file.clusters)
    prices = file.prices.per_gpu_hour
    for hardware in prices:
        if hardware not in used:
            hint = "; bytes are priced by egress_per_gb" if "egress" in hardware else ""
            yield (
                ("prices", hardware),
                f"no cluster has this hardware; the clusters have {', '.join(used)}{hint}",
            )
    has_prices = bool(prices) or _has_egress_price(file)
    for c, cluster in enumerate(file.clusters):
        if has_prices and cluster.hardware not in prices:
            yield ("clusters", c, "hardware"), f'there is no price for "{cluster.hardware}"; add it to prices'


def _has_egress_price(file: DeploymentFile) -> bool:
    """Whether bytes over any link cost something."""
    return any(
        price > 0 for price in (file.prices.egress_per_gb, *(link.egress_per_gb for link in file.links))
    )


def check_to_run(source: YamlSource, file: DeploymentFile) -> None:
    """All checks of a deployment whose servers are to be started.

    Raises:
        DeploymentError: two fields contradict each other, or something every deployment needs is missing.
    """
    checks = (_check_ports, _check_engine, _check_pools, _check_local_transfer, _check_tenants)
    found = chain.from_iterable(check(file) for check in (*checks, _check_encryption, _check_fleet))
    prices = _check_prices(file) if _has_egress_price(file) else ()
    _raise_first(source, chain(_check_can_run(file), _check_common(source, file), found, prices))


def check_to_plan(source: YamlSource, file: DeploymentFile) -> None:
    """All checks of a deployment that is to be planned; servers and their ports may be missing.

    Raises:
        DeploymentError: two fields contradict each other, or something the planner needs is missing.
    """
    _raise_first(source, chain(_check_common(source, file), _check_planning(file)))


def _raise_first(source: YamlSource, findings: Iterable[Finding]) -> None:
    for location, problem in findings:
        raise source.error(location, problem)


def _check_common(source: YamlSource, file: DeploymentFile) -> Findings:
    yield from _check_model(file)
    yield from _check_counts(file)
    yield from _check_names(source, file)
    yield from _check_roles(file)
    yield from _check_links(file)
    yield from _check_policy(file)
    yield from _check_slo(file)
    yield from _check_forecast(source, file)
    yield from check_cluster_dtypes(source, file)
    yield from _check_pool_sections(source, file)
    yield from _check_preemptible(file)
    yield from _check_data_parallel(source, file)


def _check_fleet(file: DeploymentFile) -> Findings:
    """Certificates are for an etcd with TLS."""
    fleet = file.fleet
    if fleet is None or not fleet.is_plain:
        return
    for field in ("ca_file", "certificate_file"):
        if getattr(fleet, field) is not None:
            yield ("fleet", field), "is for TLS; write https:// before every address in etcd"


def _check_tenants(file: DeploymentFile) -> Findings:
    if file.gateway.clients is not None and file.security.tenant_header is not None:
        yield ("gateway", "clients"), "leave out security.tenant_header: each client is a tenant of its own"
    if file.security.tenant_weights and file.security.tenant_header is None:
        yield ("security", "tenant_weights"), "needs security.tenant_header, which says whose a request is"


def _check_can_run(file: DeploymentFile) -> Findings:
    for field in ("published", "config"):
        if getattr(file.model, field) is not None:
            yield (
                ("model", field),
                "is enough to plan with, not to run; give path (a checkpoint directory) in its place",
            )
    for c, cluster in enumerate(file.clusters):
        if cluster.instances is None and cluster.instance_count is not None:
            yield (
                ("clusters", c, "instance_count"),
                "is enough to plan with, not to run; list the cluster's instances in its place",
            )
    for field in ("served_name", "max_model_len"):
        if getattr(file.model, field) is None:
            yield ("model", field), "is missing"


def _instances(file: DeploymentFile) -> Iterator[tuple[Location, ClusterSection, InstanceSection]]:
    for c, cluster in enumerate(file.clusters):
        for i, instance in enumerate(cluster.instances or ()):
            yield ("clusters", c, "instances", i), cluster, instance


def _check_counts(file: DeploymentFile) -> Findings:
    for c, cluster in enumerate(file.clusters):
        if (cluster.instances is None) == (cluster.instance_count is None):
            given = "neither is given" if cluster.instances is None else "both are given"
            yield (
                ("clusters", c),
                f"needs either instances (servers to start) or instance_count (to plan with); {given}",
            )


def _check_names(source: YamlSource, file: DeploymentFile) -> Findings:
    seen: dict[str, Location] = {}
    named: list[tuple[Location, str]] = []
    for c, cluster in enumerate(file.clusters):
        named.append((("clusters", c), cluster.name))
    for location, _, instance in _instances(file):
        named.append((location, instance.name))
    for location, name in named:
        if name in seen:
            line = source.line((*seen[name], "name"))
            yield (
                (*location, "name"),
                f'"{name}" is already a name in line {line}; give every cluster and instance its own',
            )
        seen[name] = location


def _check_roles(file: DeploymentFile) -> Findings:
    for location, cluster, instance in _instances(file):
        if len(set(instance.roles)) != len(instance.roles):
            yield (*location, "roles"), "names a role twice; name each role once"
        if cluster.kind == "prfaas" and "decode" in instance.roles:
            yield (
                (*location, "roles"),
                'a cluster of kind "prfaas" only prefills; make its kind "pd" to decode',
            )
        if instance.pipeline_parallel > 1 and cluster.kind != "prfaas":
            yield (
                (*location, "pipeline_parallel"),
                'stages only send KVCache, and instances of a "pd" cluster may decode; give it to those of a cluster '
                'of kind "prfaas"',
            )
    for c, cluster in enumerate(file.clusters):
        listed = cluster.instances
        if listed is None or cluster.kind != "pd":
            continue
        if not any("decode" in instance.roles for instance in listed):
            yield ("clusters", c), 'is of kind "pd" but none of its instances has the role decode; add one'
    if not any(cluster.kind == "pd" for cluster in file.clusters):
        yield ("clusters",), 'nothing decodes; add a cluster of kind "pd"'
    counted = any(cluster.instance_count is not None for cluster in file.clusters)
    if not counted and not any("prefill" in instance.roles for _, _, instance in _instances(file)):
        yield ("clusters",), "no instance has the role prefill; give it to at least one"


def _check_links(file: DeploymentFile) -> Findings:
    clusters = {cluster.name: cluster for cluster in file.clusters}
    known = ", ".join(clusters)
    seen: dict[tuple[str, str], int] = {}
    for index, link in enumerate(file.links):
        location: Location = ("links", index)
        for end, name in (("source", link.source), ("target", link.target)):
            if name not in clusters:
                yield (*location, end), f'there is no cluster "{name}"; the clusters are {known}'
        if link.source == link.target:
            yield location, f'leads from "{link.source}" to itself; instances of one cluster need no link'
        pair = (link.source, link.target)
        if pair in seen:
            yield (
                location,
                f'repeats links[{seen[pair]}] ("{link.source}" to "{link.target}"); keep one of them',
            )
        seen[pair] = index
    for c, cluster in enumerate(file.clusters):
        if cluster.kind == "prfaas" and not any(
            link.source == cluster.name and clusters[link.target].kind == "pd" for link in file.links
        ):
            yield (
                ("clusters", c),
                f'no link leads from "{cluster.name}"; add one under links to a "pd" cluster',
            )


def _check_policy(file: DeploymentFile) -> Findings:
    # Whether a class can be imported matters only where requests are routed: engines start without it.
    policy = file.routing.policy
    if policy not in BUILT_IN_POLICIES and ":" not in policy:
        installed = [each.name for each in entry_points(group=POLICY_ENTRY_POINTS)]
        known = dict.fromkeys([*BUILT_IN_POLICIES, *installed])
        if policy not in known:
            yield (
                ("routing", "policy"),
                f'there is no policy "{policy}"; there are {", ".join(known)}, and any class written as '
                "package.module:Class",
            )
    if policy == "static_threshold" and "threshold_tokens" in file.routing.params:
        yield (
            ("routing", "params", "threshold_tokens"),
            "is written as routing.threshold_tokens; give it there",
        )


def _check_slo(file: DeploymentFile) -> Findings:
    if file.slo.tpot_s is not None and file.slo.tokens_per_s is not None:
        yield ("slo", "tokens_per_s"), "is the inverse of slo.tpot_s; keep one of them"


def _check_forecast(source: YamlSource, file: DeploymentFile) -> Findings:
    control = file.control
    is_given = source.gives(("control", "forecast_period_s"))
    if is_given and 0 < control.forecast_period_s < LEAST_WINDOWS * control.window_s:
        yield (
            ("control", "forecast_period_s"),
            f"must be 0 for no forecast, or at least {LEAST_WINDOWS} times control.window_s ({control.window_s:g} s)",
        )


def _check_ports(file: DeploymentFile) -> Findings:
    gateway, admin = file.gateway, file.gateway.admin
    if admin.token_file is None and not is_loopback(admin.host):
        yield (
            ("gateway", "admin", "host"),
            f'"{admin.host}" is not this machine alone, so operators must show a token; add gateway.admin.token_file',
        )
    taken: list[tuple[str, int, str]] = [(gateway.host, gateway.port, "the gateway")]
    if admin.port:
        if admin.port == gateway.port and same_host(admin.host, gateway.host):
            yield ("gateway", "admin", "port"), f"{admin.port} is already used by the gateway; take another"
        taken.append((admin.host, admin.port, "the gateway's operators (gateway.admin)"))
    for location, _, instance in _instances(file):
        owner = f'instance "{instance.name}"'
        # The ranks', and where their data-parallel group meets.
        count = instance.gpus + (instance.data_parallel is not None)
        if instance.kv_port + count > 65536:
            yield (
                (*location, "kv_port"),
                f"{instance.kv_port} leaves no room for {instance.gpus} ranks; take one up to "
                f"{65536 - count}",
            )
        for field, port in _ports_of(instance):
            for host, taken_port, by in taken:
                if port == taken_port and same_host(instance.host, host):
                    yield (
                        (*location, field),
                        f"{port} is already used by {by}; give each instance its own ports",
                    )
            taken.append((instance.host, port, owner))
    for location, name, host, port in _pool_ports(file):
        for taken_host, taken_port, by in taken:
            if port == taken_port and same_host(host, taken_host):
                yield location, f"{port} is already used by {by}; give the pools ports of their own"
        taken.append((host, port, f'pool "{name}"'))


def _ports_of(instance: InstanceSection) -> Iterator[tuple[str, int]]:
    """Every port that an instance listens on, with the field that it comes from."""
    yield "http_port", instance.http_port
    for rank in range(instance.gpus):
        yield "kv_port", instance.kv_port + rank
    if instance.data_parallel is not None:
        yield "kv_port", instance.meeting_port
    if instance.nixl_port is not None:
        yield "nixl_port", instance.nixl_port


def admin_port(file: DeploymentFile) -> int:
    """Where operators connect: the file's port, or the next one after the gateway's that nothing of the file uses."""
    gateway, given = file.gateway, file.gateway.admin.port
    if given:
        return given
    used = {port for _, _, instance in _instances(file) for _, port in _ports_of(instance)}
    used |= {port for _, _, _, port in _pool_ports(file)}
    after, before = range(gateway.port + 1, 65536), range(gateway.port - 1, 0, -1)
    free: int = next(port for port in (*after, *before) if port not in used)
    return free


def _check_engine(file: DeploymentFile) -> Findings:
    engine = file.engine
    if engine.staging_bytes < engine.transfer_block_bytes:
        yield (
            ("engine", "staging"),
            f"{engine.staging_bytes} bytes hold no transfer block of {engine.transfer_block_bytes}; make it larger",
        )
    for c, cluster in enumerate(file.clusters):
        if cluster.hardware == "cpu" and engine.kv_cache_gib is None:
            yield (
                ("clusters", c, "hardware"),
                "engines on cpu need engine.kv_cache_gib (GiB of memory for the KVCache); add it",
            )
        if cluster.hardware == SYNTHETIC and cluster.profile is None:
            yield (
                ("clusters", c, "hardware"),
                "synthetic engines need a profile to be as fast as; add one (`internal-1t-h200`, or a file)",
            )
        if cluster.speedup is not None and cluster.hardware != SYNTHETIC:
            yield (
                ("clusters", c, "speedup"),
                "is only for synthetic engines; real ones are as fast as they are",
            )
    yield from _check_routing(file)


def _check_routing(file: DeploymentFile) -> Findings:
    threshold_tokens, longest_tokens = file.routing.threshold_tokens, file.model.max_model_len
    assert longest_tokens is not None
    if threshold_tokens is None:
        if file.routing.policy == "static_threshold":
            yield ("routing",), "needs threshold_tokens for policy static_threshold; add it"
    elif threshold_tokens > longest_tokens:
        yield (
            ("routing", "threshold_tokens"),
            f"{threshold_tokens} is more than model.max_model_len ({longest_tokens}), so nothing would ever be "
            "offloaded; lower it, or say policy: local_only",
        )


def _check_pool_sections(source: YamlSource, file: DeploymentFile) -> Findings:
    """What holds for files to run and files to plan with."""
    for c, cluster in enumerate(file.clusters):
        pool = cluster.pool
        if pool is None:
            continue
        location: Location = ("clusters", c, "pool")
        if cluster.hardware == SYNTHETIC:
            yield (
                location,
                f'is not for hardware "{SYNTHETIC}": stand-ins have no KVCache to keep; leave it out',
            )
        if pool.path is not None and pool.ssd_bytes == 0:
            yield (
                (*location, "path"),
                "is where the SSD's share lies, but pool.ssd is 0; say how much it may take",
            )
    if source.gives(("pool",)) and not any(cluster.pool for cluster in file.clusters):
        yield ("pool",), "is about pools, but no cluster has one; give clusters a pool"
    is_told = file.security.tenant_header is not None or file.gateway.clients is not None
    if source.gives(("pool", "tenant_share")) and not is_told:
        yield ("pool", "tenant_share"), "needs security.tenant_header or gateway.clients: whose a request is"


def _check_pools(file: DeploymentFile) -> Findings:
    """What holds where pools are to be started. Their ports are checked with all others."""
    taken = {cluster.name for cluster in file.clusters}
    taken |= {instance.name for _, _, instance in _instances(file)}
    for c, space, name, together in _pools(file):
        location: Location = ("clusters", c, "pool")
        if space.kv_port is None:
            yield (
                (*location, "kv_port"),
                "is missing; give the port where other machines' pools reach this one",
            )
        if name in taken:
            yield location, f'its name would be "{name}", which is taken; rename the other one'
        if len(name) > _MAX_NAME:
            yield (
                ("clusters", c, "name"),
                f'leaves no room for the name of its pool ("{name}"); take one of up to '
                f"{_MAX_NAME - len(name) + len(file.clusters[c].name)} characters",
            )
        taken.add(name)
        if len({instance.tensor_parallel for instance in together}) > 1:
            yield (
                location,
                f"serves {' and '.join(instance.name for instance in together)}, whose tensor_parallel "
                "differs, so that they can't share pages; make it equal on each machine",
            )
        staged = next((instance.name for instance in together if instance.pipeline_parallel > 1), None)
        if staged is not None:
            yield location, f"serves {staged}, whose stages share no pages; leave its pool or its stages out"
    if file.pool.staging_bytes < file.engine.transfer_block_bytes:
        yield (
            ("pool", "staging"),
            f"{file.pool.staging_bytes} bytes hold no transfer block of {file.engine.transfer_block_bytes}; "
            "make it larger",
        )


def _pool_ports(file: DeploymentFile) -> Iterator[tuple[Location, str, str, int]]:
    """Every port that a pool listens on: the field that it comes from, the pool's name, its host, the port."""
    for c, space, name, together in _pools(file):
        location, host = ("clusters", c, "pool"), together[0].host
        if space.kv_port is not None:
            yield (*location, "kv_port"), name, host, space.kv_port


def _pools(file: DeploymentFile) -> Iterator[tuple[int, PoolSpace, str, list[InstanceSection]]]:
    """Every pool: the number of its cluster, the cluster's section of pools, its name, its machine's instances."""
    for c, cluster in enumerate(file.clusters):
        if cluster.pool is not None:
            machines = by_machine(cluster.instances or ())
            for name, together in zip(pool_names(cluster.name, len(machines)), machines, strict=True):
                yield c, cluster.pool, name, together


def _check_local_transfer(file: DeploymentFile) -> Findings:
    """What holds where engines are to be started. Their ports are checked with all others."""
    wants_nixl = file.engine.local_transfer == "nixl"
    for location, cluster, instance in _instances(file):
        may_have_nixl = wants_nixl and cluster.kind == "pd"
        if may_have_nixl and instance.nixl_port is None:
            yield location, "needs nixl_port, since engine.local_transfer is nixl; give it a free port"
        if instance.nixl_port is not None and not may_have_nixl:
            yield (
                (*location, "nixl_port"),
                "is only for instances of pd clusters with engine.local_transfer: nixl; leave it out",
            )
    for c, cluster in enumerate(file.clusters):
        if not wants_nixl or cluster.kind != "pd":
            continue
        if cluster.hardware == SYNTHETIC:
            yield (
                ("clusters", c, "hardware"),
                "stand-in engines have no NIXL; leave engine.local_transfer out",
            )
        if cluster.pool is not None:
            yield (
                ("clusters", c, "pool"),
                "does not go with engine.local_transfer: nixl yet; leave one of them out",
            )
    if wants_nixl and file.security.encrypt_inside:
        yield (
            ("security", "encrypt_inside"),
            "can't be with engine.local_transfer: nixl, which encrypts nothing; leave one of them out",
        )


def _check_preemptible(file: DeploymentFile) -> Findings:
    """Only prefills may be lost, and a rate of kills needs something that is killed."""
    for c, cluster in enumerate(file.clusters):
        if cluster.preemptible and cluster.kind != "prfaas":
            yield (
                ("clusters", c, "preemptible"),
                'is for a cluster of kind "prfaas", since answers that are being decoded would be cut; leave it out',
            )
        if cluster.kills_per_hour is not None and not cluster.preemptible:
            yield ("clusters", c, "kills_per_hour"), "goes with preemptible: true; add that or leave this out"


def _check_data_parallel(source: YamlSource, file: DeploymentFile) -> Findings:
    """Whether every group has several ranks of one cluster, which are alike."""
    first: dict[str, tuple[ClusterSection, InstanceSection, Location]] = {}
    alone: dict[str, None] = {}
    for place, cluster, instance in _instances(file):
        group, location = instance.data_parallel, (*place, "data_parallel")
        if group is None:
            continue
        if group not in first:
            first[group] = cluster, instance, location
            alone[group] = None
            continue
        alone.pop(group, None)
        home, rank_0, _ = first[group]
        if home is not cluster:
            yield location, f'"{group}" is a group of "{home.name}"; its ranks are in one cluster'
        for field in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "roles"):
            if getattr(instance, field) != getattr(rank_0, field):
                yield (
                    (*place, field) if source.gives((*place, field)) else place,
                    f'{field} is another than that of "{rank_0.name}"; make the ranks of group "{group}" alike',
                )
    for group in alone:
        yield (
            first[group][2],
            f'group "{group}" has one rank; give it to further instances of the cluster, or leave it out',
        )


def _check_model(file: DeploymentFile) -> Findings:
    """Whether the file names one model, and a name that can be one."""
    model = file.model
    given = [field for field in _MODEL_FIELDS if getattr(model, field) is not None]
    if len(given) != 1:
        choices = ", ".join(f"{field} ({meaning})" for field, meaning in _MODEL_FIELDS.items())
        found = f"{' and '.join(given)} are given" if given else "none is given"
        yield ("model",), f"needs either {choices}; {found}"
    yield from _check_known_model("tiny", model.tiny, TINY_MODELS)
    yield from _check_known_model("trained", model.trained, TRAINED_MODELS)
    yield from _check_model_length(file)
    if model.hub is not None and not is_hub_name(model.hub):
        yield (
            ("model", "hub"),
            f'"{model.hub}" is no name of the hub; write it like HuggingFaceTB/SmolLM2-135M',
        )
    if model.revision is None:
        return
    if model.hub is None:
        yield ("model", "revision"), "is of a model of the hub; it goes with model.hub only"
    if not is_revision(model.revision):
        yield (
            ("model", "revision"),
            f'"{model.revision}" is no revision; write a branch, a tag or a commit, for example main',
        )


def _check_model_length(file: DeploymentFile) -> Findings:
    origin, length = file.model.origin, file.model.max_model_len
    try:
        most = None if origin is None else origin.context_tokens
    except ConfigError as error:
        yield ("model", "trained"), str(error)
        return
    if origin is not None and length is not None and most is not None and length > most:
        yield ("model", "max_model_len"), f"{length} is more than the {most} tokens that {origin.name} takes"


def _check_known_model(field: str, name: str | None, known: Sequence[str]) -> Findings:
    if name not in (None, *known):
        yield ("model", field), f'there is no {field} model "{name}"; choose one of {", ".join(known)}'


def _check_encryption(file: DeploymentFile) -> Findings:
    """Whether certificates can be made for all that need one."""
    names = [cluster.name for cluster in file.clusters]
    if file.gateway.cluster is not None and file.gateway.cluster not in names:
        yield (
            ("gateway", "cluster"),
            f'there is no cluster "{file.gateway.cluster}"; the clusters are {", ".join(names)}',
        )
    if not _encrypts(file):
        return
    seen: dict[str, str] = {}
    for location, _, instance in _instances(file):
        lower = instance.name.lower()
        if lower in OBSERVERS:
            yield (*location, "name"), f'"{instance.name}" is a name of prfaas itself; take another'
        if lower in seen:
            yield (
                (*location, "name"),
                f'"{instance.name}" and "{seen[lower]}" are one name in certificates; let more than case differ',
            )
        seen[lower] = instance.name
    for c, _, name, _ in _pools(file):
        if name.lower() in seen:
            yield (
                ("clusters", c, "pool"),
                f'its name "{name}" and "{seen[name.lower()]}" are one name in certificates; '
                "let more than case differ",
            )
        if not _is_dns_name(name):
            yield (
                ("clusters", c, "name"),
                f'"{file.clusters[c].name}" is part of the name of its pool, "{name}", which can\'t stand in a '
                'certificate; take one without empty parts between "."',
            )
        seen[name.lower()] = name
    for location, _, instance in _instances(file):
        host = instance.host.lower()
        # Certificates bear the host beside the name: whoever has one could pass for the other.
        if host != instance.name.lower() and (host in OBSERVERS or host in seen):
            yield (
                (*location, "host"),
                f'"{instance.host}" is also the name of {_whose(host, seen)}, and certificates bear both; '
                "give the machine's address",
            )
        if not _is_dns_name(instance.name):
            yield (
                (*location, "name"),
                f'"{instance.name}" can\'t stand in a certificate, which needs the form of a host name; '
                'take one without empty parts between ".", and no IP address',
            )


def _whose(host: str, instances: Mapping[str, str]) -> str:
    return f'"{instances[host]}"' if host in instances else "a part of prfaas"


def _encrypts(file: DeploymentFile) -> bool:
    return (
        file.security.encrypt_inside
        or any(link.encryption for link in file.links)
        or any(file.speaks_tls(cluster, instance) for _, cluster, instance in _instances(file))
    )


def _is_dns_name(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name) is not None
    return False
