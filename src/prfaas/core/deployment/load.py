"""From a deployment file to a `Deployment` (to run) or a `PlannedDeployment` (to plan and simulate)."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from prfaas.core.deployment.checks import admin_port, check_to_plan, check_to_run
from prfaas.core.deployment.model import ModelRef, ModelSection, default_state_dir
from prfaas.core.deployment.planned import PlannedDeployment
from prfaas.core.deployment.planned_model import planned_deployment
from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.section import fields_of
from prfaas.core.deployment.source import changed, read_source
from prfaas.core.deployment.types import (
    SYNTHETIC,
    Cluster,
    ClusterSection,
    Deployment,
    Instance,
    InstanceSection,
    Link,
)
from prfaas.core.yaml_source import FileError, Location, YamlSource


def load_deployment(path: Path | str, *, state_dir: Path | None = None) -> Deployment:
    """Read and check a deployment file that is to be run. `state_dir` defaults to `default_state_dir()`.

    Raises:
        DeploymentError: the first thing that is wrong, with file, line and field; or the file names no servers
            and is only good for planning.
    """
    path = Path(path)
    state_dir = (state_dir or default_state_dir()).absolute()
    file = read_file(path, state_dir=state_dir)
    check_to_run(file)
    return _frozen(file, state_dir)


def read_file(
    path: Path, changes: Mapping[str, float] | None = None, *, state_dir: Path | None = None
) -> DeploymentFile:
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
        context = {"home": home, "beside": path.parent, "source": source}
        return DeploymentFile.model_validate(values, context=context)
    except ValidationError as error:
        raise first_problem(source, error) from None


def links_of(file: DeploymentFile) -> tuple[Link, ...]:
    """The links as the file has them, each with its price of egress."""
    return tuple(
        link
        if file.gives(("links", index, "egress_per_gb"))
        else replace(link, egress_per_gb=file.prices.egress_per_gb)
        for index, link in enumerate(file.links)
    )


def _frozen(file: DeploymentFile, state_dir: Path) -> Deployment:
    gateway = replace(
        file.gateway,
        admin=replace(file.gateway.admin, port=admin_port(file)),
        cluster=file.gateway_cluster,
    )
    return Deployment(
        **_fields(Deployment, file)
        | {
            "path": file.source.path,
            "state_dir": state_dir,
            "model": _model(file, state_dir),
            "clusters": tuple(_cluster(file, cluster) for cluster in file.clusters),
            "links": links_of(file),
            "slo": file.slo.with_inverse(),
            "gateway": gateway,
        }
    )


def _fields(kind: type, section: object) -> dict[str, Any]:
    """The fields of a section that an object of another kind has by the same names."""
    names = (field.name for field in fields_of(kind).values())
    return {name: getattr(section, name) for name in names if hasattr(section, name)}


def _model(file: DeploymentFile, state_dir: Path) -> ModelRef:
    model = file.model
    given = model.path if model.source is None else model.source.directory(state_dir, file.name)
    assert given is not None
    adapters = {name: path.absolute() for name, path in model.adapters.items()}
    return ModelRef(**_fields(ModelSection, model) | {"path": given.absolute(), "adapters": adapters})


def _cluster(file: DeploymentFile, cluster: ClusterSection) -> Cluster:
    instances = (
        Instance(
            **_fields(InstanceSection, instance),
            cluster=cluster.name,
            tls=file.speaks_tls(cluster, instance),
            is_stand_in=cluster.hardware == SYNTHETIC,
        )
        for instance in cluster.instances or ()
    )
    price = _instance_price_per_hour(file, cluster)
    return Cluster(
        **_fields(ClusterSection, cluster) | {"instances": tuple(instances)}, instance_price_per_hour=price
    )


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
    file = read_file(path, changes)
    check_to_plan(file)
    return planned_deployment(file, links_of(file))


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


def first_problem(source: YamlSource, error: ValidationError) -> FileError:
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
