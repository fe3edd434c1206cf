"""prfaas as a library: read a deployment file, plan it, simulate it, and ask what a model's KVCache weighs.

It is stable within a minor version; everything else in the package may change without notice. Importing this module
costs little: what a function or a type needs is imported when it is first used, numpy and SciPy by `plan` and
`simulate` (the extra `plan`).

Example:
    >>> from prfaas import api
    >>> best = api.plan(api.example_path("paper")).optimum
    >>> round(best.lambda_max, 2), best.n_prefill, best.n_decode
    (3.2, 3, 5)
"""

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Written "as" itself, a name is public to type checkers; the program finds it by _SOURCES.
    from prfaas.core.deployment import Cluster as Cluster
    from prfaas.core.deployment import ControlConfig as ControlConfig
    from prfaas.core.deployment import Deployment as Deployment
    from prfaas.core.deployment import DeploymentError as DeploymentError
    from prfaas.core.deployment import Instance as Instance
    from prfaas.core.deployment import Link as Link
    from prfaas.core.deployment import PlannedCluster as PlannedCluster
    from prfaas.core.deployment import PlannedDeployment as PlannedDeployment
    from prfaas.core.deployment import Routing as Routing
    from prfaas.core.deployment import Slo as Slo
    from prfaas.core.deployment import load_deployment as load_deployment
    from prfaas.core.deployment import load_planned as load_planned
    from prfaas.core.kv.config_fields import ConfigError as ConfigError
    from prfaas.core.kv.dtypes import KvCacheDtype as KvCacheDtype
    from prfaas.core.kv.dtypes import ModelDtype as ModelDtype
    from prfaas.core.kv.dtypes import StateDtype as StateDtype
    from prfaas.core.kv.layers import ChunkedWindow as ChunkedWindow
    from prfaas.core.kv.layers import CompressedAttention as CompressedAttention
    from prfaas.core.kv.layers import FullAttention as FullAttention
    from prfaas.core.kv.layers import LinearState as LinearState
    from prfaas.core.kv.layers import SlidingWindow as SlidingWindow
    from prfaas.core.kv.model import KvModel as KvModel
    from prfaas.core.kv.published import PublishedModel as PublishedModel
    from prfaas.core.kv.published import published_models as published_models
    from prfaas.core.latency.files import load_profile as load_profile
    from prfaas.core.latency.profile import LatencyProfile as LatencyProfile
    from prfaas.core.latency.profile import ProfileError as ProfileError
    from prfaas.core.planner import Baseline as Baseline
    from prfaas.core.planner import Cost as Cost
    from prfaas.core.planner import OperatingPoint as OperatingPoint
    from prfaas.core.planner import Plan as Plan
    from prfaas.core.planner import PlanError as PlanError
    from prfaas.core.planner import ShadowPrice as ShadowPrice
    from prfaas.core.planner import TtftEstimate as TtftEstimate
    from prfaas.core.scheduling.decision import CacheTransfer as CacheTransfer
    from prfaas.core.scheduling.decision import Decision as Decision
    from prfaas.core.scheduling.decision import KvFacts as KvFacts
    from prfaas.core.scheduling.decision import PrefixHit as PrefixHit
    from prfaas.core.scheduling.decision import Route as Route
    from prfaas.core.scheduling.decision import RoutingRequest as RoutingRequest
    from prfaas.core.scheduling.options import PrefillOption as PrefillOption
    from prfaas.core.scheduling.options import options as options
    from prfaas.core.scheduling.parameters import Bounds as Bounds
    from prfaas.core.scheduling.parameters import Parameter as Parameter
    from prfaas.core.scheduling.parameters import PolicyError as PolicyError
    from prfaas.core.scheduling.parameters import parameters_of as parameters_of
    from prfaas.core.scheduling.policy import POLICIES as POLICIES
    from prfaas.core.scheduling.policy import Policy as Policy
    from prfaas.core.scheduling.policy import make_policy as make_policy
    from prfaas.core.scheduling.policy import policy_class as policy_class
    from prfaas.core.scheduling.policy import policy_named as policy_named
    from prfaas.core.scheduling.view import ClusterView as ClusterView
    from prfaas.core.scheduling.view import InstanceView as InstanceView
    from prfaas.core.scheduling.view import LinkView as LinkView
    from prfaas.core.scheduling.view import NoDecodeInstanceError as NoDecodeInstanceError
    from prfaas.core.scheduling.view import PoolView as PoolView
    from prfaas.core.scheduling.view import View as View
    from prfaas.core.shipped import example_files as example_files
    from prfaas.core.shipped import example_path as example_path
    from prfaas.core.workload.lengths import WorkloadError as WorkloadError
    from prfaas.lab.simulator.result import Result as Result

