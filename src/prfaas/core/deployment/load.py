"""From a deployment file to a `Deployment` (to run) or a `PlannedDeployment` (to plan and simulate)."""

import difflib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from prfaas.core.deployment.checks import admin_port, check_to_plan, check_to_run
from prfaas.core.deployment.model import ModelRef, default_state_dir
from prfaas.core.deployment.planned import (
    PlannedCluster,
    PlannedDeployment,
)
from prfaas.core.deployment.planned_model import kept_models, planned_deployment
from prfaas.core.deployment.pool import by_machine
from prfaas.core.deployment.schema import ClusterSection, DeploymentFile
from prfaas.core.deployment.section import fields_of
from prfaas.core.deployment.source import DeploymentError, Location, YamlSource, changed, read_source
from prfaas.core.deployment.types import (
    SYNTHETIC,
    Cluster,
    Deployment,
    Instance,
    Link,
)
from prfaas.core.latency import LatencyProfile, ProfileError, load_profile

USUAL_KILLS_PER_HOUR = 1.0
"""Of a preemptible instance of which the file says nothing: far more than clouds tell of most kinds of machines. It
costs little: a prefill of 30 s counts as 0.13 s longer."""


def kills_per_hour(cluster: ClusterSection) -> float:
    """How often an instance is expected to be taken away while it is up; 0 where that is not to happen."""
    if not cluster.preemptible:
        return 0.0
    return USUAL_KILLS_PER_HOUR if cluster.kills_per_hour is None else cluster.kills_per_hour


def load_deployment(path: Path | str, *, state_dir: Path | None = None) -> Deployment:
    """Read and check a deployment file that is to be run. `state_dir` defaults to `default_state_dir()`.

    Raises:
        DeploymentError: the first thing that is wrong, with file, line and field; or the file names no servers
            and is only good for planning.
    """
    path = Path(path)
    state_dir = (state_dir or default_state_dir()).absolute()
    source, file = read_file(path, state_dir=state_dir)
    check_to_run(source, file)
    return _frozen(source, file, state_dir)


def read_file(
    path: Path, changes: Mapping[str, float] | None = None, *, state_dir: Path | None = None
) -> tuple[YamlSource, DeploymentFile]:
    """The fields of a deployment file, each good by itself, `changes` put in.

    Without a `state_dir` its files stay relative to the deployment's folder there.

    Raises:
        DeploymentError: the file can't be read, a field is unknown or its value wrong.
    """
    source = read_source(path)
    if not isinstance(source.values, dict):
        raise source.error((), 'must be a mapping of fields ("name: …", "model: …", …)')
    if changes:
        source = changed(source, changes)
    home = Path() if state_dir is None else state_dir / str(source.values.get("name"))
    try:
        # A section that is left out has files in the deployment's folder, too.
        values = {"security": {}} | source.values
        return source, DeploymentFile.model_validate(values, context={"home": home, "beside": path.parent})
    except ValidationError as error:
        raise first_problem(source, error) from None


def links_of(source: YamlSource, file: DeploymentFile) -> tuple[Link, ...]:
    """The links as the file has them, each with its price of egress."""
    return tuple(
        link
        if source.gives(("links", index, "egress_per_gb"))
        else replace(link, egress_per_gb=file.prices.egress_per_gb)
        for index, link in enumerate(file.links)
    )


def _frozen(source: YamlSource, file: DeploymentFile, state_dir: Path) -> Deployment:
    gateway = replace(
        file.gateway,
        admin=replace(file.gateway.admin, port=admin_port(file)),
        cluster=file.gateway_cluster,
    )
    return Deployment(
        name=file.name,
        path=source.path,
        state_dir=state_dir,
        model=_model(source.path, file, state_dir),
        clusters=tuple(_cluster(source, c, file) for c in range(len(file.clusters))),
        links=links_of(source, file),
        routing=file.routing,
        slo=file.slo.with_inverse(),
        gateway=gateway,
        security=file.security,
        engine=file.engine,
        transfer=file.transfer,
        control=file.control,
        pool=file.pool,
        fleet=file.fleet,
    )


