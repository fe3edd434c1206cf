"""The volumes of pods: the deployment file, secrets, models, shared memory, and the pool's sockets and disk."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from prfaas.core.deployment import GATEWAY, PoolNode
from prfaas.tools.emit.blueprint import STATE_DIR, Blueprint
from prfaas.tools.emit.pod_plan import PodPlan, bad_field, is_address, kubernetes_name
from prfaas.tools.emit.template import Fields

KEY_SECRET = "prfaas-key"
CA_SECRET = "prfaas-ca"
TOKEN_SECRET = "prfaas-admin-token"
CONFIG_MAP = "prfaas-deployment"

SECRETS_DIR = "/run/prfaas-secrets"
"""Where the script finds them."""


def secret_of(blueprint: Blueprint, member: str) -> str:
    """The name of the Secret with a member's certificate and private key."""
    return f"prfaas-identity-{kubernetes_name(blueprint, member)}"


def secret_name(blueprint: Blueprint, file: str) -> str:
    """The name of the Secret that has a file, whose name is also the key there."""
    shared = {"key": KEY_SECRET, "ca.crt": CA_SECRET, "admin-token": TOKEN_SECRET}
    shared |= {"etcd-ca": "prfaas-etcd-ca", "etcd-client": "prfaas-etcd-client"}
    return shared.get(file) or secret_of(blueprint, file.removesuffix(".pem"))


def placing_script(blueprint: Blueprint, plan: PodPlan) -> str:
    """Copies key and certificates to where the deployment file says, with modes that prfaas accepts.

    Files of a Secret are readable for their group, which a key must not be.
    """
    placed = tuple(secret_files(blueprint, plan))
    folders = dict.fromkeys(shlex.quote(str(target.parent)) for _, target in placed)
    lines = ["set -eu", "umask 077", f"mkdir -p {' '.join(folders)}"]
    lines += [
        f"install -m 0600 {SECRETS_DIR}/{source} {shlex.quote(str(target))}" for source, target in placed
    ]
    return "\n".join(lines) + "\n"


def secret_files(blueprint: Blueprint, plan: PodPlan) -> Iterator[tuple[str, Path]]:
    """Each secret file of a pod: its name among the mounted ones, and where it goes.

    Raises:
        DeploymentError: it would not lie in the state directory, which is all that a pod can write.
    """
    deployment, security = blueprint.deployment, blueprint.deployment.security
    found = [("security.key_file", "key", security.key_file)]
    needing = [name for name in plan.identities if deployment.needs_certificate(name)]
    if needing:
        found.append(("security.certificates", "ca.crt", security.ca_file))
    for name in needing:
        file = security.identity_file(name)
        found.append(("security.certificates", file.name, file))
    token_file = deployment.gateway.admin.token_file
    if plan.component == GATEWAY and token_file is not None:
        found.append(("gateway.admin.token_file", "admin-token", token_file))
    if plan.component == GATEWAY:
        found += [("fleet", name, path) for name, path in blueprint.etcd_files]
    for field, name, target in found:
        if not target.is_relative_to(STATE_DIR):
            raise bad_field(
                blueprint, field, f"{target} is outside the state directory; give a path relative to it"
            )
        yield name, target


def volumes_of(blueprint: Blueprint, plan: PodPlan) -> list[Fields]:
    """All volumes that the containers of a pod mount."""
    volumes: list[Fields] = [
        {"name": "config", "configMap": _config_map(blueprint)},
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {
            "name": "secrets",
            "projected": {"defaultMode": 0o440, "sources": list(_sources(blueprint, plan))},
        },
    ]
    if plan.component != "pool":
        volumes += _model_volumes(blueprint)
    if plan.component == GATEWAY:
        return volumes
    if plan.host is None or (plan.uses_pool or plan.pool) is None:
        # It counts as memory of the pod, as much as is used.
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    else:
        volumes.append(_host_path("shared-memory", "/dev/shm"))
        volumes.append(_host_path("pools", _sockets(blueprint)))
    if plan.pool is not None and (disk := blueprint.pool(plan.pool).disk) is not None:
        place = {"name": "pool-disk", "emptyDir": {}}
        volumes.append(place if plan.host is None else _host_path("pool-disk", str(disk)))
    return volumes


def engine_mounts(blueprint: Blueprint, plan: PodPlan) -> list[Fields]:
    """Models, shared memory between its processes and with the pool, and the pool's socket."""
    sockets = [_mount("pools", _sockets(blueprint))] if plan.uses_pool is not None else []
    return [*model_mounts(blueprint), _mount("shared-memory", "/dev/shm"), *sockets]


def pool_mounts(blueprint: Blueprint, pool: PoolNode) -> list[Fields]:
    """Shared memory with engines, its socket where they are in other pods, and its disk."""
    mounts = [_mount("shared-memory", "/dev/shm")]
    if is_address(pool.host):
        mounts.append(_mount("pools", _sockets(blueprint)))
    disk = blueprint.pool(pool).disk
    return mounts if disk is None else [*mounts, _mount("pool-disk", str(disk))]


def _sources(blueprint: Blueprint, plan: PodPlan) -> Iterator[Fields]:
    for name, _ in secret_files(blueprint, plan):
        yield {"secret": {"name": secret_name(blueprint, name), "items": [{"key": name, "path": name}]}}


def config_keys(blueprint: Blueprint) -> dict[str, str]:
    """The ConfigMap's key of each document: a key has no "/"."""
    return {path: path.replace("/", "..") for path in blueprint.documents}


def _config_map(blueprint: Blueprint) -> Fields:
    items = [{"key": key, "path": path} for path, key in config_keys(blueprint).items()]
    return {"name": CONFIG_MAP, "items": items}


def _model_volumes(blueprint: Blueprint) -> list[Fields]:
    claim, folders = blueprint.containers.models_claim, blueprint.model_folders
    if not folders:
        return []
    if claim is None:
        return [_host_path(f"model-{number}", str(folder)) for number, folder in enumerate(folders)]
    return [{"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]


def model_mounts(blueprint: Blueprint) -> list[Fields]:
    """The directories of checkpoint and adapters, at their own paths."""
    claim, folders = blueprint.containers.models_claim, blueprint.model_folders
    if not folders:
        return []
    if claim is None:
        return [
            _mount(f"model-{number}", str(folder), read_only=True) for number, folder in enumerate(folders)
        ]
    top = folders[0].parent
    for folder in folders:
        if not folder.is_relative_to(top):
            raise bad_field(
                blueprint,
                "model.adapters",
                f"{folder} is not in {top}, where the volume of containers.models_claim is",
            )
    return [_mount("models", str(top), read_only=True)]


def _sockets(blueprint: Blueprint) -> str:
    return str(blueprint.deployment.home / "pools")


def _mount(name: str, path: str, *, read_only: bool = False) -> Fields:
    """One entry of `volumeMounts`."""
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def _host_path(name: str, path: str) -> Fields:
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}
