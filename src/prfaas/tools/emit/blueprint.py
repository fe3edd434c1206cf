"""Blueprints that files are emitted from, and the emitted files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import yaml

from prfaas.core.bounded_file import WRITTEN_BYTES, file_text
from prfaas.core.deployment import (
    CERTIFICATE_NAMES,
    GATEWAY,
    Deployment,
    DeploymentError,
    Instance,
    ModelSource,
    PoolNode,
    default_state_dir,
    is_loopback,
    load_deployment,
)
from prfaas.tools.emit.containers import ContainerSettings, load_containers
from prfaas.tools.emit.site import Machine, Site, sites_of

STATE_DIR = "/var/lib/prfaas"
"""`$PRFAAS_HOME` wherever something emitted runs."""

CONFIG_DIR = "/etc/prfaas"

CONFIG_FILE = f"{CONFIG_DIR}/deployment.yaml"
"""Where the deployment file lies wherever something emitted runs."""

USER_ID = 10001
"""The user of both container images; `containers/` makes it."""

READY_S = 1200
"""An engine may take so long to start, as with `prfaas up`."""

GATEWAY_STOP_S = 45
"""The gateway's own time to let requests end, and some seconds more."""

POOL_STOP_S = 60
END_S = 15
"""An engine's end takes so long once nothing runs there."""

WILDCARDS = ("0.0.0.0", "::")
_GATEWAY_FOLDER = "gateway"


