import json
import ssl
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.util.re import parse_env_headers

from prfaas.core.deployment import Deployment, PoolSpace, TracingConfig, load_deployment
from prfaas.core.deployment.peers import peers_of, plain_peers_of
from prfaas.core.kv.config_fields import ConfigError
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.command import CPU_EXECUTOR, EngineCommand, vllm_command
from prfaas.serving.engines.preparation import ensure_nixl
from prfaas.serving.gateway import GatewayOptions
from prfaas.serving.secret_files import TlsFileError

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WINDOWS = {**DENSE, "model_type": "gpt_oss", "sliding_window": 128}
STATES = {
    **DENSE,
    "model_type": "qwen3_next",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def make(tmp_path: Path, config: dict[str, Any], **replacements: str) -> Deployment:
    text = EXAMPLE.read_text().replace("trained: words", "path: model")
    for old, new in replacements.values():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "local.yaml").write_text(text)
    return load_deployment(tmp_path / "local.yaml", state_dir=tmp_path / "state")


def command(deployment: Deployment, name: str = "east-prefill-0") -> EngineCommand:
    return vllm_command(deployment, deployment.instance(name))


def value(built: EngineCommand, option: str) -> str:
    assert built.argv.count(option) == 1
    return built.argv[built.argv.index(option) + 1]


def extra(built: EngineCommand) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(value(built, "--kv-transfer-config"))
    assert config.pop("kv_connector_extra_config") is not None
    return json.loads(value(built, "--kv-transfer-config"))["kv_connector_extra_config"]  # type: ignore[no-any-return]


