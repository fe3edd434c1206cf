"""What holds for everything that is emitted, whatever the deployment."""

import ipaddress
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from tests.tools.emit.random_files import blueprint_of, deployment_fields

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.deployment.peers import peers_of
from prfaas.core.shipped import example_path
from prfaas.tools.emit.blueprint import Blueprint, EmittedFile, read_blueprint
from prfaas.tools.emit.compose import compose_files
from prfaas.tools.emit.kubernetes import kubernetes_files
from prfaas.tools.emit.unit import systemd_files

PROGRAM = "/opt/prfaas/bin/prfaas"
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

Fields = dict[str, Any]


def made(fields: Fields) -> Blueprint:
    with tempfile.TemporaryDirectory() as folder:
        return blueprint_of(Path(folder), fields)


def objects_of(files: Sequence[EmittedFile]) -> list[Fields]:
    """Every Kubernetes object of some files."""
    return [
        each
        for file in files
        if file.path.suffix == ".yaml" and file.path.name != "kustomization.yaml"
        for each in yaml.load_all(file.text, Loader=yaml.CSafeLoader)
    ]


def wanted(deployment: Deployment) -> Counter[tuple[str, ...]]:
    """The commands that must run somewhere, each once."""
    commands = [("engine", instance.name) for instance in deployment.instances]
    commands += [("pool", pool.name) for pool in deployment.pools]
    return Counter([*commands, ("serve",)])


def short(words: Sequence[str]) -> tuple[str, ...]:
    """Without the file, and without what units of pools say beyond pods."""
    return tuple(
        word for word in words if word not in ("/etc/prfaas/deployment.yaml", "start", "--keep-memory")
    )


@given(deployment_fields())
@settings(max_examples=12)
def test_everything_runs_exactly_once(fields: Fields) -> None:
    blueprint = made(fields)
    units = [
        line.removeprefix(f"ExecStart={PROGRAM} ").split()
        for file in systemd_files(blueprint, PROGRAM)
        for line in file.text.splitlines()
        if line.startswith("ExecStart=")
    ]
    assert Counter(map(short, units)) == wanted(blueprint.deployment)
    pods = [
        container["args"]
        for each in objects_of(kubernetes_files(blueprint))
        if each["kind"] in ("StatefulSet", "Deployment")
        for container in each["spec"]["template"]["spec"]["containers"]
    ]
    assert Counter(map(short, pods)) == wanted(blueprint.deployment)
    services = [
        service["command"]
        for file in compose_files(blueprint)
        if file.path.name == "compose.yaml"
        for service in yaml.load(file.text, yaml.CSafeLoader)["services"].values()
        # Beside what is the deployment's.
        if service.get("profiles") != ["monitoring"]
    ]
    assert Counter(map(short, services)) == wanted(blueprint.deployment)


@given(deployment_fields())
@settings(max_examples=12)
def test_every_port_is_open_to_those_that_use_it(fields: Fields) -> None:
    """The ports and who connects are counted here anew, from the fields and from who sends KV to whom."""
    blueprint = made(fields)
    deployment = blueprint.deployment
    files = kubernetes_files(blueprint)
    policies = {
        (file.path.parent.name, each["metadata"]["name"]): each["spec"]
        for file in files
        for each in objects_of([file])
        if each["kind"] == "NetworkPolicy"
    }
    where: dict[str, tuple[str, str]] = {}
    for file in files:
        for each in objects_of([file]):
            if each["kind"] in ("StatefulSet", "Deployment"):
                for container in each["spec"]["template"]["spec"]["containers"]:
                    name = container["args"][-1] if container["name"] != "gateway" else "gateway"
                    where[name] = (file.path.parent.name, each["metadata"]["name"])

    def names(peers: list[Fields], site: str, member: str) -> bool:
        """Whether a site's policy means a member with one of these."""
        own_site, pod = where[member]
        label = {"podSelector": {"matchLabels": {"prfaas/member": pod}}}
        network = {"ipBlock": {"cidr": fields["containers"]["networks"][own_site][0]}}
        return (label if own_site == site else network) in peers

    def takes(target: str, port: int, source: str) -> bool:
        if where[source] == where[target]:
            return True
        rules = policies[where[target]]["ingress"]
        taken = any(
            port in {each["port"] for each in rule["ports"]}
            and ("from" not in rule or names(rule["from"], where[target][0], source))
            for rule in rules
        )
        spec = policies[where[source]]
        # The gateway may connect to anything.
        assert spec["policyTypes"] == ["Ingress"] + (["Egress"] if source != "gateway" else [])
        return taken and (
            source == "gateway"
            or any(
                port in {each["port"] for each in rule["ports"]}
                and names(rule["to"], where[source][0], target)
                for rule in spec["egress"]
            )
        )

    for instance in deployment.instances:
        ports = {instance.http_port, *instance.kv_ports}
        for port in ports:
            assert takes(instance.name, port, "gateway"), (instance.name, port)
        for peer in peers_of(deployment, instance):
            for port in peer.member.kv_ports:
                assert takes(peer.member.name, port, instance.name), (instance.name, peer.member.name)
    for pool in deployment.pools:
        assert takes(pool.name, pool.kv_port, "gateway"), pool.name
        for other in deployment.pools:
            linked = deployment.link(other.cluster, pool.cluster) is not None
            if other.name != pool.name and (linked or other.cluster == pool.cluster):
                assert takes(pool.name, pool.kv_port, other.name), (other.name, pool.name)
    assert takes("gateway", deployment.gateway.port, "gateway")


