"""The exact commands that start the engines of a deployment: a vLLM server, or stand-ins in one process."""

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.deployment.peers import peers_of, plain_peers_of, sources_of
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.model import KvModel
from prfaas.core.units import GIB
from prfaas.serving.engines.data_parallel import given_endpoint, rank_of, rank_options
from prfaas.serving.secret_files import load_headers
from prfaas.serving.tracing.collector import HEADERS_VARIABLE, PROTOCOL, PROTOCOL_VARIABLE, collector_of

# Both ends of a transfer must lay state out alike, and vLLM would otherwise choose by the CPU's features.
# "SD" is what the CPU kernels read in place; vLLM's mamba/ops/cpu/gdn_attention.py copies "DS" first.
CONV_STATE_LAYOUT = "SD"

# The only one that vLLM's NIXL connector moves. Engines of other clusters have it then too, so that all are alike.
NIXL_CONV_STATE_LAYOUT = "DS"

# Also chosen by the CPU's features otherwise, and half the precision on some.
STATE_DTYPE = "float32"

CPU_RETENTION_TOKENS = 256

# By its path, since vLLM's platforms/cpu.py takes "uni" for "mp". That is there to pin OpenMP's threads, which these
# engines have one of; a process less starts in two thirds of the time, and waits for nobody by spinning.
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

NIXL_MODULE = "prfaas.serving.engines.vllm.nixl_connector"

NO_HOST = "none.invalid"
"""Resolves to nothing, ever (RFC 2606)."""

