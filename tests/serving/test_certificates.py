"""A deployment's certificates: what is made, kept and replaced, and that TLS takes them."""

import datetime
import itertools
import multiprocessing
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from prfaas.core.deployment import CONTROL, GATEWAY, TOOLS, Deployment, load_deployment
from prfaas.serving import certificates
from prfaas.serving.certificates import CertificateFolder, identity_of
from prfaas.serving.engines.preparation import ensure_certificates
from prfaas.serving.secret_files import TlsFileError
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.handshake import names_instance

ALL = ("far-0", "home-0", GATEWAY, TOOLS)


def deployment_at(folder: Path, host: str = "10.0.0.1", **changes: Any) -> Deployment:
    """Two clusters with an instance each."""
    clusters = [
        {"name": "far", "kind": "prfaas", "hardware": "h200"},
        {"name": "home", "kind": "pd", "hardware": "h20"},
    ]
    for number, (cluster, role) in enumerate(zip(clusters, ("prefill", "decode"), strict=True)):
        name = f"{cluster['name']}-0"
        ports = {"http_port": 8100 + number, "kv_port": 8200 + number}
        cluster["instances"] = [{"name": name, "roles": [role], "host": host, **ports}]  # type: ignore[assignment]
    file = folder / "sites.yaml"
    document = {
        "name": "sites",
        "model": {"served_name": "m", "path": "m", "max_model_len": 1000},
        "clusters": clusters,
        "links": [{"source": "far", "target": "home", "bandwidth": "1 Gbit/s"}],
        **changes,
    }
    file.write_text(yaml.safe_dump(document))
    return load_deployment(file, state_dir=folder / "state")


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return deployment_at(tmp_path)


@pytest.fixture
def folder(deployment: Deployment) -> CertificateFolder:
    made = CertificateFolder(deployment)
    assert made.make() == ALL
    return made


def contents(folder: CertificateFolder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.path.iterdir()}


