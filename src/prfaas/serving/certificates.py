"""Certificates of a deployment: an authority (CA) of its own, and one certificate for each that takes part.

One file per member holds its certificate and its private key, so that both are always replaced together.
Only the machine that issues certificates needs the CA's own key.
"""

import contextlib
import datetime
import fcntl
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from prfaas.core.bounded_file import WRITTEN_BYTES, file_bytes
from prfaas.core.deployment import CERTIFICATE_NAMES, Deployment, Instance, PoolNode
from prfaas.serving import issuing
from prfaas.serving.secret_files import TlsFileError
from prfaas.serving.transport.io.tls_identity import TlsIdentity

LIFETIME_DAYS = 365
_SOON = datetime.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Member:
    """Who needs a certificate: an instance, a pool, the gateway, or the tools."""

    name: str
    file: Path
    names: tuple[str, ...]
    """What its certificate stands for: its names on the wire, and the host name or address of its machine."""


@dataclass(frozen=True, slots=True)
class CertificateState:
    """One member's certificate as it is on this machine."""

    member: Member
    expires: datetime.datetime | None
    """None: there is none, or it can't be read."""
    issued_by_newest: bool
    """Whether it comes from the newest CA that is trusted."""
    problem: str | None
    """Why it can't be used, as the end of a sentence that begins with its name."""
    expires_soon: bool = False
    """It is good today, and replaced when certificates are made the next time."""

    @property
    def is_fit(self) -> bool:
        """True if nothing need be done about it."""
        return self.problem is None and not self.expires_soon


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA that is trusted."""

    name: str
    expires: datetime.datetime

    @property
    def ends_soon(self) -> bool:
        """Certificates can't be made for their usual time any more."""
        return self.expires - issuing.now() < LIFETIME_DAYS * issuing.DAY


def members_of(deployment: Deployment) -> tuple[Member, ...]:
    """All that need a certificate: instances and pools in the order of the file, then the gateway and the tools."""
    security = deployment.security
    machines: tuple[Instance | PoolNode, ...] = (*deployment.instances, *deployment.pools)
    placed = ((each.name, (each.name, each.host)) for each in machines)
    return tuple(
        Member(name, security.identity_file(name), tuple(dict.fromkeys(map(issuing.plain_name, names))))
        for name, names in (*placed, *CERTIFICATE_NAMES.items())
    )


def identity_of(deployment: Deployment, name: str) -> TlsIdentity | None:
    """Who a member is on encrypted ways; None if all of its ways are plain.

    Raises:
        TlsFileError: its certificate or the CA's can't be used.
    """
    if not deployment.needs_certificate(name):
        return None
    security = deployment.security
    file = security.identity_file(name)
    return TlsIdentity(file, file, security.ca_file)


def https_options(instance: Instance, tls: TlsIdentity | None) -> Mapping[str, Any]:
    """What an aiohttp request to an instance is given beside its URL.

    Args:
        instance: who is asked.
        tls: who asks.

    Raises:
        TlsFileError: the instance speaks TLS only, and who asks has no certificate.
    """
    if not instance.tls:
        return {}
    if tls is None:
        raise TlsFileError(f"{instance.name} speaks TLS only, and there is no certificate to ask it with")
    return {"ssl": tls.https_context(), "server_hostname": instance.name}


