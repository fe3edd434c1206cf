"""systemd units, as systemd reads them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from prfaas.core.shipped import example_path
from prfaas.tools.emit.blueprint import read_blueprint
from prfaas.tools.emit.unit import systemd_files
from prfaas.tools.emit.writing import write_files

PROGRAM = "/opt/prfaas/bin/prfaas"


def unit(files: dict[str, str], name: str) -> dict[str, list[str]]:
    """A unit's settings: every value of each name."""
    found: dict[str, list[str]] = {}
    for line in files[name].splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found.setdefault(key, []).append(value)
    return found


def emitted(path: Path) -> dict[str, str]:
    return {str(file.path): file.text for file in systemd_files(read_blueprint(path), PROGRAM)}


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed, which reads units"
)
@pytest.mark.parametrize("name", ["two-datacenters", "local"])
def test_systemd_finds_no_mistake(name: str, tmp_path: Path) -> None:
    write_files(tmp_path, systemd_files(read_blueprint(example_path(name)), sys.executable))
    for folder in {path.parent for path in tmp_path.rglob("*.service")}:
        units = sorted(str(path) for path in folder.iterdir() if path.suffix in (".service", ".target"))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *units],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed, which reads units"
)
def test_systemd_would_find_one(tmp_path: Path) -> None:
    text = emitted(example_path("two-datacenters"))["home/gateway/prfaas-gateway.service"]
    bad = tmp_path / "prfaas-gateway.service"
    bad.write_text(text.replace(PROGRAM, sys.executable).replace("KillMode=mixed", "KillMood=mixed"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(bad)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "KillMood" in done.stderr


def test_each_machine_has_its_own() -> None:
    names = set(emitted(example_path("two-datacenters")))
    assert {
        "east/192.0.2.10/prfaas-engine-east-0.service",
        "home/198.51.100.12/prfaas-engine-home-2.service",
        "home/gateway/prfaas-gateway.service",
        "home/gateway/prfaas/deployment.yaml",
    } <= names
    local = {name for name in emitted(example_path("local")) if name.endswith(".service")}
    assert local == {
        "prfaas-east/127.0.0.1/prfaas-engine-east-prefill-0.service",
        "prfaas-east/127.0.0.1/prfaas-pool-prfaas-east-pool.service",
        "home/127.0.0.1/prfaas-engine-home-prefill-0.service",
        "home/127.0.0.1/prfaas-engine-home-decode-0.service",
        "home/127.0.0.1/prfaas-pool-home-pool.service",
        "home/127.0.0.1/prfaas-gateway.service",
    }


def test_a_unit_waits_for_what_it_needs() -> None:
    files = emitted(example_path("two-datacenters"))
    home = "/var/lib/prfaas-gateway/two-datacenters"
    gateway = unit(files, "home/gateway/prfaas-gateway.service")
    assert gateway["AssertPathExists"] == [
        "/etc/prfaas/deployment.yaml",
        f"{home}/key",
        f"{home}/certificates/ca.crt",
        f"{home}/certificates/gateway.pem",
        f"{home}/certificates/tools.pem",
        f"{home}/admin-token",
    ]
    assert int(gateway["TimeoutStopSec"][0]) > 30, "requests that are open may go on for 30 s"
    assert gateway["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    local = emitted(example_path("local"))
    engine = unit(local, "home/127.0.0.1/prfaas-engine-home-decode-0.service")
    # On one machine key and certificates are made on first use.
    assert engine["AssertPathExists"] == ["/etc/prfaas/deployment.yaml"]
    assert engine["After"] == ["network-online.target prfaas-pool-home-pool.service"]
    assert "CUDA_VISIBLE_DEVICES" not in str(engine)


def test_an_engine_tells_all_gateways_before_it_ends() -> None:
    files = emitted(example_path("two-datacenters"))
    engine = unit(files, "home/198.51.100.12/prfaas-engine-home-2.service")
    said = f"-{PROGRAM} drain home-2 /etc/prfaas/deployment.yaml --as-engine --wait 30"
    # The dash: an engine that is away has nothing to say, and no unit fails for that.
    assert engine["ExecStop"] == [said]
    assert int(engine["TimeoutStopSec"][0]) > 2 * 30, "the command, and then vLLM's --shutdown-timeout"
    assert "ExecStop" not in unit(files, "home/gateway/prfaas-gateway.service")


def test_engines_of_one_machine_have_gpus_of_their_own(tmp_path: Path) -> None:
    fields = yaml.safe_load(example_path("two-datacenters").read_text())
    for number, instance in enumerate(fields["clusters"][1]["instances"]):
        instance |= {"host": "198.51.100.10", "http_port": 8100 + number, "kv_port": 8200 + 10 * number}
    fields["clusters"][1]["gpus_per_instance"] = 2
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(fields))
    files = emitted(path)
    visible = [
        unit(files, f"home/198.51.100.10/prfaas-engine-home-{number}.service")["Environment"][1]
        for number in range(3)
    ]
    assert visible == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "CUDA_VISIBLE_DEVICES=2,3",
        "CUDA_VISIBLE_DEVICES=4,5",
    ]


def test_a_model_in_a_persons_folder_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    text = example_path("two-datacenters").read_text()
    name = "east/192.0.2.10/prfaas-engine-east-0.service"
    path.write_text(text)
    assert unit(emitted(path), name)["ProtectHome"] == ["yes"]
    path.write_text(text.replace("/models/", "/home/someone/"))
    assert unit(emitted(path), name)["ProtectHome"] == ["read-only"]


def test_a_role_has_a_user_and_the_secrets_that_it_needs() -> None:
    files = emitted(example_path("two-datacenters"))
    folders = {"prfaas": "east/192.0.2.10", "prfaas-gateway": "home/gateway"}
    secrets = {
        user: set(re.findall(r"^install -m 0600 .*/(\S+)$", files[f"{folder}/install.sh"], re.MULTILINE))
        for user, folder in folders.items()
    }
    assert secrets == {
        "prfaas": {"key", "ca.crt", "east-0.pem"},
        "prfaas-gateway": {"key", "ca.crt", "gateway.pem", "tools.pem", "admin-token"},
    }
    for user, folder in folders.items():
        (service,) = (unit(files, name) for name in files if name.startswith(folder) and "service" in name)
        home = f"/var/lib/{user}"
        assert (service["User"], service["StateDirectory"]) == ([user], [user])
        assert f"PRFAAS_HOME={home} HOME={home}" in service["Environment"]
        script = files[f"{folder}/install.sh"]
        for path in service["AssertPathExists"][1:]:
            assert path.startswith(f"{home}/") and f"-o {user} -g {user} " in script and path in script
    # On one machine whoever needs the key first makes it, for all.
    local = emitted(example_path("local"))
    users = {unit(local, name)["User"][0] for name in local if name.endswith(".service")}
    assert users == {"prfaas"}
    assert "0600" not in local["home/127.0.0.1/install.sh"]


def test_pages_of_a_pool_outlive_its_unit_and_engines_reach_them() -> None:
    pool = unit(emitted(example_path("local")), "home/127.0.0.1/prfaas-pool-home-pool.service")
    assert pool["ExecStart"] == [f"{PROGRAM} pool start --keep-memory /etc/prfaas/deployment.yaml home-pool"]
    assert "PrivateDevices" not in pool and "PrivateIPC" not in pool


def test_a_pool_may_write_its_disk(tmp_path: Path) -> None:
    fields = yaml.safe_load(example_path("two-datacenters").read_text())
    fields["clusters"][1]["pool"] = {"memory": "1 GiB", "ssd": "1 GiB", "path": "/mnt/nvme", "kv_port": 8400}
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(fields))
    pool = unit(emitted(path), "home/198.51.100.11/prfaas-pool-home-pool-1.service")
    assert pool["ReadWritePaths"] == ["/mnt/nvme"]


def test_the_ports_of_a_machine() -> None:
    files = emitted(example_path("two-datacenters"))
    assert files["home/gateway/ports.txt"].splitlines()[1:] == [
        "8000/tcp  gateway http   clients",
        "8001/tcp  gateway admin  operators",
    ]
    assert (
        files["home/198.51.100.10/ports.txt"].splitlines()[2]
        == "8200-8207/tcp  home-0 kv    gateway, east-0 (192.0.2.10), east-1 (192.0.2.11), "
        "home-1 (198.51.100.11), home-2 (198.51.100.12)"
    )