_SOURCES = {
    "prfaas.core.deployment": (
        "Cluster ControlConfig Deployment DeploymentError Instance Link PlannedCluster PlannedDeployment "
        "Routing Slo load_deployment load_planned"
    ),
    "prfaas.core.shipped": "example_files example_path",
    "prfaas.core.kv.config_fields": "ConfigError",
    "prfaas.core.kv.dtypes": "KvCacheDtype ModelDtype StateDtype",
    "prfaas.core.kv.layers": "ChunkedWindow CompressedAttention FullAttention LinearState SlidingWindow",
    "prfaas.core.kv.model": "KvModel",
    "prfaas.core.kv.published": "PublishedModel published_models",
    "prfaas.core.latency.files": "load_profile",
    "prfaas.core.latency.profile": "LatencyProfile ProfileError",
    "prfaas.core.planner": "Baseline Cost OperatingPoint Plan PlanError ShadowPrice TtftEstimate",
    "prfaas.core.scheduling.decision": "CacheTransfer Decision KvFacts PrefixHit Route RoutingRequest",
    "prfaas.core.scheduling.options": "PrefillOption options",
    "prfaas.core.scheduling.parameters": "Bounds Parameter PolicyError parameters_of",
    "prfaas.core.scheduling.policy": "POLICIES Policy make_policy policy_class policy_named",
    "prfaas.core.scheduling.view": "ClusterView InstanceView LinkView NoDecodeInstanceError PoolView View",
    "prfaas.core.workload.lengths": "WorkloadError",
    "prfaas.lab.simulator.result": "Result",
}
_MODULE_OF = {name: module for module, names in _SOURCES.items() for name in names.split()}
__all__ = sorted((*_MODULE_OF, "kv_model", "plan", "simulate"))


