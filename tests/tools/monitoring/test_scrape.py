"""Where Prometheus is sent: every address of the deployment once, with its names; and Prometheus takes it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.tools.monitoring.scrape import scrape_configs, scrape_yaml

FILE = """
name: sites
model: {served_name: m, path: m, max_model_len: 1000}
clusters:
  - name: far
    kind: prfaas
    hardware: h200
    instances: [{name: far-0, roles: [prefill], host: 10.0.0.1, http_port: 8100, kv_port: 8200}]
  - name: home
    kind: pd
    hardware: h20
    instances:
      - {name: home-0, roles: [decode], host: "fd00::1", http_port: 8101, kv_port: 8201}
      - {name: home-1, roles: [prefill], host: "fd00::1", http_port: 8102, kv_port: 8202}
links:
  - {source: far, target: home, bandwidth: 1 Gbit/s}
gateway: {host: 10.0.0.9, port: 8000, admin: {host: 10.0.0.9, port: 9001, token_file: admin.token}}
"""


def deployment_at(folder: Path, text: str = FILE) -> Deployment:
    path = folder / "sites.yaml"
    path.write_text(text)
    return load_deployment(path, state_dir=folder / "state")


def targets(document: dict[str, Any]) -> dict[str, tuple[str, dict[str, str]]]:
    """Address → job and labels."""
    return {
        target: (job["job_name"], static["labels"])
        for job in document["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }


def test_every_address_is_a_target_with_its_names(tmp_path: Path) -> None:
    found = targets(scrape_configs(deployment_at(tmp_path)))
    assert {address: labels.get("instance") for address, (_, labels) in found.items()} == {
        "10.0.0.9:9001": None,
        "10.0.0.1:8100": "far-0",
        "[fd00::1]:8101": "home-0",
        "[fd00::1]:8102": "home-1",
    }
    assert found["[fd00::1]:8101"][1]["cluster"] == "home"
    assert {labels["deployment"] for _, labels in found.values()} == {"sites"}


def test_the_token_goes_to_the_gateway_only(tmp_path: Path) -> None:
    deployment = deployment_at(tmp_path)
    jobs = scrape_configs(deployment)["scrape_configs"]
    sent = {job["job_name"]: job.get("authorization", {}).get("credentials_file") for job in jobs}
    assert sent.pop("prfaas-gateway") == str(deployment.gateway.admin.token_file)
    assert set(sent.values()) == {None}


def test_engines_with_tls_are_asked_with_the_tools_certificate(tmp_path: Path) -> None:
    deployment = deployment_at(tmp_path)
    jobs = {job["job_name"]: job for job in scrape_configs(deployment)["scrape_configs"]}
    encrypted = {each.name for each in deployment.instances if each.tls}
    assert encrypted
    assert {
        static["labels"]["instance"] for static in jobs["prfaas-engines-tls"]["static_configs"]
    } == encrypted
    assert jobs["prfaas-engines-tls"]["scheme"] == "https"
    assert jobs["prfaas-engines-tls"]["tls_config"]["cert_file"].endswith("tools.pem")


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not there: Debian's package prometheus has it"
)
def test_prometheus_takes_it(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yaml").write_text(scrape_yaml(deployment_at(tmp_path)))
    command = ["promtool", "check", "config", "--syntax-only", "prometheus.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_file_is_what_the_document_says(tmp_path: Path) -> None:
    deployment = deployment_at(tmp_path)
    assert yaml.safe_load(scrape_yaml(deployment)) == scrape_configs(deployment)