def shake_hands(server: TlsIdentity, client: TlsIdentity) -> tuple[dict[str, Any], dict[str, Any]]:
    """What client and server have seen of the other's certificate. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.server_context().wrap_bio(to_server, to_client, server_side=True)
    asking = client.client_context().wrap_bio(to_client, to_server)
    for _ in range(3):
        for side in (asking, serving):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return asking.getpeercert() or {}, serving.getpeercert() or {}


def identity(deployment: Deployment, name: str) -> TlsIdentity:
    found = identity_of(deployment, name)
    assert found is not None
    return found


def test_certificates_are_good_at_both_ends_of_tls(deployment: Deployment, folder: CertificateFolder) -> None:
    far, home = identity(deployment, "far-0"), identity(deployment, "home-0")
    for server, client in ((far, home), (home, far), (far, identity(deployment, GATEWAY))):
        shake_hands(server, client)
    of_server, of_client = shake_hands(far, identity(deployment, GATEWAY))
    assert names_instance(of_server, "far-0/1") and not names_instance(of_server, "home-0")
    assert names_instance(of_client, GATEWAY) and names_instance(of_client, CONTROL)
    assert ("IP Address", "10.0.0.1") in of_server["subjectAltName"]


def test_another_deployments_certificate_is_refused(
    tmp_path: Path, deployment: Deployment, folder: CertificateFolder
) -> None:
    (tmp_path / "other").mkdir()
    other = deployment_at(tmp_path / "other")
    CertificateFolder(other).make()
    with pytest.raises(ssl.SSLError):
        shake_hands(identity(deployment, "far-0"), identity(other, GATEWAY))


def test_private_files_are_private(folder: CertificateFolder) -> None:
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.path.iterdir()}
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert modes.pop("ca.crt") == 0o644
    assert set(modes) == {"ca.key", ".lock", *(f"{name}.pem" for name in ALL)}
    assert set(modes.values()) == {0o600}


def test_what_is_fit_is_kept(deployment: Deployment, folder: CertificateFolder) -> None:
    before = contents(folder)
    assert CertificateFolder(deployment).make() == ()
    assert contents(folder) == before


def test_rotation_replaces_members_and_keeps_the_ca(
    deployment: Deployment, folder: CertificateFolder
) -> None:
    before, running = contents(folder), identity(deployment, "far-0")
    assert folder.make(rotate=True) == ALL
    after = contents(folder)
    assert {name for name in after if after[name] != before[name]} == {f"{name}.pem" for name in ALL}
    # One that has the old files in memory reads the new ones, and gets on with one that is started now.
    home, fresh = identity(deployment, "home-0"), identity(deployment, "far-0")
    serials = {shake_hands(each, home)[0]["serialNumber"] for each in (running, fresh)}
    assert len(serials) == 1


def test_a_changed_host_gets_a_new_certificate(tmp_path: Path, folder: CertificateFolder) -> None:
    moved = deployment_at(tmp_path, host="10.9.9.9")
    (state, *_) = CertificateFolder(moved).states()
    assert state.problem is not None and "doesn't name 10.9.9.9" in state.problem
    assert CertificateFolder(moved).make() == ("far-0", "home-0")


def test_forms_of_one_address_are_one(tmp_path: Path) -> None:
    folder = CertificateFolder(deployment_at(tmp_path, host="FD00:0:0::1"))
    folder.make()
    assert all(state.is_fit for state in folder.states())


def at(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(certificates.issuing, "now", lambda: now)


def test_what_expires_is_replaced(folder: CertificateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 334)
    assert folder.make() == ()
    at(monkeypatch, 336)
    (state, *_) = folder.states()
    assert state.expires_soon and state.problem is None
    at(monkeypatch, 366)
    (state, *_) = folder.states()
    assert state.problem is not None and "expired on" in state.problem
    assert folder.make() == ALL
    assert folder.make() == ()


def test_a_short_life_is_not_always_about_to_end(folder: CertificateFolder) -> None:
    assert folder.make(lifetime_days=3, rotate=True) == ALL
    assert folder.make() == ()


def test_a_certificate_of_tomorrow_is_not_good(
    folder: CertificateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, -1)
    (state, *_) = folder.states()
    assert state.problem is not None and "is good from" in state.problem


def test_no_certificate_outlives_its_ca(folder: CertificateFolder) -> None:
    with pytest.raises(TlsFileError, match=r"can't be good for 4000 days: their CA ends in 36[0-9]{2}"):
        folder.make(lifetime_days=4000, rotate=True)


def unreadable(file: Path, _folder: CertificateFolder) -> None:
    file.write_text("nothing")


def open_to_all(file: Path, _folder: CertificateFolder) -> None:
    file.chmod(0o644)


def of_another(file: Path, folder: CertificateFolder) -> None:
    file.write_bytes((folder.path / "home-0.pem").read_bytes())


def mixed(file: Path, folder: CertificateFolder) -> None:
    own, other = file.read_text(), (folder.path / "home-0.pem").read_text()
    mark = "-----BEGIN PRIVATE KEY"
    file.write_text(own[: own.index(mark)] + other[other.index(mark) :])


def removed(file: Path, _folder: CertificateFolder) -> None:
    file.unlink()


@pytest.mark.parametrize(
    "damage, text",
    [
        (unreadable, "has no certificate in"),
        (removed, "has no certificate at"),
        (open_to_all, "run chmod 600"),
        (of_another, "doesn't name far-0"),
        (mixed, "don't belong together"),
    ],
)
def test_what_is_unfit_is_named_and_replaced(folder: CertificateFolder, damage: Any, text: str) -> None:
    damage(folder.path / "far-0.pem", folder)
    far, *others = folder.states()
    assert far.problem is not None and text in far.problem
    assert all(state.is_fit for state in others)
    assert folder.make() == ("far-0",)
    assert all(state.is_fit for state in folder.states())


def test_a_ca_is_changed_without_a_moment_of_refusal(
    deployment: Deployment, folder: CertificateFolder, tmp_path: Path
) -> None:
    """Each machine copies the files when it wants, but ends a step before the next one begins."""
    old = contents(folder)
    folder.add_authority()
    assert len(folder.authorities()) == 2
    assert all(state.problem is None and not state.issued_by_newest for state in folder.states())
    both = contents(folder)
    with pytest.raises(TlsFileError, match="far-0 has no certificate of the newest CA yet"):
        folder.retire_authorities()
    with pytest.raises(TlsFileError, match="has 2 CAs already"):
        folder.add_authority()
    assert folder.make(rotate=True) == ALL
    new = contents(folder)
    folder.retire_authorities()
    assert len(folder.authorities()) == 1
    last = contents(folder)

    def on_machine(name: str, files: dict[str, bytes], member: str) -> TlsIdentity:
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        for file, content in files.items():
            (home / file).write_bytes(content)
        return TlsIdentity(home / f"{member}.pem", home / f"{member}.pem", home / "ca.crt")

    steps = (old, both, new, last)
    for before, after in itertools.pairwise(steps):
        slow, quick = on_machine("slow", before, "far-0"), on_machine("quick", after, "home-0")
        shake_hands(slow, quick)
        shake_hands(quick, slow)
    with pytest.raises(ssl.SSLError):
        shake_hands(on_machine("slow", old, "far-0"), on_machine("quick", last, "home-0"))


def test_an_interrupted_change_of_the_ca_goes_on(folder: CertificateFolder) -> None:
    trusted = folder.ca_file.read_bytes()
    folder.add_authority()
    # The process ended between the two files.
    folder.ca_file.write_bytes(trusted)
    with pytest.raises(TlsFileError, match=r"--rotate-ca` to trust it"):
        folder.make(rotate=True)
    folder.add_authority()
    assert len(folder.authorities()) == 2
    assert folder.make(rotate=True) == ALL
    folder.retire_authorities()


def test_a_lost_bundle_comes_back_with_the_key(folder: CertificateFolder) -> None:
    folder.ca_file.unlink()
    assert folder.make() == ()
    assert all(state.is_fit for state in folder.states())


def test_without_the_cas_key_only_what_is_fit_can_be_kept(folder: CertificateFolder) -> None:
    folder.ca_key_file.unlink()
    assert folder.make() == ()
    (folder.path / "far-0.pem").unlink()
    with pytest.raises(TlsFileError, match=r"ca.key can't be read .* where the CA was made"):
        folder.make()
    with pytest.raises(TlsFileError, match=r"ca.key can't be read"):
        folder.add_authority()


def test_files_of_the_ca_that_are_no_ca(folder: CertificateFolder) -> None:
    folder.ca_key_file.write_bytes(folder.ca_file.read_bytes())
    with pytest.raises(TlsFileError, match="must hold the newest CA and its key"):
        folder.make(rotate=True)
    folder.ca_file.write_text("")
    with pytest.raises(TlsFileError, match="holds no certificate"):
        folder.states()


def test_the_only_ca_is_not_retired(folder: CertificateFolder) -> None:
    with pytest.raises(TlsFileError, match="one CA, so there is none to retire"):
        folder.retire_authorities()


def test_leaves_can_issue_nothing(folder: CertificateFolder) -> None:
    leaf = x509.load_pem_x509_certificate((folder.path / "far-0.pem").read_bytes())
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert leaf.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign is False


def make(deployment: Deployment) -> tuple[str, ...]:
    return CertificateFolder(deployment).make()


def test_engines_that_start_together_make_one_set(tmp_path: Path) -> None:
    deployment = deployment_at(tmp_path, host="127.0.0.1")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.map(make, [deployment] * 4)
    assert sorted(made) == [(), (), (), ALL]
    assert all(state.is_fit for state in CertificateFolder(deployment).states())


def test_on_one_machine_they_are_made_on_first_use(tmp_path: Path) -> None:
    deployment = deployment_at(tmp_path, host="127.0.0.1")
    # Only the link is encrypted, so the gateway needs none.
    ensure_certificates(deployment, [GATEWAY])
    assert not deployment.security.certificates.exists()
    ensure_certificates(deployment, ["far-0"])
    assert all(state.is_fit for state in CertificateFolder(deployment).states())


def test_where_nothing_is_encrypted_none_is_made(tmp_path: Path) -> None:
    link = {"source": "far", "target": "home", "bandwidth": "1 Gbit/s", "encryption": False}
    deployment = deployment_at(tmp_path, host="127.0.0.1", links=[link])
    ensure_certificates(deployment, ALL)
    assert not deployment.security.certificates.exists()
    assert identity_of(deployment, "far-0") is None


def test_on_several_machines_what_is_missing_is_named(deployment: Deployment) -> None:
    with pytest.raises(TlsFileError, match=r"ca.crt can't be read"):
        ensure_certificates(deployment, ["far-0"])
    folder = CertificateFolder(deployment)
    folder.make()
    folder.ca_key_file.unlink()
    (folder.path / "home-0.pem").unlink()
    ensure_certificates(deployment, ["far-0"])
    with pytest.raises(
        TlsFileError, match=r"home-0 has no certificate .*prfaas certs .*copy home-0.pem and ca.crt"
    ):
        ensure_certificates(deployment, ["home-0"])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    deployment = deployment_at(tmp_path, security={"certificates": str(tmp_path / "file" / "below")})
    with pytest.raises(TlsFileError, match="can't be written"):
        CertificateFolder(deployment).make()
