"""`prfaas explain`: why one request went the way it did, from its record at the gateway."""

import typer

from prfaas.cli.common import AsJson, TokenFile, admin_address, fetch, print_json
from prfaas.cli.option_groups import argument, with_options

_DEFAULT_URL = "http://127.0.0.1:8001"


@with_options
def explain(
    request_id: str = argument(
        ..., "The X-Request-Id of its answer, among the last 10,000.", metavar="REQUEST_ID"
    ),
    where: str = argument(
        _DEFAULT_URL,
        "The deployment file, or the URL of the gateway's operators.",
        metavar="[DEPLOYMENT|URL]",
    ),
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request was prefilled where it was, with the numbers that decided, and what happened on its way.

    Example: prfaas explain 0c5f1f0a5fd14a3d9c2a5f2f8f6e4b1d examples/local.yaml
    """
    from urllib.parse import quote

    from prfaas.core.explanation import sentences

    told = fetch(admin_address(where, token_file), f"/prfaas/requests/{quote(request_id, safe='')}")
    if as_json:
        print_json(told)
    else:
        for sentence in sentences(told):
            typer.echo(sentence)
