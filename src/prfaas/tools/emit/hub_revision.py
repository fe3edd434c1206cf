"""The commit of a model of the hub, written into the deployment file that all machines get.

Each machine asks the hub by itself. A branch may move between two of them, and their engines would refuse each other.
"""

from pathlib import Path

import yaml

from prfaas.core.deployment import Deployment, DeploymentError, ModelSource, default_state_dir, is_loopback


def with_hub_revision(deployment: Deployment, text: str) -> str:
    """The deployment file with the commit that this machine has for the model; other models' files as they are.

    Raises:
        DeploymentError: the file names a branch or a tag, and this machine has not pinned it.
    """
    source = deployment.model.source
    if source is None or source.kind != "hub" or all(is_loopback(each.host) for each in deployment.instances):
        return text
    return _written(text, _commit(deployment, source))


def _commit(deployment: Deployment, source: ModelSource) -> str:
    if source.is_commit:
        assert source.revision is not None
        return source.revision
    pin = source.directory(default_state_dir(), deployment.name)
    if not pin.is_symlink():
        raise DeploymentError(
            deployment.path,
            None,
            "model.revision",
            f"is no commit, and {source.name} may move between two machines; pin it here first: "
            f"prfaas model fetch {deployment.path} --no-weights",
        )
    return Path(pin.readlink()).name


def _written(text: str, commit: str) -> str:
    """`text` with the commit in place of `model.revision`, or behind `model.hub`; comments and order stay."""
    model = _field(yaml.compose(text, yaml.CSafeLoader), "model")
    revision = _field(model, "revision")
    if revision is not None:
        return f"{text[: revision.start_mark.index]}{commit}{text[revision.end_mark.index :]}"
    hub = _field(model, "hub")
    assert isinstance(model, yaml.MappingNode) and hub is not None
    before = ", " if model.flow_style else "\n" + " " * model.start_mark.column
    return f"{text[: hub.end_mark.index]}{before}revision: {commit}{text[hub.end_mark.index :]}"


def _field(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """What a mapping has under a key."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for key, value in pairs if key.value == name), None)
