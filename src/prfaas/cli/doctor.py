"""`prfaas doctor`: does everything fit, and does disaggregation really happen."""

from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.common import AsJson, DeploymentPath, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from prfaas.core.deployment import Deployment
    from prfaas.tools.finding import Finding


def doctor(
    deployment: DeploymentPath,
    probe: Annotated[
        bool, typer.Option(help="Send one prompt over the threshold, to see that it is prefilled elsewhere.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check a deployment: files, key, engines, versions, KV ports, pools, gateway, clocks, file descriptors, and
    that disaggregation really happens.

    Each problem comes with what to do about it. Exit code 1 if there is one.

    Example: prfaas doctor examples/local.yaml
    """
    from prfaas.tools.finding import any_problem

    findings = _diagnose(deployment, probe)
    if as_json:
        _print_json(findings)
    else:
        _print_text(findings)
    if any_problem(findings):
        raise typer.Exit(1)


def _diagnose(path: "Path", probe: bool) -> "list[Finding]":
    import asyncio

    from prfaas.core.deployment import DeploymentError, load_deployment
    from prfaas.core.shipped import page
    from prfaas.tools.doctor import check_model
    from prfaas.tools.finding import ok, problem
    from prfaas.tools.rank_facts import check_ranks
    from prfaas.tools.security_facts import check_certificates, check_encryption, check_key

    try:
        loaded = load_deployment(path)
    except DeploymentError as error:
        fields = f"correct the file; every field is in {page('reference/deployment-file')}"
        return [problem("file", str(error), fields)]
    findings = [ok("file", f"{path} is valid"), check_model(loaded), check_key(loaded)]
    findings += check_ranks(loaded)
    findings += check_certificates(loaded) + check_encryption(loaded)
    return findings + asyncio.run(_ask(loaded, probe))


async def _ask(deployment: "Deployment", probe: bool) -> "list[Finding]":
    import aiohttp

    from prfaas.tools.doctor import check_disaggregation, check_engines, check_gateway
    from prfaas.tools.finding import any_problem
    from prfaas.tools.pool_facts import check_pools
    from prfaas.tools.process_facts import check_processes

    async with aiohttp.ClientSession() as session:
        findings = await check_engines(deployment, session)
        findings += await check_pools(deployment)
        gateway = await check_gateway(deployment, session)
        findings.append(gateway)
        findings += await check_processes(deployment, session)
        if probe and not any_problem([gateway]):
            findings.append(await check_disaggregation(deployment, session))
    return findings


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