@dataclass(frozen=True, slots=True)
class EmittedFile:
    """A file to write: where, below the folder that was asked for, and its text."""

    path: PurePosixPath
    text: str
    is_script: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """One machine of a site, with the folder that gets its files."""

    site: Site
    machine: Machine | None
    """None: a machine for the gateway alone, wherever its address is."""
    has_gateway: bool
    folder: PurePosixPath

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The engines that run there, in the order of the file."""
        return () if self.machine is None else self.machine.instances

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all that runs there and may need a certificate."""
        pool = () if self.machine is None or self.machine.pool is None else (self.machine.pool.name,)
        return (
            *(instance.name for instance in self.instances),
            *pool,
            *(CERTIFICATE_NAMES if self.has_gateway else ()),
        )


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a machine, as whatever emitted starts it."""

    kind: Literal["engine", "pool", "gateway"]
    name: str
    """Of the instance or pool, or "gateway"."""
    image: str
    args: tuple[str, ...]
    """Of `prfaas`."""
    members: tuple[str, ...]
    """The names of the certificates that it may need."""
    gpus: int = 0
    disk: Path | None = None
    """A folder outside the state directory that a pool writes into; below it the daemon makes its own."""
    stop_s: int = POOL_STOP_S
    """Seconds that it gets to end."""
    before_stop: tuple[str, ...] = ()
    """Arguments of `prfaas`: what is run on its machine before it is told to end."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A deployment as it will lie on its machines, with the files that go there unchanged."""

    deployment: Deployment
    """Its state directory is that of the machines, not of this one."""
    containers: ContainerSettings
    documents: Mapping[str, str]
    """Text by path below `CONFIG_DIR`: the deployment file and what it names beside itself."""

    @property
    def is_on_one_machine(self) -> bool:
        """True if key and certificates are made where they are needed, on first use."""
        return all(is_loopback(instance.host) for instance in self.deployment.instances)

    @property
    def model_folders(self) -> tuple[Path, ...]:
        """The directories of checkpoint and adapters; no checkpoint's where prfaas makes or fetches the model."""
        model = self.deployment.model
        own = (model.path,) if model.source is None else ()
        return (*own, *model.adapters.values())

    def secrets(self, members: Sequence[str]) -> Iterator[tuple[str, str, Path]]:
        """The secret files of these members: the field that says where each lies, its name among them, and its path."""
        deployment, security = self.deployment, self.deployment.security
        yield "security.key_file", "key", security.key_file
        needing = [name for name in members if deployment.needs_certificate(name)]
        if needing:
            yield "security.certificates", "ca.crt", security.ca_file
        for name in needing:
            file = security.identity_file(name)
            yield "security.certificates", file.name, file
        if GATEWAY not in members:
            return
        if deployment.gateway.admin.token_file is not None:
            yield "gateway.admin.token_file", "admin-token", deployment.gateway.admin.token_file
        fleet = deployment.fleet
        if fleet is not None:
            for name, path in (("etcd-ca", fleet.ca_file), ("etcd-client", fleet.certificate_file)):
                if path is not None:
                    yield "fleet", name, path

    def placed(self, name: str) -> Instance | PoolNode:
        """An instance or a pool by name.

        Raises:
            DeploymentError: there is neither.
        """
        pools = {pool.name: pool for pool in self.deployment.pools}
        return pools.get(name) or self.deployment.instance(name)

    def processes(self, place: Place) -> Iterator[Process]:
        """All that runs on a machine, in the order in which it starts."""
        if place.machine is not None and place.machine.pool is not None:
            yield self.pool(place.machine.pool)
        yield from map(self.engine, place.instances)
        if place.has_gateway:
            yield self.gateway()

    def engine(self, instance: Instance) -> Process:
        """The process of an instance; its GPUs are the cluster's `gpus_per_instance`, else its ranks."""
        timeout_s = self.deployment.engine.shutdown_timeout_s
        return Process(
            "engine",
            instance.name,
            self.containers.gateway_image if instance.is_stand_in else self.containers.engine_image,
            ("engine", CONFIG_FILE, instance.name),
            (instance.name,),
            gpus=self.containers.gpus.get(instance.cluster, instance.gpus),
            # What is left when both times are over goes on at another engine.
            stop_s=2 * timeout_s + END_S,
            before_stop=("drain", instance.name, CONFIG_FILE, "--as-engine", "--wait", str(timeout_s)),
        )

    def pool(self, pool: PoolNode) -> Process:
        """The daemon of a pool."""
        args, disk = ("pool", CONFIG_FILE, pool.name), pool.path.parents[1]
        own = None if disk.is_relative_to(STATE_DIR) else disk
        return Process("pool", pool.name, self.containers.gateway_image, args, (pool.name,), disk=own)

    def gateway(self) -> Process:
        """The gateway."""
        image, args = self.containers.gateway_image, ("serve", CONFIG_FILE)
        return Process("gateway", GATEWAY, image, args, tuple(CERTIFICATE_NAMES), stop_s=GATEWAY_STOP_S)

    def places(self) -> tuple[Place, ...]:
        """Every machine of every site; and one for the gateway where its address names none of them."""
        return tuple(place for site in sites_of(self.deployment) for place in self._places_of(site))

    def _places_of(self, site: Site) -> Sequence[Place]:
        host = self.deployment.gateway.host
        found = [
            Place(
                site,
                machine,
                site.has_gateway and _same_machine(host, machine.host),
                PurePosixPath(site.name, machine.host.replace(":", "-")),
            )
            for machine in site.machines
        ]
        if site.has_gateway and not any(place.has_gateway for place in found):
            found.append(Place(site, None, True, PurePosixPath(site.name, _GATEWAY_FOLDER)))
        return found


def read_blueprint(path: Path) -> Blueprint:
    """Read a deployment file to emit from it.

    Raises:
        DeploymentError: the file can't be used, or it names a file that isn't there.
    """
    deployment = load_deployment(path, state_dir=Path(STATE_DIR))
    containers = load_containers(path)
    text = _with_hub_revision(deployment, file_text(path, WRITTEN_BYTES))
    documents = {PurePosixPath(CONFIG_FILE).name: text}
    for companion in containers.companions:
        try:
            documents[str(companion)] = file_text(path.parent / companion, WRITTEN_BYTES)
        except OSError as error:
            raise DeploymentError(path, None, "", f"{companion} can't be read ({error.strerror})") from error
    return Blueprint(deployment, containers, documents)


def _same_machine(one: str, other: str) -> bool:
    return one == other or (is_loopback(one) and is_loopback(other))


def _with_hub_revision(deployment: Deployment, text: str) -> str:
    """The deployment file with the commit that this machine has for a model of the hub.

    Each machine asks the hub by itself. A branch may move between two of them, and their engines would refuse each
    other. Files of other models stay as they are.

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
