"""One HTTP question to an engine on this machine: whether it is healthy, or that a stand-in is to die."""

import http.client

from prfaas.core.deployment import TOOLS, Deployment, Instance
from prfaas.serving.certificates import identity_of
from prfaas.serving.transport.tls_identity import TlsIdentity

_ANSWER_S = 2.0


class EngineQuestions:
    """Asks the engines of one deployment."""

    def __init__(self) -> None:
        self._tls: TlsIdentity | None = None

    def ask(self, deployment: Deployment, instance: Instance, method: str, path: str) -> int | None:
        """The status of the answer; None where there is none."""
        # Not urllib: it would take a proxy of the environment for a server on this machine.
        if instance.tls:
            self._tls = self._tls or identity_of(deployment, TOOLS)
            assert self._tls is not None
            context = self._tls.https_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                instance.host, instance.http_port, timeout=_ANSWER_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(instance.host, instance.http_port, timeout=_ANSWER_S)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
