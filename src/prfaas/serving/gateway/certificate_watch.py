"""Until when the certificates on the gateway's machine are good, for `GET /metrics`."""

import asyncio
from collections.abc import Mapping

from prometheus_client import Gauge

from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import TlsFileError

_PERIOD_S = 60.0


class CertificateWatch:
    """Reads the deployment's certificates again each minute, since they are replaced while the gateway runs."""

    def __init__(self, running: RunningDeployment, expires: Gauge) -> None:
        """`expires`: gets the Unix time of each certificate's end, by the name of its file."""
        self._running = running
        self._expires = expires

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            ends_s = await asyncio.to_thread(self.ends_s)
            self._expires.clear()
            for file, end_s in ends_s.items():
                self._expires.labels(file).set(end_s)
            await asyncio.sleep(_PERIOD_S)

    def ends_s(self) -> Mapping[str, float]:
        """File name → Unix time at which its certificate ends, of those that are there and can be read.

        Of the CAs that are trusted it is the newest: while the CA is changed, the older ones may end.
        """
        folder = CertificateFolder(self._running.current)
        try:
            newest, states = folder.authorities()[0], folder.states()
        except TlsFileError:
            return {}
        ends_s = {
            each.member.file.name: each.expires.timestamp() for each in states if each.expires is not None
        }
        return ends_s | {folder.ca_file.name: newest.expires.timestamp()}
