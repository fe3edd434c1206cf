"""X.509 as prfaas uses it: ECDSA P-256, an authority (CA) per deployment, certificates for both ends of TLS."""

import datetime
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFETIME_DAYS = 3650
DAY = datetime.timedelta(days=1)
# Clocks of two machines differ: what is issued here must be good there at once.
_BACKDATED = datetime.timedelta(hours=1)


def new_authority(deployment: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A CA for a deployment. Its subject differs from earlier ones, so that messages tell them apart."""
    key, created = ec.generate_private_key(ec.SECP256R1()), now()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, deployment),
            x509.NameAttribute(NameOID.COMMON_NAME, f"prfaas CA {created:%Y-%m-%d %H:%M:%S}"),
        ]
    )
    certificate = (
        _builder(subject, subject, key, created, CA_LIFETIME_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def new_certificate(
    names: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    lifetime_days: int,
) -> bytes:
    """A key and a certificate for it, good at both ends of a connection, as PEM.

    Args:
        names: host names and IP addresses that it stands for; the first is its subject.
        authority: the CA.
        authority_key: its key.
        lifetime_days: from now.

    Raises:
        ValueError: a name can't stand in a certificate.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _builder(subject, authority.subject, key, now(), lifetime_days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return certificate_pem(certificate) + key_pem(key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    created: datetime.datetime,
    lifetime_days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(created - _BACKDATED)
        .not_valid_after(created + lifetime_days * DAY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def names_of(certificate: x509.Certificate) -> frozenset[str]:
    """The host names and addresses that a certificate stands for, in the form of `plain_name`."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return frozenset()
    addresses = names.get_values_for_type(x509.IPAddress)
    return frozenset(
        map(plain_name, (*names.get_values_for_type(x509.DNSName), *(str(each) for each in addresses)))
    )


def plain_name(name: str) -> str:
    """A host name without regard to case, or an IP address in its one usual form."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether a CA has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def private_key_of(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    """The private key in `pem`; None if there is none of the kind that is made here."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """As it stands in files."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """As it stands in files, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def now() -> datetime.datetime:
    """With its time zone, UTC."""
    return datetime.datetime.now(datetime.UTC)
