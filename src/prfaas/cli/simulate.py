"""`prfaas simulate`: a deployment under load, with the policies that would run it."""

import math
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from prfaas.cli.common import (
    AsJson,
    CliError,
    DeploymentPath,
    console,
    made_folder,
    print_json,
    progress_bar,
    write_text,
)
from prfaas.cli.completions import policy_names
from prfaas.cli.option_groups import option, options_of_panel, with_options
from prfaas.cli.pool_options import PoolsAsked, pools_asked
from prfaas.cli.trace_options import TraceAsked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prfaas.cli.simulate_inputs import SimulatedTraffic
    from prfaas.lab.report.simulation import SimulationReport
    from prfaas.lab.simulator.result import Result
    from prfaas.lab.simulator.scenario import Scenario

_LOAD, _REQUESTS = 0.7, 20_000
_arrival_option = options_of_panel("What arrives")
_world_option = options_of_panel("What it meets")
_length_option = options_of_panel("How long")


@dataclass(frozen=True, slots=True)
class LengthAsked:
    """For how long requests arrive."""

    requests: int | None = _length_option(None, f"Default: {_REQUESTS}.", min=1)
    duration: float | None = _length_option(None, "Simulated seconds of arrivals instead.")

    def check(self) -> None:
        """Raise CliError for two lengths, or one that is none."""
        if self.requests is not None and self.duration is not None:
            raise CliError("give --requests or --duration, not both")
        if self.duration is not None and not (math.isfinite(self.duration) and self.duration > 0):
            raise CliError(f"--duration: must be seconds above 0, not {self.duration:g}")

    @property
    def count(self) -> int | None:
        """How many requests; None: those of the duration."""
        return None if self.duration is not None else self.requests or _REQUESTS


@dataclass(frozen=True, slots=True)
class ArrivalsAsked:
    """What arrives, beside a trace."""

    load: float | None = _arrival_option(
        None,
        "Share of the highest throughput that `prfaas plan` finds, for a trace that of its lengths. "
        f"Default: {_LOAD}.",
    )
    rate: float | None = _arrival_option(None, "Requests per second, in place of a load.")
    bursts: bool = _arrival_option(
        False, "The same mean rate in phases: 0.7 × it for 60 s on average, 2.2 × for 15 s.", "--bursts"
    )
    diurnal: str | None = _arrival_option(
        None,
        "The same mean rate as a sine: swing from 0 to 1, period in seconds, e.g. 0.8/86400.",
        metavar="SWING/S",
    )
    seed: int = _arrival_option(0, "Another seed, other traffic.", min=0)
    seeds: int = _arrival_option(1, "So many seeds from this one on, with 95 % intervals.", min=1, max=1000)

    def rate_rps(self, lambda_max_rps: float, length: LengthAsked) -> float:
        """The mean rate. Raises CliError for two, one that is none, or more requests than can be simulated."""
        from prfaas.lab.simulator.simulation import check_length

        if self.load is not None and self.rate is not None:
            raise CliError("give --load or --rate, not both")
        load = _LOAD if self.load is None else self.load
        name, given, unit = (
            ("--load", load, lambda_max_rps) if self.rate is None else ("--rate", self.rate, 1.0)
        )
        if not (math.isfinite(given) and given > 0):
            raise CliError(f"{name}: must be a number above 0, not {given:g}")
        try:
            check_length(given * unit, length.count, length.duration)
        except ValueError as error:
            raise CliError(str(error)) from None
        return given * unit


@dataclass(frozen=True, slots=True)
class WorldAsked:
    """What the traffic meets: policies, caches, links, failures, and other numbers in the file."""

    policy: str | None = _world_option(
        None,
        "Or package.module:Class. Default: the file's, as `prfaas up` would run it.",
        metavar="NAME",
        autocompletion=policy_names,
    )
    compare: str | None = _world_option(
        None, "Several policies under the very same requests.", metavar="A,B,C"
    )
    param: list[str] | None = _world_option(
        None,
        "A parameter of policies, e.g. fairness=1; may be repeated. `prfaas policies` lists all.",
        metavar="NAME=VALUE",
    )
    caches: bool | None = _world_option(
        None, "Prefix caches on every instance. Default: only with --trace.", "--caches/--no-caches"
    )
    cache_memory: str | None = _world_option(
        None, "Of one instance, for its prefix cache. Default: 64 GiB.", metavar="SIZE"
    )
    link_fluctuation: str | None = _world_option(
        None,
        "Let bandwidths vary: standard deviation as a share, and correlation time, e.g. 0.3:30.",
        metavar="SD:CORRELATION_S",
    )
    steps: list[str] | None = _world_option(
        None,
        'Another bandwidth from second T on, e.g. "east->home@600=2 Gbit/s"; may be repeated.',
        "--bandwidth-steps",
        metavar="LINK@T=BANDWIDTH",
    )
    outage: list[str] | None = _world_option(
        None,
        'A link carries nothing from second T on for S seconds, e.g. "east->home@600+60"; may be repeated.',
        metavar="LINK@T+S",
    )
    fail: list[str] | None = _world_option(
        None, "An instance is gone for a time, with all it had; may be repeated.", metavar="INSTANCE@T+S"
    )
    set_fields: list[str] | None = _world_option(
        None,
        "Another number in the file, e.g. links[0].bandwidth=10e9; may be repeated.",
        "--set",
        metavar="FIELD=VALUE",
    )


