"""`prfaas simulate`: a deployment under load, with the policies that would run it."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prfaas.cli.common import (
    AsJson,
    CliError,
    DeploymentPath,
    console,
    json_text,
    made_folder,
    print_json,
    progress_bar,
    write_text,
)
from prfaas.cli.completions import policy_names
from prfaas.cli.option_groups import options_of_panel, with_groups
from prfaas.cli.pool_options import PoolsAsked, pools_asked
from prfaas.cli.trace_options import TraceAsked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prfaas.cli.simulate_inputs import SimulatedTraffic
    from prfaas.lab.report.records import RecordsFile
    from prfaas.lab.report.simulation import SimulationReport
    from prfaas.lab.simulator.result import Result
    from prfaas.lab.simulator.scenario import Scenario

_LOAD, _REQUESTS = 0.7, 20_000
_arrival_option = options_of_panel("What arrives")
_world_option = options_of_panel("What it meets")
_length_option = options_of_panel("How long")


@with_groups
def simulate(
    deployment: DeploymentPath,
    load: Annotated[
        float | None,
        _arrival_option(
            help="Share of the highest throughput that `prfaas plan` finds, for a trace that of its lengths. "
            f"Default: {_LOAD}."
        ),
    ] = None,
    rate: Annotated[float | None, _arrival_option(help="Requests per second, in place of a load.")] = None,
    *,
    asked_trace: TraceAsked,
    bursts: Annotated[
        bool,
        _arrival_option(
            "--bursts", help="The same mean rate in phases: 0.7 × it for 60 s on average, 2.2 × for 15 s."
        ),
    ] = False,
    diurnal: Annotated[
        str | None,
        _arrival_option(
            metavar="SWING/S",
            help="The same mean rate as a sine: swing from 0 to 1, period in seconds, e.g. 0.8/86400.",
        ),
    ] = None,
    seed: Annotated[int, _arrival_option(min=0, help="Another seed, other traffic.")] = 0,
    seeds: Annotated[
        int, _arrival_option(min=1, help="So many seeds from this one on, with 95 % intervals.")
    ] = 1,
    policy: Annotated[
        str | None,
        _world_option(
            metavar="NAME",
            help="Or package.module:Class. Default: the file's, as `prfaas up` would run it.",
            autocompletion=policy_names,
        ),
    ] = None,
    compare: Annotated[
        str | None, _world_option(metavar="A,B,C", help="Several policies under the very same requests.")
    ] = None,
    param: Annotated[
        list[str] | None,
        _world_option(
            metavar="NAME=VALUE",
            help="A parameter of policies, e.g. fairness=1; may be repeated. `prfaas policies` lists all.",
        ),
    ] = None,
    caches: Annotated[
        bool | None,
        _world_option(
            "--caches/--no-caches",
            help="Prefix caches on every instance. Default: only with --trace.",
        ),
    ] = None,
    cache_memory: Annotated[
        str | None,
        _world_option(metavar="SIZE", help="Of one instance, for its prefix cache. Default: 64 GiB."),
    ] = None,
    pools_given: PoolsAsked,
    link_fluctuation: Annotated[
        str | None,
        _world_option(
            metavar="SD:CORRELATION_S",
            help="Let bandwidths vary: standard deviation as a share, and correlation time, e.g. 0.3:30.",
        ),
    ] = None,
    steps: Annotated[
        list[str] | None,
        _world_option(
            "--bandwidth-steps",
            metavar="LINK@T=BANDWIDTH",
            help='Another bandwidth from second T on, e.g. "east->home@600=2 Gbit/s"; may be repeated.',
        ),
    ] = None,
    outage: Annotated[
        list[str] | None,
        _world_option(
            metavar="LINK@T+S",
            help='A link carries nothing from second T on for S seconds, e.g. "east->home@600+60"; may be repeated.',
        ),
    ] = None,
    fail: Annotated[
        list[str] | None,
        _world_option(
            metavar="INSTANCE@T+S", help="An instance is gone for a time, with all it had; may be repeated."
        ),
    ] = None,
    set_fields: Annotated[
        list[str] | None,
        _world_option(
            "--set",
            metavar="FIELD=VALUE",
            help="Another number in the file, e.g. links[0].bandwidth=10e9; may be repeated.",
        ),
    ] = None,
    requests: Annotated[int | None, _length_option(min=1, help=f"Default: {_REQUESTS}.")] = None,
    duration: Annotated[float | None, _length_option(help="Simulated seconds of arrivals instead.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write DIR/index.html, one self-contained page with plots."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a row per request to FILE.parquet, .csv, .csv.gz, .jsonl or .jsonl.gz.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a deployment under load: TTFT, throughput, queues and egress, with the scheduler's own code.

    The first tenth of the time is warm-up and not counted. The same seed gives the same numbers. The page
    guides/simulate has options and results.

    Example: prfaas simulate examples/paper.yaml --load 0.9 --compare paper,tilted --report out
    """
    from prfaas.cli.simulate_inputs import (
        caches_asked,
        failures_of,
        links_asked,
        parse_changes,
        policies_of,
        records_file,
        scenario_for,
        traffic_asked,
    )
    from prfaas.core.deployment import load_planned
    from prfaas.core.planner import best_operation, problem_of
    from prfaas.lab.report.simulation import SimulationReport
    from prfaas.lab.simulator.recording import Recording

    length = _length(requests, duration)
    changes = parse_changes(set_fields or ())
    planned = load_planned(deployment, changes=changes)
    problem = problem_of(planned)
    asked = policies_of(planned, policy, compare, param or ())
    trace = asked_trace.read()
    recording = None if trace is None else Recording.of(planned, problem, trace)
    lambda_max = best_operation(problem).lambda_max if recording is None else recording.lambda_max_rps
    if lambda_max == 0:
        raise CliError(
            f"{deployment}: can serve nothing by `prfaas plan`; it needs instances that prefill and that decode"
        )
    rate_rps, failures = _rate(load, rate, lambda_max, length), failures_of(outage, fail)
    links = links_asked(planned, link_fluctuation, steps or ())
    options = caches_asked(planned, trace is not None if caches is None else caches, cache_memory)
    pools = pools_asked(planned, pools_given)
    traffic = traffic_asked(problem, recording, rate_rps, bursts=bursts, diurnal=diurnal)
    _check_any(traffic, seed, length[1])
    folder = None if report is None else made_folder(report)
    rows = records_file(records)
    scenarios = [
        scenario_for(planned, name, params, options, links, pools, failures=failures)
        for name, params in asked.items()
    ]
    results = _simulated(scenarios, traffic, seed, *length)
    others = [_simulated(scenarios, traffic, seed + more, *length) for more in range(1, seeds)]
    shown = SimulationReport(
        deployment=planned,
        results=results,
        summaries={name: result.summary() for name, result in results.items()},
        rate_rps=rate_rps,
        lambda_max_rps=lambda_max,
        seed=seed,
        requests=length[0],
        duration_s=length[1],
        arrivals=traffic.described,
        arrivals_text=traffic.text,
        notes=traffic.notes,
        caches=options,
        pools=pools,
        link_fluctuation=link_fluctuation,
        bandwidth_steps=steps or (),
        failures=failures,
        changes=changes,
        changes_text=set_fields or (),
        params={name: params for name, params in asked.items() if params},
        repeats={name: [each[name].summary() for each in others] for name in results} if others else {},
        command=shlex.join(["prfaas", *sys.argv[1:]]),
    )
    _show(shown, folder, rows, as_json=as_json)


