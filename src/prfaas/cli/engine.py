"""`prfaas engine`: one engine of a deployment, in place of this process."""

import os
from dataclasses import replace

import typer

from prfaas.cli.common import AsJson, DeploymentPath, InstanceName, LogsAsked, print_json
from prfaas.cli.option_groups import option, with_options


@with_options
def engine(
    deployment: DeploymentPath,
    name: InstanceName,
    print_only: bool = option(False, "Print the exact command line and start nothing.", "--print"),
    *,
    logs: LogsAsked,
    as_json: AsJson = False,
) -> None:
    """Start one engine of a deployment (a vLLM server, or a stand-in where hardware is synthetic), or print how.

    Run it on the machine that the instance's host names. --json implies --print.

    Example: prfaas engine examples/local.yaml home-decode-0 --print
    """
    from prfaas.cli.fetching import fetch_model
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.descriptors import raise_descriptor_limit
    from prfaas.serving.engines.command import synthetic_command, vllm_command
    from prfaas.serving.engines.data_parallel import end_group_before
    from prfaas.serving.engines.preparation import (
        ensure_certificates,
        ensure_dtypes,
        ensure_events_folder,
        ensure_key,
        ensure_nixl,
        ensure_vllm,
    )

    loaded = load_deployment(deployment)
    instance = loaded.instance(name)
    fetch_model(loaded)
    command = synthetic_command(loaded, [name]) if instance.is_stand_in else vllm_command(loaded, instance)
    if logs != LogsAsked():
        command = replace(command, env={**command.env, **logs.settings().environment()})
    if as_json:
        print_json({"argv": command.argv, "env": command.env})
        return
    if print_only:
        typer.echo(command.shell)
        return
    if not instance.is_stand_in:
        ensure_vllm()
        ensure_dtypes(loaded, [instance])
        ensure_nixl(loaded, [instance])
    ensure_key(loaded)
    ensure_certificates(loaded, [name])
    ensure_events_folder(loaded)
    end_group_before(loaded, instance, started=[name])
    typer.echo(f"open files: {raise_descriptor_limit():,} at most", err=True)
    os.execve(command.argv[0], command.argv, command.environment())
