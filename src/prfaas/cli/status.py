"""`prfaas status`: a running deployment at a glance."""

from typing import Any

import typer

from prfaas.cli.common import (
    AdminAddress,
    AsJson,
    CliError,
    GatewayWhere,
    TokenFile,
    admin_address,
    console,
    fetch,
    print_json,
)
from prfaas.cli.option_groups import option, with_options

_PERIOD_S = 1.0
_PATH = "/prfaas/state"
# Of a pipe: the table of pools is the widest.
_COLUMNS = 170


@with_options
def status(
    where: GatewayWhere,
    watch: bool = option(False, "Show it again every second, until Ctrl-C.", "--watch"),
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a running deployment: instances with roles and queues, links, thresholds, hit rates, routes.

    Columns that do not fit the terminal are left out, least important first, and named. With --watch, a gateway that
    restarts is waited for. With --watch --json, one JSON document per line and second.

    Example: prfaas status examples/local.yaml --watch
    """
    admin = admin_address(where, token_file)
    if watch:
        _watch(admin, as_json)
    elif as_json:
        print_json(fetch(admin, _PATH))
    else:
        from prfaas.cli.status_tables import tables

        console(_COLUMNS).print(tables(fetch(admin, _PATH)))


class _Watched:
    """A gateway that is asked again and again, and may go away and come back meanwhile."""

    def __init__(self, admin: AdminAddress) -> None:
        self._admin = admin
        self.state: dict[str, Any] | None = None
        """Its newest state."""
        self.lost: CliError | None = None
        """The reason why it does not answer now."""
        self._lost_at_s = 0.0

    def ask(self) -> str:
        """Ask once; the sentence on what has changed since the last time, or "".

        Raises:
            CliError: it has never answered.
        """
        import time

        before = self.state
        try:
            self.state = fetch(self._admin, _PATH)
        except CliError as error:
            if before is None:
                raise
            if self.lost is not None:
                return ""
            self.lost, self._lost_at_s = error, time.monotonic()
            return f"the gateway does not answer; asking again every second ({error})"
        was_lost, self.lost = self.lost is not None, None
        if before is not None and self.state["up_s"] < before["up_s"]:
            return "the gateway was started again: its counters begin at 0"
        return "the gateway answers again" if was_lost else ""

    def note(self) -> str:
        """The line above the tables while they are old."""
        import time

        from prfaas.core.units import format_s

        if self.lost is None:
            return ""
        since = format_s(round(time.monotonic() - self._lost_at_s))
        return f"The gateway has not answered for {since}. This is what it told before; asking every second."


def _watch(admin: AdminAddress, as_json: bool) -> None:
    import contextlib
    import json
    import time

    from rich.live import Live

    from prfaas.cli.status_tables import tables

    out = console(_COLUMNS)
    watched = _Watched(admin)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as screen:
        live: Live | None = None
        while True:
            change = watched.ask()
            state = watched.state
            on_screen = out.is_terminal and not as_json
            if change and not on_screen:
                typer.echo(change, err=True)
            if state is None or (watched.lost is not None and not on_screen):
                pass
            elif as_json:
                typer.echo(json.dumps(state))
            elif not on_screen:
                out.print(tables(state))
            elif live is None:
                live = screen.enter_context(Live(tables(state), console=out, screen=True, auto_refresh=False))
            else:
                live.update(tables(state, watched.note()), refresh=True)
            time.sleep(_PERIOD_S)
