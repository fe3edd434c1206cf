"""Checked inputs of `prfaas simulate`: its traffic, policies, changed fields, caches and links' fluctuation.

The traffic is made up, or a recorded trace, at one rate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prfaas.cli.common import CliError, check_target, field_number
from prfaas.cli.trace_options import beyond
from prfaas.core.deployment import PlannedDeployment
from prfaas.core.extras import how_to_install
from prfaas.core.planner import PlanProblem
from prfaas.core.scheduling.parameters import PolicyError, Setting, parameters_of
from prfaas.core.scheduling.policy import make_policy, policy_class
from prfaas.core.units import parse_bytes
from prfaas.core.workload.arrivals import BURST, CALM, Arrivals, Diurnal, Mmpp
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.traffic import IndependentTraffic, ReplayedTraffic, Traffic
from prfaas.lab.simulator.capacity import CapacityProcess, Fluctuating
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.recording import CACHE_BYTES, Arriving, Recording
from prfaas.lab.simulator.scenario import Failure, Scenario, as_deployed, stepped


@dataclass(frozen=True, slots=True)
class SimulatedTraffic:
    """Requests to simulate, and what they are."""

    traffic: Traffic
    described: dict[str, Any]
    """What they are, for JSON."""
    text: str
    """The same for people, in one line."""
    notes: tuple[str, ...] = ()
    """What was done to a trace, and what else one should know."""


def failures_of(outages: Sequence[str] | None, fails: Sequence[str] | None) -> list[Failure]:
    """From `--outage LINK@T+S` and `--fail INSTANCE@T+S`.

    Raises:
        CliError: another form, or times out of range.
    """

    found = []
    asked = (("--outage", "east->home", outages or ()), ("--fail", "home-0", fails or ()))
    for option, example, text in (
        (option, example, each) for option, example, all_ in asked for each in all_
    ):
        what, _, times = text.rpartition("@")
        at, _, lasts = times.rpartition("+")
        try:
            found.append(Failure(what, float(at), float(lasts)))
            if ("->" in what) != ("->" in example) or not math.isfinite(float(at) + float(lasts)):
                raise ValueError
        except ValueError:
            raise CliError(
                f'{option} "{text}": write it as {example}@600+60, from second 600 on for 60 s'
            ) from None
    return found


def traffic_asked(
    arriving: Arriving, rate_rps: float, *, bursts: bool, diurnal: str | None
) -> SimulatedTraffic:
    """The recorded trace at one rate, or what is made up.

    Raises:
        CliError: `--bursts` and `--diurnal`, one of them with a trace, or no swing and period.
        WorkloadError: the trace has no duration and so no rate.
    """
    if arriving.recording is not None and (bursts or diurnal is not None):
        raise CliError("--bursts and --diurnal make up arrivals; a --trace has its own")
    shape = _swing_and_period(diurnal)
    try:
        traffic = arriving.at_rate(rate_rps, bursts=bursts, diurnal=shape)
    except WorkloadError as error:
        raise error if arriving.recording is not None else CliError(f"--diurnal: {error}") from None
    if isinstance(traffic, IndependentTraffic):
        return _made_up(arriving.problem, traffic)
    assert arriving.recording is not None
    return _recorded(arriving.recording, traffic)


def _made_up(problem: PlanProblem, traffic: IndependentTraffic) -> SimulatedTraffic:
    """Prompts from the deployment file's lengths, all answers of its mean length."""
    workload, mean_tokens = problem.workload, traffic.inputs.mean()
    described, text = _described(traffic.arrivals)
    described |= {"mean_input_tokens": mean_tokens, "mean_output_tokens": workload.output_tokens}
    text += (
        f"; prompts of {mean_tokens:,.0f} tokens on average as in the file, "
        f"answers of {workload.output_tokens:,.0f}"
    )
    notes = []
    if workload.prefix_hit_ratio:
        notes.append(
            f"Prompts are what a prefix_hit_ratio of {workload.prefix_hit_ratio:g} leaves of the file's lengths, in "
            "transfers too."
        )
    if any(cluster.prefix_hit_ratio is not None for cluster in problem.clusters):
        notes.append("A cluster's own prefix_hit_ratio plays no part: no two made-up prompts begin alike.")
    return SimulatedTraffic(traffic, described, text, tuple(notes))


