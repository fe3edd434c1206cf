"""The kinds of values in a deployment file: names, sizes, bandwidths, times, and their bounds."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from prfaas.core.deployment.addresses import checked_host
from prfaas.core.latency.files import load_profile
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.units import format_bits_per_s, parse_bits_per_s, parse_bytes

# Less without a unit is somebody who thinks in larger units.
_LEAST_PLAIN_BITS_PER_S = 1e6

# More than any deployment has, and less than what a message on the wire, a socket's option or a timer can hold.
_MOST_BITS_PER_S = 1e15
_MOST_BYTES = 1 << 50
_MOST_COUNT = (1 << 31) - 1
_MOST_S = 1e9
_MOST_SOCKET_S = 32_767.0
_MOST_CHARACTERS = 4096

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

# A label of RFC 1123, which Kubernetes asks of names.
LABEL_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


def matching(pattern: str, problem: str) -> AfterValidator:
    """A text that a regular expression matches as a whole; else the problem is said, with the text for its braces."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(problem.format(text))
        return text

    return AfterValidator(check)


# A process can't be started with one.
_WITHOUT_NUL = matching(r"[^\0]*", "must not have a NUL character")


def _given(problem: str) -> BeforeValidator:
    # None is only the default, so that what was forgotten doesn't pass for what is left out.
    def check(value: object) -> object:
        if value is None:
            raise ValueError(problem)
        return value

    return BeforeValidator(check)