def test_a_server_on_cpu(tmp_path: Path) -> None:
    built = command(make(tmp_path, STATES))
    assert built.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert value(built, "--model") == str(tmp_path / "model")
    assert value(built, "--served-model-name") == "words"
    assert (value(built, "--host"), value(built, "--port")) == ("127.0.0.1", "18100")
    assert value(built, "--max-model-len") == "32768"
    assert value(built, "--max-num-batched-tokens") == "2048"
    assert value(built, "--max-num-seqs") == "16"
    assert "--enforce-eager" in built.argv
    assert "--tensor-parallel-size" not in built.argv
    assert value(built, "--distributed-executor-backend") == CPU_EXECUTOR
    assert value(built, "--kv-cache-memory-bytes") == str(1024**3 // 4)
    assert built.env["VLLM_SSM_CONV_STATE_LAYOUT"] == "SD"
    assert "PYTHONPATH" not in built.env
    assert built.is_forkable


def test_other_hardware_finds_its_own_settings(tmp_path: Path) -> None:
    deployment = make(
        tmp_path,
        STATES,
        a=("hardware: cpu", "hardware: h200"),
        b=("kv_port: 18200", "kv_port: 18400, tensor_parallel: 2"),
    )
    built = command(deployment)
    assert "--enforce-eager" not in built.argv
    assert "--distributed-executor-backend" not in built.argv
    assert "--prefix-cache-retention-interval" not in built.argv
    assert value(built, "--tensor-parallel-size") == "2"
    peer = extra(built)["peers"]["home-decode-0"]
    assert peer["bandwidth_bits_per_s"] == deployment.links[0].bandwidth_bits_per_s
    assert 2 * peer["share_bits_per_s"] == deployment.links[0].bandwidth_bits_per_s
    assert value(built, "--kv-cache-memory-bytes") == str(1024**3 // 4)
    assert not [name for name in built.env if "CPU" in name or "OMP" in name]
    assert not built.is_forkable


def test_the_connector_is_told_whom_it_may_know(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES)
    config = json.loads(value(command(deployment), "--kv-transfer-config"))
    assert config["kv_connector"] == "PrfaasConnector"
    assert config["kv_connector_module_path"] == "prfaas.serving.engines.vllm.connector"
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_both", "recompute")
    producer, inside, consumer = (
        extra(command(deployment, name)) for name in ("east-prefill-0", "home-prefill-0", "home-decode-0")
    )
    assert set(producer["peers"]) == {"home-decode-0", "home-prefill-0"}
    assert producer["peers"]["home-decode-0"] == {
        "host": "127.0.0.1",
        "kv_port": 18202,
        "link": "prfaas-east->home",
        "connections": 4,
        "bandwidth_bits_per_s": deployment.links[0].bandwidth_bits_per_s,
        "on_demand": False,
        "encrypted": True,
        "compressed": False,
        "share_bits_per_s": deployment.links[0].bandwidth_bits_per_s,
    }
    assert producer["peers"]["home-prefill-0"]["on_demand"]
    assert not inside["peers"]["home-decode-0"]["encrypted"]
    assert producer["producers"] == []
    assert inside["peers"]["home-decode-0"]["link"] == "home"
    assert inside["peers"]["home-decode-0"]["bandwidth_bits_per_s"] is None
    # Its role may change.
    assert set(consumer["peers"]) == {"home-prefill-0"}
    assert consumer["producers"] == ["east-prefill-0", "home-prefill-0"]
    assert consumer["staging_bytes"] == 64 * 1024**2
    assert consumer["key_file"] == str(tmp_path / "state" / "local" / "key")


def test_the_connector_is_told_where_its_certificate_is(tmp_path: Path) -> None:
    consumer = extra(command(make(tmp_path, STATES), "home-decode-0"))
    folder = tmp_path / "state" / "local" / "certificates"
    assert consumer["identity_file"] == str(folder / "home-decode-0.pem")
    assert consumer["ca_file"] == str(folder / "ca.crt")
    assert consumer["plain_peers"] == ["control", "gateway", "home-prefill-0", "tools"]


def test_where_all_is_plain_the_connector_has_no_certificate(tmp_path: Path) -> None:
    built = command(
        make(tmp_path, STATES, a=("    connections: 4\n", "    connections: 4\n    encryption: false\n"))
    )
    assert not {"identity_file", "ca_file", "plain_peers"} & set(extra(built))
    assert not [option for option in built.argv if "ssl" in option]


def test_a_server_elsewhere_wants_certificates_of_its_clients(tmp_path: Path) -> None:
    deployment = make(
        tmp_path, STATES, a=("host: 127.0.0.1, http_port: 18100", "host: 10.0.0.1, http_port: 18100")
    )
    built = command(deployment)
    own = str(tmp_path / "state" / "local" / "certificates" / "east-prefill-0.pem")
    assert value(built, "--ssl-certfile") == value(built, "--ssl-keyfile") == own
    assert value(built, "--ssl-ca-certs") == str(deployment.security.ca_file)
    assert value(built, "--ssl-cert-reqs") == str(int(ssl.CERT_REQUIRED))
    assert "--enable-ssl-refresh" in built.argv
    at_home = command(deployment, "home-decode-0")
    assert not [option for option in at_home.argv if "ssl" in option]
    # vLLM's server must not end a connection before the gateway does.
    assert int(built.env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > GatewayOptions().tls_engine_keepalive_s
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" not in at_home.env


@pytest.mark.slow("imports vLLM or torch")
def test_the_connector_understands_what_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from prfaas.serving.engines.vllm.settings import ConnectorSettings

    deployment = make(tmp_path, STATES)
    for instance in deployment.instances:
        settings = ConnectorSettings.parse(extra(command(deployment, instance.name)))
        assert settings.name == instance.name
        assert set(settings.peers) == {peer.member.name for peer in peers_of(deployment, instance)}
        assert settings.plain_peers == plain_peers_of(deployment, instance)
        assert settings.identity_file == deployment.security.identity_file(instance.name)
        with pytest.raises(TlsFileError, match="cannot be read"):
            assert settings.tls
        CertificateFolder(deployment).make()
        assert settings.tls is not None
        deployment.security.ca_file.unlink()


@pytest.mark.parametrize(
    ("config", "retention", "state_dtype"),
    [(DENSE, None, None), (WINDOWS, "256", None), (STATES, "256", "float32")],
    ids=["dense", "windows", "states"],
)
def test_options_that_only_some_models_take(
    tmp_path: Path, config: dict[str, Any], retention: str | None, state_dtype: str | None
) -> None:
    built = command(make(tmp_path, config))
    for option, expected in (
        ("--prefix-cache-retention-interval", retention),
        ("--mamba-ssm-cache-dtype", state_dtype),
    ):
        assert (value(built, option) if option in built.argv else None) == expected


def test_dtypes_are_vllm_s_own_unless_the_file_names_them(tmp_path: Path) -> None:
    built = command(make(tmp_path, STATES))
    assert not [word for word in built.argv if word in ("--dtype", "--kv-cache-dtype")]


def test_dtypes_of_the_file(tmp_path: Path) -> None:
    named = ("path: model", "path: model\n  dtype: float32\n  kv_cache_dtype: fp8_e5m2")
    built = command(make(tmp_path, STATES, a=named))
    assert value(built, "--dtype") == "float32"
    assert value(built, "--kv-cache-dtype") == "fp8_e5m2"
    assert value(built, "--mamba-ssm-cache-dtype") == "float32"


def test_dtypes_of_a_cluster(tmp_path: Path) -> None:
    """Its engines alone are started with it, and all are told to convert."""
    named = ("    kind: prfaas\n", "    kind: prfaas\n    kv_cache_dtype: fp8\n")
    deployment = make(tmp_path, STATES, a=named)
    for instance in deployment.instances:
        built = vllm_command(deployment, instance)
        assert ("--kv-cache-dtype" in built.argv) == (instance.cluster == "prfaas-east")
        assert extra(built)["convert_kv"] is True
    assert value(command(deployment), "--kv-cache-dtype") == "fp8"


@pytest.mark.parametrize("model", ["", "\n  kv_cache_dtype: fp8"])
def test_where_all_keep_one_dtype_nothing_is_converted(tmp_path: Path, model: str) -> None:
    deployment = make(tmp_path, STATES, a=("path: model", f"path: model{model}"))
    assert all("convert_kv" not in extra(vllm_command(deployment, each)) for each in deployment.instances)


def test_a_cache_that_the_model_does_not_have_starts_no_engine(tmp_path: Path) -> None:
    deployment = make(tmp_path, DENSE, a=("path: model", "path: model\n  kv_cache_dtype: fp8_ds_mla"))
    with pytest.raises(
        ConfigError, match=r'fp8_ds_mla is a layout of sparse MLA .*, not of model_type "qwen3"'
    ):
        command(deployment)


def test_the_file_s_own_options_come_last(tmp_path: Path) -> None:
    deployment = make(
        tmp_path,
        STATES,
        a=(
            "  staging: 64 MiB",
            "  extra_args: [--seed, '7']\n  env: {OMP_NUM_THREADS: 2}\n  prefix_cache_retention_tokens: 512",
        ),
    )
    built = command(deployment)
    assert built.argv[-2:] == ("--seed", "7")
    assert built.environment({"PATH": "p", "OMP_NUM_THREADS": "9"})["OMP_NUM_THREADS"] == "2"
    assert built.environment({"PATH": "p"})["PATH"] == "p"
    assert value(built, "--prefix-cache-retention-interval") == "512"


def test_a_cluster_s_own_options_come_after_those_of_all(tmp_path: Path) -> None:
    deployment = make(
        tmp_path,
        STATES,
        a=("  staging: 64 MiB", "  staging: 64 MiB\n  extra_args: [--seed, '7']"),
        b=("    kind: prfaas\n", "    kind: prfaas\n    extra_args: [--block-size, '32']\n"),
    )
    assert command(deployment, "east-prefill-0").argv[-4:] == ("--seed", "7", "--block-size", "32")
    for name in ("home-prefill-0", "home-decode-0"):
        assert command(deployment, name).argv[-2:] == ("--seed", "7")


def test_a_cluster_whose_engines_keep_no_prefixes_is_told_no_distance_of_them(tmp_path: Path) -> None:
    off = ("    kind: prfaas\n", "    kind: prfaas\n    extra_args: [--no-enable-prefix-caching]\n")
    deployment = make(tmp_path, STATES, a=off)
    assert "--prefix-cache-retention-interval" not in command(deployment, "east-prefill-0").argv
    assert "--prefix-cache-retention-interval" in command(deployment, "home-decode-0").argv


def test_a_model_that_nobody_knows_starts_without_what_depends_on_it(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES)
    known = command(deployment)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "later"}')
    unknown = command(deployment)
    left_out = ("--mamba-ssm-cache-dtype", "--prefix-cache-retention-interval")
    assert [word for word in unknown.argv if word.startswith("--")] == [
        word for word in known.argv if word.startswith("--") and word not in left_out
    ]


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: there is no such file"):
        command(deployment)


def test_events_are_published_where_subscribers_look(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES)
    for instance in deployment.instances:
        config = json.loads(value(command(deployment, instance.name), "--kv-events-config"))
        endpoint = deployment.events_endpoint(instance)
        assert (config["endpoint"], config["replay_endpoint"]) == (endpoint.publish, endpoint.replay)
        transfer = json.loads(value(command(deployment, instance.name), "--kv-transfer-config"))
        assert transfer["kv_connector_extra_config"]["events"] == asdict(endpoint)
        assert config["enable_kv_cache_events"] is True


def test_adapters_are_named(tmp_path: Path) -> None:
    deployment = make(tmp_path, DENSE)
    assert "--enable-lora" not in command(deployment).argv
    adapters = {"law": tmp_path / "law", "art": tmp_path / "art"}
    with_adapters = replace(deployment, model=replace(deployment.model, adapters=adapters))
    argv = command(with_adapters).argv
    at = argv.index("--lora-modules")
    assert argv[at - 1 : at + 3] == (
        "--enable-lora",
        "--lora-modules",
        f"law={tmp_path / 'law'}",
        f"art={tmp_path / 'art'}",
    )


def test_the_connector_is_told_where_its_pool_is(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES)
    pooled = replace(
        deployment,
        clusters=tuple(
            replace(cluster, pool=PoolSpace(1 << 28, kv_port=18300) if cluster.kind == "pd" else None)
            for cluster in deployment.clusters
        ),
    )
    told = extra(command(pooled, "home-decode-0"))
    assert told["pool_socket"] == str(tmp_path / "state" / "local" / "pools" / "home-pool.sock")
    assert (told["pool"]["checkpoint_tokens"], told["pool"]["timeout_s"]) == (32768, 2.0)
    assert "pool_socket" not in extra(command(pooled, "east-prefill-0"))


def test_engines_send_traces_where_the_gateway_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(tmp_path, DENSE)
    assert "--otlp-traces-endpoint" not in command(plain).argv
    secrets = tmp_path / "headers"
    secrets.write_text("Authorization: Bearer a, b=c\nX-Tenant: me\n")
    secrets.chmod(0o600)
    tracing = TracingConfig("http://collector:4318/v1/traces", headers_file=secrets)
    traced = replace(plain, gateway=replace(plain.gateway, tracing=tracing))
    built = command(traced)
    assert value(built, "--otlp-traces-endpoint") == "http://collector:4318/v1/traces"
    assert built.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert "service.instance.id=east-prefill-0" in built.env["OTEL_RESOURCE_ATTRIBUTES"]
    # A command that is printed holds no secret.
    assert "Bearer" not in str(built)
    told = built.environment({"PATH": "/bin"})["OTEL_EXPORTER_OTLP_TRACES_HEADERS"]
    assert parse_env_headers(told) == {"authorization": "Bearer a, b=c", "x-tenant": "me"}
    # What only the environment says is handed on too, with the headers that are there already.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4318")
    assert value(command(plain), "--otlp-traces-endpoint") == "http://other:4318/v1/traces"
    assert "OTEL_EXPORTER_OTLP_TRACES_HEADERS" not in command(plain).environment({})


NIXL = {
    "pool": ("    pool: {memory: 256 MiB, ssd: 1 GiB, kv_port: 18301}\n", ""),
    "on": ("engine:\n", "engine:\n  local_transfer: nixl\n"),
    "one": ("kv_port: 18201", "kv_port: 18201, nixl_port: 18501"),
    "other": ("kv_port: 18202", "kv_port: 18202, nixl_port: 18502"),
}


def test_engines_of_a_pd_cluster_have_nixl_beside_our_connector(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES, **NIXL)
    built = command(deployment, "home-decode-0")
    config = json.loads(value(built, "--kv-transfer-config"))
    module = "prfaas.serving.engines.vllm.nixl_connector"
    assert (config["kv_connector"], config["kv_connector_module_path"]) == ("PrfaasNixlConnector", module)
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_both", "recompute")
    nixl, ours = config["kv_connector_extra_config"]["connectors"]
    assert (nixl["kv_connector"], nixl["kv_connector_module_path"]) == ("TicketedNixlConnector", module)
    assert (nixl["kv_buffer_device"], nixl["kv_load_failure_policy"]) == ("cpu", "recompute")
    assert nixl["kv_connector_extra_config"] == {"kv_lease_duration": 60, "num_threads": 0}
    assert ours["kv_connector"] == "PrfaasConnector"
    assert set(ours["kv_connector_extra_config"]["producers"]) == {"east-prefill-0", "home-prefill-0"}
    assert built.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert built.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "18502"
    assert built.env["UCX_TLS"] == "tcp,self"


def test_engines_of_all_clusters_lay_kv_out_as_nixl_wants_it(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES, **NIXL)
    far = command(deployment)
    assert extra(far)["nixl_beside"] is True
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in far.env and "UCX_TLS" not in far.env
    for name in ("east-prefill-0", "home-prefill-0", "home-decode-0"):
        assert command(deployment, name).env["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"


def test_elsewhere_ucx_finds_its_way_by_itself(tmp_path: Path) -> None:
    hardware = ("kind: pd\n    hardware: cpu", "kind: pd\n    hardware: h200")
    deployment = make(tmp_path, DENSE, **NIXL, hardware=hardware)
    built = command(deployment, "home-decode-0")
    nixl, _ = json.loads(value(built, "--kv-transfer-config"))["kv_connector_extra_config"]["connectors"]
    assert "kv_buffer_device" not in nixl and "UCX_TLS" not in built.env


def test_an_engine_without_the_package_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = make(tmp_path, STATES, **NIXL)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ensure_nixl(deployment, [deployment.instance("east-prefill-0")])
    with pytest.raises(EngineError, match=r"home-decode-0 needs the package nixl.*\[nixl\]"):
        ensure_nixl(deployment, deployment.instances[2:])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ensure_nixl(deployment, deployment.instances)


def test_nixl_is_left_out_where_the_file_does_not_ask_for_it(tmp_path: Path) -> None:
    deployment = make(tmp_path, STATES)
    built = command(deployment, "home-decode-0")
    assert not [name for name in built.env if "NIXL" in name or "UCX" in name]
    assert "nixl_beside" not in extra(built)
