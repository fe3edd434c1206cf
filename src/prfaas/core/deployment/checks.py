"""What must fit together between the sections of a deployment file: rules, each of which raises where it is broken.

A rule of one section alone stands at its field. A file that is to run and one that is to be planned share most rules.
"""

import ipaddress
import re
from collections.abc import Iterator
from importlib.metadata import entry_points

from prfaas.core.deployment.addresses import is_loopback, same_host
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    LengthsSpec,
    LogNormalLengths,
    TraceLengths,
    UniformLengths,
)
from prfaas.core.deployment.planned_model import check_cluster_dtypes
from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.security import OBSERVERS
from prfaas.core.deployment.types import (
    BUILT_IN_POLICIES,
    POLICY_ENTRY_POINTS,
    SYNTHETIC,
    ClusterSection,
    InstanceSection,
    by_pool,
)
from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.yaml_source import Location

_MAX_NAME = 63

_MODEL_FIELDS = {
    "path": "a checkpoint directory",
    "trained": "a model with trained weights",
    "hub": "ORG/NAME on the Hugging Face hub",
    "tiny": "a made model's name",
    "published": "a model that `prfaas models` lists",
    "config": "a config.json to plan with",
}


def check_to_run(file: DeploymentFile) -> None:
    """All rules of a deployment whose servers are to be started.

    Raises:
        DeploymentError: two fields contradict each other, or something every deployment needs is missing.
    """
    _only_planned(file)
    _common(file)
    _ports(file)
    _threshold(file)
    for place, cluster in _clusters(file):
        _engines(file, place, cluster)
    _machines(file)
    _staging(file)
    _nixl(file)
    if file.gateway.clients is not None and file.security.tenant_header is not None:
        raise file.error(
            ("gateway", "clients"), "leave out security.tenant_header: each client is a tenant of its own"
        )
    _certificates(file)
    if file.fleet is not None and file.fleet.is_plain:
        for field in ("ca_file", "certificate_file"):
            if getattr(file.fleet, field) is not None:
                raise file.error(("fleet", field), "is for TLS; write https:// before every address in etcd")
    if _has_egress_price(file):
        _prices(file)


def check_to_plan(file: DeploymentFile) -> None:
    """All rules of a deployment that is to be planned; servers and their ports may be missing.

    Raises:
        DeploymentError: two fields contradict each other, or something the planner needs is missing.
    """
    _common(file)
    for place, cluster in _clusters(file):
        if cluster.profile is None:
            raise file.error(
                place,
                "has no profile, so how fast its instances are is not known; name one that `prfaas profile` "
                "wrote or one that comes with prfaas",
            )
    if file.workload is None:
        raise file.error(("workload",), "is missing; say how long prompts and answers are")
    _lengths(file, file.workload.lengths)
    if file.workload.output_tokens is None and not isinstance(file.workload.lengths, TraceLengths):
        raise file.error(("workload", "output_tokens"), "is missing; give the mean length of answers")
    if file.slo.tpot_s is None and file.slo.tokens_per_s is None:
        raise file.error(
            ("slo",), "needs tokens_per_s (or tpot_s): without it there is no limit to the decode batch"
        )
    _prices(file)
    for place, cluster in _clusters(file):
        _measured(file, place, cluster)


def _common(file: DeploymentFile) -> None:
    _model(file)
    _names(file)
    if not any(cluster.kind == "pd" for cluster in file.clusters):
        raise file.error(("clusters",), 'nothing decodes; add a cluster of kind "pd"')
    _links(file)
    for place, cluster in _clusters(file):
        _cluster(file, place, cluster)
    counted = any(cluster.instance_count is not None for cluster in file.clusters)
    if not counted and not any("prefill" in instance.roles for _, _, instance in _instances(file)):
        raise file.error(("clusters",), "no instance has the role prefill; give it to at least one")
    _policy(file)
    _experiment(file)
    _speed(file)
    check_cluster_dtypes(file)
    if file.gives(("pool",)) and not any(cluster.pool for cluster in file.clusters):
        raise file.error(("pool",), "is about pools, but no cluster has one; give clusters a pool")
    is_told = file.security.tenant_header is not None or file.gateway.clients is not None
    if file.gives(("pool", "tenant_share")) and not is_told:
        raise file.error(
            ("pool", "tenant_share"), "needs security.tenant_header or gateway.clients: whose a request is"
        )
    _data_parallel(file)


def _clusters(file: DeploymentFile) -> Iterator[tuple[Location, ClusterSection]]:
    for c, cluster in enumerate(file.clusters):
        yield ("clusters", c), cluster


