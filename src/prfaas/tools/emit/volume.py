"""What pods get from files: the deployment file, secrets and models. Where they mount it says `pod.yaml.jinja`."""

import shlex
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from prfaas.tools.emit.blueprint import CONFIG_DIR, CONFIG_FILE, STATE_DIR, USER_ID, Blueprint
from prfaas.tools.emit.pod_plan import PodPlan, bad_field, kubernetes_name

KEY_SECRET = "prfaas-key"
CA_SECRET = "prfaas-ca"
TOKEN_SECRET = "prfaas-admin-token"
CONFIG_MAP = "prfaas-deployment"

SECRETS_DIR = "/run/prfaas-secrets"
"""Where the script finds them."""

KEYS_DIR = "/run/prfaas-keys"
"""The memory that it copies them to."""


def secret_of(blueprint: Blueprint, member: str) -> str:
    """The name of the Secret with a member's certificate and private key."""
    return f"prfaas-identity-{kubernetes_name(blueprint, member)}"


def secret_name(blueprint: Blueprint, file: str) -> str:
    """The name of the Secret that has a file, whose name is also the key there."""
    shared = {"key": KEY_SECRET, "ca.crt": CA_SECRET, "admin-token": TOKEN_SECRET}
    shared |= {"etcd-ca": "prfaas-etcd-ca", "etcd-client": "prfaas-etcd-client"}
    return shared.get(file) or secret_of(blueprint, file.removesuffix(".pem"))


def placing_script(blueprint: Blueprint, plan: PodPlan) -> str:
    """Copies key and certificates into memory, and links them to where the deployment file says.

    Files of a Secret are readable for their group, which a key must not be.
    """
    placed = tuple(secret_files(blueprint, plan))
    folders = dict.fromkeys(shlex.quote(str(target.parent)) for _, target in placed)
    lines = ["set -eu", "umask 077", f"mkdir -p {' '.join(folders)}"]
    for source, target in placed:
        lines.append(f"install -m 0600 {SECRETS_DIR}/{source} {KEYS_DIR}/{source}")
        lines.append(f"ln -sfn {KEYS_DIR}/{source} {shlex.quote(str(target))}")
    return "\n".join(lines) + "\n"


def secret_files(blueprint: Blueprint, plan: PodPlan) -> Iterator[tuple[str, Path]]:
    """Each secret file of a pod: its name among the mounted ones, and where it goes.

    Raises:
        DeploymentError: it would not lie in the state directory, which is all that a pod can write.
    """
    for field, name, target in blueprint.secrets(plan.identities):
        if not target.is_relative_to(STATE_DIR):
            raise bad_field(
                blueprint, field, f"{target} is outside the state directory; give a path relative to it"
            )
        yield name, target


def pod_values(blueprint: Blueprint) -> dict[str, Any]:
    """What every template of a pod is told: the settings, and what pods get from the deployment file."""
    return {
        "settings": blueprint.containers,
        "config_map": CONFIG_MAP,
        "config_keys": config_keys(blueprint),
        "config_hash": sha256(repr(sorted(blueprint.documents.items())).encode()).hexdigest()[:16],
        "config_dir": CONFIG_DIR,
        "config_file": CONFIG_FILE,
        "state_dir": STATE_DIR,
        "hub_folder": hub_folder(blueprint),
        "user": USER_ID,
    }


def config_keys(blueprint: Blueprint) -> dict[str, str]:
    """The ConfigMap's key of each document: a key has no "/"."""
    return {path: path.replace("/", "..") for path in blueprint.documents}


def hub_folder(blueprint: Blueprint) -> str | None:
    """Where a model of the hub lies in engines if one Job fetches it into the claim; None: each pod fetches its own."""
    source = blueprint.deployment.model.source
    if source is None or source.kind != "hub" or blueprint.containers.models_claim is None:
        return None
    return str(source.directory(Path(STATE_DIR), blueprint.deployment.name).parent)


def model_places(blueprint: Blueprint) -> dict[str, str]:
    """The directories of checkpoint and adapters, at their own paths, by the volume that has them."""
    claim, folders = blueprint.containers.models_claim, blueprint.model_folders
    if claim is None or not folders:
        return {f"model-{number}": str(folder) for number, folder in enumerate(folders)}
    top = folders[0].parent
    for folder in folders:
        if not folder.is_relative_to(top):
            raise bad_field(
                blueprint,
                "model.adapters",
                f"{folder} is not in {top}, where the volume of containers.models_claim is",
            )
    return {"models": str(top)}