def needs(other: str, problem: str) -> AfterValidator:
    """A field that goes only with another one, which stands before it in the section; else the problem is said."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # A wrong one is missing here.
        if value and not info.data.get(other, True):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _env_value(value: object) -> object:
    # YAML reads `X: 1` as a number, which is what a person means by "1" here.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _size_or_zero(value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else parse_bytes(value)


def _line(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"must have at most {_MOST_CHARACTERS} characters, not {len(text)}")
    return text


def _bandwidth(value: object) -> float:
    rate = parse_bits_per_s(value)
    if rate > _MOST_BITS_PER_S:
        raise ValueError(f"must be at most {format_bits_per_s(_MOST_BITS_PER_S)}")
    if isinstance(value, int | float) and rate < _LEAST_PLAIN_BITS_PER_S:
        raise ValueError(f'{rate:g} would be {rate:g} bit/s; write the unit, for example "{rate:g} Gbit/s"')
    return rate


def _cidr(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(f'"{text}" is no block of addresses; write it like "10.0.1.0/24"') from None


def _setting(value: object) -> float | str:
    if not isinstance(value, int | float | str) or value != value:
        raise ValueError("must be a number, a word, or true or false")
    return value


def _profile(value: object, info: ValidationInfo) -> LatencyProfile:
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "must be text")
    return load_profile(_line(value), relative_to=(info.context or {}).get("beside"))


def _path(below: str) -> BeforeValidator:
    def path(value: object, info: ValidationInfo) -> Path:
        if isinstance(value, str):
            value = Path(_line(value)).expanduser()
        if not isinstance(value, Path):
            raise PydanticCustomError("string_type", "must be text")
        # Files to plan with have no folder of their own.
        return Path((info.context or {}).get(below, "")) / value

    return BeforeValidator(path)


_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-",
}

# The command line builder sets these from other fields, where a second value would silently win; or instances can't be
# started so. An entry that ends with a dash stands for all options that begin with it.
OWNED_ARGS = {
    "--kv-transfer-config": "it is made from clusters, links and transfer",
    "--host": "give the instance's host",
    "--port": "give the instance's http_port",
    "--model": "give model.path, model.hub, model.trained or model.tiny",
    "--served-model-name": "give model.served_name",
    "--tensor-parallel-size": "give the instance's tensor_parallel",
    "--pipeline-parallel-size": "give the instance's pipeline_parallel",
    "--decode-context-parallel-size": "KVCache that is divided by tokens is not moved",
    "--prefill-context-parallel-size": "KVCache that is divided by tokens is not moved",
    "--data-parallel-": "start each replica as an instance of its own, and give those of one group data_parallel",
    "--enable-expert-parallel": "give the instance's expert_parallel",
    "--nnodes": "an instance is on one machine: give its tensor_parallel",
    "--enable-dbo": "layers tell that they are computed when half of a batch is",
    "--ubatch-size": "layers tell that they are computed when part of a batch is",
    "--enable-sleep-mode": "transfers use blocks where they lay when the engine started",
    "--kv-offloading-": "vLLM would put another connector in the place of the one for transfers; give clusters[].pool",
    "--kv-events-config": "events are published for the engine's own KV port, which tells them to gateways",
    "--lora-modules": "give model.adapters",
    "--ssl-keyfile": "give security.engine_tls and security.certificates",
    "--ssl-certfile": "give security.engine_tls and security.certificates",
    "--ssl-ca-certs": "give security.engine_tls and security.certificates",
    "--ssl-cert-reqs": "give security.engine_tls and security.certificates",
    "--dtype": "give model.dtype",
    "--kv-cache-dtype": "give model.kv_cache_dtype, or clusters[].kv_cache_dtype for one cluster",
    "--max-model-len": "give model.max_model_len",
    "--max-num-batched-tokens": "give engine.max_num_batched_tokens",
    "--max-num-seqs": "give engine.max_num_seqs",
    "--prefix-cache-retention-interval": "give engine.prefix_cache_retention_tokens",
    "--otlp-traces-endpoint": "give gateway.tracing",
    "--shutdown-timeout": "give engine.shutdown_timeout_s",
    "--config": "give its options here",
    "--uds": "give the instance's host and http_port",
    "--kv-cache-dtype-skip-layers": "all layers keep the dtype of model.kv_cache_dtype or clusters[].kv_cache_dtype",
}


def free_arg(arg: str) -> str:
    """`arg` where no field of the file stands for it.

    Raises:
        ValueError: one does; the text names it.
    """
    owned = _owned_arg(arg)
    if owned is not None:
        raise ValueError(f"{arg!r} can't be given here; {OWNED_ARGS[owned]}")
    return arg


def _owned_arg(arg: str) -> str | None:
    name = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if len(name) <= 2 or not name.startswith("--"):
        return next((owned for short, owned in _SHORT.items() if name.startswith(short)), None)
    # argparse takes any unambiguous beginning of an option's name for the whole one.
    families = (owned for owned in OWNED_ARGS if owned.endswith("-") and name.startswith(owned))
    return next((owned for owned in OWNED_ARGS if owned.startswith(name)), next(families, None))


_AMOUNT = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}

Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(strict=True, pattern=NAME_PATTERN)]
HostName = Annotated[
    str,
    Field(strict=True),
    matching(r"[A-Za-z0-9._-]{1,253}", '{!r} is no host name; write it without "http://" and without a port'),
    AfterValidator(str.lower),
]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Positive = Annotated[int, Field(strict=True, gt=0, le=_MOST_COUNT)]
Whole = Annotated[int, Field(strict=True, ge=0, le=_MOST_COUNT)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=_MOST_S, allow_inf_nan=False)]
SocketSeconds = Annotated[float, Field(strict=True, gt=0, le=_MOST_SOCKET_S, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Ratio = Annotated[float, Field(strict=True, ge=0, lt=1)]
Text = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_line)]
Host = Annotated[Text, AfterValidator(checked_host)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth), WithJsonSchema(_AMOUNT)]
Size = Annotated[int, BeforeValidator(parse_bytes), Field(le=_MOST_BYTES), WithJsonSchema(_AMOUNT)]
SizeOrZero = Annotated[int, BeforeValidator(_size_or_zero), Field(le=_MOST_BYTES), WithJsonSchema(_AMOUNT)]
Arg = Annotated[str, Field(strict=True), AfterValidator(free_arg), _WITHOUT_NUL]
EnvName = Annotated[
    str, Field(strict=True), matching(r"[^=\0]+", "{!r} is no name of an environment variable")
]
EnvValue = Annotated[str, BeforeValidator(_env_value), Field(strict=True), _WITHOUT_NUL]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Cidr = Annotated[str, Field(strict=True), AfterValidator(_cidr)]
ResourceName = Annotated[str, Field(strict=True, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")]
"""Of what a device plugin of Kubernetes hands out, like `nvidia.com/gpu`."""
ImageName = Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$")]
TenantHeader = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9-]{1,64}$")]
Label = Annotated[str, Field(strict=True, pattern=LABEL_PATTERN)]
Toleration = Annotated[
    str,
    Field(strict=True),
    matching(
        r"[A-Za-z0-9./_-]+(=[A-Za-z0-9._-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
        "{!r} is no toleration; write the taint as kubectl does: KEY, KEY:NoSchedule or KEY=VALUE:NoSchedule",
    ),
]
GatewayReference = Annotated[
    str,
    Field(strict=True),
    matching(r"[a-z0-9-]+/[a-z0-9.-]+", "{!r} is no Gateway of the Gateway API; write NAMESPACE/NAME"),
]
PolicyName = Annotated[
    str,
    Field(strict=True),
    matching(
        r"[\w.-]+(:[A-Za-z_][\w.]*)?",
        '"{}" is no policy; write a name, for example "tilted", or package.module:Class',
    ),
]
PolicySetting = Annotated[
    float | str, PlainValidator(_setting), WithJsonSchema({"type": ["number", "string", "boolean"]})
]
Folder = Annotated[Path, _path("")]
HomeFile = Annotated[Path, _path("home")]
"""Relative to the deployment's folder in the state directory, which readers of files give as `context["home"]`."""
FileBeside = Annotated[Path, _path("beside")]
"""Relative to the deployment file's folder, which readers of files give as `context["beside"]`."""
Profile = Annotated[
    LatencyProfile, PlainValidator(_profile), WithJsonSchema({"type": "string", "minLength": 1})
]
"""By the name of one that comes with prfaas, or the path of a file, as that of `FileBeside`."""
GIVEN = _given("must not be empty")
SECTION = _given('must be a mapping ("field: value" lines), not empty')
