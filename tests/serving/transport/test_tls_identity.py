"""Certificate files: what is refused, and what is read again."""

import logging
import ssl
from pathlib import Path

import pytest

from prfaas.serving.transport.io.tls_identity import TlsFileError, TlsIdentity
from prfaas.serving.transport.protocol.handshake import names_instance

from .authority import Authority


def shown_to(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[dict[str, object], dict[str, object]]:
    """The peer's certificate as the server and as the client see it, after a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    ours = client.wrap_bio(to_client, to_server)
    for side in (ours, theirs, ours, theirs):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert ours.version() == theirs.version() == "TLSv1.3"
    seen = theirs.getpeercert(), ours.getpeercert()
    assert seen[0] and seen[1]
    return seen  # type: ignore[return-value]


def test_both_sides_see_whose_certificate_it_is(authority: Authority) -> None:
    server, client = authority.identity("c", "node-7"), authority.identity("p")
    of_client, of_server = shown_to(server.server_context(), client.client_context())
    assert names_instance(of_client, "p") and names_instance(of_client, "p/3")
    assert names_instance(of_server, "C/0") and names_instance(of_server, "node-7")
    for other in ("q", "p2", "", "/0", "p.c", "*"):
        assert not names_instance(of_client, other)


def test_a_name_is_only_a_dns_entry() -> None:
    assert not names_instance({"subjectAltName": (("URI", "p"), ("IP Address", "p"))}, "p")
    assert not names_instance({"subject": ((("commonName", "p"),),)}, "p")
    assert not names_instance({"subjectAltName": (("DNS", "*"),)}, "p")


def test_others_are_refused(authority: Authority, tmp_path: Path) -> None:
    server = authority.identity("c")
    foreign = Authority(tmp_path / "foreign").identity("p")
    expired = authority.identity("p", expired=True)
    for client in (TlsIdentity(foreign.certificate, foreign.key, authority.file), expired):
        with pytest.raises(ssl.SSLError):
            shown_to(server.server_context(), client.client_context())
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname = False
    without.load_verify_locations(authority.file)
    with pytest.raises(ssl.SSLError):
        shown_to(server.server_context(), without)
    good = authority.identity("p")
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname = False
    older.load_verify_locations(good.ca)
    older.load_cert_chain(good.certificate, good.key)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        shown_to(server.server_context(), older)


def test_changed_files_are_read_again(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    server, client = authority.identity("c"), authority.identity("p")
    before = client.client_context()
    assert client.client_context() is before

    # The certificate is there and its key is not yet: the old pair stays in use, and that is said once.
    certificate, key = authority.write("q", file="new")
    client.certificate.write_bytes(certificate.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert client.client_context() is before
        assert client.client_context() is before
    assert len(caplog.records) == 1
    assert "not used yet" in caplog.text

    client.key.write_bytes(key.read_bytes())
    of_client, _ = shown_to(server.server_context(), client.client_context())
    assert names_instance(of_client, "q") and not names_instance(of_client, "p")


def test_a_new_authority_is_trusted_when_its_file_says_so(authority: Authority, tmp_path: Path) -> None:
    server = authority.identity("c")
    second = Authority(tmp_path / "second", "next CA").identity("p")
    client = TlsIdentity(second.certificate, second.key, authority.file)
    with pytest.raises(ssl.SSLError):
        shown_to(server.server_context(), client.client_context())
    authority.file.write_bytes(authority.file.read_bytes() + second.ca.read_bytes())
    of_client, _ = shown_to(server.server_context(), client.client_context())
    assert names_instance(of_client, "p")


def test_unfit_files_are_named(authority: Authority, tmp_path: Path) -> None:
    good = authority.identity("c")
    other = authority.identity("d")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for files, words in (
        ((tmp_path / "none.pem", good.key, good.ca), ("none.pem", "No such file")),
        ((good.certificate, other.key, good.ca), ("c.pem", "d.key", "mismatch")),
        ((empty, good.key, good.ca), ("empty.pem", "cannot be used")),
        ((good.certificate, good.key, empty), ("CA file", "empty.pem")),
    ):
        with pytest.raises(TlsFileError) as refused:
            TlsIdentity(*files)
        assert all(word in str(refused.value) for word in words), str(refused.value)
