"""A finding of `prfaas doctor`, and what it finds in files: the model and the key."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prfaas.core.deployment import Deployment
from prfaas.core.kv import ConfigError, model_from_directory
from prfaas.serving.engines.preparation import is_on_one_machine
from prfaas.serving.transport.ticket import KeyFileError, load_key


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    level: Literal["ok", "problem"]
    text: str
    """What was found."""
    mend: str | None = None
    """What to do about it; only for problems."""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(subject, "ok", text)


def problem(subject: str, text: str, mend: str) -> Finding:
    """Something needs mending."""
    return Finding(subject, "problem", text, mend)


def any_problem(findings: Sequence[Finding]) -> bool:
    """True if something needs mending."""
    return any(finding.level == "problem" for finding in findings)


def check_model(deployment: Deployment) -> Finding:
    """The checkpoint is there (or will be made) and its KVCache is understood."""
    model = deployment.model
    if model.tiny is not None and not model.path.exists():
        return ok("model", f"{model.tiny} will be made at {model.path} when the first engine starts")
    try:
        kv_model = model_from_directory(model.path, name=model.served_name)
    except ConfigError as error:
        mend = (
            f"prfaas model make {model.tiny}"
            if model.tiny is not None
            else f"set model.path in {deployment.path} to a checkpoint directory of a supported model"
        )
        return problem("model", str(error), mend)
    return ok("model", kv_model.describe())


def check_key(deployment: Deployment) -> Finding:
    """The key is there and private."""
    path = deployment.security.key_file
    if not path.exists() and is_on_one_machine(deployment):
        return ok("key", f"will be made at {path} when the first engine starts")
    try:
        load_key(path)
    except KeyFileError as error:
        if path.exists():
            mend = f"chmod 600 {path}, or remove it and make a new one with `prfaas key {deployment.path}`"
        else:
            mend = f"make it with `prfaas key {deployment.path}` and copy it to every machine"
        return problem("key", str(error), mend)
    return ok("key", f"{path} is private")