def _instances(file: DeploymentFile) -> Iterator[tuple[Location, ClusterSection, InstanceSection]]:
    for place, cluster in _clusters(file):
        for i, instance in enumerate(cluster.instances or ()):
            yield (*place, "instances", i), cluster, instance


def _only_planned(file: DeploymentFile) -> None:
    for field in ("published", "config"):
        if getattr(file.model, field) is not None and not _has_checkpoint(file):
            problem = "is enough to plan with, not to run; give path (a checkpoint directory) in its place"
            raise file.error(("model", field), problem)
    for place, cluster in _clusters(file):
        if cluster.instances is None and cluster.instance_count is not None:
            problem = "is enough to plan with, not to run; list the cluster's instances in its place"
            raise file.error((*place, "instance_count"), problem)
    for field in ("served_name", "max_model_len"):
        if getattr(file.model, field) is None:
            raise file.error(("model", field), "is missing")


def _model(file: DeploymentFile) -> None:
    """Whether the file names one model, a name that can be one, and no more tokens than it takes."""
    model = file.model
    given = [field for field in _MODEL_FIELDS if getattr(model, field) is not None]
    # A checkpoint that is not on this machine yet can be planned with by what is published of its model.
    named = [field for field in given if field != "published"] if _has_checkpoint(file) else given
    if len(named) != 1:
        choices = ", ".join(f"{field} ({meaning})" for field, meaning in _MODEL_FIELDS.items())
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise file.error(("model",), f"needs either {choices}; {found}")
    try:
        longest = None if model.source is None else model.source.context_tokens
    except ConfigError as error:
        raise file.error(("model", "trained"), str(error)) from None
    length = model.max_model_len
    if longest is not None and length is not None and length > longest:
        problem = f"{length} is more than the {longest} tokens that {model.trained} takes"
        raise file.error(("model", "max_model_len"), problem)


def _has_checkpoint(file: DeploymentFile) -> bool:
    """Whether it says where engines find the weights of a model that prfaas does not make itself."""
    return file.model.path is not None or file.model.hub is not None


def _names(file: DeploymentFile) -> None:
    seen: dict[str, int | None] = {}
    named = [(place, cluster.name) for place, cluster in _clusters(file)]
    named += [(place, instance.name) for place, _, instance in _instances(file)]
    for above, name in named:
        place = (*above, "name")
        if name in seen:
            raise file.error(
                place,
                f'"{name}" is already a name in line {seen[name]}; give every cluster and instance its own',
            )
        seen[name] = file.source.line(place)


def _links(file: DeploymentFile) -> None:
    seen: dict[str, int] = {}
    for index, link in enumerate(file.links):
        file.require_cluster(("links", index, "source"), link.source)
        file.require_cluster(("links", index, "target"), link.target)
        if link.source == link.target:
            problem = f'leads from "{link.source}" to itself; instances of one cluster need no link'
            raise file.error(("links", index), problem)
        first = seen.setdefault(link.name, index)
        if first != index:
            problem = f'repeats links[{first}] ("{link.source}" to "{link.target}"); keep one of them'
            raise file.error(("links", index), problem)


def _cluster(file: DeploymentFile, place: Location, cluster: ClusterSection) -> None:
    listed = cluster.instances
    if (listed is None) == (cluster.instance_count is None):
        given = "neither is given" if listed is None else "both are given"
        raise file.error(
            place, f"needs either instances (servers to start) or instance_count (to plan with); {given}"
        )
    if listed is not None and cluster.tensor_parallel is not None:
        raise file.error(
            (*place, "tensor_parallel"), "goes with instance_count; give it to each instance here"
        )
    for i, instance in enumerate(listed or ()):
        if len({*instance.roles}) != len(instance.roles):
            raise file.error((*place, "instances", i, "roles"), "names a role twice; name each role once")
        if cluster.kind == "prfaas" and "decode" in instance.roles:
            problem = 'a cluster of kind "prfaas" only prefills; make its kind "pd" to decode'
            raise file.error((*place, "instances", i, "roles"), problem)
        if instance.pipeline_parallel > 1 and cluster.kind != "prfaas":
            raise file.error(
                (*place, "instances", i, "pipeline_parallel"),
                'stages only send KVCache, and instances of a "pd" cluster may decode; give it to those of a cluster '
                'of kind "prfaas"',
            )
    if cluster.preemptible and cluster.kind != "prfaas":
        raise file.error(
            (*place, "preemptible"),
            'is for a cluster of kind "prfaas", since answers that are being decoded would be cut; leave it out',
        )
    if cluster.kind == "prfaas":
        decoding = {each.name for each in file.clusters if each.kind == "pd"}
        if decoding and not any(
            link.source == cluster.name and link.target in decoding for link in file.links
        ):
            raise file.error(
                place, f'no link leads from "{cluster.name}"; add one under links to a "pd" cluster'
            )
    elif listed is not None and not any("decode" in instance.roles for instance in listed):
        raise file.error(place, 'is of kind "pd" but none of its instances has the role decode; add one')
    if cluster.pool is not None and cluster.hardware == SYNTHETIC:
        problem = f'is not for hardware "{SYNTHETIC}": stand-ins have no KVCache to keep; leave it out'
        raise file.error((*place, "pool"), problem)


