"""Questions to an engine's HTTP server, asked where there is no event loop."""

import http.client
import json
from collections.abc import Mapping

from prfaas.core.deployment import Instance
from prfaas.serving.transport.io.tls_identity import TlsIdentity

_ANSWER_S = 2.0


def ask(
    instance: Instance,
    method: str,
    path: str,
    *,
    tls: TlsIdentity | None,
    content: Mapping[str, object] | None = None,
) -> int | None:
    """The status of the answer; None where there is none within 2 s.

    Args:
        instance: whose server is asked.
        method: of HTTP.
        path: with which it is asked.
        tls: who asks, where the server speaks TLS only.
        content: what is sent, as JSON.
    """
    body = None if content is None else json.dumps(content)
    # Not urllib: it would take a proxy of the environment for a server on this machine.
    if instance.tls:
        assert tls is not None
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            instance.host, instance.http_port, timeout=_ANSWER_S, context=tls.https_context()
        )
    else:
        connection = http.client.HTTPConnection(instance.host, instance.http_port, timeout=_ANSWER_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
