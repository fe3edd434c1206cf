"""`prfaas worth`: what offloading was worth, from the ledgers that gateways keep."""

from pathlib import Path
from typing import Any, Literal

import typer

from prfaas.cli.common import AsJson, CliError, console, print_json
from prfaas.cli.option_groups import argument, option, with_options

_By = Literal["hour", "hour-of-day", "cluster", "link", "length", "tenant", "all"]


@with_options
def worth(
    files: list[Path] = argument(
        ..., "The deployment file, or the ledgers of its gateways.", metavar="DEPLOYMENT|LEDGER…"
    ),
    by: _By = option("length", "What requests are put together by.", "--by"),
    hours: float = option(
        24.0, "Of so many hours until now; 0: all there is.", "--hours", metavar="H", min=0.0
    ),
    as_json: AsJson = False,
) -> None:
    """Say what offloading was worth: TTFT and GPU-seconds spared, egress paid, and how far predictions were off.

    Gateways keep a ledger where the deployment file names one (gateway.ledger).

    Example: prfaas worth examples/when-it-pays.yaml --by hour
    """
    from prfaas.serving.worth import told

    found = told(_ledgers(files), by, hours)
    if as_json:
        print_json(found)
        return
    if not found["all"]:
        raise CliError("no request was routed in that time; --hours 0 looks at all there is")
    for sentence in found["sentences"]:
        typer.echo(sentence)
    if by != "all":
        console().print(_table(by, found["rows"]))


def _ledgers(files: list[Path]) -> list[Path]:
    """Those named, and those that deployment files name."""
    from prfaas.core.deployment import load_deployment

    found = []
    for path in files:
        if path.suffix not in (".yaml", ".yml"):
            found.append(path)
            continue
        ledger = load_deployment(path).gateway.ledger
        if ledger is None:
            raise CliError(
                f"{path} has no gateway.ledger: nothing is kept; write gateway: {{ledger: {{file: …}}}}"
            )
        found.append(ledger.file)
    return found


def _table(by: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from prfaas.core.units import format_bytes, format_s

    table = Table(by, box=None, pad_edge=False)
    columns = {
        "requests": ("requests", "{:,}".format),
        "offloaded": ("offloaded", "{:,}".format),
        "first token": ("mean_with_s", format_s),
        "without": ("mean_without_s", format_s),
        "sooner": ("saved_share", "{:+.0%}".format),
        "GPU-s moved": ("gpu_s_moved", "{:,.0f}".format),
        "spent": ("gpu_s_spent", "{:,.0f}".format),
        "egress": ("egress_bytes", format_bytes),
        "net": ("net", "{:+.2f}".format),
        "off by": ("bias_of_offloaded", "{:+.0%}".format),
    }
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        cells = ("–" if row[field] is None else said(row[field]) for field, said in columns.values())
        table.add_row(row["key"].strip() or "–", *cells)
    return table