def __getattr__(name: str) -> Any:
    """A re-exported name, imported when it is first asked for (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def kv_model(
    model: Path | str,
    *,
    kv_cache_dtype: "KvCacheDtype" = "auto",
    dtype: "ModelDtype" = "auto",
    state_dtype: "StateDtype" = "float32",
) -> "KvModel":
    """What one request's KVCache is made of: its layers by kind, and its bytes at every length.

    Args:
        model: the name of a published model (`published_models` lists them), a `config.json` of Hugging Face, or
            the directory of a checkpoint.
        kv_cache_dtype: what engines keep K and V in, as vLLM's `--kv-cache-dtype`: for example "fp8". Sparse MLA has
            two layouts of an fp8 cache, so it needs "fp8_ds_mla" or "fp8_e4m3".
        dtype: what engines compute in, as vLLM's `--dtype`: for example "float32".
        state_dtype: of recurrent states, as vLLM's `--mamba-ssm-cache-dtype`.

    Raises:
        ConfigError: no such model, an unreadable file, a model whose KVCache is not known, or no such dtype.

    Example:
        >>> model = kv_model("internal-1t")
        >>> model.is_hybrid, model.token_bytes
        (True, 17280)
        >>> model.bytes_to_move(num_tokens=32_768, skip_tokens=16_384) < model.kv_bytes(32_768)
        True
        >>> 2 * kv_model("minimax-m2.5", kv_cache_dtype="fp8").token_bytes == kv_model("minimax-m2.5").token_bytes
        True
    """
    from prfaas.core.kv.dtypes import CacheDtypes
    from prfaas.core.kv.hf_config import model_from_directory, model_from_file
    from prfaas.core.kv.published import published_model

    path, dtypes = Path(model), CacheDtypes(kv_cache_dtype, dtype, state_dtype)
    if path.is_dir():
        return model_from_directory(path, dtypes=dtypes)
    if isinstance(model, Path) or path.suffix == ".json":
        return model_from_file(path, dtypes=dtypes)
    return published_model(model).kept_in(dtypes)


def plan(deployment: "PlannedDeployment | Path | str") -> "Plan":
    """The best way to operate a deployment, what limits it, and how it compares: `prfaas plan`.

    Args:
        deployment: what `load_planned` gave, or the path of a deployment file with profiles and a workload.

    Returns:
        The best roles, threshold and throughput (`optimum`, requests per second), the baselines, shadow prices,
        cost and TTFT. Section 3.4 of the paper (arXiv 2604.15039) has the model.

    Raises:
        DeploymentError: the first thing that is wrong with the file, with its line and field.
        PlanError: the solver gave up.

    Example:
        >>> paper = load_planned(example_path("paper"))
        >>> found = plan(paper)
        >>> found.name, found.method, round(found.ratio_to_homogeneous, 2)
        ('paper', 'exact search', 1.58)
    """
    from prfaas.core.planner import make_plan, problem_of

    return make_plan(problem_of(_planned(deployment)))


def simulate(
    deployment: "PlannedDeployment | Path | str",
    *,
    load: float | None = None,
    requests_per_s: float | None = None,
    policy: str | None = None,
    params: "Mapping[str, float | str] | None" = None,
    requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    bursts: bool = False,
    diurnal: tuple[float, float] | None = None,
    trace: Path | str | None = None,
    columns: Mapping[str, str] | None = None,
    trace_format: str | None = None,
    cache_bytes: int | None = None,
    pools: bool = True,
    bandwidth_steps: "Iterable[tuple[str, float, float]]" = (),
    outages: "Iterable[tuple[str, float, float]]" = (),
    failures: "Iterable[tuple[str, float, float]]" = (),
) -> "Result":
    """A deployment under Poisson traffic of its own lengths, or a trace, run by the scheduler's own code.

    It is what `prfaas simulate` does.

    Args:
        deployment: what `load_planned` gave, or the path of a deployment file with profiles and a workload.
        load: the arrival rate as a share of the highest throughput that `plan` finds, for a trace that of its
            lengths; 0.7 where neither this nor `requests_per_s` is given.
        requests_per_s: the arrival rate itself, in place of a load.
        policy: one of `POLICIES`, an installed one, or `package.module:Class`; None: the file's.
        params: of the policy; None: the file's, where the policy is the file's.
        requests: how many arrive, 20,000 unless a duration is given. The first tenth of the time is not counted.
        duration_s: simulated seconds of arrivals instead.
        bursts: the same mean rate in phases, 0.7 × it for 60 s on average and 2.2 × for 15 s.
        diurnal: the same mean rate as a sine: its swing from 0 to 1, and its period in seconds.
        seed: the same seed gives the same numbers.
        trace: the file of a recorded trace in place of made-up traffic; its times are scaled to the rate, and it is
            repeated as often as needed.
        columns: of a trace in no known format: what its columns for `arrival` (seconds, or date and time;
            `arrival_ms`: milliseconds), `input` and `output` (tokens) are called.
        trace_format: of the trace, as `prfaas simulate --format`; None: as the file tells.
        cache_bytes: memory of every instance for its prefix cache; None: 64 GiB with a trace, none without.
        pools: False: without the pools that the file has.
        bandwidth_steps: links that change: ("east->home", 600, 2e9) carries 2 Gbit/s from second 600 on.
        outages: links that carry nothing: ("east->home", 600, 60) from second 600 on for 60 s.
        failures: instances that are gone, likewise: ("home-0", 600, 60).

    Returns:
        One entry per request, as numpy arrays in the order of arrival; `Result.summary()` has the numbers, and
        `Result.to_dataframe()` a row per request.

    Raises:
        DeploymentError: the first thing that is wrong with the file, with its line and field.
        ValueError: both a load and a rate, a rate of 0 or less, a trace with other arrivals, both `requests` and
            `duration_s`, or a link or instance that there is not.
        PolicyError: a policy that there is not, or a parameter that it does not take.
        WorkloadError: a trace that can't be read.

    Example:
        >>> result = simulate(example_path("paper"), load=0.5, requests=3000, seed=1)
        >>> summary = result.summary()
        >>> summary["lost"], summary["stable"], 0 < summary["offloaded_fraction"] < 1
        (0, True, True)
    """
    import math

    import numpy as np

    from prfaas.core.workload.requests import read_requests
    from prfaas.core.workload.trace_columns import TraceColumns
    from prfaas.lab.simulator.recording import Arriving, caches_for
    from prfaas.lab.simulator.scenario import Failure, as_deployed, stepped
    from prfaas.lab.simulator.simulation import simulate as run

    if requests is not None and duration_s is not None:
        raise ValueError("give requests or duration_s, not both")
    if load is not None and requests_per_s is not None:
        raise ValueError("give a load or requests_per_s, not both")
    planned = _planned(deployment)
    named = None if columns is None else TraceColumns.of(columns)
    recorded = None if trace is None else read_requests(Path(trace), trace_format, named)
    arriving = Arriving.of(planned, recorded)
    rate_rps = requests_per_s
    if rate_rps is None:
        rate_rps = (0.7 if load is None else load) * arriving.lambda_max_rps
    if not (math.isfinite(rate_rps) and rate_rps > 0):
        raise ValueError(f"requests must arrive at a rate above 0, not {rate_rps:g} per second")
    traffic = arriving.at_rate(rate_rps, bursts=bursts, diurnal=diurnal)
    scenario = as_deployed(
        planned,
        policy,
        params,
        caches=caches_for(planned, cache_bytes, has_trace=trace is not None),
        pools=None if pools else {},
        links=stepped(planned, bandwidth_steps),
        failures=[Failure(what, at_s, lasts_s) for what, at_s, lasts_s in (*outages, *failures)],
    )
    return run(
        scenario,
        traffic.chunks(np.random.default_rng(seed)),
        seed=seed,
        requests=20_000 if requests is None and duration_s is None else requests,
        duration_s=duration_s,
    )


def _planned(deployment: "PlannedDeployment | Path | str") -> "PlannedDeployment":
    from prfaas.core.deployment import load_planned

    return load_planned(deployment) if isinstance(deployment, Path | str) else deployment