@with_options
def simulate(
    deployment: DeploymentPath,
    arrivals: ArrivalsAsked,
    *,
    asked_trace: TraceAsked,
    met: WorldAsked,
    asked_pools: PoolsAsked,
    length: LengthAsked,
    report: Path | None = option(
        None, "Write DIR/index.html, one self-contained page with plots.", metavar="DIR"
    ),
    records: Path | None = option(
        None, "Write a row per request to FILE.csv, FILE.csv.gz or FILE.parquet.", metavar="FILE"
    ),
    as_json: AsJson = False,
) -> None:
    """Simulate a deployment under load: TTFT, throughput, queues and egress, with the scheduler's own code.

    The first tenth of the time is warm-up and not counted. The same seed gives the same numbers. The page
    guides/simulate has options and results.

    Example: prfaas simulate examples/paper.yaml --load 0.9 --compare paper,tilted --report out
    """
    from prfaas.cli.simulate_inputs import (
        caches_asked,
        check_records,
        failures_of,
        links_asked,
        parse_changes,
        policies_of,
        scenario_for,
        traffic_asked,
    )
    from prfaas.core.deployment import load_planned
    from prfaas.lab.report.simulation import SimulationReport
    from prfaas.lab.simulator.recording import Arriving

    length.check()
    changes = parse_changes(met.set_fields or ())
    planned = load_planned(deployment, changes=changes)
    asked = policies_of(planned, met.policy, met.compare, met.param or ())
    trace = asked_trace.read()
    arriving = Arriving.of(planned, trace)
    lambda_max = arriving.lambda_max_rps
    if lambda_max == 0:
        raise CliError(
            f"{deployment}: can serve nothing by `prfaas plan`; it needs instances that prefill and that decode"
        )
    rate_rps, failures = arrivals.rate_rps(lambda_max, length), failures_of(met.outage, met.fail)
    links = links_asked(planned, met.link_fluctuation, met.steps or ())
    has_caches = trace is not None if met.caches is None else met.caches
    caches, pools = caches_asked(planned, has_caches, met.cache_memory), pools_asked(planned, asked_pools)
    traffic = traffic_asked(arriving, rate_rps, bursts=arrivals.bursts, diurnal=arrivals.diurnal)
    _check_any(traffic, arrivals.seed, length.duration)
    folder = None if report is None else made_folder(report)
    check_records(records)
    scenarios = [
        scenario_for(planned, name, params, caches, links, pools, failures=failures)
        for name, params in asked.items()
    ]
    results, *others = (
        _simulated(scenarios, traffic, length, arrivals.seed + more) for more in range(arrivals.seeds)
    )
    shown = SimulationReport(
        deployment=planned,
        results=results,
        summaries={name: result.summary() for name, result in results.items()},
        rate_rps=rate_rps,
        lambda_max_rps=lambda_max,
        seed=arrivals.seed,
        requests=length.count,
        duration_s=length.duration,
        arrivals=traffic.described,
        arrivals_text=traffic.text,
        notes=traffic.notes,
        caches=caches,
        pools=pools,
        link_fluctuation=met.link_fluctuation,
        bandwidth_steps=met.steps or (),
        failures=failures,
        changes=changes,
        changes_text=met.set_fields or (),
        params={name: params for name, params in asked.items() if params},
        repeats={name: [each[name].summary() for each in others] for name in results} if others else {},
        command=shlex.join(["prfaas", *sys.argv[1:]]),
    )
    _show(shown, folder, records, as_json=as_json)


def _show(shown: "SimulationReport", folder: Path | None, records: Path | None, *, as_json: bool) -> None:
    from prfaas.lab.report.records import write_records
    from prfaas.lab.report.simulation import print_simulation

    if folder is not None:
        from prfaas.lab.report.simulation_figures import simulation_page

        write_text(folder / "index.html", simulation_page(shown))
    if records is not None:
        typer.echo(f"wrote {records}: {write_records(records, shown.results):,} rows", err=True)
    if as_json:
        print_json(shown.to_json())
    else:
        print_simulation(console(), shown)


def _simulated(
    scenarios: "Sequence[Scenario]", traffic: "SimulatedTraffic", length: LengthAsked, seed: int
) -> "dict[str, Result]":
    """Every scenario under the same requests, with a bar on stderr; how quick it was is said there too."""
    import numpy as np

    from prfaas.core.scheduling.checked_policy import UnsoundDecisionError
    from prfaas.core.scheduling.view import NoDecodeInstanceError
    from prfaas.lab.simulator.simulation import simulate as run

    expected = length.count or round((length.duration or 0.0) * traffic.traffic.mean_per_s)
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
                    requests=length.count,
                    duration_s=length.duration,
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


def _check_any(traffic: "SimulatedTraffic", seed: int, duration_s: float | None) -> None:
    import numpy as np

    first_s = float(next(traffic.traffic.chunks(np.random.default_rng(seed))).arrival_s[0])
    if duration_s is not None and first_s >= duration_s:
        raise CliError(
            f"--duration: nothing arrives within {duration_s:g} s; the first request comes after {first_s:.3g} s"
        )
