"""Runs the burst live and simulated, and leaves nothing running."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from prfaas.core.shipped import example_path
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Overheads, scenario_of
from prfaas.lab.simulator.simulation import simulate
from prfaas.serving.engines.running import RunningEngines
from prfaas.tools.demo.gateway import DemoError
from prfaas.tools.demo.pays.burst import BURST_REQUESTS, Burst, Side
from prfaas.tools.demo.pays.limits import pay_limits
from prfaas.tools.demo.pays.live import live_runs
from prfaas.tools.demo.pays.outcome import BurstOutcome, SideOutcome

WITH_PRFAAS, WITHOUT = "when-it-pays.yaml", "without-prfaas.yaml"
_READY_TIMEOUT_S = 120.0


def run_burst(
    bursting: Callable[[int], AbstractContextManager[Callable[[], None]]],
    requests: int = BURST_REQUESTS,
    files: tuple[Path, Path] | None = None,
) -> BurstOutcome:
    """The burst to two deployments of stand-ins.

    Args:
        bursting: Shows progress while stand-ins start and answer so many requests; what it gives is called after each
            answer.
        requests: Of the burst; each side gets all of them.
        files: The deployment with PrfaaS and the one without; None: the examples.

    Raises:
        DemoError: the examples are not installed, a gateway ended, or stand-ins don't answer.
        DeploymentError: a file is wrong.
        EngineError, KeyFileError: stand-ins can't be started.
    """
    try:
        paying, without = map(Side.of_file, files or (example_path(WITH_PRFAAS), example_path(WITHOUT)))
    except FileNotFoundError as error:
        raise DemoError(str(error)) from error
    with bursting(2 * requests) as answered, ExitStack() as running:
        started = [running.enter_context(RunningEngines(side.deployment)) for side in (paying, without)]
        # Stand-ins need more than a second to start anyway.
        limits = pay_limits()
        burst = Burst.of(paying, without, requests)
        for engines in started:
            engines.wait_ready(_READY_TIMEOUT_S)
        runs = live_runs((paying, without), burst, answered)
    ours, theirs = (
        SideOutcome(side, run, simulated(side, burst, run.overhead_s))
        for side, run in zip((paying, without), runs, strict=True)
    )
    return BurstOutcome(burst, ours, theirs, limits)


def simulated(side: Side, burst: Burst, overhead_s: float) -> Result:
    """The same requests through the simulator, with the file's policy, roles and threshold.

    `overhead_s`: of every request beside its work; the first token takes a decode step, as live.
    """
    routing = side.planned.routing
    scenario = scenario_of(
        side.planned,
        policy=routing.policy,
        params=routing.params,
        roles=side.prefill_instances,
        threshold_tokens=routing.threshold_tokens,
        adapts=False,
        allocation=False,
        overheads=Overheads(request_s=overhead_s, first_step=True),
    )
    return simulate(scenario, burst.chunks(), requests=burst.count, warmup_share=0.0)
