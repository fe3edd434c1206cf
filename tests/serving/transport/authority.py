"""A certificate authority for tests."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from prfaas.serving.transport.io.tls_identity import TlsIdentity

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs what it is asked to; `folder` gets the files."""

    def __init__(self, folder: Path, name: str = "test CA") -> None:
        self.folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * _DAY)
            .not_valid_after(now + 10 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def identity(self, *names: str, file: str = "", expired: bool = False) -> TlsIdentity:
        """The files of a new certificate for `names`, as `file` or the first name calls them."""
        certificate, key = self.write(*names, file=file, expired=expired)
        return TlsIdentity(certificate, key, self.file)

    def write(self, *names: str, file: str = "", expired: bool = False) -> tuple[Path, Path]:
        """The paths of certificate and key; files that are there already are replaced."""
        now = datetime.datetime.now(datetime.UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _DAY)
            .not_valid_after(now + (-_DAY if expired else _DAY))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
            .sign(self._key, hashes.SHA256())
        )
        paths = self.folder / f"{file or names[0]}.pem", self.folder / f"{file or names[0]}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths
