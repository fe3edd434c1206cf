"""The gateway's read-only pages, as commands fetch them: by deployment file or by URL."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prfaas.cli.common import CliError

_TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20


def gateway_url(where: str) -> str:
    """The base of a gateway's HTTP API. Raises DeploymentError for a bad file."""
    if where.startswith(("http://", "https://")):
        return where.rstrip("/").removesuffix("/v1")
    from prfaas.core.deployment import load_deployment

    return load_deployment(Path(where)).gateway.url


def fetch(url: str, path: str) -> dict[str, Any]:
    """The JSON object at `url` + `path`.

    Raises:
        CliError: nothing answers there, or not with such an object; the text is what the gateway says itself.
    """
    # Environments with a proxy for the outside would send it questions about this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + path, timeout=_TIMEOUT_S) as response:
            document = json.loads(response.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise CliError(
            _said(error) or f"{url}{path} answered {error.code}; is it a prfaas gateway?"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise CliError(f"no gateway answers at {url} ({reason}); start it: prfaas serve DEPLOYMENT") from None
    except ValueError as error:
        raise CliError(f"{url}{path} is no page of a prfaas gateway ({error})") from None
    if not isinstance(document, dict):
        raise CliError(f"{url}{path} is no page of a prfaas gateway")
    return document


def _said(error: urllib.error.HTTPError) -> str | None:
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