TLS_KEEPALIVE_S = 40
"""An engine keeps an idle connection with TLS for longer than the gateway does, so that no request meets its end."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Command line and environment of a process. It holds no secret."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What is added to the environment."""
    trace_headers_file: Path | None = None
    """Its secrets are added too, but only when the process is started."""
    is_forkable: bool = False
    """A process that has imported vLLM may fork in place of starting it: see `template.py`."""

    @property
    def shell(self) -> str:
        """The same for a shell, without secrets."""
        return shlex.join(["env", *(f"{key}={value}" for key, value in self.env.items()), *self.argv])

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (default: this process's environment) with `env` laid over it, and the headers for traces.

        Raises:
            TraceHeadersError: the file of these can't be used.
        """
        headers = {} if self.trace_headers_file is None else load_headers(self.trace_headers_file)
        # As W3C's baggage: percent-encoded values between commas.
        told = ",".join(f"{name}={quote(value, safe='')}" for name, value in headers.items())
        secrets = {HEADERS_VARIABLE: told} if told else {}
        return {**(os.environ if base is None else base), **secrets, **self.env}


def vllm_command(deployment: Deployment, instance: Instance) -> EngineCommand:
    """How to start the vLLM server of `instance`. Reads the model's `config.json`, so the model must be there.

    Raises:
        ConfigError: the model's `config.json` is missing, or a field in it is.
    """
    on_cpu = deployment.cluster_of(instance).hardware == "cpu"
    collector = collector_of(deployment.gateway.tracing)
    kv_model = deployment.model.known_kv_model(deployment.cluster_of(instance).kv_cache_dtype)
    engine = deployment.engine
    extra_args = (*engine.extra_args, *deployment.cluster_of(instance).extra_args)
    keeps_prefixes = "--no-enable-prefix-caching" not in extra_args
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(deployment.model.folder)),
        *("--served-model-name", deployment.model.served_name),
        *("--host", instance.host, "--port", str(instance.http_port)),
        *_tls(deployment, instance),
        *("--max-model-len", str(deployment.model.max_model_len)),
        *("--max-num-batched-tokens", str(engine.max_num_batched_tokens)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--shutdown-timeout", str(engine.shutdown_timeout_s)),
        *_mixed_chunks(deployment, instance),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        # The gateway has engines render what it can't turn into token ids itself.
        "--enable-scale-out",
        *_media(deployment),
        *(_retention(deployment, kv_model, on_cpu) if keeps_prefixes else ()),
        *_dtypes(deployment.cache_dtypes(instance.cluster)),
        *(
            ("--mamba-ssm-cache-dtype", STATE_DTYPE)
            if kv_model is not None and kv_model.has_linear_state
            else ()
        ),
        *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
        *(("--enforce-eager",) if on_cpu else ()),
        *_kv_memory(deployment),
        *_ranks(instance, on_cpu),
        *rank_options(deployment, instance),
        *("--kv-transfer-config", json.dumps(kv_transfer_config(deployment, instance))),
        *_events(deployment, instance),
        *_adapters(deployment),
        *(("--otlp-traces-endpoint", collector.endpoint) if collector is not None else ()),
        *extra_args,
    ]
    conv_layout = NIXL_CONV_STATE_LAYOUT if engine.local_transfer == "nixl" else CONV_STATE_LAYOUT
    env = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_SSM_CONV_STATE_LAYOUT": conv_layout}
    # A host that media may come from names no other one.
    env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
    if deployment.uses_nixl(instance):
        env |= _nixl_env(deployment, instance, on_cpu)
    if instance.tls:
        env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(TLS_KEEPALIVE_S)
    if on_cpu:
        # What vLLM compiles in spite of --enforce-eager (how it ranks logprobs, and finds a rank's own words) costs the
        # first request that needs it ten seconds of a C++ compiler, and saves nothing that shows here.
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    if collector is not None:
        env |= _tracing(deployment, instance)
    headers_file = None if collector is None else collector.headers_file
    # On GPUs nothing is to be other than with `vllm serve`, and imports are a small part of a start there.
    return EngineCommand(tuple(argv), {**env, **engine.env}, headers_file, is_forkable=on_cpu)


def synthetic_command(deployment: Deployment, names: Sequence[str]) -> EngineCommand:
    """The command that starts the instances `names` of `deployment`, all in one process."""
    argv = [
        *(sys.executable, "-m", "prfaas.serving.engines.synthetic"),
        *("--state-dir", str(deployment.state_dir)),
        str(deployment.path.absolute()),
        *names,
    ]
    return EngineCommand(tuple(argv), {})


def kv_transfer_config(deployment: Deployment, instance: Instance) -> dict[str, object]:
    """The value of vLLM's `--kv-transfer-config`: our connector, and NIXL's beside it where the file wants that."""
    ours = _own_transfer_config(deployment, instance)
    if not deployment.uses_nixl(instance):
        return ours
    # Whole seconds, and at least six: a sixth of it is the time between two heartbeats. Our own count ends before it.
    settings = {"kv_lease_duration": max(6, math.ceil(deployment.transfer.lease_s))}
    nixl: dict[str, object] = {
        "kv_connector": "TicketedNixlConnector",
        "kv_connector_module_path": NIXL_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    if deployment.cluster_of(instance).hardware == "cpu":
        nixl["kv_buffer_device"] = "cpu"
        # UCX's threads poll without rest, and here they would take the cores from the model.
        settings["num_threads"] = 0
    return {
        "kv_connector": "PrfaasNixlConnector",
        "kv_connector_module_path": NIXL_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl, ours]},
    }


def _nixl_env(deployment: Deployment, instance: Instance, on_cpu: bool) -> dict[str, str]:
    assert instance.nixl_port is not None
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": instance.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(instance.nixl_port - rank_of(deployment, instance)),
    }
    # Elsewhere UCX finds the best way by itself. On CPUs it would look for devices that are not there.
    return {**env, "UCX_TLS": "tcp,self"} if on_cpu else env


def _own_transfer_config(deployment: Deployment, instance: Instance) -> dict[str, object]:
    return {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.serving.engines.vllm.connector",
        "kv_role": "kv_both",
        # The default fails the request; a transfer that goes wrong must only cost time.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "name": instance.name,
            "kv_host": instance.host,
            "kv_port": instance.kv_port,
            "events": asdict(deployment.events_endpoint(instance)),
            "key_file": str(deployment.security.key_file),
            "peers": {
                peer.member.name: {
                    "host": peer.member.host,
                    "kv_port": peer.member.kv_port,
                    **asdict(peer.path.shared_by(instance.gpus)),
                }
                for peer in peers_of(deployment, instance)
            },
            **_certificates(deployment, instance),
            **_pool(deployment, instance),
            "producers": [source.member.name for source in sources_of(deployment, instance)],
            **_ranks_of_others(deployment, instance),
            **({"convert_kv": True} if deployment.converts_kv else {}),
            "staging_bytes": deployment.engine.staging_bytes,
            "transfer_block_bytes": deployment.engine.transfer_block_bytes,
            "transfer": asdict(deployment.transfer),
            **({"nixl_beside": True} if deployment.engine.local_transfer == "nixl" else {}),
        },
    }


def _tracing(deployment: Deployment, instance: Instance) -> dict[str, str]:
    """What vLLM takes of its traces from the environment: it would speak gRPC, and call itself nothing."""
    who = f"service.instance.id={instance.name},prfaas.cluster={instance.cluster},prfaas.deployment={deployment.name}"
    return {PROTOCOL_VARIABLE: PROTOCOL, "OTEL_SERVICE_NAME": "vllm", "OTEL_RESOURCE_ATTRIBUTES": who}


def _certificates(deployment: Deployment, instance: Instance) -> dict[str, object]:
    if not deployment.needs_certificate(instance.name):
        return {}
    security = deployment.security
    return {
        "identity_file": str(security.identity_file(instance.name)),
        "ca_file": str(security.ca_file),
        "plain_peers": sorted(plain_peers_of(deployment, instance)),
    }


def _pool(deployment: Deployment, instance: Instance) -> dict[str, object]:
    node = deployment.pool_of(instance)
    if node is None:
        return {}
    return {
        "pool_socket": str(deployment.pool_socket(node)),
        "pool": asdict(deployment.pool),
    }


def _ranks_of_others(deployment: Deployment, instance: Instance) -> dict[str, object]:
    ways = (*peers_of(deployment, instance), *sources_of(deployment, instance))
    others = [way.member for way in ways]
    unlike = {
        other.name: other.tensor_parallel
        for other in others
        if other.tensor_parallel != instance.tensor_parallel
    }
    stages = {other.name: other.pipeline_parallel for other in others if other.pipeline_parallel > 1}
    found = {"ranks_of_others": unlike, "stages_of_others": stages}
    return {name: told for name, told in found.items() if told}


def _media(deployment: Deployment) -> tuple[str, ...]:
    """Also of requests that did not pass the gateway. To vLLM an empty list means every host."""
    return ("--allowed-media-domains", *(deployment.gateway.media_domains or (NO_HOST,)))


def _tls(deployment: Deployment, instance: Instance) -> tuple[str, ...]:
    if not instance.tls:
        return ()
    security = deployment.security
    own = str(security.identity_file(instance.name))
    return (
        *("--ssl-keyfile", own, "--ssl-certfile", own, "--ssl-ca-certs", str(security.ca_file)),
        # Clients must show a certificate of the same CA: ssl.CERT_REQUIRED.
        *("--ssl-cert-reqs", "2"),
        "--enable-ssl-refresh",
    )


def _retention(deployment: Deployment, kv_model: KvModel | None, on_cpu: bool) -> tuple[str, ...]:
    # vLLM refuses the option on models without windows or states, and a value that is no multiple of its
    # block size; on CPUs blocks are 128 or 256 tokens, elsewhere they are not known before the start.
    tokens = deployment.engine.prefix_cache_retention_tokens
    if tokens is None and on_cpu:
        tokens = CPU_RETENTION_TOKENS
    if tokens is None or kv_model is None or not kv_model.is_hybrid:
        return ()
    return ("--prefix-cache-retention-interval", str(tokens))


def _mixed_chunks(deployment: Deployment, instance: Instance) -> tuple[str, ...]:
    """On an engine that decodes a prompt leaves room in each step for others; while it is alone it has whole steps.

    vLLM serves what runs before what waits. A prompt that took whole steps would keep all out whose KVCache has come,
    until its end. A second one would be next in the queue, and take what the first leaves.
    """
    if not instance.has_role("decode"):
        return ()
    longest = min(deployment.engine.mixed_chunk_tokens, deployment.model.max_model_len)
    return ("--long-prefill-token-threshold", str(longest))


def _dtypes(dtypes: CacheDtypes) -> tuple[str, ...]:
    given = {"--dtype": dtypes.model, "--kv-cache-dtype": dtypes.kv_cache}
    return tuple(word for option, dtype in given.items() if dtype != "auto" for word in (option, dtype))


def _kv_memory(deployment: Deployment) -> tuple[str, ...]:
    gib = deployment.engine.kv_cache_gib
    if gib is None:
        return ()
    return ("--kv-cache-memory-bytes", str(round(gib * GIB)))


def _ranks(instance: Instance, on_cpu: bool) -> tuple[str, ...]:
    if instance.gpus == 1:
        return ("--distributed-executor-backend", CPU_EXECUTOR) if on_cpu else ()
    sizes = {
        "--tensor-parallel-size": instance.tensor_parallel,
        "--pipeline-parallel-size": instance.pipeline_parallel,
    }
    return tuple(word for option, size in sizes.items() if size > 1 for word in (option, str(size)))


def _events(deployment: Deployment, instance: Instance) -> tuple[str, ...]:
    endpoint = deployment.events_endpoint(instance)
    endpoint = given_endpoint(endpoint, rank_of(deployment, instance))
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.publish,
        "replay_endpoint": endpoint.replay,
    }
    return ("--kv-events-config", json.dumps(config))


def _adapters(deployment: Deployment) -> tuple[str, ...]:
    adapters = deployment.model.adapters
    if not adapters:
        return ()
    return ("--enable-lora", "--lora-modules", *(f"{name}={path}" for name, path in adapters.items()))