def _show(
    shown: "SimulationReport", folder: Path | None, rows: "RecordsFile | None", *, as_json: bool
) -> None:
    from prfaas.lab.report.simulation import print_simulation

    if folder is not None:
        from prfaas.lab.report.simulation_figures import simulation_page

        write_text(folder / "index.html", simulation_page(shown))
    if rows is not None:
        count = rows.write(shown.results, json_text(shown.to_json()))
        typer.echo(f"wrote {rows.path}: {count:,} rows", err=True)
    if as_json:
        print_json(shown.to_json())
    else:
        print_simulation(console(), shown)


def _simulated(
    scenarios: "Sequence[Scenario]",
    traffic: "SimulatedTraffic",
    seed: int,
    requests: int | None,
    duration_s: float | None,
) -> "dict[str, Result]":
    """Every scenario under the same requests, with a bar on stderr; how quick it was is said there too."""
    import numpy as np

    from prfaas.core.scheduling.checked_policy import UnsoundDecisionError
    from prfaas.core.scheduling.view import NoDecodeInstanceError
    from prfaas.lab.simulator.simulation import simulate as run

    expected = requests if requests is not None else round((duration_s or 0.0) * traffic.traffic.mean_per_s)
    results = {}
    with progress_bar(transient=True) as progress:
        for scenario in scenarios:
            task = progress.add_task(scenario.policy, total=expected)

            def advance(done: int, task: Any = task) -> None:
                progress.update(task, completed=done)

            started_s = time.perf_counter()
            try:
                result = run(
                    scenario,
                    traffic.traffic.chunks(np.random.default_rng(seed)),
                    seed=seed,
                    requests=requests,
                    duration_s=duration_s,
                    progress=advance,
                )
            except (NoDecodeInstanceError, UnsoundDecisionError) as error:
                raise CliError(f"policy {scenario.policy}: {error}") from error
            took_s = time.perf_counter() - started_s
            results[scenario.policy] = result
            progress.update(task, completed=expected)
            count = len(result.arrival_s)
            typer.echo(
                f"{scenario.policy}: {count:,} requests in {took_s:.2f} s, {count / took_s:,.0f} per second",
                err=True,
            )
    return results


def _length(requests: int | None, duration_s: float | None) -> tuple[int | None, float | None]:
    import math

    if requests is not None and duration_s is not None:
        raise CliError("give --requests or --duration, not both")
    if duration_s is not None and not (math.isfinite(duration_s) and duration_s > 0):
        raise CliError(f"--duration: must be seconds above 0, not {duration_s:g}")
    return (None, duration_s) if duration_s is not None else (requests or _REQUESTS, None)


def _rate(
    load: float | None, rate: float | None, lambda_max: float, length: tuple[int | None, float | None]
) -> float:
    import math

    from prfaas.lab.simulator.simulation import check_length

    if load is not None and rate is not None:
        raise CliError("give --load or --rate, not both")
    option, given, unit = (
        ("--rate", rate, 1.0) if rate is not None else ("--load", _LOAD if load is None else load, lambda_max)
    )
    if not (math.isfinite(given) and given > 0):
        raise CliError(f"{option}: must be a number above 0, not {given:g}")
    try:
        check_length(given * unit, *length)
    except ValueError as error:
        raise CliError(str(error)) from None
    return given * unit


def _check_any(traffic: "SimulatedTraffic", seed: int, duration_s: float | None) -> None:
    import numpy as np

    first_s = float(next(traffic.traffic.chunks(np.random.default_rng(seed))).arrival_s[0])
    if duration_s is not None and first_s >= duration_s:
        raise CliError(
            f"--duration: nothing arrives within {duration_s:g} s; the first request comes after {first_s:.3g} s"
        )
