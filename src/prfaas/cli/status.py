"""`prfaas status`: a running deployment at a glance."""

from typing import Annotated

import typer

from prfaas.cli.common import AdminAddress, AsJson, TokenFile, console

_PERIOD_S = 1.0
_PATH = "/prfaas/state"
# Of a pipe: the table of pools is the widest.
_COLUMNS = 170


def status(
    where: Annotated[
        str,
        typer.Argument(
            metavar="DEPLOYMENT|URL",
            help="The deployment file, or the URL of the gateway's operators (gateway.admin).",
        ),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a running deployment: instances with roles and queues, links, thresholds, hit rates, routes.

    With --watch --json, one JSON document per line and second.

    Example: prfaas status examples/local.yaml --watch
    """
    import json

    from prfaas.cli.common import admin_address, fetch

    admin = admin_address(where, token_file)
    if watch:
        _watch(admin, as_json)
    elif as_json:
        typer.echo(json.dumps(fetch(admin, _PATH), indent=2))
    else:
        from prfaas.cli.status_tables import tables

        console(_COLUMNS).print(tables(fetch(admin, _PATH)))


def _watch(admin: AdminAddress, as_json: bool) -> None:
    import contextlib
    import json
    import time

    from rich.live import Live

    from prfaas.cli.common import fetch
    from prfaas.cli.status_tables import tables

    out = console(_COLUMNS)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as screen:
        live: Live | None = None
        while True:
            state = fetch(admin, _PATH)
            if as_json:
                typer.echo(json.dumps(state))
            elif not out.is_terminal:
                out.print(tables(state))
            elif live is None:
                live = screen.enter_context(Live(tables(state), console=out, screen=True, auto_refresh=False))
            else:
                live.update(tables(state), refresh=True)
            time.sleep(_PERIOD_S)
