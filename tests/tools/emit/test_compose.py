"""Compose files, as Compose reads them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.core.deployment import DeploymentError
from prfaas.core.shipped import example_path
from prfaas.tools.emit.blueprint import read_blueprint
from prfaas.tools.emit.compose import compose_files
from prfaas.tools.emit.writing import write_files
from prfaas.tools.monitoring import dashboards

Fields = dict[str, Any]


def services(path: Path) -> Fields:
    """Of all machines, by name."""
    found: Fields = {}
    for file in compose_files(read_blueprint(path)):
        if file.path.name == "compose.yaml":
            found |= yaml.safe_load(file.text)["services"]
    return {name: service for name, service in found.items() if "profiles" not in service}


@pytest.mark.slow("asks programs of others, each a process")
@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not installed, which reads its files"
)
@pytest.mark.parametrize("name", ["two-datacenters", "local"])
def test_compose_finds_no_mistake(name: str, tmp_path: Path) -> None:
    write_files(tmp_path, compose_files(read_blueprint(example_path(name))))
    files = sorted(tmp_path.rglob("compose.yaml"))
    assert files
    for file in files:
        done = subprocess.run(
            ["docker-compose", "--file", str(file), "--profile", "monitoring", "config", "--quiet"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_machine_has_what_runs_there() -> None:
    by_folder = {
        str(file.path.parent): {
            name for name, each in yaml.safe_load(file.text)["services"].items() if "profiles" not in each
        }
        for file in compose_files(read_blueprint(example_path("local")))
        if file.path.name == "compose.yaml"
    }
    assert by_folder == {
        "prfaas-east/127.0.0.1": {"prfaas-east-pool", "east-prefill-0"},
        "home/127.0.0.1": {"home-pool", "home-prefill-0", "home-decode-0", "gateway"},
    }


def test_monitoring_stands_beside_the_gateway(tmp_path: Path) -> None:
    """What its services are told to read is mounted there, and Prometheus takes its own."""
    write_files(tmp_path, compose_files(read_blueprint(example_path("local"))))
    (folder,) = (path.parent for path in tmp_path.rglob("monitoring"))
    monitoring = {
        name: each
        for name, each in yaml.safe_load((folder / "compose.yaml").read_text())["services"].items()
        if each.get("profiles") == ["monitoring"]
    }
    assert set(monitoring) == {"prometheus", "grafana"}
    for service in monitoring.values():
        assert service["read_only"] and service["network_mode"] == "host"
        mounts = dict(each.split(":")[:2] for each in service["volumes"])
        mounted = mounts["./monitoring"]
        named = [
            *(word.partition("=")[2] for word in service.get("command") or ()),
            *service["environment"].values(),
        ]
        for path in (each for each in named if each.startswith(mounted)):
            assert (folder / "monitoring" / path.removeprefix(mounted + "/")).exists(), path
    below = folder / "monitoring"
    (provider,) = yaml.safe_load((below / "grafana/dashboards/prfaas.yaml").read_text())["providers"]
    shown = below / provider["options"]["path"].removeprefix("/etc/monitoring/")
    assert {path.name for path in shown.iterdir()} == {path.name for path in dashboards()}
    (source,) = yaml.safe_load((below / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert (
        f"--web.listen-address={source['url'].removeprefix('http://')}" in monitoring["prometheus"]["command"]
    )
    if shutil.which("promtool") is not None:
        checked = subprocess.run(
            ["promtool", "check", "config", str(below / "prometheus.yaml")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_gpus_are_divided_between_engines(tmp_path: Path) -> None:
    fields = yaml.safe_load(example_path("two-datacenters").read_text())
    for number, instance in enumerate(fields["clusters"][0]["instances"]):
        instance |= {"host": "192.0.2.10", "http_port": 8100 + number, "kv_port": 8200 + 10 * number}
        instance |= {"tensor_parallel": 4}
    for instance in fields["clusters"][1]["instances"]:
        instance["tensor_parallel"] = 4
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(fields))
    found = services(path)
    devices = [
        found[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("east-0", "east-1")
    ]
    assert devices == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    fields["containers"]["gpu_resource"] = "amd.com/gpu"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(DeploymentError, match=r"containers\.gpu_resource"):
        services(path)


def test_engines_and_their_pool_share_memory() -> None:
    found = services(example_path("local"))
    for name in ("home-pool", "home-decode-0"):
        assert "/dev/shm:/dev/shm" in found[name]["volumes"]
    assert found["home-decode-0"]["depends_on"] == ["home-pool"]
    alone = services(example_path("two-datacenters"))["home-0"]
    assert "/dev/shm:/dev/shm" not in alone["volumes"]
    assert alone["shm_size"]


def test_synthetic_engines_need_no_vllm() -> None:
    found = services(example_path("synthetic"))
    assert {service["image"] for service in found.values()} == {"prfaas-gateway"}
    assert "deploy" not in found["east-prefill-0"]


def test_health_is_asked_where_it_is_answered() -> None:
    found = services(example_path("two-datacenters"))
    assert "'http://198.51.100.10:8100/health'" in found["home-0"]["healthcheck"]["test"][-1]
    assert "/ready" in found["gateway"]["healthcheck"]["test"][-1]
    # It wants a certificate of who asks.
    assert "'https://192.0.2.10:8100/health'" in found["east-0"]["healthcheck"]["test"][-1]
    assert "/certificates/east-0.pem'" in found["east-0"]["healthcheck"]["test"][-1]
    for service in found.values():
        compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
