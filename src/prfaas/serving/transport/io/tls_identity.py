"""This side's identity on encrypted links: a certificate, its key, and the authority that both sides trust.

A certificate belongs to the instances that its dNSName entries list, compared without case. The ranks of an instance
("p/0", "p/1") share it.
"""

import logging
import ssl
import threading
from pathlib import Path

from prfaas.serving.secret_files import TlsFileError

log = logging.getLogger(__name__)


class TlsIdentity:
    """The three files of one side, read again when one of them has changed; thread-safe.

    Connections that are up keep the certificate that they began with.
    """

    def __init__(self, certificate: Path, key: Path, ca: Path) -> None:
        """Reads the files.

        Args:
            certificate: PEM; this side's certificate, then those between it and the authority.
            key: PEM; the private key of the certificate, without a passphrase.
            ca: PEM; the authorities that peers' certificates may come from: two of them while one is replaced.

        Raises:
            TlsFileError: a file is missing or unfit.
        """
        self.certificate = certificate
        self.key = key
        self.ca = ca
        self._lock = threading.Lock()
        self._seen = self._versions()
        self._loaded = self._load()

    def server_context(self) -> ssl.SSLContext:
        """For accepted connections: TLS 1.3 only, and the client must show a certificate. Not to be changed."""
        return self._newest()[0]

    def client_context(self) -> ssl.SSLContext:
        """For connections to others: TLS 1.3 only, with this side's certificate. Not to be changed.

        It checks whom the peer's certificate comes from. The caller checks whose it is: `names_instance`.
        """
        return self._newest()[1]

    def https_context(self) -> ssl.SSLContext:
        """The `client_context`, which also checks the host name in the peer's certificate."""
        return self._newest()[2]

    def listening_context(self) -> ssl.SSLContext:
        """For a server that keeps one context for good: each handshake uses the files as they are then."""

        def newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.server_context()

        context, _, _ = self._load()
        context.sni_callback = newest
        return context

    def _newest(self) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            try:
                versions = self._versions()
                if versions != self._seen:
                    self._seen = versions
                    self._loaded = self._load()
            except TlsFileError as error:
                # Files are replaced one after another: until they fit together, those in memory serve.
                log.warning("changed TLS files are not used yet: %s", error)
            return self._loaded

    def _versions(self) -> list[tuple[int, int, int]]:
        """Changes with each writing of a file."""
        found = []
        for path in (self.certificate, self.key, self.ca):
            try:
                stat = path.stat()
            except OSError as error:
                raise TlsFileError(f"TLS file {path} cannot be read: {error.strerror}") from None
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return found

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
        """Contexts for accepted connections, for connections to peers, and for HTTPS."""
        server, client, https = (
            ssl.SSLContext(protocol)
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_CLIENT)
        )
        # Nothing is resumed, so each connection proves anew who is at its ends.
        server.num_tickets = 0
        client.check_hostname = False
        for context in (server, client, https):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                # The empty passphrase keeps OpenSSL from asking for one at the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
            except (OSError, ValueError) as error:
                files = f"certificate {self.certificate} and key {self.key}"
                raise TlsFileError(f"{files} cannot be used: {_reason(error)}") from None
            try:
                context.load_verify_locations(cafile=self.ca)
            except (OSError, ValueError) as error:
                raise TlsFileError(f"CA file {self.ca} cannot be used: {_reason(error)}") from None
        return server, client, https


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
