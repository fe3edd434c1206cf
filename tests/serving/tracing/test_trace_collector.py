"""Whether there are traces, and where they go: the deployment file wins, OTEL_* variables come after it."""

from pathlib import Path

import pytest

from prfaas.core.deployment import DeploymentError, TracingConfig, load_deployment
from prfaas.core.deployment.addresses import traces_url
from prfaas.serving.secret_files import TraceHeadersError, load_headers
from prfaas.serving.tracing.collector import collector_of

ROOT = Path(__file__).parents[3]
FILE = TracingConfig("http://file:4318/v1/traces", 0.5, Path("headers"))
BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://base:4318/"}
TRACES = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://own:4318/path"}


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        (BASE, "http://base:4318/v1/traces"),
        (TRACES, "http://own:4318/path"),
        (BASE | TRACES, "http://own:4318/path"),
        (TRACES | {"OTEL_SDK_DISABLED": "TRUE"}, None),
        (TRACES | {"OTEL_TRACES_EXPORTER": "none"}, None),
        (TRACES | {"OTEL_TRACES_EXPORTER": "otlp"}, "http://own:4318/path"),
        (TRACES | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
        (TRACES | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, "http://own:4318/path"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "own:4317"}, None),
        ({"OTEL_SERVICE_NAME": "x"}, None),
    ],
)
def test_what_the_environment_says(environment: dict[str, str], endpoint: str | None) -> None:
    collector = collector_of(None, environment)
    assert (None if collector is None else collector.endpoint) == endpoint
    if collector is not None:
        assert collector.sample_ratio is None and not collector.is_demanded


def test_the_file_wins() -> None:
    collector = collector_of(FILE, TRACES | {"OTEL_TRACES_EXPORTER": "none"})
    assert collector is not None and collector.is_demanded
    assert (collector.endpoint, collector.sample_ratio, collector.headers_file) == (
        "http://file:4318/v1/traces",
        0.5,
        Path("headers"),
    )
    assert collector_of(FILE, {"OTEL_SDK_DISABLED": "true"}) is None


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://[::1]/x/v1/traces", "https://[::1]/x/v1/traces"),
    ],
)
def test_urls(url: str, whole: str) -> None:
    assert traces_url(url) == whole


@pytest.mark.parametrize(
    "url",
    ["a:4318", "grpc://a:4317", "http://", "http://a:99999", "http://a b", "http://u:p@a", "http://a/?x=1"],
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError):
        traces_url(url)


def deployed(tmp_path: Path, tracing: str) -> Path:
    text = (ROOT / "examples" / "local.yaml").read_text()
    assert text.count("\ngateway:\n") == 1
    path = tmp_path / "local.yaml"
    path.write_text(text.replace("\ngateway:\n", f"\ngateway:\n  tracing: {tracing}\n"))
    return path


def test_the_deployment_file(tmp_path: Path) -> None:
    path = deployed(tmp_path, "{endpoint: 'http://a:4318', sample_ratio: 0.1, headers_file: collector}")
    loaded = load_deployment(path, state_dir=tmp_path / "state")
    tracing = loaded.gateway.tracing
    assert tracing is not None
    assert (tracing.endpoint, tracing.sample_ratio) == ("http://a:4318/v1/traces", 0.1)
    assert tracing.headers_file == loaded.security.key_file.parent / "collector"


@pytest.mark.parametrize(
    ("tracing", "words"),
    [
        ("{endpoint: 'a:4318'}", "gateway.tracing.endpoint"),
        ("{endpoint: 'http://u:secret@a'}", "headers_file"),
        ("{endpoint: 'http://a', sample_ratio: 2}", "gateway.tracing.sample_ratio"),
        ("{}", "gateway.tracing.endpoint"),
        ("", "gateway.tracing"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(tmp_path: Path, tracing: str, words: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load_deployment(deployed(tmp_path, tracing), state_dir=tmp_path / "state")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_headers(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    with pytest.raises(TraceHeadersError, match="cannot be read: No such file"):
        load_headers(path)
    path.write_text("# a comment\n\nAuthorization: Bearer a b\nX-Tenant:\tme \n")
    path.chmod(0o644)
    with pytest.raises(TraceHeadersError, match="mode 0644: others can read it"):
        load_headers(path)
    path.chmod(0o640)
    assert load_headers(path) == {"Authorization": "Bearer a b", "X-Tenant": "me"}


@pytest.mark.parametrize("line", ["hunter2", "A B: hunter2", "A:", "A: hunter2\x07", "A: hünter2"])
def test_a_line_that_is_no_header_is_not_quoted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "headers"
    path.write_text(f"A: b\n{line}\n")
    path.chmod(0o600)
    with pytest.raises(TraceHeadersError, match="line 2 is no header") as caught:
        load_headers(path)
    assert "hunter2" not in str(caught.value)