def _policy(file: DeploymentFile) -> None:
    # Whether a class can be imported matters only where requests are routed: engines start without it.
    policy = file.routing.policy
    _known_policy(file, ("routing", "policy"), policy)
    if policy == "static_threshold" and "threshold_tokens" in file.routing.params:
        problem = "is written as routing.threshold_tokens; give it there"
        raise file.error(("routing", "params", "threshold_tokens"), problem)


def _known_policy(file: DeploymentFile, place: Location, policy: str) -> None:
    if policy in BUILT_IN_POLICIES or ":" in policy:
        return
    known = dict.fromkeys(
        [*BUILT_IN_POLICIES, *(each.name for each in entry_points(group=POLICY_ENTRY_POINTS))]
    )
    if policy not in known:
        raise file.error(
            place,
            f'there is no policy "{policy}"; there are {", ".join(known)}, and any class written as '
            "package.module:Class",
        )


def _experiment(file: DeploymentFile) -> None:
    place, experiment = ("gateway", "experiment"), file.gateway.experiment
    if experiment is None:
        return
    _known_policy(file, (*place, "against"), experiment.against)
    given = [name for name in ("against", "without_link", "threshold_tokens") if file.gives((*place, name))]
    if len(given) > 1:
        raise file.error(place, f"has {given[0]} and {given[1]}; give one of them")
    if file.gateway.ledger is None:
        raise file.error(place, "needs gateway.ledger, where what comes of it is kept; add one")
    if experiment.washout_s >= experiment.slice_s:
        problem = f"must be less than slice_s ({experiment.slice_s:g}), or no request would count"
        raise file.error((*place, "washout_s"), problem)
    links = [f"{link.source}->{link.target}" for link in file.links]
    if experiment.without_link is not None and experiment.without_link not in links:
        problem = f'there is no link "{experiment.without_link}"; there are {", ".join(links) or "none"}'
        raise file.error((*place, "without_link"), problem)


def _speed(file: DeploymentFile) -> None:
    if file.slo.tpot_s is not None and file.slo.tokens_per_s is not None:
        raise file.error(("slo", "tokens_per_s"), "is the inverse of slo.tpot_s; keep one of them")


def _data_parallel(file: DeploymentFile) -> None:
    """Whether every group has several ranks of one cluster, which are alike."""
    groups: dict[str, list[tuple[Location, ClusterSection, InstanceSection]]] = {}
    for place, cluster, instance in _instances(file):
        if instance.data_parallel is not None:
            groups.setdefault(instance.data_parallel, []).append((place, cluster, instance))
    for group, ((place_0, home, rank_0), *others) in groups.items():
        if not others:
            raise file.error(
                (*place_0, "data_parallel"),
                f'group "{group}" has one rank; give it to further instances of the cluster, or leave it out',
            )
        for place, cluster, instance in others:
            if home is not cluster:
                problem = f'"{group}" is a group of "{home.name}"; its ranks are in one cluster'
                raise file.error((*place, "data_parallel"), problem)
            for field in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "roles"):
                if getattr(instance, field) != getattr(rank_0, field):
                    raise file.error(
                        (*place, field) if file.gives((*place, field)) else place,
                        f'{field} is another than that of "{rank_0.name}"; make the ranks of group "{group}" alike',
                    )


def _lengths(file: DeploymentFile, lengths: LengthsSpec) -> None:
    place = ("workload", "lengths")
    match lengths:
        case LogNormalLengths(low=low, high=high) | UniformLengths(low=low, high=high) if low >= high:
            raise file.error((*place, "high"), f"{high:g} must be greater than low ({low:g})")
        case EmpiricalLengths(lengths=given, weights=(_, *_) as weights) if len(weights) != len(given):
            raise file.error(
                (*place, "weights"), f"has {len(weights)} entries for {len(given)} lengths; give one for each"
            )
        case EmpiricalLengths(weights=(_, *_) as weights) if not any(weights):
            raise file.error((*place, "weights"), "are all 0; at least one must be above 0")


