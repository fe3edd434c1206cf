"""What a reviewer of Kubernetes manifests looks for, each with the reason."""

import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from tests.tools.emit.random_files import blueprint_of
from tests.tools.emit.test_emitted import made, objects_of
from tests.tools.emit.test_kubernetes import OURS, Fields, example, objects, pod

from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.core.shipped import example_path
from prfaas.serving.certificates import CertificateFolder
from prfaas.tools.emit.health import health_code
from prfaas.tools.emit.kubernetes import kubernetes_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def settled() -> Fields:
    """The example with every setting of `containers`, a model of the hub, and pools in pods of their own address."""
    ours = {"cpus": 2.5, "memory": "96 GiB", "disk": "20 GiB", "priority_class": "serving", "env": {"A": "1"}}
    ours |= {
        "node_selector": {"pool": "gpu"},
        "tolerations": ["nvidia.com/gpu:NoSchedule", "team=llm", "spot"],
    }
    fields = example(
        containers={
            "gateway_image": "registry.example/llm/prfaas-gateway:1.0",
            "engine_image": "registry.example/llm/prfaas-engine@sha256:" + "0" * 64,
            "pull_secrets": ["pull"],
            "models_claim": "models",
            "models_storage": "500 GiB",
            "storage_class": "fast",
            "hub_token_secret": "hub",
            "pod_monitor": True,
            "engine_pod": ours,
            "pool_pod": ours,
            "gateway_pod": ours,
            "hostnames": ["llm.example"],
            "route_parent": "edge/public",
            "ingress_class": "nginx",
            "ingress_tls_secret": "llm-tls",
        },
        model={"hub": "Qwen/Qwen3-Next-80B-A3B-Instruct", "revision": COMMIT},
    )
    del fields["model"]["path"]
    fields["clusters"][1]["pool"] = {"memory": "1 GiB", "ssd": "4 TiB", "path": "/mnt/nvme", "kv_port": 8400}
    for instance in fields["clusters"][1]["instances"]:
        instance["host"] = f"{instance['name']}.prfaas.svc"
    return fields


def workloads(fields: Fields) -> Iterator[Fields]:
    for (kind, _), each in objects(fields).items():
        if kind in ("StatefulSet", "Deployment", "Job"):
            yield each


def volumes(spec: Fields) -> dict[str, Fields]:
    return {volume["name"]: volume for volume in spec["volumes"]}


def test_every_setting_keeps_to_the_schemas() -> None:
    found = objects(settled())
    assert {"Job", "PersistentVolumeClaim", "Ingress", "HTTPRoute"} <= {kind for kind, _ in found}
    for each in found.values():
        if each["kind"] not in OURS:
            kubernetes_validate.validate(each, "1.34", strict=True)