@given(deployment_fields())
@settings(max_examples=12)
def test_only_clients_come_from_anywhere(fields: Fields) -> None:
    for each in objects_of(kubernetes_files(made(fields))):
        if each["kind"] != "NetworkPolicy":
            continue
        for rule in each["spec"]["ingress"]:
            if "from" not in rule:
                assert each["metadata"]["name"] == "prfaas-gateway"
                assert [port["port"] for port in rule["ports"]] == [8000]
            else:
                assert rule["from"], "an empty list would let everybody in"


@given(deployment_fields())
@settings(max_examples=12)
def test_objects_fit_together(fields: Fields) -> None:
    blueprint = made(fields)
    files = kubernetes_files(blueprint)
    names: Counter[tuple[str, str, str]] = Counter()
    for file in files:
        for each in objects_of([file]):
            names[str(file.path.parent), each["kind"], each["metadata"]["name"]] += 1
            assert LABEL.fullmatch(each["metadata"]["name"])
            if each["kind"] in ("StatefulSet", "Deployment"):
                check_workload(each)
    assert max(names.values()) == 1
    for file in files:
        if file.path.name == "kustomization.yaml":
            beside = {each.path.name for each in files if each.path.parent == file.path.parent}
            listed = {name for name in yaml.safe_load(file.text)["resources"] if "/" not in name}
            assert listed == {name for name in beside if name.endswith(".yaml")} - {"kustomization.yaml"}


def check_workload(each: Fields) -> None:
    template = each["spec"]["template"]
    spec = template["spec"]
    selector = each["spec"]["selector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()
    volumes = Counter(volume["name"] for volume in spec["volumes"])
    assert max(volumes.values()) == 1
    ports = Counter(port["name"] for container in spec["containers"] for port in container["ports"])
    assert max(ports.values()) == 1
    assert all(len(name) <= 15 for name in ports)
    mounted = set()
    for container in (*spec["initContainers"], *spec["containers"]):
        places = Counter(mount["mountPath"] for mount in container["volumeMounts"])
        assert max(places.values()) == 1
        mounted |= {mount["name"] for mount in container["volumeMounts"]}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    claimed = {each["metadata"]["name"] for each in each["spec"].get("volumeClaimTemplates", ())}
    assert mounted == set(volumes) | claimed
    if spec.get("hostNetwork"):
        ipaddress.ip_address(spec["nodeSelector"]["prfaas/machine"])


@pytest.mark.parametrize("name", ["two-datacenters", "synthetic", "local"])
def test_the_same_bytes_for_the_same_file(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def once(home: str) -> list[EmittedFile]:
        monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / home))
        blueprint = read_blueprint(example_path(name))
        files = [*systemd_files(blueprint, PROGRAM), *compose_files(blueprint)]
        return files + (list(kubernetes_files(blueprint)) if name == "two-datacenters" else [])

    first = once("one")
    assert first == once("another")
    assert not any(str(tmp_path) in file.text for file in first)


def test_the_deployment_file_goes_along_unchanged() -> None:
    path = example_path("two-datacenters")
    blueprint = read_blueprint(path)
    for files in (systemd_files(blueprint, PROGRAM), compose_files(blueprint)):
        copies = [file for file in files if file.path.name == "deployment.yaml"]
        assert len(copies) == len(blueprint.places()) == 6
        assert {file.text for file in copies} == {path.read_text()}
    (config,) = (each for each in objects_of(kubernetes_files(blueprint)) if each["kind"] == "ConfigMap")
    assert config["data"] == {"deployment.yaml": path.read_text()}
    assert load_deployment(path).name == "two-datacenters"