def _swing_and_period(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    swing, sign, period_s = text.partition("/")
    try:
        if not sign:
            raise ValueError
        return float(swing), float(period_s)
    except ValueError:
        raise CliError(f'--diurnal "{text}": write SWING/SECONDS, for example 0.8/86400') from None


def _described(arrivals: Arrivals) -> tuple[dict[str, Any], str]:

    if isinstance(arrivals, Mmpp):
        phases = [{"rate_rps": each.rate_per_s, "mean_s": each.dwell_s} for each in arrivals.phases]
        text = (
            f"bursts: {CALM.rate_per_s:g} × the mean rate for {CALM.dwell_s:g} s on average, then "
            f"{BURST.rate_per_s:g} × for {BURST.dwell_s:g} s"
        )
        return {"process": "mmpp", "phases": phases}, text
    if isinstance(arrivals, Diurnal):
        least, most = (1 + side * arrivals.swing for side in (-1, 1))
        text = f"day and night: {least:g} to {most:g} × the mean rate, every {arrivals.period_s:,.0f} s"
        return {"process": "diurnal", "swing": arrivals.swing, "period_s": arrivals.period_s}, text
    return {"process": "poisson"}, "Poisson arrivals"


def _recorded(recording: Recording, traffic: ReplayedTraffic) -> SimulatedTraffic:
    trace = recording.trace
    name = Path(trace.name).name
    described = {
        "process": "trace",
        "trace": name,
        "trace_requests": len(trace),
        "trace_span_s": trace.span_s,
        "speed_factor": traffic.speed,
        "jitter_s": traffic.jitter_s,
        "round_s": traffic.round_s,
        "profiles_tokens": [*recording.range_tokens],
        "empty_requests": trace.empty,
        "mean_input_tokens": float(trace.input_tokens.mean()),
        "mean_output_tokens": trace.mean_output_tokens,
        "lambda_max_of_trace_rps": recording.lambda_max_rps,
        "lambda_max_of_trace_cached_rps": recording.lambda_max_cached_rps,
    }
    text = (
        f"the trace {name} ({len(trace):,} requests in {trace.span_s:,.0f} s), {traffic.speed:.4g} times as "
        f"fast as recorded; prompts of {described['mean_input_tokens']:,.0f} tokens on average, answers of "
        f"{described['mean_output_tokens']:,.0f}"
    )
    return SimulatedTraffic(traffic, described, text, tuple(_notes(recording, traffic, described)))


def _notes(recording: Recording, traffic: ReplayedTraffic, described: dict[str, Any]) -> Iterator[str]:
    trace = recording.trace
    yield (
        f"Units of {described['trace']}: {trace.units}. It is repeated every {traffic.round_s:,.0f} simulated "
        "seconds as often as needed, each time with other prefixes."
    )
    if trace.quantum_s:
        yield (
            f"Its clock has steps of {trace.quantum_s:g} s: every arrival is moved by an even 0 to "
            f"{trace.quantum_s:g} s of the trace's time."
        )
    yield from beyond(trace.lengths, recording.range_tokens)
    if trace.empty:
        yield f"{trace.empty:,} requests without a prompt are left out."
    yield (
        f"The load is a share of the {described['lambda_max_of_trace_rps']:.4g} requests/s that the planner finds for "
        f"the trace's lengths with nothing cached; behind a prefix cache that forgets nothing it finds "
        f"{described['lambda_max_of_trace_cached_rps']:.4g}."
    )


def check_records(path: Path | None) -> None:
    """Raises CliError, before a long simulation, where `--records` could not be written after it."""
    check_target(path, "--records")
    if path is None:
        return
    if not path.name.lower().endswith((".csv", ".csv.gz", ".parquet")):
        raise CliError(f"--records: {path}: its name must end in .csv, .csv.gz or .parquet")
    if path.suffix.lower() == ".parquet" and None in map(find_spec, ("pandas", "pyarrow")):
        raise CliError(f"--records: Parquet needs pyarrow ({how_to_install('records')}); .csv.gz does not")


def parse_changes(texts: Sequence[str]) -> dict[str, float]:
    """From `--set FIELD=VALUE` to what `load_planned` takes. A bandwidth may have a unit.

    Raises:
        CliError: another form, no number, or a field twice.
    """
    changes: dict[str, float] = {}
    for text in texts:
        field, sign, value = (part.strip() for part in text.partition("="))
        if not (sign and field and value):
            raise CliError(f'--set "{text}": write FIELD=VALUE, for example "links[0].bandwidth=10 Gbit/s"')
        if field in changes:
            raise CliError(f"--set: {field} is given twice")
        changes[field] = field_number(f'--set "{text}"', field, value)
    return changes


def policies_of(
    deployment: PlannedDeployment, policy: str | None, compare: str | None, settings: Sequence[str] = ()
) -> dict[str, dict[str, Setting]]:
    """The policies to simulate with their parameters; without options as the deployment would run.

    Those of the file belong to the file's policy. One of `settings`, NAME=VALUE, goes to every policy that has it.

    Raises:
        CliError: both options, a name twice, a policy that there is not, or a parameter that none of them has.
        DeploymentError: the policy that the file names is not there.
    """

    if policy is not None and compare is not None:
        raise CliError("give --policy or --compare, not both")
    option, routing = "--policy" if compare is None else "--compare", deployment.routing
    one = routing.policy if policy is None else policy
    names = [one] if compare is None else [name.strip() for name in compare.split(",")]
    if len(set(names)) < len(names):
        raise CliError(f"{option}: names a policy twice")
    asked: dict[str, dict[str, Setting]] = {name: routing.params_of(name) for name in names}
    known = {}
    for name in names:
        try:
            known[name] = parameters_of(policy_class(name))
        except PolicyError as error:
            if policy is None and compare is None:
                raise deployment.error(("routing", "policy"), str(error)) from error
            raise CliError(f"{option}: {error}") from error
    for text in settings:
        parameter, sign, value = (part.strip() for part in text.partition("="))
        if not (sign and parameter and value):
            raise CliError(f'--param "{text}": write NAME=VALUE, for example fairness=1')
        having = [name for name in names if parameter in known[name]]
        if not having:
            all_known = dict.fromkeys(each.described for name in names for each in known[name].values())
            raise CliError(
                f'--param: {" and ".join(names)} {"has" if len(names) == 1 else "have"} no parameter "{parameter}"; '
                f"there are {'; '.join(all_known) or 'none'}"
            )
        for name in having:
            asked[name][parameter] = known[name][parameter].parsed(value)
    return asked


def scenario_for(
    deployment: PlannedDeployment,
    policy: str,
    params: Mapping[str, Setting],
    caches: CacheOptions | None,
    links: Mapping[str, CapacityProcess],
    pools: Mapping[str, PoolOptions] | None = None,
    *,
    failures: Sequence[Failure] = (),
) -> Scenario:
    """The scenario of a deployment as it would run: its `routing` and `control` sections count.

    Raises:
        CliError: a deployment that can be planned but not run by this policy, or a parameter out of its bounds.
        DeploymentError: the same, where the file has the parameter.
    """

    try:
        scenario = as_deployed(
            deployment, policy, params, caches=caches, pools=pools, links=links, failures=failures
        )
        make_policy(policy, scenario.params)
    except PolicyError as error:
        wrong = error.parameter
        in_file = deployment.routing.params_of(policy)
        if wrong is not None and wrong in in_file and in_file[wrong] == params.get(wrong):
            raise deployment.error(("routing", "params", wrong), str(error)) from error
        raise CliError(f"--param: {error}" if wrong is not None else str(error)) from error
    except ValueError as error:
        raise CliError(f"{deployment.path}: can't be simulated: {error}") from error
    return scenario


def caches_asked(deployment: PlannedDeployment, has_caches: bool, memory: str | None) -> CacheOptions | None:
    """Prefix caches of so much memory on every instance, 64 GiB if not said, in the model's own tokens; None: none.

    Raises:
        CliError: no size, memory that no cache has, or the model keeps nothing per token that could be cached.
    """

    if not has_caches:
        if memory is not None:
            raise CliError("--cache-memory is for prefix caches, and there are none: give --caches, too")
        return None
    try:
        num_bytes = CACHE_BYTES if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise CliError(f"--cache-memory: {error}") from None
    try:
        return CacheOptions.of_memory(deployment.kv_model, num_bytes)
    except ValueError as error:
        raise CliError(f"--caches: {error}") from None


def links_asked(
    deployment: PlannedDeployment, fluctuation: str | None, steps: Sequence[str]
) -> dict[str, CapacityProcess]:
    """Links that are not as in the file all the time.

    Args:
        deployment: the file.
        fluctuation: SD:CORRELATION_S, of every link around its bandwidth in the file.
        steps: LINK@T=BANDWIDTH each.

    Raises:
        CliError: both, another form, a link that there is not, or numbers out of range.
    """
    if steps and fluctuation is not None:
        raise CliError("give --bandwidth-steps or --link-fluctuation, not both")
    return _stepped(deployment, steps) if fluctuation is None else _fluctuating(deployment, fluctuation)


def _fluctuating(deployment: PlannedDeployment, text: str) -> dict[str, CapacityProcess]:

    parts = text.split(":")
    try:
        relative_sd, correlation_s = (float(part) for part in parts)
        if not (math.isfinite(relative_sd) and 0 < relative_sd <= 1 and 0 < correlation_s < math.inf):
            raise ValueError
    except ValueError:
        raise CliError(
            f'--link-fluctuation "{text}": must be SD:CORRELATION_S, the standard deviation as a share of the '
            "bandwidth (above 0, at most 1) and a correlation time above 0 s, for example 0.3:30"
        ) from None
    return {
        link.name: Fluctuating(link.bandwidth_bits_per_s, relative_sd, correlation_s)
        for link in deployment.links
    }


def _stepped(deployment: PlannedDeployment, texts: Sequence[str]) -> dict[str, CapacityProcess]:

    steps: list[tuple[str, float, float]] = []
    links: dict[str, CapacityProcess] = {}
    for text in texts:
        option = f'--bandwidth-steps "{text}"'
        what, sign, value = text.partition("=")
        link, _, at = what.rpartition("@")
        try:
            at_s = float(at if sign else "")
        except ValueError:
            raise CliError(f'{option}: write it as "east->home@600=2 Gbit/s", from second 600 on') from None
        steps.append((link, at_s, field_number(option, "bandwidth", value)))
        try:
            links = stepped(deployment, steps)
        except ValueError as error:
            raise CliError(f"{option}: {error}") from None
    return links