class CertificateFolder:
    """The folder of a deployment's certificates on this machine.

    `ca.crt` has the CAs that are trusted, the newest first; `ca.key` the newest one with its key.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.path = deployment.security.certificates
        self.ca_file = deployment.security.ca_file
        self.ca_key_file = self.path / "ca.key"
        self.members = members_of(deployment)
        self._deployment_name = deployment.name
        self._command = f"prfaas certs {deployment.path}"

    def make(self, *, lifetime_days: int = LIFETIME_DAYS, rotate: bool = False) -> tuple[str, ...]:
        """Make what is missing, unfit or about to expire. What is fit stays as it is.

        Args:
            lifetime_days: of the certificates that are made.
            rotate: replace all members' certificates by new ones of the newest CA.

        Returns:
            The names of the members that got a new certificate.

        Raises:
            TlsFileError: the CA's key is not on this machine, the CA ends earlier than the certificates would,
                or a file can't be written.
        """
        with self._locked():
            if not self.ca_file.exists():
                self._trust_newest(())
            wanted = [state.member for state in self.states() if rotate or not state.is_fit]
            if wanted:
                authority, key = self._issuer()
                if authority != self._authorities()[0]:
                    raise TlsFileError(
                        f"the CA of {self.ca_key_file} is not the first in {self.ca_file}: run "
                        f"`{self._command} --rotate-ca` to trust it, or put the right files there"
                    )
                _check_lifetime(lifetime_days, authority)
                for member in wanted:
                    _write(member.file, _pem(member, authority, key, lifetime_days), 0o600)
        return tuple(member.name for member in wanted)

    def add_authority(self) -> None:
        """Begin to change the CA: a new one is trusted beside the present one, and issues from now on.

        Raises:
            TlsFileError: a change is under way already, or there is no CA yet.
        """
        with self._locked():
            present = self._authorities()
            # Elsewhere a new CA would only be one that the others don't know.
            self._issuer()
            if len(present) > 1:
                raise TlsFileError(
                    f"{self.ca_file} has {len(present)} CAs already: end that change with --rotate, then --retire-ca"
                )
            self._write_issuer()
            self._trust_newest(present)

    def retire_authorities(self) -> None:
        """End the change of the CA: only the newest one is trusted from now on.

        Raises:
            TlsFileError: there is only one, or a member's certificate is not of the newest.
        """
        with self._locked():
            present = self._authorities()
            if len(present) == 1:
                raise TlsFileError(f"{self.ca_file} has one CA, so there is none to retire")
            older = [state.member.name for state in self.states() if not state.issued_by_newest]
            if older:
                raise TlsFileError(
                    f"{older[0]} has no certificate of the newest CA yet: run `{self._command} --rotate`, copy the new "
                    "certificates to their machines, and retire the old CA then"
                )
            _write(self.ca_file, issuing.certificate_pem(present[0]), 0o644)

    def authorities(self) -> tuple[Authority, ...]:
        """The CAs that are trusted, the newest first.

        Raises:
            TlsFileError: their file is missing or unfit.
        """
        return tuple(
            Authority(each.subject.rfc4514_string(), each.not_valid_after_utc) for each in self._authorities()
        )

    def states(self, names: Collection[str] | None = None) -> tuple[CertificateState, ...]:
        """How the certificates of all members, or of some, are.

        Raises:
            TlsFileError: the CAs' file is missing or unfit.
        """
        authorities, now = self._authorities(), issuing.now()
        return tuple(
            _state(member, authorities, now)
            for member in self.members
            if names is None or member.name in names
        )

    def ends_s(self) -> Mapping[str, float]:
        """File name → Unix time at which its certificate ends, of those that are there and can be read.

        Of the CAs that are trusted it is the newest: while the CA is changed, the older ones may end.
        """
        try:
            newest, states = self.authorities()[0], self.states()
        except TlsFileError:
            return {}
        ends_s = {each.member.file.name: each.expires.timestamp() for each in states if each.expires}
        return ends_s | {self.ca_file.name: newest.expires.timestamp()}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Engines of one machine may start at the same time, and each makes what is missing."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TlsFileError(f"{self.path} can't be written ({error.strerror})") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _authorities(self) -> tuple[x509.Certificate, ...]:
        try:
            found = x509.load_pem_x509_certificates(file_bytes(self.ca_file, WRITTEN_BYTES))
        except OSError as error:
            raise TlsFileError(
                f"CA file {self.ca_file} can't be read ({error.strerror}): make it with `{self._command}`, or copy it "
                "from the machine where that was done"
            ) from None
        except ValueError:
            raise TlsFileError(
                f"CA file {self.ca_file} holds no certificate: copy it anew from the machine where it was made"
            ) from None
        return tuple(found)

    def _issuer(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """The CA that issues here, with its key."""
        try:
            content = file_bytes(self.ca_key_file, WRITTEN_BYTES)
            authority, key = x509.load_pem_x509_certificate(content), issuing.private_key_of(content)
        except OSError as error:
            raise TlsFileError(
                f"the CA's key {self.ca_key_file} can't be read ({error.strerror}): run `{self._command}` where the CA "
                "was made, and copy the new files from there"
            ) from None
        except ValueError:
            authority, key = None, None
        if authority is None or key is None or key.public_key() != authority.public_key():
            raise TlsFileError(f"{self.ca_key_file} must hold the newest CA and its key, as they were made")
        return authority, key

    def _write_issuer(self) -> None:
        authority, key = issuing.new_authority(self._deployment_name)
        _write(self.ca_key_file, issuing.certificate_pem(authority) + issuing.key_pem(key), 0o600)

    def _trust_newest(self, present: Sequence[x509.Certificate]) -> None:
        """Have the CA that issues here trusted before those that are; make one where there is none."""
        if not self.ca_key_file.exists():
            self._write_issuer()
        issuer, _ = self._issuer()
        _write(self.ca_file, b"".join(map(issuing.certificate_pem, (issuer, *present))), 0o644)


def _state(
    member: Member, authorities: Sequence[x509.Certificate], now: datetime.datetime
) -> CertificateState:
    def unfit(problem: str, expires: datetime.datetime | None = None) -> CertificateState:
        return CertificateState(member, expires, False, problem)

    try:
        mode, content = stat.S_IMODE(member.file.stat().st_mode), file_bytes(member.file, WRITTEN_BYTES)
    except FileNotFoundError:
        return unfit(f"has no certificate at {member.file}")
    except OSError as error:
        return unfit(f"has a certificate {member.file} that can't be read ({error.strerror})")
    try:
        certificate = x509.load_pem_x509_certificate(content)
    except ValueError:
        return unfit(f"has no certificate in {member.file}")
    expires, key = certificate.not_valid_after_utc, issuing.private_key_of(content)
    issuers = [issuing.is_issued_by(certificate, authority) for authority in authorities]
    if mode & 0o077:
        return unfit(f"has a key that others can read: run chmod 600 on {member.file}", expires)
    if key is None or key.public_key() != certificate.public_key():
        return unfit(f"has a certificate and a key in {member.file} that don't belong together", expires)
    if not any(issuers):
        return unfit(f"has a certificate {member.file} of another CA than those trusted here", expires)
    missing = set(member.names) - issuing.names_of(certificate)
    if missing:
        return unfit(
            f"has a certificate {member.file} that doesn't name {', '.join(sorted(missing))}", expires
        )
    if expires <= now:
        return unfit(f"has a certificate {member.file} that expired on {expires:%Y-%m-%d}", expires)
    if certificate.not_valid_before_utc > now:
        begins = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M:%S}"
        return unfit(f"has a certificate {member.file} that is good from {begins} UTC on only", expires)
    lifetime = expires - certificate.not_valid_before_utc
    return CertificateState(member, expires, issuers[0], None, expires - now < min(_SOON, lifetime / 3))


def _pem(
    member: Member, authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, lifetime_days: int
) -> bytes:
    """A new certificate with its key. Raises TlsFileError."""
    try:
        return issuing.new_certificate(member.names, authority, key, lifetime_days)
    except ValueError as error:
        raise TlsFileError(
            f"{member.name} can't get a certificate for {', '.join(member.names)}: {error}"
        ) from None


def _check_lifetime(lifetime_days: int, authority: x509.Certificate) -> None:
    left_days = (authority.not_valid_after_utc - issuing.now()) // issuing.DAY
    if lifetime_days > left_days:
        raise TlsFileError(
            f"certificates can't be good for {lifetime_days} days: their CA ends in {left_days}; shorten --days, or "
            "change the CA with --rotate-ca"
        )


def _write(file: Path, content: bytes, mode: int) -> None:
    """In one step: who reads meanwhile sees the old content or the new, whole. Raises TlsFileError."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, mode)
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        unfinished.replace(file)
    except OSError as error:
        raise TlsFileError(f"{file} can't be written ({error.strerror})") from None
    finally:
        unfinished.unlink(missing_ok=True)
