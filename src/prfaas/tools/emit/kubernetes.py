"""Kubernetes: a Kustomize base that all sites share, and an overlay for each site."""

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from prfaas.core.deployment import GATEWAY, TOOLS, is_loopback
from prfaas.tools.emit.blueprint import Blueprint, EmittedFile
from prfaas.tools.emit.document import yaml_text
from prfaas.tools.emit.network_policy import PolicyMaker
from prfaas.tools.emit.pod import pod_objects
from prfaas.tools.emit.pod_plan import PodPlan, kubernetes_name, plan_pods
from prfaas.tools.emit.site import Site, sites_of
from prfaas.tools.emit.template import Fields, objects, rendered
from prfaas.tools.emit.volume import (
    CA_SECRET,
    CONFIG_MAP,
    TOKEN_SECRET,
    config_keys,
    pod_values,
    secret_files,
    secret_name,
    secret_of,
)

_BASE = PurePosixPath("base")
_OVERLAYS = PurePosixPath("overlays")


def kubernetes_files(blueprint: Blueprint) -> tuple[EmittedFile, ...]:
    """`base/`, and `overlays/SITE/` with the site's pods, Services, policies, and a script that makes its Secrets.

    Raises:
        DeploymentError: a host, a path or a name of the file can't be used in Kubernetes.
    """
    plans = {site.name: plan_pods(blueprint, site) for site in sites_of(blueprint.deployment)}
    files = list(_base_files(blueprint, plans))
    for site in sites_of(blueprint.deployment):
        files += _overlay_files(blueprint, site, plans[site.name])
    return tuple(files)


def _base_files(blueprint: Blueprint, plans: dict[str, tuple[PodPlan, ...]]) -> Iterator[EmittedFile]:
    uses_machines = any(plan.host is not None for pods in plans.values() for plan in pods)
    uses_folders = bool(blueprint.model_folders) and blueprint.containers.models_claim is None
    level = "privileged" if uses_machines or uses_folders else "restricted"
    namespace = objects("namespace.yaml.jinja", namespace=blueprint.containers.namespace, level=level)
    keys = config_keys(blueprint)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIG_MAP},
        "data": {keys[path]: text for path, text in blueprint.documents.items()},
    }
    yield _file(_BASE / "namespace.yaml", *namespace)
    yield _file(_BASE / "config-map.yaml", config)
    names = ["namespace.yaml", "config-map.yaml"]
    if models := objects("models.yaml.jinja", **pod_values(blueprint)):
        names.append("models.yaml")
        yield _file(_BASE / names[-1], *models)
    yield _kustomization(_BASE, names, blueprint)


def _overlay_files(blueprint: Blueprint, site: Site, plans: tuple[PodPlan, ...]) -> Iterator[EmittedFile]:
    folder = _OVERLAYS / site.name
    maker = PolicyMaker(blueprint, site.name, {member: plan for plan in plans for member in plan.members})
    names = ["../../base"]
    for plan in plans:
        names.append(f"{plan.name}.yaml")
        yield _file(folder / names[-1], *pod_objects(blueprint, plan), maker.policy(plan))
    if any(plan.component == "engine" for plan in plans):
        names.append("pod-disruption-budget.yaml")
        budget = objects("pod-disruption-budget.yaml.jinja", site=kubernetes_name(blueprint, site.name))
        yield _file(folder / names[-1], *budget)
    port = blueprint.deployment.gateway.port
    entrance = objects("entrance.yaml.jinja", settings=blueprint.containers, port=port)
    if site.has_gateway and entrance:
        names.append("entrance.yaml")
        yield _file(folder / names[-1], *entrance)
    monitors = tuple(_pod_monitors(blueprint, plans)) if blueprint.containers.pod_monitor else ()
    if monitors:
        names.append("pod-monitors.yaml")
        yield _file(folder / names[-1], *monitors)
    yield _kustomization(folder, names, blueprint)
    yield EmittedFile(folder / "create-secrets.sh", _secrets_script(blueprint, plans), is_script=True)


def _file(path: PurePosixPath, *objects: Fields) -> EmittedFile:
    return EmittedFile(path, yaml_text(*objects))


def _kustomization(folder: PurePosixPath, resources: list[str], blueprint: Blueprint) -> EmittedFile:
    namespace = blueprint.containers.namespace
    document = objects("kustomization.yaml.jinja", namespace=namespace, resources=resources)
    return _file(folder / "kustomization.yaml", *document)


def _secrets_script(blueprint: Blueprint, plans: tuple[PodPlan, ...]) -> str:
    """Secrets of what runs at the site, from the files of this machine's state directory; nothing of them is here."""
    deployment = blueprint.deployment
    wanted: dict[str, tuple[str, str]] = {}
    for plan in plans:
        for name, target in secret_files(blueprint, plan):
            file = target.relative_to(deployment.home) if target.is_relative_to(deployment.home) else target
            wanted[secret_name(blueprint, name)] = (name, str(file))
    if blueprint.containers.pod_monitor and _needs_tools_certificate(plans):
        file = deployment.security.identity_file(TOOLS).relative_to(deployment.home)
        wanted[secret_of(blueprint, TOOLS)] = (f"{TOOLS}.pem", str(file))
    return rendered(
        "create-secrets.sh.jinja",
        deployment=shlex.quote(deployment.name),
        namespace=blueprint.containers.namespace,
        secrets=[(secret, key, shlex.quote(file)) for secret, (key, file) in wanted.items()],
    )


def _pod_monitors(blueprint: Blueprint, plans: tuple[PodPlan, ...]) -> Iterator[Fields]:
    """One for each pod that has metrics which Prometheus can reach."""
    admin = blueprint.deployment.gateway.admin
    for plan in plans:
        if plan.instance is not None or (plan.component == GATEWAY and not is_loopback(admin.host)):
            yield from objects(
                "pod-monitor.yaml.jinja",
                plan=plan,
                deployment=blueprint.deployment.name,
                token_secret=TOKEN_SECRET,
                ca_secret=CA_SECRET,
                tools=TOOLS,
                tools_secret=secret_of(blueprint, TOOLS),
            )


def _needs_tools_certificate(plans: tuple[PodPlan, ...]) -> bool:
    """True if Prometheus must show a certificate: engines with TLS accept nobody without one."""
    return any(plan.instance is not None and plan.instance.tls for plan in plans)