def _model(path: Path, file: DeploymentFile, state_dir: Path) -> ModelRef:
    model = file.model
    assert model.served_name is not None and model.max_model_len is not None
    origin = model.origin
    if origin is not None:
        directory = origin.directory(state_dir, file.name)
    else:
        assert model.path is not None
        directory = path.parent.absolute() / Path(model.path).expanduser()
    adapters = {
        name: path.parent.absolute() / Path(adapter).expanduser() for name, adapter in model.adapters.items()
    }
    return ModelRef(
        served_name=model.served_name,
        max_model_len=model.max_model_len,
        path=directory,
        source=origin,
        adapters=adapters,
        kv_cache_dtype=model.kv_cache_dtype,
        dtype=model.dtype,
    )


def _cluster(source: YamlSource, index: int, file: DeploymentFile) -> Cluster:
    cluster = file.clusters[index]
    profile = None if cluster.profile is None else _profile(source, index, cluster.profile)
    instances = tuple(
        Instance(
            **{each.name: getattr(instance, each.name) for each in fields(instance)},
            cluster=cluster.name,
            tls=file.speaks_tls(cluster, instance),
            is_stand_in=cluster.hardware == SYNTHETIC,
        )
        for instance in cluster.instances or ()
    )
    if cluster.tensor_parallel is not None:
        raise source.error(
            ("clusters", index, "tensor_parallel"), "is only to plan with; give it to each instance here"
        )
    return Cluster(
        name=cluster.name,
        kind=cluster.kind,
        hardware=cluster.hardware,
        instances=instances,
        profile=profile,
        speedup=cluster.speedup or 1.0,
        pool=cluster.pool,
        instance_price_per_hour=_instance_price_per_hour(file, cluster),
        preemptible=cluster.preemptible,
        kills_per_hour=kills_per_hour(cluster),
        extra_args=cluster.extra_args,
        kv_cache_dtype=cluster.kv_cache_dtype,
    )


def _profile(source: YamlSource, index: int, name: str) -> LatencyProfile:
    try:
        return load_profile(name, relative_to=source.path.parent)
    except ProfileError as error:
        raise source.error(("clusters", index, "profile"), str(error)) from None


def _instance_price_per_hour(file: DeploymentFile, cluster: ClusterSection) -> float:
    sizes = [instance.gpus for instance in cluster.instances or ()]
    return file.prices.per_gpu_hour.get(cluster.hardware, 0.0) * (cluster.gpus_per_instance or max(sizes))


def load_planned(path: Path | str, *, changes: Mapping[str, float] | None = None) -> PlannedDeployment:
    """Read and check a deployment file for planning: one to run will do as well as one without any server.

    `changes` puts other numbers in place of some of the file's, by field: {"links[0].bandwidth": 1e10}.

    Raises:
        DeploymentError: the first thing that is wrong, with file, line and field.
    """
    path = Path(path)
    source, file = read_file(path, changes)
    check_to_plan(source, file)
    models = kept_models(source, file)
    clusters = tuple(
        _planned_cluster(source, c, cluster, file.model.published) for c, cluster in enumerate(file.clusters)
    )
    return planned_deployment(source, file, models, clusters, links_of(source, file))


def _tensor_parallel(source: YamlSource, index: int, cluster: ClusterSection, gpus: int, default: int) -> int:
    if cluster.instances is not None:
        if cluster.tensor_parallel is not None:
            raise source.error(
                ("clusters", index, "tensor_parallel"),
                "goes with instance_count; give it to each instance here",
            )
        return cluster.instances[0].tensor_parallel
    found = cluster.tensor_parallel or default
    if found > gpus:
        raise source.error(
            ("clusters", index, "tensor_parallel"),
            f"{found} ranks need as many GPUs, but an instance has {gpus}",
        )
    return found


