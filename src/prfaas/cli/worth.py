"""`prfaas worth`: what offloading was worth, from the ledgers that gateways keep."""

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from prfaas.cli.common import AsJson, CliError, console, print_json
from prfaas.cli.option_groups import argument, option, with_options

if TYPE_CHECKING:
    from prfaas.serving.worth import Worth

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
    from prfaas.serving.ledger_file import open_ledger
    from prfaas.serving.worth import effects
    from prfaas.serving.worth import worth as worth_of

    since_s = time.time() - 3600 * hours if hours else 0.0
    with ExitStack() as stack:
        ledgers = [open_ledger(path, read_only=True) for path in _ledgers(files)]
        for ledger in ledgers:
            stack.callback(ledger.close)
        total, rows = worth_of(ledgers, since_s=since_s), worth_of(ledgers, by, since_s)
        compared = effects(ledgers, since_s)
    if as_json:
        print_json(
            {
                "by": by,
                "all": [_document(each) for each in total],
                "rows": [_document(each) for each in rows],
                "experiments": {
                    against: asdict(each) | {"saved_s": each.saved_s} for against, each in compared.items()
                },
            }
        )
        return
    if not total:
        raise CliError("no request was routed in that time; --hours 0 looks at all there is")
    for sentence in _sentences(total[0]):
        typer.echo(sentence)
    for against, each in compared.items():
        typer.echo(
            f"Experiment against {against}: first tokens come {each.saved_s:.3g} ± {each.half_s:.2g} s sooner as it is "
            f"({each.as_is_s:.3g} against {each.other_s:.3g} s, {each.pairs} pairs of slices)."
        )
    if by != "all":
        console().print(_table(by, rows))


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


def _document(row: "Worth") -> dict[str, Any]:
    stayed, left = row.bias
    marginal = row.marginal_s()
    return asdict(row) | {
        "saved_share": row.saved_share,
        "net": row.net,
        "bias_of_those_that_stayed": stayed,
        "bias_of_offloaded": left,
        "marginal_s": None if marginal is None else marginal[0],
        "marginal_interval_s": None if marginal is None else marginal[1],
    }


def _sentences(total: "Worth") -> list[str]:
    from prfaas.core.units import format_bytes, format_s

    said = [f"{total.offloaded:,} of {total.requests:,} requests were offloaded."]
    if total.saved_share is not None:
        sooner = "sooner" if total.saved_share >= 0 else "later"
        said.append(
            f"Their first tokens came {abs(total.saved_share):.0%} {sooner} than in their own clusters: "
            f"{format_s(total.with_s / total.timed)} on average, predicted {format_s(total.without_s / total.timed)}."
        )
    if total.offloaded:
        said.append(
            f"{total.gpu_s_moved:,.0f} GPU-seconds of prefill were moved, for {total.gpu_s_spent:,.0f} elsewhere and "
            f"{format_bytes(total.egress_bytes)} over links."
        )
        if total.gpu_cost_spared or total.egress_cost:
            gpus, egress = f"{total.gpu_cost_spared:+.2f}", f"{-total.egress_cost:+.2f}"
            said.append(f"In money: {gpus} of GPUs, {egress} of egress, net {total.net:+.2f}.")
    for bias, who in zip(total.bias, ("stayed", "were offloaded"), strict=True):
        if bias is not None:
            said.append(
                f"Requests that {who} took {abs(bias):.0%} {'longer' if bias >= 0 else 'less'} than predicted."
            )
    marginal = total.marginal_s()
    if marginal is not None:
        said.append(
            f"Holdout: one more offloaded request has its first token {marginal[0]:.3g} ± {marginal[1]:.2g} s sooner "
            f"({total.held_out:,} were held out)."
        )
    return said


def _table(by: str, rows: list["Worth"]) -> Any:
    from rich.table import Table

    from prfaas.core.units import format_bytes, format_s

    table = Table(by, box=None, pad_edge=False)
    names = (
        "requests",
        "offloaded",
        "first token",
        "without",
        "sooner",
        "GPU-s moved",
        "spent",
        "egress",
        "net",
        "off by",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        timed, (_, bias) = row.timed, row.bias
        table.add_row(
            row.key.strip() or "–",
            f"{row.requests:,}",
            f"{row.offloaded:,}",
            format_s(row.with_s / timed) if timed else "–",
            format_s(row.without_s / timed) if timed else "–",
            "–" if row.saved_share is None else f"{row.saved_share:+.0%}",
            f"{row.gpu_s_moved:,.0f}",
            f"{row.gpu_s_spent:,.0f}",
            format_bytes(row.egress_bytes),
            f"{row.net:+.2f}",
            "–" if bias is None else f"{bias:+.0%}",
        )
    return table
