"""`prfaas reload`: have a running gateway take its deployment file on again, without a restart."""

import typer

from prfaas.cli.common import AsJson, CliError, GatewayWhere, TokenFile, admin_address, fetch, print_json
from prfaas.cli.option_groups import option, with_options


@with_options
def reload(
    where: GatewayWhere,
    check: bool = option(
        False, "Only say what would change; exit code 2 if that needs a restart.", "--check"
    ),
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Have the running gateway read its deployment file again, and take on what has changed.

    Instances can join and leave; clusters and links can be added; links' bandwidth, prices, the routing policy,
    thresholds, limits and periods can change. Nothing is restarted, and no request is lost: an instance leaves when
    its work has ended. If anything in the file can't change while everything runs, nothing is changed, and exit code
    2 says what it was. The gateway reads its own file: given another one here, it refuses.

    Example: prfaas reload examples/local.yaml --check
    """
    from pathlib import Path

    from prfaas.core.bounded_file import WRITTEN_BYTES, file_bytes
    from prfaas.serving.reloading import digest_of

    asked = ["check=true"] if check else []
    address = admin_address(where, token_file)
    if not where.startswith(("http://", "https://")):
        asked.append(f"digest={digest_of(file_bytes(Path(where), WRITTEN_BYTES))}")
    answer = fetch(address, "/prfaas/reload" + ("?" + "&".join(asked) if asked else ""), method="POST")
    refused = [change for change in answer["changes"] if change["needs"] is not None]
    if as_json:
        print_json(answer)
    else:
        for change in answer["changes"]:
            needs = f"; it can't while everything runs: {change['needs']}" if change["needs"] else ""
            typer.echo(change["sentence"] + needs)
        if not answer["changes"]:
            typer.echo("nothing changes")
        elif answer["applied"]:
            leaving = ", ".join(answer["leaving"])
            typer.echo("applied" + (f"; leaving when their work has ended: {leaving}" if leaving else ""))
    if refused and not as_json:
        raise CliError("this file needs a restart")
    if refused:
        raise typer.Exit(2)
