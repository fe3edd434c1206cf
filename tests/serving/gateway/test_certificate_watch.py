"""What `GET /metrics` says of certificates: those that are on this machine, as they are now."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving import issuing
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.gateway import server
from prfaas.serving.gateway.server import watch_certificates
from prfaas.serving.running_deployment import RunningDeployment

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
    instances: [{name: home-0, roles: [decode], host: 10.0.0.1, http_port: 8101, kv_port: 8201}]
links:
  - {source: far, target: home, bandwidth: 1 Gbit/s}
"""
FILES = {"far-0.pem", "home-0.pem", "gateway.pem", "tools.pem", "ca.crt"}


def deployment_at(folder: Path) -> Deployment:
    path = folder / "sites.yaml"
    path.write_text(FILE)
    return load_deployment(path, state_dir=folder / "state")


@pytest.fixture
def expires() -> Gauge:
    return Gauge("expires", "", ("certificate",), registry=CollectorRegistry())


def shown(gauge: Gauge) -> dict[str, float]:
    return {
        sample.labels["certificate"]: sample.value for family in gauge.collect() for sample in family.samples
    }


def test_a_deployment_without_certificates_shows_none(tmp_path: Path) -> None:
    assert CertificateFolder(deployment_at(tmp_path)).ends_s() == {}


def test_each_file_that_is_there_has_its_own_end(tmp_path: Path) -> None:
    deployment = deployment_at(tmp_path)
    folder = CertificateFolder(deployment)
    folder.make(lifetime_days=30)
    ends_s = folder.ends_s()
    assert ends_s.keys() == FILES
    ends = {state.member.file.name: state.expires for state in folder.states()}
    assert all(ends_s[name] == end.timestamp() for name, end in ends.items() if end is not None)
    # What runs elsewhere has its file there; what can't be read has no end.
    (folder.path / "far-0.pem").unlink()
    (folder.path / "home-0.pem").write_text("nothing")
    assert folder.ends_s().keys() == FILES - {"far-0.pem", "home-0.pem"}


def test_of_two_authorities_the_newest_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployment_at(tmp_path)
    folder = CertificateFolder(deployment)
    with monkeypatch.context() as earlier:
        year_ago = issuing.now() - 365 * issuing.DAY
        earlier.setattr(issuing, "now", lambda: year_ago)
        folder.make()
    folder.add_authority()
    newest, older = folder.authorities()
    assert newest.expires > older.expires
    assert folder.ends_s()["ca.crt"] == newest.expires.timestamp()


def test_files_are_read_again(tmp_path: Path, expires: Gauge, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployment_at(tmp_path)
    folder = CertificateFolder(deployment)
    folder.make(lifetime_days=30)

    async def body() -> None:
        watching = asyncio.create_task(watch_certificates(RunningDeployment(deployment), expires))
        try:
            async with asyncio.timeout(20):
                while not shown(expires):
                    await asyncio.sleep(0.01)
                before = shown(expires)
                folder.make(lifetime_days=60, rotate=True)
                while shown(expires).get("gateway.pem", 0.0) <= before["gateway.pem"]:
                    await asyncio.sleep(0.01)
                (folder.path / "tools.pem").unlink()
                while "tools.pem" in shown(expires):
                    await asyncio.sleep(0.01)
        finally:
            watching.cancel()

    monkeypatch.setattr(server, "CERTIFICATES_S", 0.02)
    asyncio.run(body())
    assert shown(expires).keys() == FILES - {"tools.pem"}