@pytest.mark.parametrize("fields", [example(), settled()], ids=["example", "settled"])
def test_every_container_says_what_it_needs(fields: Fields) -> None:
    """Without requests a pod is placed where there is no room, and is the first to go when memory ends."""
    for each in workloads(fields):
        spec = each["spec"]["template"]["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert set(container["resources"]["requests"]) == {"cpu", "memory", "ephemeral-storage"}
            assert "memory" in container["resources"]["limits"]
            # A limit of CPUs slows what would not be in anyone's way.
            assert "cpu" not in container["resources"]["limits"]


@pytest.mark.parametrize("fields", [example(), settled()], ids=["example", "settled"])
def test_memory_volumes_are_bounded(fields: Fields) -> None:
    """One that is not can take all the memory of its node."""
    for each in workloads(fields):
        for volume in each["spec"]["template"]["spec"]["volumes"]:
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                assert "sizeLimit" in volume["emptyDir"]


def test_resources_are_those_of_the_file() -> None:
    (engine, pool) = pod(settled(), "home-1")["containers"]
    for container in (engine, pool):
        told = {"memory": str(96 << 30), "ephemeral-storage": str(20 << 30)}
        assert container["resources"]["requests"] == {"cpu": "2.5", **told}
        assert told.items() <= container["resources"]["limits"].items()
        assert {"name": "A", "value": "1"} in container["env"]


def test_pages_of_a_pool_are_on_a_claim() -> None:
    """4 TiB on a node's root disk would evict all its pods."""
    (claim,) = objects(settled())["StatefulSet", "home-1"]["spec"]["volumeClaimTemplates"]
    assert int(claim["spec"]["resources"]["requests"]["storage"]) >= 4 << 40
    assert claim["spec"]["storageClassName"] == "fast"
    mounts = pod(settled(), "home-1")["containers"][1]["volumeMounts"]
    assert {"name": claim["metadata"]["name"], "mountPath": "/mnt/nvme"} in mounts


def test_a_pool_without_a_folder_of_an_ssd_is_refused(tmp_path: Path) -> None:
    fields = example()
    fields["clusters"][1]["pool"] = {"memory": "1 GiB", "ssd": "4 TiB", "kv_port": 8400}
    with pytest.raises(DeploymentError, match=r"clusters\.home\.pool\.path: is missing"):
        kubernetes_files(blueprint_of(tmp_path, fields))


def test_images_that_nodes_do_not_find_are_told() -> None:
    """A name alone is looked for at a public registry, and without a version it is another one next week."""
    assert not list(made(settled()).containers.image_notices())
    gateway, engine = made(example()).containers.image_notices()
    assert gateway.startswith('containers.gateway_image: "prfaas-gateway" names no registry and no version;')
    assert engine.startswith("containers.engine_image")
    for image, lacks in (("registry:5000/prfaas", "names no version"), ("prfaas:1.0", "names no registry;")):
        changed = made(example(containers={"gateway_image": image})).containers
        assert lacks in next(changed.image_notices())


def test_one_job_fetches_a_model_of_the_hub() -> None:
    """Each engine would fetch hundreds of gigabytes to its node's disk again whenever it starts."""
    found = objects(settled())
    (job,) = (each for (kind, _), each in found.items() if kind == "Job")
    spec = job["spec"]["template"]["spec"]
    (fetch,) = spec["containers"]
    assert fetch["args"] == ["model", "fetch", "/etc/prfaas/deployment.yaml"]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert token in fetch["env"]
    folder = "/var/lib/prfaas/two-datacenters/hub"
    assert {"name": "HF_HOME", "value": f"{folder}/.cache"} in fetch["env"]
    assert {"name": "hub", "mountPath": folder} in fetch["volumeMounts"]
    engine = pod(settled(), "east-0")["containers"][0]
    assert {"name": "hub", "mountPath": folder, "readOnly": True} in engine["volumeMounts"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine["env"] and token not in engine["env"]
    assert found["PersistentVolumeClaim", "models"]["spec"]["resources"]["requests"]["storage"] == str(
        500 << 30
    )


def test_a_gateway_needs_no_checkpoint_of_the_hub() -> None:
    """It reads a configuration and a tokenizer, which it fetches; so it runs on any node."""
    spec = pod(settled(), "prfaas-gateway")
    assert not {"hub", "models"} & set(volumes(spec))
    assert any(each["name"] == "HF_TOKEN" for each in spec["containers"][0]["env"])


def test_private_keys_are_on_no_disk() -> None:
    for each in workloads(example()):
        spec = each["spec"]["template"]["spec"]
        assert volumes(spec)["keys"]["emptyDir"]["medium"] == "Memory"
        written = {mount["mountPath"] for mount in spec["initContainers"][0]["volumeMounts"]}
        assert "/run/prfaas-keys" in written


def test_pods_run_where_the_file_says() -> None:
    """Nodes with GPUs have taints, and a registry of one's own asks who pulls."""
    for name in ("east-0", "home-1", "prfaas-gateway"):
        spec = pod(settled(), name)
        assert spec["nodeSelector"].items() >= {"pool": "gpu"}.items()
        assert spec["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "llm"},
            {"key": "spot", "operator": "Exists"},
        ]
        assert spec["priorityClassName"] == "serving"
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert pod(settled(), "east-0")["nodeSelector"]["prfaas/machine"] == "192.0.2.10"


def test_a_changed_file_shows_at_its_pods() -> None:
    """The gateway rolls; engines, which are replaced by hand, are seen to be older than the file."""

    def told(fields: Fields) -> set[str]:
        templates = [each["spec"]["template"]["metadata"] for each in workloads(fields)]
        return {each["annotations"]["prfaas/config"] for each in templates if "annotations" in each}

    first, second = told(example()), told(example(routing={"threshold_tokens": 4321}))
    assert len(first) == len(second) == 1 and first != second


def test_kinds_that_a_cluster_may_not_have_are_asked_for() -> None:
    """`kubectl apply` refuses all of a site where one kind is not known."""
    assert not {"PodMonitor", "HTTPRoute", "Ingress"} & {kind for kind, _ in objects(example())}


def test_clients_outside_reach_the_gateway() -> None:
    found = objects(settled())
    route = found["HTTPRoute", "prfaas-gateway"]["spec"]
    assert route["parentRefs"] == [{"namespace": "edge", "name": "public"}]
    assert route["hostnames"] == ["llm.example"]
    assert route["rules"] == [
        {"backendRefs": [{"name": "prfaas-gateway", "port": 8000}], "timeouts": {"request": "0s"}}
    ]
    ingress = found["Ingress", "prfaas-gateway"]
    assert ingress["spec"]["tls"] == [{"secretName": "llm-tls", "hosts": ["llm.example"]}]
    # A proxy that holds answers back would make streams of one piece.
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


def test_engines_reach_nobody_else() -> None:
    """Who takes an engine over gets nowhere from there."""
    policy = objects(example())["NetworkPolicy", "east-0"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    names, *others = policy["egress"]
    assert [port["port"] for port in names["ports"]] == [53, 53]
    assert others and all(rule["to"] and rule["ports"] for rule in others)
    assert {port["port"] for rule in others for port in rule["ports"]} == set(range(8200, 8208))
    # Without a claim each engine fetches the model itself, and engines fetch media only if the file has domains.
    fields = settled()
    del fields["containers"]["models_claim"], fields["containers"]["models_storage"]
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} in objects(fields)["NetworkPolicy", "east-0"][
        "spec"
    ]["egress"]
    assert not any(
        "to" not in rule for rule in objects(settled())["NetworkPolicy", "east-0"]["spec"]["egress"]
    )


def test_a_gateway_serves_until_no_node_sends_it_any() -> None:
    """A pod's end is known to it before it is known to all nodes."""
    spec = pod(example(), "prfaas-gateway")
    (command,) = (each["lifecycle"]["preStop"]["exec"]["command"] for each in spec["containers"])
    assert command[0] == "sleep"
    assert spec["terminationGracePeriodSeconds"] >= 30 + int(command[1])


def test_an_engine_tells_all_gateways_before_it_ends() -> None:
    """Requests would be sent to it until its port refuses."""
    fields = example()
    fields.setdefault("engine", {})["shutdown_timeout_s"] = 90
    spec = pod(fields, "east-0")
    (command,) = (each["lifecycle"]["preStop"]["exec"]["command"] for each in spec["containers"])
    assert command[:3] == ["prfaas", "drain", "east-0"] and command[-3:] == ["--as-engine", "--wait", "90"]
    # Its grace begins with the hook.
    assert spec["terminationGracePeriodSeconds"] > 2 * 90


@contextmanager
def engine_with_tls(own: Path, authority: Path, *, hangs: bool) -> Iterator[int]:
    """A server that wants a certificate of who asks; one that hangs still listens."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if hangs:
                ended.wait(30)
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("hangs", [False, True], ids=["well", "hung"])
@pytest.mark.slow("starts processes")
def test_a_probe_sees_an_engine_with_tls_that_hangs(hangs: bool, tmp_path: Path) -> None:
    """It listens on for as long as it hangs, so that a connection alone proves nothing."""
    deployment = load_deployment(example_path("two-datacenters"), state_dir=tmp_path)
    CertificateFolder(deployment).make()
    own = deployment.security.identity_file("east-0")
    with engine_with_tls(own, deployment.security.ca_file, hangs=hangs) as port:
        instance = replace(deployment.instance("east-0"), host="127.0.0.1", http_port=port)
        code = health_code(deployment, instance)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) is not hangs, done.stderr.decode()


def test_random_objects_stay_unlike() -> None:
    """The settings bring no object twice."""
    names = [
        (each["kind"], each["metadata"]["name"]) for each in objects_of(kubernetes_files(made(settled())))
    ]
    assert len(names) == len(set(names))