def _has_egress_price(file: DeploymentFile) -> bool:
    """Whether bytes over any link cost something."""
    return any(
        price > 0 for price in (file.prices.egress_per_gb, *(link.egress_per_gb for link in file.links))
    )


def _measured(file: DeploymentFile, place: Location, cluster: ClusterSection) -> None:
    """Whether the profile of a cluster that is to be planned is of its model and its instances."""
    profile, model = cluster.profile, file.model.published
    assert profile is not None
    if model is not None and profile.model != model:
        problem = f'"{profile.name}" is how fast {profile.model} is, but model.published is {model}'
        raise file.error((*place, "profile"), problem)
    if cluster.kind == "pd" and profile.decode is None:
        raise file.error(
            (*place, "profile"), f'"{profile.name}" has no decode times, which a cluster of kind "pd" needs'
        )
    gpus = cluster.gpus_per_instance or (cluster.instances and cluster.instances[0].gpus)
    if gpus and gpus != profile.gpus_per_instance:
        raise file.error(
            (*place, "gpus_per_instance" if cluster.gpus_per_instance else "profile"),
            f'instances have {gpus} GPUs, but profile "{profile.name}" was measured on '
            f"{profile.gpus_per_instance}; name a profile of the same size",
        )
    if cluster.tensor_parallel is not None and cluster.tensor_parallel > profile.gpus_per_instance:
        ranks = f"{cluster.tensor_parallel} ranks need as many GPUs"
        raise file.error(
            (*place, "tensor_parallel"), f"{ranks}, but an instance has {profile.gpus_per_instance}"
        )


def _prices(file: DeploymentFile) -> None:
    """Instances have all prices or none; where egress has one, all, since it is weighed against theirs."""
    used = dict.fromkeys(cluster.hardware for cluster in file.clusters)
    prices = file.prices.per_gpu_hour
    for hardware in prices:
        if hardware not in used:
            hint = "; bytes are priced by egress_per_gb" if "egress" in hardware else ""
            problem = f"no cluster has this hardware; the clusters have {', '.join(used)}{hint}"
            raise file.error(("prices", hardware), problem)
    has_prices = bool(prices) or _has_egress_price(file)
    for place, cluster in _clusters(file):
        if has_prices and cluster.hardware not in prices:
            raise file.error(
                (*place, "hardware"), f'there is no price for "{cluster.hardware}"; add it to prices'
            )


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
    for place, cluster, name, together in _pools(file):
        if cluster.pool is not None and cluster.pool.kv_port is not None:
            yield (*place, "pool", "kv_port"), together[0].host, cluster.pool.kv_port, f'pool "{name}"'


def _ports(file: DeploymentFile) -> None:
    admin = file.gateway.admin
    if admin.token_file is None and not is_loopback(admin.host):
        raise file.error(
            ("gateway", "admin", "host"),
            f'"{admin.host}" is not this machine alone, so operators must show a token; add gateway.admin.token_file',
        )
    for place, _, instance in _instances(file):
        last = 65536 - len(instance.reserved_kv_ports)
        if instance.kv_port > last:
            problem = f"{instance.kv_port} leaves no room for {instance.gpus} ranks; take one up to {last}"
            raise file.error((*place, "kv_port"), problem)
    taken: dict[int, list[tuple[str, str]]] = {}
    for place, host, port, owner in _listeners(file):
        for other_host, by in taken.setdefault(port, []):
            if same_host(host, other_host):
                raise file.error(place, f"{port} is already used by {by}; take another")
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


def _engines(file: DeploymentFile, place: Location, cluster: ClusterSection) -> None:
    """What engines need that are to be started."""
    is_stand_in = cluster.hardware == SYNTHETIC
    if cluster.hardware == "cpu" and file.engine.kv_cache_gib is None:
        problem = "engines on cpu need engine.kv_cache_gib (GiB of memory for the KVCache); add it"
        raise file.error((*place, "hardware"), problem)
    if is_stand_in and cluster.profile is None:
        problem = "synthetic engines need a profile to be as fast as; add one (`internal-1t-h200`, or a file)"
        raise file.error((*place, "hardware"), problem)
    if cluster.speedup != 1 and not is_stand_in:
        raise file.error(
            (*place, "speedup"), "is only for synthetic engines; real ones are as fast as they are"
        )


