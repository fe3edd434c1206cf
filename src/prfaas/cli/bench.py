"""`prfaas bench`: vLLM's load test, joined with what the gateway knows of the routes."""

from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.common import (
    AdminAddress,
    AsJson,
    CliError,
    DeploymentPath,
    TokenFile,
    admin_address,
    console,
    fetch_text,
    print_json,
)

if TYPE_CHECKING:
    from prfaas.tools.bench.route_counts import GatewayReading


def bench(
    deployment: DeploymentPath,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options of `vllm bench serve`, after two dashes."),
    ] = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Run `vllm bench serve` against a running gateway, and say which ways its requests went.

    Server, model and tokenizer are given to it; what stands after -- wins over them. Its text goes to stderr. The
    gateway's counters before and after give requests, KV bytes and times of each route.

    Example: prfaas bench examples/local.yaml -- --dataset-name random --random-input-len 6000 --num-prompts 20
    """
    from prfaas.core.deployment import load_deployment
    from prfaas.tools.bench.route_counts import CountsError, counts_between, counts_notes, counts_table
    from prfaas.tools.bench.vllm_serve import LoadTestError, run_load_test

    loaded = load_deployment(deployment)
    admin = admin_address(str(deployment), token_file)
    before = _reading(admin)
    try:
        result = run_load_test(loaded, options or ())
        counts = counts_between(before, _reading(admin))
    except (LoadTestError, CountsError) as error:
        raise CliError(str(error)) from error
    if as_json:
        print_json({"vllm": result, "gateway": counts.to_json()})
        return
    out = console()
    out.print(counts_table(counts))
    for note in counts_notes(counts, int(result.get("completed", 0))):
        out.print(note)


def _reading(admin: "AdminAddress") -> "GatewayReading":
    from prfaas.tools.bench.route_counts import GatewayReading

    try:
        return GatewayReading.of(fetch_text(admin, "/metrics"))
    except ValueError as error:
        raise CliError(f"{admin.url}/metrics is no page of a prfaas gateway ({error})") from error
