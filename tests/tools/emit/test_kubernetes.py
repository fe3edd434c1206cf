"""What Kubernetes itself says of the manifests, and what pods are told."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from tests.tools.emit.random_files import blueprint_of, deployment_fields
from tests.tools.emit.test_emitted import made, objects_of

from prfaas.core.deployment import DeploymentError
from prfaas.core.shipped import example_path
from prfaas.serving.secret_files import create_key, load_key, load_token
from prfaas.tools.emit.blueprint import read_blueprint
from prfaas.tools.emit.kubernetes import kubernetes_files
from prfaas.tools.emit.writing import write_files

EXAMPLE = example_path("two-datacenters")
OURS = {"PodMonitor", "HTTPRoute"}
"""Kinds of others, of the Prometheus operator and the Gateway API: their schemas are not part of Kubernetes."""

Fields = dict[str, Any]


def example(**changes: Any) -> Fields:
    fields = yaml.safe_load(EXAMPLE.read_text())
    assert isinstance(fields, dict)
    for key, value in changes.items():
        fields[key] = {**fields.get(key, {}), **value} if isinstance(value, dict) else value
    return fields


def objects(fields: Fields) -> dict[tuple[str, str], Fields]:
    """By kind and name, those of all sites."""
    return {
        (each["kind"], each["metadata"]["name"]): each for each in objects_of(kubernetes_files(made(fields)))
    }


def pod(fields: Fields, name: str) -> Fields:
    found = objects(fields)
    each = found.get(("StatefulSet", name)) or found["Deployment", name]
    spec = each["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_the_example_keeps_to_the_schemas(version: str) -> None:
    for each in objects(example()).values():
        if each["kind"] not in OURS:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.slow("asks programs of others, each a process")
@given(deployment_fields())
@settings(max_examples=5)
def test_whatever_is_emitted_keeps_to_the_schemas(fields: Fields) -> None:
    for each in objects_of(kubernetes_files(made(fields))):
        if each["kind"] not in OURS:
            kubernetes_validate.validate(each, "1.34", strict=True)


def test_the_schemas_see_mistakes() -> None:
    each = objects(example())["StatefulSet", "east-0"]
    each["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(each, "1.34", strict=True)


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed, which renders overlays"
)
@pytest.mark.parametrize("site", ["east", "home"])
def test_an_overlay_renders_to_what_its_site_needs(site: str, tmp_path: Path) -> None:
    files = kubernetes_files(read_blueprint(EXAMPLE))
    write_files(tmp_path, files)
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "overlays" / site)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rendered = list(yaml.safe_load_all(done.stdout))
    ours = objects_of([file for file in files if site in file.path.parts or "base" in file.path.parts])
    assert sorted((each["kind"], each["metadata"]["name"]) for each in rendered) == sorted(
        (each["kind"], each["metadata"]["name"]) for each in ours
    )
    assert {each["metadata"].get("namespace") for each in rendered} == {"prfaas", None}


def test_probes_ask_who_can_answer() -> None:
    gateway = pod(example(), "prfaas-gateway")["containers"][0]
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    # Where engines are away, its /health is 503: it must not be restarted for that.
    assert gateway["livenessProbe"]["tcpSocket"] == {"port": "http"}
    at_home = pod(example(), "home-0")["containers"][0]
    assert at_home["readinessProbe"]["httpGet"] == {
        "path": "/health",
        "port": "http",
        "host": "198.51.100.10",
    }
    assert at_home["startupProbe"]["periodSeconds"] * at_home["startupProbe"]["failureThreshold"] == 1200
    # It speaks TLS and wants a certificate: the pod asks with its own.
    east = pod(example(), "east-0")["containers"][0]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        code = east[name]["exec"]["command"][-1]
        assert "'https://192.0.2.10:8100/health'" in code and "/certificates/east-0.pem'" in code


def test_pods_run_on_the_machine_that_the_file_names() -> None:
    spec = pod(example(), "home-1")
    assert spec["nodeSelector"] == {"prfaas/machine": "198.51.100.11"}
    assert spec["hostNetwork"]
    assert "nodeSelector" not in pod(example(), "prfaas-gateway")


def test_gpus_are_those_of_the_file() -> None:
    assert pod(example(), "east-0")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    fields = example(containers={"gpu_resource": "amd.com/gpu"})
    fields["clusters"][0]["gpus_per_instance"] = 16
    limits = pod(fields, "east-0")["containers"][0]["resources"]["limits"]
    assert set(limits) == {"amd.com/gpu", "memory"} and limits["amd.com/gpu"] == 16
    fields["clusters"][0]["hardware"] = "cpu"
    fields["engine"] = {"kv_cache_gib": 1}
    assert pod(fields, "east-0")["containers"][0]["resources"]["limits"] == {}


def test_engines_with_nixl_reach_each_other_and_have_their_devices() -> None:
    fields = example(engine={"local_transfer": "nixl"}, containers={"rdma_resource": "rdma/hca"})
    for place in fields["clusters"]:
        for instance in place["instances"] if place["kind"] == "pd" else ():
            instance["nixl_port"] = 5600
    (engine,) = pod(fields, "home-0")["containers"]
    assert engine["resources"]["limits"].items() >= {"nvidia.com/gpu": 8, "rdma/hca": 1}.items()
    assert {"name": "nixl", "containerPort": 5600, "protocol": "TCP"} in engine["ports"]
    (far,) = pod(fields, "east-0")["containers"]
    assert "rdma/hca" not in far["resources"]["limits"]
    rules = objects(fields)["NetworkPolicy", "home-1"]["spec"]["ingress"]
    # UCX chooses its ports itself.
    (of_nixl,) = (rule for rule in rules if "ports" not in rule)
    assert [each for each in of_nixl["from"] if "podSelector" in each] == [
        {"podSelector": {"matchLabels": {"prfaas/member": f"home-{number}"}}} for number in (0, 2)
    ]


def test_roles_are_labels_of_llm_d() -> None:
    fields = example()
    fields["clusters"][1]["instances"][0]["roles"] = ["prefill", "decode"]
    found = objects(fields)
    roles = {
        name: each["spec"]["template"]["metadata"]["labels"].get("llm-d.ai/role")
        for (kind, name), each in found.items()
        if kind in ("StatefulSet", "Deployment")
    }
    assert roles == {
        "east-0": "prefill",
        "east-1": "prefill",
        "home-0": "prefill-decode",
        "home-1": "decode",
        "home-2": "decode",
        "prfaas-gateway": None,
    }


def test_pods_on_their_machines_network_are_known_by_its_address() -> None:
    rules = objects(example())["NetworkPolicy", "home-1"]["spec"]["ingress"]
    (kv,) = (rule for rule in rules if rule["ports"][0]["port"] == 8200)
    assert {"ipBlock": {"cidr": "198.51.100.12/32"}} in kv["from"]
    assert {"podSelector": {"matchLabels": {"prfaas/member": "home-2"}}} in kv["from"]
    assert {"podSelector": {"matchLabels": {"prfaas/member": "prfaas-gateway"}}} in kv["from"]


def test_secrets_come_to_lie_where_prfaas_takes_them(tmp_path: Path) -> None:
    """The script of the first container, with its folders moved."""
    (secrets,) = pod(example(), "prfaas-gateway")["initContainers"]
    shell, option, script = secrets["command"]
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    create_key(tmp_path / "key")
    for name, text in (
        ("key", (tmp_path / "key").read_text()),
        ("admin-token", "t" * 32),
        *((name, name) for name in ("ca.crt", "gateway.pem", "tools.pem")),
    ):
        (mounted / name).write_text(text)
        # As the kubelet leaves files of a Secret for a pod with a group of its own.
        (mounted / name).chmod(0o440)
    moved = script
    (tmp_path / "memory").mkdir()
    folders = {"/run/prfaas-secrets": mounted, "/run/prfaas-keys": tmp_path / "memory"}
    for place, own in {**folders, "/var/lib/prfaas": tmp_path / "state"}.items():
        moved = moved.replace(place, str(own))
    for _ in range(2):
        subprocess.run([shell, option, moved], check=True, timeout=60)
    home = tmp_path / "state" / "two-datacenters"
    assert load_key(home / "key")
    assert load_token(home / "admin-token") == "t" * 32
    files = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    certificates = {f"certificates/{name}" for name in ("ca.crt", "gateway.pem", "tools.pem")}
    assert files == {"key", "admin-token"} | certificates
    assert {path.stat().st_mode & 0o777 for path in home.rglob("*") if path.is_file()} == {0o600}
    assert all(
        path.is_symlink() and path.resolve().parent == tmp_path / "memory" for path in home.rglob("*.*")
    )


def test_several_gateways_share_an_etcd() -> None:
    assert objects(example())["Deployment", "prfaas-gateway"]["spec"]["replicas"] == 1
    fleet = {
        "etcd": ["https://etcd.example:2379"],
        "ca_file": "etcd/ca.crt",
        "certificate_file": "etcd/own.pem",
    }
    gateways = objects(example(fleet=fleet))["Deployment", "prfaas-gateway"]["spec"]
    assert gateways["replicas"] == 2
    spec = gateways["template"]["spec"]
    sources = next(volume for volume in spec["volumes"] if volume["name"] == "secrets")["projected"][
        "sources"
    ]
    assert {"prfaas-etcd-ca", "prfaas-etcd-client"} <= {each["secret"]["name"] for each in sources}
    script = spec["initContainers"][0]["command"][-1]
    assert "/run/prfaas-keys/etcd-client /var/lib/prfaas/two-datacenters/etcd/own.pem" in script
    named = objects(example(fleet={**fleet, "name": "one"}))["Deployment", "prfaas-gateway"]["spec"]
    assert named["replicas"] == 1


def test_engines_are_replaced_one_at_a_time() -> None:
    found = objects(example())
    assert found["StatefulSet", "east-0"]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    budget = found["PodDisruptionBudget", "home-engines"]["spec"]
    assert budget["maxUnavailable"] == 1
    labels = found["StatefulSet", "home-2"]["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_a_pool_shares_its_engines_machine() -> None:
    fields = example()
    fields["clusters"][1]["pool"] = {"memory": "1 GiB", "ssd": "4 GiB", "path": "/mnt/nvme", "kv_port": 8400}
    engine, pool = pod(fields, "home-1"), pod(fields, "home-pool-1")
    assert pool["nodeSelector"] == engine["nodeSelector"]
    for name, path in (("pools", "/var/lib/prfaas/two-datacenters/pools"), ("shared-memory", "/dev/shm")):
        volume = {"name": name, "hostPath": {"path": path, "type": "Directory"}}
        assert volume in engine["volumes"] and volume in pool["volumes"]
    assert {"name": "pool-disk", "mountPath": "/mnt/nvme"} in pool["containers"][0]["volumeMounts"]
    assert pool["containers"][0]["resources"]["requests"]["memory"] == str((1 << 30) + (256 << 20))


def test_a_pool_is_beside_an_engine_that_has_an_address_of_its_own() -> None:
    fields = example()
    fields["clusters"][1]["pool"] = {"memory": "1 GiB", "kv_port": 8400}
    for instance in fields["clusters"][1]["instances"]:
        instance["host"] = f"{instance['name']}.prfaas.svc"
    spec = pod(fields, "home-1")
    assert [container["args"][-1] for container in spec["containers"]] == ["home-1", "home-pool-1"]
    assert "hostNetwork" not in spec
    service = objects(fields)["Service", "home-1"]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert {"name": "pool-kv", "port": 8400, "protocol": "TCP"} in service["ports"]


def test_a_claim_replaces_folders_of_machines() -> None:
    fields = example(containers={"models_claim": "models"})
    spec = pod(fields, "east-0")
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    assert claim in spec["volumes"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]


def test_prometheus_shows_what_it_must() -> None:
    found = objects(example(containers={"pod_monitor": True}))
    (gateway,) = found["PodMonitor", "prfaas-gateway"]["spec"]["podMetricsEndpoints"]
    assert gateway["authorization"]["credentials"] == {"name": "prfaas-admin-token", "key": "admin-token"}
    (east,) = found["PodMonitor", "east-0"]["spec"]["podMetricsEndpoints"]
    assert east["scheme"] == "https" and east["tlsConfig"]["serverName"] == "east-0"
    (home,) = found["PodMonitor", "home-0"]["spec"]["podMetricsEndpoints"]
    assert "tlsConfig" not in home
    # The labels that dashboards choose by, as `prfaas monitoring scrape` gives them.
    labels = [
        {each["targetLabel"]: each["replacement"] for each in told["relabelings"]} for told in (gateway, east)
    ]
    name = example()["name"]
    assert labels == [
        {"deployment": name},
        {"deployment": name, "cluster": "east", "instance": "east-0"},
    ]
    without = objects(example())
    assert not any(kind == "PodMonitor" for kind, _ in without)
    fields = example(containers={"pod_monitor": True})
    fields["gateway"]["admin"] = {"port": 8001}
    assert ("PodMonitor", "prfaas-gateway") not in objects(fields)


def wrong_files() -> Iterator[tuple[str, Fields, str]]:
    loopback = example()
    loopback["gateway"] = {"host": "127.0.0.1", "port": 8000}
    yield "gateway on loopback", loopback, 'write "0.0.0.0"'
    named = example()
    named["clusters"][0]["instances"][0]["host"] = "somewhere.example"
    yield "a name that is no Service's", named, 'must begin with "east-0"'
    shared = example()
    for index in (0, 1):
        shared["clusters"][0]["instances"][index] |= {"host": "east-0.svc", "http_port": 8100 + index}
        shared["clusters"][0]["instances"][index] |= {"kv_port": 8200 + 8 * index}
    yield "two engines of one name", shared, "but a pod is one engine"
    unseen = example(containers={"networks": {}})
    yield (
        "a gateway whose address is not known",
        unseen,
        "containers.networks.home: is missing: from which addresses",
    )
    twice = example()
    twice["clusters"][0]["instances"][0]["name"] = "east_1"
    yield "two names in one", twice, 'are both "east-1" in Kubernetes'
    outside = example(security={"key_file": "/etc/keys/prfaas"})
    yield "a key elsewhere", outside, "security.key_file: /etc/keys/prfaas is outside the state directory"
    relative = example(model={"path": "models/qwen3-next"})
    yield "a model beside the file", relative, "model.path"
    long = example()
    long["clusters"][0]["instances"][0]["name"] = "e" * 53
    yield "a long name", long, "up to 52 characters"
    nowhere = example(containers={"networks": {"west": ["10.0.0.0/8"]}})
    yield "a network of no cluster", nowhere, 'there is no cluster "west"'
    wrong = example(containers={"networks": {"east": ["10.0.0.1/8"]}})
    yield "no block of addresses", wrong, "is no block of addresses"


@pytest.mark.parametrize(("fields", "said"), [pytest.param(*each[1:], id=each[0]) for each in wrong_files()])
def test_what_can_not_be_is_said_in_one_sentence(fields: Fields, said: str, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError) as raised:
        kubernetes_files(blueprint_of(tmp_path, fields))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_one_machine_alone_is_no_deployment_in_pods() -> None:
    with pytest.raises(DeploymentError, match="is one machine alone"):
        kubernetes_files(read_blueprint(example_path("synthetic")))


def test_profiles_lie_beside_the_file(tmp_path: Path) -> None:
    profile = "profiles/east.yaml"
    fields = example()
    fields["clusters"][0]["profile"] = profile
    (tmp_path / "profiles").mkdir()
    source = Path(__file__).parents[3] / "src/prfaas/core/latency/data/internal-1t-h200.yaml"
    (tmp_path / profile).write_text(source.read_text())
    found = objects_of(kubernetes_files(blueprint_of(tmp_path, fields)))
    (config,) = (each for each in found if each["kind"] == "ConfigMap")
    assert set(config["data"]) == {"deployment.yaml", "profiles..east.yaml"}
    (spec,) = (
        each["spec"]["template"]["spec"]
        for each in found
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "east-0"
    )
    (volume,) = (each for each in spec["volumes"] if each["name"] == "config")
    assert {"key": "profiles..east.yaml", "path": profile} in volume["configMap"]["items"]
