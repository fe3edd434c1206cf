"""`prfaas doctor`: does everything fit, and does disaggregation really happen."""

from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import AsJson, DeploymentPath, print_json
from prfaas.cli.option_groups import option, with_options

if TYPE_CHECKING:
    from prfaas.tools.finding import Finding


@with_options
def doctor(
    deployment: DeploymentPath,
    probe: bool = option(True, "Send one prompt over the threshold, to see that it is prefilled elsewhere."),
    as_json: AsJson = False,
) -> None:
    """Check a deployment: files, key, engines, versions, KV ports, pools, gateway, clocks, file descriptors, and
    that disaggregation really happens.

    Each problem comes with what to do about it. Exit code 1 if there is one.

    Example: prfaas doctor examples/local.yaml
    """
    import asyncio

    from prfaas.tools.doctor import diagnose
    from prfaas.tools.finding import any_problem

    findings = asyncio.run(diagnose(deployment, probe=probe))
    if as_json:
        _print_json(findings)
    else:
        _print_text(findings)
    if any_problem(findings):
        raise typer.Exit(1)


def _print_text(findings: "list[Finding]") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        bad = finding.level == "problem"
        line = Text("problem  " if bad else "ok       ", style="bold red" if bad else "green")
        line.append(f"{finding.subject}: {finding.text}", style="default")
        console.print(line)
        if finding.mend is not None:
            console.print(Text(f"         → {finding.mend}"))


def _print_json(findings: "list[Finding]") -> None:
    import dataclasses

    from prfaas.tools.finding import any_problem

    document = {"ok": not any_problem(findings), "findings": [dataclasses.asdict(each) for each in findings]}
    print_json(document)
