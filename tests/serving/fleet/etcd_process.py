"""A real etcd on loopback, as Debian's package has it."""

import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.ports import free_ports

LIMIT_S = 60.0

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="there is no etcd; install the Debian package etcd-server"
)


class EtcdProcess:
    """One member of etcd, alone, that can be stopped and started with what it has kept."""

    def __init__(self, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        """`tls`: CA of clients, and this server's certificate with its key."""
        client, peer = free_ports(2)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{client}"
        self._tls = tls
        self._peer = f"http://127.0.0.1:{peer}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "etcd",
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={self.url}",
                    f"--advertise-client-urls={self.url}",
                    f"--listen-peer-urls={self._peer}",
                    f"--initial-advertise-peer-urls={self._peer}",
                    f"--initial-cluster=default={self._peer}",
                    *self._tls_options(),
                    # A test's disk may be slow, and what it writes is of no worth.
                    "--unsafe-no-fsync",
                ],
                stdout=log,
                stderr=log,
            )
        until_s = time.monotonic() + LIMIT_S
        while not self._is_healthy():
            assert time.monotonic() < until_s, (self._folder / "log.txt").read_text()[-3000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as a machine that loses its power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(LIMIT_S)
            self._process = None

    def _tls_options(self) -> list[str]:
        if self._tls is None:
            return []
        ca, own = self._tls
        return ["--client-cert-auth", f"--trusted-ca-file={ca}", f"--cert-file={own}", f"--key-file={own}"]

    def _is_healthy(self) -> bool:
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls[0])
            context.load_cert_chain(self._tls[1])
            with (
                suppress(OSError),
                urllib.request.urlopen(self.url + "/health", timeout=1, context=context) as told,
            ):
                return b"true" in told.read()
            return False
        with suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=1) as response:
            return b"true" in response.read()
        return False


@contextmanager
def running_etcd(folder: Path, tls: tuple[Path, Path] | None = None) -> Iterator[EtcdProcess]:
    etcd = EtcdProcess(folder, tls)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.stop()
