"""Files of any content: what can't be used is refused in one sentence that names it."""

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from tests.mutations import mutated

from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.core.deployment.source import read_source
from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import read_requests
from prfaas.serving.gateway.clients import Clients, ClientsFileError

EXAMPLES = Path(__file__).parents[1] / "examples"
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DEPLOYMENTS = [(EXAMPLES / "local.yaml").read_bytes(), (EXAMPLES / "synthetic.yaml").read_bytes()]
CONFIGS = [(EXAMPLES / "stand-in" / "config.json").read_bytes()]
CLIENTS = [
    b"alice: {key_sha256: [%b], share: 2, per_s: 3.5, priority: low}\nbob:\n  key_sha256:\n  - %b\n"
    % (b"0f" * 32, b"1e" * 32)
]


def traces() -> list[bytes]:
    with gzip.open(EXAMPLES / "traces" / "mooncake_conversation.jsonl.gz") as file:
        return [b"".join(file.readline(4096) for _ in range(5))]


def is_sentence(text: str) -> bool:
    return "\n" not in text.strip() and len(text) < 4000


@FUZZ
@given(text=mutated(DEPLOYMENTS))
def test_a_deployment_file_may_hold_anything(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "sites.yaml"
    path.write_bytes(text)
    for read in (read_source, load_deployment):
        try:
            read(path)
        except DeploymentError as error:
            assert is_sentence(str(error)), error


@FUZZ
@given(text=mutated(CONFIGS))
def test_a_config_of_a_model_may_hold_anything(text: bytes) -> None:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(config, dict):
        try:
            model_from_config(config)
        except ConfigError as error:
            assert is_sentence(str(error)), error


@FUZZ
@given(text=mutated(CLIENTS))
def test_a_clients_file_may_hold_anything(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "clients.yaml"
    path.write_bytes(text)
    with suppress(ClientsFileError):
        Clients(path)


@FUZZ
@given(text=mutated(traces()))
# A name of a column has a line end in it.
@example(text=b'{"timestamp": 0, "i---\nnput_length": 6758, "hash_ids": [0]}\n')
@pytest.mark.parametrize("form", ["mooncake", None])
def test_a_trace_may_hold_anything(tmp_path: Path, form: str | None, text: bytes) -> None:
    path = tmp_path / ("trace.jsonl" if form else "trace.csv")
    path.write_bytes(text)
    try:
        read_requests(path, form)  # type: ignore[arg-type]
    except WorkloadError as error:
        assert is_sentence(str(error)), error
