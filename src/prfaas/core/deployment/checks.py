"""What must fit together between the sections of a deployment file: rules, each of which yields what breaks it.

A rule of one section alone stands at its field. A file that is to run and one that is to be planned share most rules.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points

from prfaas.core.deployment.addresses import is_loopback, same_host
from prfaas.core.deployment.model import is_hub_name, is_revision
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    LengthsSpec,
    LogNormalLengths,
    TraceLengths,
    UniformLengths,
)
from prfaas.core.deployment.planned_model import check_cluster_dtypes
from prfaas.core.deployment.pool import PoolSpace, by_pool
from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.security import OBSERVERS
from prfaas.core.deployment.source import Findings
from prfaas.core.deployment.types import (
    BUILT_IN_POLICIES,
    POLICY_ENTRY_POINTS,
    SYNTHETIC,
    ClusterSection,
    InstanceSection,
)
from prfaas.core.kv import ConfigError
from prfaas.core.yaml_source import Location, YamlSource

_MAX_NAME = 63

_MODEL_FIELDS = {
    "path": "a checkpoint directory",
    "trained": "a model with trained weights",
    "hub": "ORG/NAME on the Hugging Face hub",
    "tiny": "a made model's name",
    "published": "a model that `prfaas models` lists",
    "config": "a config.json to plan with",
}


def check_to_run(source: YamlSource, file: DeploymentFile) -> None:
    """All rules of a deployment whose servers are to be started.

    Raises:
        DeploymentError: two fields contradict each other, or something every deployment needs is missing.
    """
    _raise_first(source, _to_run(source, file))


def check_to_plan(source: YamlSource, file: DeploymentFile) -> None:
    """All rules of a deployment that is to be planned; servers and their ports may be missing.

    Raises:
        DeploymentError: two fields contradict each other, or something the planner needs is missing.
    """
    _raise_first(source, _to_plan(source, file))


def _raise_first(source: YamlSource, findings: Findings) -> None:
    for location, problem in findings:
        raise source.error(location, problem)


def _to_run(source: YamlSource, file: DeploymentFile) -> Findings:
    yield from _only_planned(file)
    yield from _common(source, file)
    yield from _ports(file)
    yield from _threshold(file)
    yield from _each_cluster(file, _engines)
    yield from _machines(file)
    yield from _staging(file)
    yield from _nixl(file)
    if file.gateway.clients is not None and file.security.tenant_header is not None:
        yield ("gateway", "clients"), "leave out security.tenant_header: each client is a tenant of its own"
    yield from _certificates(file)
    if file.fleet is not None and file.fleet.is_plain:
        for field in ("ca_file", "certificate_file"):
            if getattr(file.fleet, field) is not None:
                yield ("fleet", field), "is for TLS; write https:// before every address in etcd"
    if _has_egress_price(file):
        yield from _prices(file)


def _to_plan(source: YamlSource, file: DeploymentFile) -> Findings:
    yield from _common(source, file)
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
    yield from _lengths(file.workload.lengths)
    if file.workload.output_tokens is None and not isinstance(file.workload.lengths, TraceLengths):
        yield ("workload", "output_tokens"), "is missing; give the mean length of answers"
    if file.slo.tpot_s is None and file.slo.tokens_per_s is None:
        yield ("slo",), "needs tokens_per_s (or tpot_s): without it there is no limit to the decode batch"
    yield from _prices(file)
    yield from _each_cluster(file, _measured)


def _common(source: YamlSource, file: DeploymentFile) -> Findings:
    yield from _model(file)
    yield from _names(source, file)
    if not any(cluster.kind == "pd" for cluster in file.clusters):
        yield ("clusters",), 'nothing decodes; add a cluster of kind "pd"'
    yield from _links(file)
    yield from _each_cluster(file, _cluster)
    counted = any(cluster.instance_count is not None for cluster in file.clusters)
    if not counted and not any("prefill" in instance.roles for _, _, instance in _instances(file)):
        yield ("clusters",), "no instance has the role prefill; give it to at least one"
    yield from _policy(file)
    yield from _speed(file)
    yield from check_cluster_dtypes(file)
    if source.gives(("pool",)) and not any(cluster.pool for cluster in file.clusters):
        yield ("pool",), "is about pools, but no cluster has one; give clusters a pool"
    is_told = file.security.tenant_header is not None or file.gateway.clients is not None
    if source.gives(("pool", "tenant_share")) and not is_told:
        yield ("pool", "tenant_share"), "needs security.tenant_header or gateway.clients: whose a request is"
    yield from _data_parallel(source, file)


def _each_cluster(
    file: DeploymentFile, rule: Callable[[DeploymentFile, ClusterSection], Findings]
) -> Findings:
    """What a rule finds in clusters, whose places it gives within the cluster."""
    for c, cluster in enumerate(file.clusters):
        for place, problem in rule(file, cluster):
            yield ("clusters", c, *place), problem


def _instances(file: DeploymentFile) -> Iterator[tuple[Location, ClusterSection, InstanceSection]]:
    for c, cluster in enumerate(file.clusters):
        for i, instance in enumerate(cluster.instances or ()):
            yield ("clusters", c, "instances", i), cluster, instance


def _only_planned(file: DeploymentFile) -> Findings:
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


def _model(file: DeploymentFile) -> Findings:
    """Whether the file names one model, a name that can be one, and no more tokens than it takes."""
    model = file.model
    given = [field for field in _MODEL_FIELDS if getattr(model, field) is not None]
    if len(given) != 1:
        choices = ", ".join(f"{field} ({meaning})" for field, meaning in _MODEL_FIELDS.items())
        found = f"{' and '.join(given)} are given" if given else "none is given"
        yield ("model",), f"needs either {choices}; {found}"
    if model.hub is not None and not is_hub_name(model.hub):
        problem = f'"{model.hub}" is no name of the hub; write it like HuggingFaceTB/SmolLM2-135M'
        yield ("model", "hub"), problem
    if model.revision is not None and not is_revision(model.revision):
        problem = f'"{model.revision}" is no revision; write a branch, a tag or a commit, for example main'
        yield ("model", "revision"), problem
    try:
        longest = None if model.source is None else model.source.context_tokens
    except ConfigError as error:
        yield ("model", "trained"), str(error)
    else:
        length = model.max_model_len
        if longest is not None and length is not None and length > longest:
            problem = f"{length} is more than the {longest} tokens that {model.trained} takes"
            yield ("model", "max_model_len"), problem


def _names(source: YamlSource, file: DeploymentFile) -> Findings:
    seen: dict[str, int | None] = {}
    places: list[tuple[Location, str]] = [
        (("clusters", c, "name"), cluster.name) for c, cluster in enumerate(file.clusters)
    ]
    places += [((*place, "name"), instance.name) for place, _, instance in _instances(file)]
    for place, name in places:
        if name in seen:
            yield (
                place,
                f'"{name}" is already a name in line {seen[name]}; give every cluster and instance its own',
            )
        seen[name] = source.line(place)


def _links(file: DeploymentFile) -> Findings:
    known = [cluster.name for cluster in file.clusters]
    seen: dict[str, int] = {}
    for index, link in enumerate(file.links):
        for end, name in (("source", link.source), ("target", link.target)):
            if name not in known:
                yield (
                    ("links", index, end),
                    f'there is no cluster "{name}"; the clusters are {", ".join(known)}',
                )
        if link.source == link.target:
            problem = f'leads from "{link.source}" to itself; instances of one cluster need no link'
            yield ("links", index), problem
        first = seen.setdefault(link.name, index)
        if first != index:
            problem = f'repeats links[{first}] ("{link.source}" to "{link.target}"); keep one of them'
            yield ("links", index), problem


def _cluster(file: DeploymentFile, cluster: ClusterSection) -> Findings:
    listed = cluster.instances
    if (listed is None) == (cluster.instance_count is None):
        given = "neither is given" if listed is None else "both are given"
        yield (), f"needs either instances (servers to start) or instance_count (to plan with); {given}"
    if listed is not None and cluster.tensor_parallel is not None:
        yield ("tensor_parallel",), "goes with instance_count; give it to each instance here"
    for i, instance in enumerate(listed or ()):
        if len({*instance.roles}) != len(instance.roles):
            yield ("instances", i, "roles"), "names a role twice; name each role once"
        if cluster.kind == "prfaas" and "decode" in instance.roles:
            yield (
                ("instances", i, "roles"),
                'a cluster of kind "prfaas" only prefills; make its kind "pd" to decode',
            )
        if instance.pipeline_parallel > 1 and cluster.kind != "prfaas":
            yield (
                ("instances", i, "pipeline_parallel"),
                'stages only send KVCache, and instances of a "pd" cluster may decode; give it to those of a cluster '
                'of kind "prfaas"',
            )
    if cluster.preemptible and cluster.kind != "prfaas":
        yield (
            ("preemptible",),
            'is for a cluster of kind "prfaas", since answers that are being decoded would be cut; leave it out',
        )
    if cluster.kind == "prfaas":
        decoding = {each.name for each in file.clusters if each.kind == "pd"}
        if decoding and not any(
            link.source == cluster.name and link.target in decoding for link in file.links
        ):
            yield (), f'no link leads from "{cluster.name}"; add one under links to a "pd" cluster'
    elif listed is not None and not any("decode" in instance.roles for instance in listed):
        yield (), 'is of kind "pd" but none of its instances has the role decode; add one'
    if cluster.pool is not None and cluster.hardware == SYNTHETIC:
        problem = f'is not for hardware "{SYNTHETIC}": stand-ins have no KVCache to keep; leave it out'
        yield ("pool",), problem


def _policy(file: DeploymentFile) -> Findings:
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


def _speed(file: DeploymentFile) -> Findings:
    if file.slo.tpot_s is not None and file.slo.tokens_per_s is not None:
        yield ("slo", "tokens_per_s"), "is the inverse of slo.tpot_s; keep one of them"


def _data_parallel(source: YamlSource, file: DeploymentFile) -> Findings:
    """Whether every group has several ranks of one cluster, which are alike."""
    groups: dict[str, list[tuple[Location, ClusterSection, InstanceSection]]] = {}
    for place, cluster, instance in _instances(file):
        if instance.data_parallel is not None:
            groups.setdefault(instance.data_parallel, []).append((place, cluster, instance))
    for group, ((place_0, home, rank_0), *others) in groups.items():
        if not others:
            yield (
                (*place_0, "data_parallel"),
                f'group "{group}" has one rank; give it to further instances of the cluster, or leave it out',
            )
        for place, cluster, instance in others:
            if home is not cluster:
                problem = f'"{group}" is a group of "{home.name}"; its ranks are in one cluster'
                yield (*place, "data_parallel"), problem
            for field in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "roles"):
                if getattr(instance, field) != getattr(rank_0, field):
                    yield (
                        (*place, field) if source.gives((*place, field)) else place,
                        f'{field} is another than that of "{rank_0.name}"; make the ranks of group "{group}" alike',
                    )


def _lengths(lengths: LengthsSpec) -> Findings:
    place = ("workload", "lengths")
    match lengths:
        case LogNormalLengths(low=low, high=high) | UniformLengths(low=low, high=high) if low >= high:
            yield (*place, "high"), f"{high:g} must be greater than low ({low:g})"
        case EmpiricalLengths(lengths=given, weights=(_, *_) as weights) if len(weights) != len(given):
            problem = f"has {len(weights)} entries for {len(given)} lengths; give one for each"
            yield (*place, "weights"), problem
        case EmpiricalLengths(weights=(_, *_) as weights) if not any(weights):
            yield (*place, "weights"), "are all 0; at least one must be above 0"


def _has_egress_price(file: DeploymentFile) -> bool:
    """Whether bytes over any link cost something."""
    return any(
        price > 0 for price in (file.prices.egress_per_gb, *(link.egress_per_gb for link in file.links))
    )


def _measured(file: DeploymentFile, cluster: ClusterSection) -> Findings:
    """Whether the profile of a cluster that is to be planned is of its model and its instances."""
    profile, model = cluster.profile, file.model.published
    assert profile is not None
    if model is not None and profile.model != model:
        problem = f'"{profile.name}" is how fast {profile.model} is, but model.published is {model}'
        yield ("profile",), problem
    if cluster.kind == "pd" and profile.decode is None:
        problem = f'"{profile.name}" has no decode times, which a cluster of kind "pd" needs'
        yield ("profile",), problem
    gpus = cluster.gpus_per_instance or (cluster.instances and cluster.instances[0].gpus)
    if gpus and gpus != profile.gpus_per_instance:
        yield (
            ("gpus_per_instance" if cluster.gpus_per_instance else "profile",),
            f'instances have {gpus} GPUs, but profile "{profile.name}" was measured on '
            f"{profile.gpus_per_instance}; name a profile of the same size",
        )
    elif cluster.tensor_parallel is not None and cluster.tensor_parallel > profile.gpus_per_instance:
        ranks = f"{cluster.tensor_parallel} ranks need as many GPUs"
        yield ("tensor_parallel",), f"{ranks}, but an instance has {profile.gpus_per_instance}"


def _prices(file: DeploymentFile) -> Findings:
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


def _listeners(file: DeploymentFile) -> Iterator[tuple[Location, str, int, str]]:
    """All that listens: the field that its port comes from, host, port, and who it is."""
    gateway, admin = file.gateway, file.gateway.admin
    yield ("gateway", "port"), gateway.host, gateway.port, "the gateway"
    if admin.port:
        owner = "the gateway's operators (gateway.admin)"
        yield ("gateway", "admin", "port"), admin.host, admin.port, owner
    for place, _, instance in _instances(file):
        owner = f'instance "{instance.name}"'
        yield (*place, "http_port"), instance.host, instance.http_port, owner
        for port in instance.reserved_kv_ports:
            yield (*place, "kv_port"), instance.host, port, owner
        if instance.nixl_port is not None:
            yield (*place, "nixl_port"), instance.host, instance.nixl_port, owner
    for c, space, name, together in _pools(file):
        if space.kv_port is not None:
            yield ("clusters", c, "pool", "kv_port"), together[0].host, space.kv_port, f'pool "{name}"'


def _ports(file: DeploymentFile) -> Findings:
    admin = file.gateway.admin
    if admin.token_file is None and not is_loopback(admin.host):
        yield (
            ("gateway", "admin", "host"),
            f'"{admin.host}" is not this machine alone, so operators must show a token; add gateway.admin.token_file',
        )
    for place, _, instance in _instances(file):
        last = 65536 - len(instance.reserved_kv_ports)
        if instance.kv_port > last:
            yield (
                (*place, "kv_port"),
                f"{instance.kv_port} leaves no room for {instance.gpus} ranks; take one up to {last}",
            )
    taken: dict[int, list[tuple[str, str]]] = {}
    for place, host, port, owner in _listeners(file):
        for other_host, by in taken.setdefault(port, []):
            if same_host(host, other_host):
                yield place, f"{port} is already used by {by}; take another"
        taken[port].append((host, owner))


def admin_port(file: DeploymentFile) -> int:
    """Where operators connect: the file's port, or the next one after the gateway's that nothing of the file uses."""
    gateway, given = file.gateway, file.gateway.admin.port
    if given:
        return given
    used = {port for _, _, port, _ in _listeners(file)}
    after, before = range(gateway.port + 1, 65536), range(gateway.port - 1, 0, -1)
    free: int = next(port for port in (*after, *before) if port not in used)
    return free


def _engines(file: DeploymentFile, cluster: ClusterSection) -> Findings:
    """What engines need that are to be started."""
    is_stand_in = cluster.hardware == SYNTHETIC
    if cluster.hardware == "cpu" and file.engine.kv_cache_gib is None:
        problem = "engines on cpu need engine.kv_cache_gib (GiB of memory for the KVCache); add it"
        yield ("hardware",), problem
    if is_stand_in and cluster.profile is None:
        yield (
            ("hardware",),
            "synthetic engines need a profile to be as fast as; add one (`internal-1t-h200`, or a file)",
        )
    if cluster.speedup != 1 and not is_stand_in:
        yield ("speedup",), "is only for synthetic engines; real ones are as fast as they are"


def _threshold(file: DeploymentFile) -> Findings:
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


def _pools(file: DeploymentFile) -> Iterator[tuple[int, PoolSpace, str, list[InstanceSection]]]:
    """Every pool: the number of its cluster, the cluster's section of pools, its name, its machine's instances."""
    for c, cluster in enumerate(file.clusters):
        if cluster.pool is not None:
            for name, together in by_pool(cluster.name, cluster.instances or ()).items():
                yield c, cluster.pool, name, together


def _machines(file: DeploymentFile) -> Findings:
    """What holds where pools are to be started."""
    taken = {cluster.name for cluster in file.clusters}
    taken |= {instance.name for _, _, instance in _instances(file)}
    for c, space, name, together in _pools(file):
        pool: Location = ("clusters", c, "pool")
        if space.kv_port is None:
            yield (*pool, "kv_port"), "is missing; give the port where other machines' pools reach this one"
        if name in taken:
            yield pool, f'its name would be "{name}", which is taken; rename the other one'
        taken.add(name)
        if len(name) > _MAX_NAME:
            yield (
                ("clusters", c, "name"),
                f'leaves no room for the name of its pool ("{name}"); take one of up to '
                f"{_MAX_NAME - len(name) + len(file.clusters[c].name)} characters",
            )
        if len({instance.tensor_parallel for instance in together}) > 1:
            yield (
                pool,
                f"serves {' and '.join(instance.name for instance in together)}, whose tensor_parallel "
                "differs, so that they can't share pages; make it equal on each machine",
            )
        staged = next((instance.name for instance in together if instance.pipeline_parallel > 1), None)
        if staged is not None:
            yield pool, f"serves {staged}, whose stages share no pages; leave its pool or its stages out"


def _staging(file: DeploymentFile) -> Findings:
    block = file.engine.transfer_block_bytes
    for section, size in (("engine", file.engine.staging_bytes), ("pool", file.pool.staging_bytes)):
        if size < block:
            yield (section, "staging"), f"{size} bytes hold no transfer block of {block}; make it larger"


def _nixl(file: DeploymentFile) -> Findings:
    wants_nixl = file.engine.local_transfer == "nixl"
    for place, cluster, instance in _instances(file):
        may_have_nixl = wants_nixl and cluster.kind == "pd"
        if may_have_nixl and instance.nixl_port is None:
            yield place, "needs nixl_port, since engine.local_transfer is nixl; give it a free port"
        if instance.nixl_port is not None and not may_have_nixl:
            yield (
                (*place, "nixl_port"),
                "is only for instances of pd clusters with engine.local_transfer: nixl; leave it out",
            )
    for c, cluster in enumerate(file.clusters):
        if wants_nixl and cluster.kind == "pd" and cluster.hardware == SYNTHETIC:
            problem = "stand-in engines have no NIXL; leave engine.local_transfer out"
            yield ("clusters", c, "hardware"), problem


def _certificates(file: DeploymentFile) -> Findings:
    """Whether certificates can be made for all that need one: they bear names, and hosts beside them."""
    names = [cluster.name for cluster in file.clusters]
    if file.gateway.cluster is not None and file.gateway.cluster not in names:
        yield (
            ("gateway", "cluster"),
            f'there is no cluster "{file.gateway.cluster}"; the clusters are {", ".join(names)}',
        )
    if not _encrypts(file):
        return
    seen = dict.fromkeys(OBSERVERS, "a part of prfaas")
    for place, _, instance in _instances(file):
        name, lower = instance.name, instance.name.lower()
        if lower in OBSERVERS:
            yield (*place, "name"), f'"{name}" is a name of prfaas itself; take another'
        if lower in seen:
            yield (
                (*place, "name"),
                f'"{name}" and {seen[lower]} are one name in certificates; let more than case differ',
            )
        if not _is_dns_name(name):
            yield (
                (*place, "name"),
                f'"{name}" can\'t stand in a certificate, which needs the form of a host name; '
                'take one without empty parts between ".", and no IP address',
            )
        seen[lower] = f'"{name}"'
    for c, _, name, _ in _pools(file):
        if name.lower() in seen:
            yield (
                ("clusters", c, "pool"),
                f'its name "{name}" and {seen[name.lower()]} are one name in certificates; '
                "let more than case differ",
            )
        if not _is_dns_name(name):
            yield (
                ("clusters", c, "name"),
                f'"{file.clusters[c].name}" is part of the name of its pool, "{name}", which can\'t stand in a '
                'certificate; take one without empty parts between "."',
            )
        seen[name.lower()] = f'"{name}"'
    for place, _, instance in _instances(file):
        host = instance.host.lower()
        # Whoever has one could pass for the other.
        if host in seen and host != instance.name.lower():
            yield (
                (*place, "host"),
                f'"{instance.host}" is also the name of {seen[host]}, and certificates bear both; '
                "give the machine's address",
            )


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
