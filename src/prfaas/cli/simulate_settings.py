"""What `prfaas simulate` is asked for, checked: policies, changed fields, caches and links' fluctuation."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prfaas.cli.errors import CliError

if TYPE_CHECKING:
    from prfaas.deployment import PlannedDeployment
    from prfaas.deployment.schema import DeploymentFile
    from prfaas.kvmodel import KvModel
    from prfaas.simulator import CacheOptions, Scenario
    from prfaas.simulator.capacity import CapacityProcess


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
        changes[field] = _number(text, value, is_rate=field.endswith("bandwidth"))
    return changes


def policies_of(deployment: "PlannedDeployment", policy: str | None, compare: str | None) -> tuple[str, ...]:
    """The policies to simulate; without options the one that the deployment would run with.

    Raises:
        CliError: both options, a name twice, or one that there is not.
    """
    from prfaas.scheduling import POLICIES

    if policy is not None and compare is not None:
        raise CliError("give --policy or --compare, not both")
    if compare is not None:
        option, names = "--compare", tuple(name.strip() for name in compare.split(","))
    else:
        option, names = "--policy", (policy or _file_of(deployment).routing.policy,)
    for name in names:
        if name not in POLICIES:
            raise CliError(f'{option}: there is no policy "{name}"; there are {", ".join(POLICIES)}')
    if len(set(names)) < len(names):
        raise CliError(f"{option}: names a policy twice")
    return names


def scenario_for(
    deployment: "PlannedDeployment",
    policy: str,
    caches: "CacheOptions | None",
    links: "Mapping[str, CapacityProcess]",
    prefill_concurrency: int = 1,
) -> "Scenario":
    """As the deployment would run: its `routing` and `control` sections count.

    Raises:
        CliError: a deployment that can be planned but not run by this policy.
    """
    from prfaas.deployment import ControlConfig
    from prfaas.simulator import scenario_of

    file = _file_of(deployment)
    control = ControlConfig(**file.control.model_dump())
    threshold = file.routing.threshold_tokens
    try:
        return scenario_of(
            deployment,
            policy=policy,
            threshold_tokens=None if threshold is None else float(threshold),
            control=control,
            allocation=control.allocation,
            caches=caches,
            links=links,
            prefill_concurrency=prefill_concurrency,
        )
    except ValueError as error:
        raise CliError(f"{deployment.path}: can't be simulated: {error}") from error


def cache_options(model: "KvModel", text: str) -> "CacheOptions":
    """Prefix caches of so much memory on every instance, in the model's own tokens.

    Raises:
        CliError: no size, or the model keeps nothing per token that could be cached.
    """
    from prfaas.simulator import CacheOptions
    from prfaas.units import parse_bytes

    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise CliError(f"--cache-memory: {error}") from None
    try:
        return CacheOptions.of_memory(model, num_bytes)
    except ValueError as error:
        raise CliError(f"--caches: {error}") from None


def fluctuation(deployment: "PlannedDeployment", text: str | None) -> "dict[str, CapacityProcess]":
    """From `--link-fluctuation SD:CORRELATION_S`: every link around its bandwidth in the file.

    Raises:
        CliError: another form, or numbers out of range.
    """
    if text is None:
        return {}
    from prfaas.simulator.capacity import Fluctuating

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


def _file_of(deployment: "PlannedDeployment") -> "DeploymentFile":
    """The sections that planning leaves out; checked when the deployment was loaded."""
    from prfaas.deployment.schema import DeploymentFile

    return DeploymentFile.model_validate(deployment.source.values)


def _number(text: str, value: str, *, is_rate: bool) -> float:
    from prfaas.units import parse_bits_per_s

    try:
        number = float(value)
    except ValueError:
        if not is_rate:
            raise CliError(f'--set "{text}": "{value}" is no number') from None
        try:
            return parse_bits_per_s(value)
        except ValueError as error:
            raise CliError(f'--set "{text}": {error}') from None
    if not math.isfinite(number):
        raise CliError(f'--set "{text}": "{value}" is no number')
    return number