def _threshold(file: DeploymentFile) -> None:
    threshold_tokens, longest_tokens = file.routing.threshold_tokens, file.model.max_model_len
    assert longest_tokens is not None
    if threshold_tokens is None:
        if file.routing.policy == "static_threshold":
            raise file.error(("routing",), "needs threshold_tokens for policy static_threshold; add it")
    elif threshold_tokens > longest_tokens:
        raise file.error(
            ("routing", "threshold_tokens"),
            f"{threshold_tokens} is more than model.max_model_len ({longest_tokens}), so nothing would ever be "
            "offloaded; lower it, or say policy: local_only",
        )


def _pools(file: DeploymentFile) -> Iterator[tuple[Location, ClusterSection, str, list[InstanceSection]]]:
    """Every pool: its cluster with the place of that, its name, its machine's instances."""
    for place, cluster in _clusters(file):
        if cluster.pool is not None:
            for name, together in by_pool(cluster.name, cluster.instances or ()).items():
                yield place, cluster, name, together


def _machines(file: DeploymentFile) -> None:
    """What holds where pools are to be started."""
    taken = {cluster.name for cluster in file.clusters}
    taken |= {instance.name for _, _, instance in _instances(file)}
    for place, cluster, name, together in _pools(file):
        pool = (*place, "pool")
        if cluster.pool is not None and cluster.pool.kv_port is None:
            raise file.error(
                (*pool, "kv_port"), "is missing; give the port where other machines' pools reach this one"
            )
        if name in taken:
            raise file.error(pool, f'its name would be "{name}", which is taken; rename the other one')
        taken.add(name)
        if len(name) > _MAX_NAME:
            raise file.error(
                (*place, "name"),
                f'leaves no room for the name of its pool ("{name}"); take one of up to '
                f"{_MAX_NAME - len(name) + len(cluster.name)} characters",
            )
        if len({instance.tensor_parallel for instance in together}) > 1:
            raise file.error(
                pool,
                f"serves {' and '.join(instance.name for instance in together)}, whose tensor_parallel "
                "differs, so that they can't share pages; make it equal on each machine",
            )
        staged = next((instance.name for instance in together if instance.pipeline_parallel > 1), None)
        if staged is not None:
            raise file.error(
                pool, f"serves {staged}, whose stages share no pages; leave its pool or its stages out"
            )


def _staging(file: DeploymentFile) -> None:
    block = file.engine.transfer_block_bytes
    for section, size in (("engine", file.engine.staging_bytes), ("pool", file.pool.staging_bytes)):
        if size < block:
            raise file.error(
                (section, "staging"), f"{size} bytes hold no transfer block of {block}; make it larger"
            )


def _nixl(file: DeploymentFile) -> None:
    wants_nixl = file.engine.local_transfer == "nixl"
    for place, cluster, instance in _instances(file):
        may_have_nixl = wants_nixl and cluster.kind == "pd"
        if may_have_nixl and instance.nixl_port is None:
            raise file.error(
                place, "needs nixl_port, since engine.local_transfer is nixl; give it a free port"
            )
        if instance.nixl_port is not None and not may_have_nixl:
            problem = "is only for instances of pd clusters with engine.local_transfer: nixl; leave it out"
            raise file.error((*place, "nixl_port"), problem)
    for place, cluster in _clusters(file):
        if wants_nixl and cluster.kind == "pd" and cluster.hardware == SYNTHETIC:
            raise file.error(
                (*place, "hardware"), "stand-in engines have no NIXL; leave engine.local_transfer out"
            )


def _certificates(file: DeploymentFile) -> None:
    """Whether certificates can be made for all that need one: they bear names, and hosts beside them."""
    if file.gateway.cluster is not None:
        file.require_cluster(("gateway", "cluster"), file.gateway.cluster)
    if not _encrypts(file):
        return
    seen = dict.fromkeys(OBSERVERS, "a part of prfaas")
    named = [(place, each.name, f'"{each.name}"') for place, _, each in _instances(file)]
    named += [(place, name, f'its pool "{name}"') for place, _, name, _ in _pools(file)]
    for above, name, said in named:
        place, lower = (*above, "name"), name.lower()
        if lower in OBSERVERS:
            raise file.error(place, f"{said} is a name of prfaas itself; take another")
        if lower in seen:
            raise file.error(
                place, f"{said} and {seen[lower]} are one name in certificates; let more than case differ"
            )
        if not _is_dns_name(name):
            raise file.error(
                place,
                f"{said} can't stand in a certificate, which needs the form of a host name; "
                'take one without empty parts between ".", and no IP address',
            )
        seen[lower] = f'"{name}"'
    for place, _, instance in _instances(file):
        host = instance.host.lower()
        # Whoever has one could pass for the other.
        if host in seen and host != instance.name.lower():
            raise file.error(
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