def _planned_cluster(
    source: YamlSource, index: int, cluster: ClusterSection, model: str | None
) -> PlannedCluster:
    assert cluster.profile is not None
    profile = _profile(source, index, cluster.profile)
    if model is not None and profile.model != model:
        raise source.error(
            ("clusters", index, "profile"),
            f'"{profile.name}" is how fast {profile.model} is, but model.published is {model}',
        )
    if cluster.kind == "pd" and profile.decode is None:
        raise source.error(
            ("clusters", index, "profile"),
            f'"{profile.name}" has no decode times, which a cluster of kind "pd" needs',
        )
    profile = profile if cluster.speedup is None else profile.sped_up(cluster.speedup)
    # The published times are those of the paper, which counts every byte once; vLLM would copy heads to all ranks.
    ranks = profile.gpus_per_instance if model is None else 1
    together = group_ranks = 1
    if cluster.instances is None:
        assert cluster.instance_count is not None
        count, gpus = cluster.instance_count, cluster.gpus_per_instance
    else:
        count = len(cluster.instances)
        together = max(map(len, by_machine(cluster.instances)))
        # Groups of several sizes are moved by what divides them all.
        groups = Counter(each.data_parallel or f"alone {each.name}" for each in cluster.instances)
        group_ranks = math.gcd(*groups.values())
        gpus = cluster.gpus_per_instance or cluster.instances[0].gpus
    if gpus is not None and gpus != profile.gpus_per_instance:
        field = "gpus_per_instance" if cluster.gpus_per_instance is not None else "profile"
        raise source.error(
            ("clusters", index, field),
            f'instances have {gpus} GPUs, but profile "{profile.name}" was measured on '
            f"{profile.gpus_per_instance}; name a profile of the same size",
        )
    return PlannedCluster(
        name=cluster.name,
        kind=cluster.kind,
        hardware=cluster.hardware,
        instance_count=count,
        gpus_per_instance=profile.gpus_per_instance,
        profile=profile,
        prefix_hit_ratio=cluster.prefix_hit_ratio,
        pool=cluster.pool,
        instances_per_machine=together,
        tensor_parallel=_tensor_parallel(source, index, cluster, profile.gpus_per_instance, ranks),
        kills_per_hour=kills_per_hour(cluster),
        group_ranks=group_ranks,
    )


_KINDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": 'must be a mapping ("name: value" lines)',
    "dataclass_type": 'must be a mapping ("field: value" lines)',
    "model_type": 'must be a mapping ("field: value" lines)',
    "model_attributes_type": 'must be a mapping ("field: value" lines)',
    "string_pattern_mismatch": 'must be letters, digits, ".", "_" and "-", starting with a letter or digit',
    "string_too_short": "must not be empty",
    "too_short": "must have at least one entry",
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NO_FORM = ("union_tag_not_found", "union_tag_invalid")
_BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def first_problem(source: YamlSource, error: ValidationError) -> DeploymentError:
    """The finding that stands first in the file, unknown fields before others: they often explain those."""

    # A list whose entries are wrong counts as too short besides.
    def order(details: ErrorDetails) -> tuple[bool, bool, int]:
        kind = details["type"]
        return kind not in _UNKNOWN, kind == "too_short", source.line(_place(details)[0]) or 0

    details = min(error.errors(), key=order)
    location, section = _place(details)
    if details["type"] in _UNKNOWN:
        return source.error(location, _unknown_field(str(location[-1]), section))
    return source.error(location, _sentence(details))


def _place(details: ErrorDetails) -> tuple[Location, type]:
    """Where a finding is in the file, and the section there."""
    location: list[str | int] = []
    section: type = DeploymentFile
    forms: Mapping[str, type] = {}
    for part in details["loc"]:
        # A bad key of a mapping is reported at (…, key, "[key]"), a field of one form of a section behind its name.
        if part in forms:
            section, forms = forms[str(part)], {}
        elif part != "[key]":
            location.append(part)
            field = fields_of(section).get(str(part))
            if field is not None and field.sections:
                section, forms = field.section or section, field.forms
    if details["type"] in _NO_FORM and isinstance(details["input"], dict):
        location.append(details["ctx"]["discriminator"].strip("'"))
    return tuple(location), section


def _sentence(details: ErrorDetails) -> str:
    kind, value = details["type"], details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    if kind in _NO_FORM:
        if not isinstance(value, dict):
            kind = "model_type"
        elif "expected_tags" in context:
            return f"must be one of {_list_of(context['expected_tags'])}, not {_shown(context['tag'])}"
        else:
            kind = "missing"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be one of {_list_of(str(context['expected']))}, not {_shown(value)}"
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        bound = context[limit]
        bound = f"{bound:g}" if isinstance(bound, float) else bound
        return f"{words} {bound}, not {_shown(value)}"
    if kind in _KINDS:
        return f"{_KINDS[kind]}, not {_shown(value)}"
    return f"{details['msg']}, got {_shown(value)}"


def _list_of(expected: str) -> str:
    return expected.replace("'", '"').replace(" or ", ", ")


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list" if value else "an empty list"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f'{text[:56]}…"'


def _unknown_field(name: str, section: type) -> str:
    known = list(fields_of(section))
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f'is no known field; did you mean "{near[0]}"?'
    return f"is no known field; known here are {', '.join(known)}"
